// The e4m3 forward's half of the C interface: checks and choice of the instantiation.
#include <algorithm>
#include <cstdint>
#include <string>

#include "host/call_fields.h"
#include "host/compiled.h"
#include "host/fp8_dispatch.h"
#include "kernels/fp8/fp8_traits.h"

namespace flash_attn3 {
namespace {

using Launch = Status (*)(const Fp8Params&, const DeviceInfo&, cudaStream_t, FwdPlan*);

const CompiledKernel<Launch> kCompiled[] = {
#if FLASH_ATTN3_HAS_FWD_E4M3_D64
    {DType::kE4M3, 64, 64, launch_fwd_e4m3_d64},
#endif
#if FLASH_ATTN3_HAS_FWD_E4M3_D128
    {DType::kE4M3, 128, 128, launch_fwd_e4m3_d128},
#endif
#if FLASH_ATTN3_HAS_FWD_E4M3_D192_128
    {DType::kE4M3, 192, 128, launch_fwd_e4m3_d192_128},
#endif
#if FLASH_ATTN3_HAS_FWD_E4M3_D256
    {DType::kE4M3, 256, 256, launch_fwd_e4m3_d256},
#endif
    {DType::kE4M3, 0, 0, nullptr}};

Status check_scale(const char* name, const Fp8Scale& scale, bool is_query) {
  const int32_t rows = scale.block_rows;
  if (rows == 0 || rows == ValueLayout::kKeys || (is_query && rows == 64)) return {};
  return Status::invalid(std::string(name) + " can have blocks of " + (is_query ? "64 or " : "") +
                         "128 rows, not of " + std::to_string(rows) + ".");
}

// What transposes V ahead reads 16 bytes at a time; a bad address would fault instead of raising.
Status check_values_in_rows(const Fp8Params& in) {
  const Strides& strides = in.fwd.v_strides;
  const bool ragged = is_ragged_k(in.fwd);
  if (reinterpret_cast<uintptr_t>(in.fwd.v) % 16 == 0 && strides.row % 16 == 0 &&
      strides.head % 16 == 0 && (ragged || strides.batch % 16 == 0)) {
    return {};
  }
  return Status::invalid("v must start at a multiple of 16 bytes, and so must its rows and heads.");
}

Status check_fp8(const Fp8Params& in) {
  Status status = check_fwd(in.fwd);
  if (status.ok() && in.fwd.dtype != DType::kE4M3) {
    status = Status::invalid("dtype must be e4m3 for this function.");
  }
  for (const int32_t d : {in.fwd.head_dim, in.fwd.head_dim_v}) {
    if (status.ok() && d % 16 != 0) {
      status = Status::invalid("head dims of e4m3 must be multiples of 16, not " +
                               std::to_string(d) + ".");
    }
  }
  if (status.ok()) status = check_scale("q_scale", in.q_scale, true);
  if (status.ok()) status = check_scale("k_scale", in.k_scale, false);
  if (status.ok()) status = check_scale("v_scale", in.v_scale, false);
  if (status.ok() && in.v_room != nullptr && in.v_transposed == 0) {
    status = check_values_in_rows(in);
  }
  return status;
}

// How many queries must meet a key, by all heads that share it and half of them under a causal
// edge, for V to be transposed ahead: that costs 2 bytes of memory traffic an element of V. The
// fewer columns V has, the less the attention kernel waits for its own transposition; of 256 it
// waits longest, but where O holds the sums of all keys.
int64_t transpose_ahead_from(const FwdParams& in) {
  if (in.head_dim_v <= 64) return 4096;
  return in.head_dim_v > 128 && in.max_seqlen_k > kShortBlocks * ValueLayout::kKeys ? 1024 : 2048;
}

int64_t queries_of_a_key(const FwdParams& in) {
  int64_t queries = in.max_seqlen_q;
  if (in.window_left >= 0 && in.window_right >= 0) {
    queries = std::min<int64_t>(queries, int64_t(in.window_left) + in.window_right + 1);
  } else if (in.window_left >= 0 || in.window_right >= 0) {
    queries /= 2;  // one end is open
  }
  if (in.attention_chunk > 0) queries = std::min<int64_t>(queries, in.attention_chunk);
  return queries * (in.heads / std::max(in.heads_kv, 1));
}

int64_t room_bytes(const Fp8Params& in) {
  if (in.v_transposed != 0 || queries_of_a_key(in.fwd) < transpose_ahead_from(in.fwd)) return 0;
  if (in.fwd.sm_margin > 0) return 0;  // the transposing kernel would run on all SMs
  const int64_t keys = value_blocks(in.fwd) * ValueLayout::kKeys;
  // A sequence has blocks of its own: short ones would ask for many times the room of V.
  if (is_ragged_k(in.fwd) && keys > 4 * in.fwd.total_k) return 0;
  return keys * in.fwd.heads_kv * in.fwd.head_dim_v;
}

Status run(const Fp8Params* in, cudaStream_t stream, FwdPlan* plan) {
  if (in == nullptr) return Status::invalid("params must not be null.");
  const Status status = check_fp8(*in);
  if (!status.ok()) return status;
  return on_device(in->fwd.device, [&](const DeviceInfo& device) {
    const int head_dim = in->fwd.head_dim, head_dim_v = in->fwd.head_dim_v;
    const auto* kernel = find_kernel(kCompiled, DType::kE4M3, head_dim, head_dim_v);
    if (kernel == nullptr) {
      return Status::not_compiled("This build has no e4m3 forward kernel for head dims (" +
                                  std::to_string(head_dim) + ", " + std::to_string(head_dim_v) +
                                  ").");
    }
    Fp8Params call = *in;
    if (call.v_room != nullptr && call.v_transposed == 0) {
      if (plan == nullptr) {
        const Status transposed = transpose_values(call, stream);
        if (!transposed.ok()) return transposed;
      }
      call.fwd.v = call.v_room;
      call.v_transposed = 1;
    }
    return kernel->launch(call, device, stream, plan);
  });
}

}  // namespace

std::string compiled_e4m3() { return list_kernels(kCompiled); }

}  // namespace flash_attn3

using namespace flash_attn3;

int flash_attn3_fp8_fwd(const Fp8Params* params, cudaStream_t stream, char* message,
                        size_t message_size) {
  return report(run(params, stream, nullptr), message, message_size);
}

int64_t flash_attn3_fp8_room_bytes(const Fp8Params* params) {
  return params != nullptr && check_fp8(*params).ok() ? room_bytes(*params) : 0;
}

int flash_attn3_fp8_fwd_plan(const Fp8Params* params, FwdPlan* plan, char* message,
                             size_t message_size) {
  if (plan == nullptr)
    return report(Status::invalid("plan must not be null."), message, message_size);
  return report(run(params, nullptr, plan), message, message_size);
}
