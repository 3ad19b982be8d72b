// The backward half of the C interface: checks, choice of the instantiation, run-time parameters.
#include <cmath>
#include <cstdint>
#include <string>

#include "host/bwd_config.h"
#include "host/bwd_dispatch.h"

namespace flash_attn3 {
namespace {

bool is_ragged_q(const BwdParams& in) { return in.cu_seqlens_q != nullptr; }
bool is_ragged_k(const BwdParams& in) { return in.cu_seqlens_k != nullptr; }

int64_t q_tiles_of(const BwdParams& in, int tile_m) {
  if (is_ragged_q(in)) return in.total_q / tile_m + in.batch;
  return int64_t(blocks_for(in.max_seqlen_q, tile_m)) * in.batch;
}

// 16-byte accesses and TMA both want this; a dimension of size 1 has no stride that counts.
Status check_tensor(const char* name, const void* data, const Strides& strides, bool ragged) {
  if (data == nullptr) return Status::invalid(std::string(name) + " must not be null.");
  if (reinterpret_cast<uintptr_t>(data) % 16 != 0) {
    return Status::invalid(std::string(name) + " must start at a multiple of 16 bytes.");
  }
  if (strides.row % 8 != 0 || strides.head % 8 != 0 || (!ragged && strides.batch % 8 != 0)) {
    return Status::invalid(std::string(name) + " must have strides that are multiples of 8.");
  }
  return {};
}

Status check_tensors(const BwdParams& in) {
  const bool q = is_ragged_q(in), k = is_ragged_k(in);
  Status status = check_tensor("q", in.q, in.q_strides, q);
  if (status.ok()) status = check_tensor("k", in.k, in.k_strides, k);
  if (status.ok()) status = check_tensor("v", in.v, in.v_strides, k);
  if (status.ok()) status = check_tensor("out", in.out, in.out_strides, q);
  if (status.ok()) status = check_tensor("dout", in.dout, in.dout_strides, q);
  if (status.ok()) status = check_tensor("dq", in.dq, in.dq_strides, q);
  if (status.ok()) status = check_tensor("dk", in.dk, in.dk_strides, k);
  if (status.ok()) status = check_tensor("dv", in.dv, in.dv_strides, k);
  return status;
}

Status check_sizes(const BwdParams& in) {
  if (in.batch < 1 || in.heads < 1 || in.heads_kv < 1 || in.heads % in.heads_kv != 0) {
    return Status::invalid("batch and heads must be positive, and heads_kv must divide heads.");
  }
  for (const int32_t d : {in.head_dim, in.head_dim_v}) {
    if (d < 8 || d > 256 || d % 8 != 0) {
      return Status::invalid("head dims must be multiples of 8 from 8 to 256, not " +
                             std::to_string(d) + ".");
    }
  }
  const int64_t rows_q = is_ragged_q(in) ? in.total_q : in.max_seqlen_q;
  const int64_t rows_k = is_ragged_k(in) ? in.total_k : in.max_seqlen_k;
  if (rows_q < 1 || rows_k < 1 || rows_q > kMostRows || rows_k > kMostRows) {
    return Status::invalid("q and k must have between 1 and 2^30 rows.");
  }
  // Tiles of 64 rows are counted in 32 bits.
  const double tiles_q = (double(rows_q) / 64 + 1) * (is_ragged_q(in) ? 1.0 : in.batch) + in.batch;
  const double tiles_k = (double(rows_k) / 64 + 1) * (is_ragged_k(in) ? 1.0 : in.batch) + in.batch;
  if (tiles_q * in.heads >= double(1 << 30) || tiles_k * in.heads_kv >= double(1 << 30)) {
    return Status::invalid("there are too many rows times heads for one call.");
  }
  if (in.device < 0) return Status::invalid("device must not be negative.");
  return {};
}

using Launch = Status (*)(const BwdParams&, const DeviceInfo&, cudaStream_t, BwdPlan*);

struct CompiledKernel {
  DType dtype;
  int head_dim, head_dim_v;
  int tile_m;
  Launch launch;
};

template <int kHeadDim, int kHeadDimV>
constexpr CompiledKernel compiled(DType dtype, Launch launch) {
  return {dtype, kHeadDim, kHeadDimV, BwdScheduleOf<kHeadDim, kHeadDimV>::Type::kBlockM, launch};
}

// In order of growing cost: the first that holds a call's head dims runs it.
const CompiledKernel kCompiled[] = {
#if FLASH_ATTN3_HAS_BWD_BF16_D64
    compiled<64, 64>(DType::kBFloat16, launch_bwd_bf16_d64),
#endif
#if FLASH_ATTN3_HAS_BWD_BF16_D96
    compiled<96, 96>(DType::kBFloat16, launch_bwd_bf16_d96),
#endif
#if FLASH_ATTN3_HAS_BWD_BF16_D128
    compiled<128, 128>(DType::kBFloat16, launch_bwd_bf16_d128),
#endif
#if FLASH_ATTN3_HAS_BWD_BF16_D192_128
    compiled<192, 128>(DType::kBFloat16, launch_bwd_bf16_d192_128),
#endif
#if FLASH_ATTN3_HAS_BWD_BF16_D192
    compiled<192, 192>(DType::kBFloat16, launch_bwd_bf16_d192),
#endif
#if FLASH_ATTN3_HAS_BWD_BF16_D256
    compiled<256, 256>(DType::kBFloat16, launch_bwd_bf16_d256),
#endif
#if FLASH_ATTN3_HAS_BWD_FP16_D64
    compiled<64, 64>(DType::kFloat16, launch_bwd_fp16_d64),
#endif
#if FLASH_ATTN3_HAS_BWD_FP16_D96
    compiled<96, 96>(DType::kFloat16, launch_bwd_fp16_d96),
#endif
#if FLASH_ATTN3_HAS_BWD_FP16_D128
    compiled<128, 128>(DType::kFloat16, launch_bwd_fp16_d128),
#endif
#if FLASH_ATTN3_HAS_BWD_FP16_D192_128
    compiled<192, 128>(DType::kFloat16, launch_bwd_fp16_d192_128),
#endif
#if FLASH_ATTN3_HAS_BWD_FP16_D192
    compiled<192, 192>(DType::kFloat16, launch_bwd_fp16_d192),
#endif
#if FLASH_ATTN3_HAS_BWD_FP16_D256
    compiled<256, 256>(DType::kFloat16, launch_bwd_fp16_d256),
#endif
    {DType::kFloat16, 0, 0, 0, nullptr}};

const CompiledKernel* find_kernel(const BwdParams& in) {
  for (const CompiledKernel& kernel : kCompiled) {
    if (kernel.launch != nullptr && kernel.dtype == in.dtype && kernel.head_dim >= in.head_dim &&
        kernel.head_dim_v >= in.head_dim_v) {
      return &kernel;
    }
  }
  return nullptr;
}

Status run(const BwdParams* in, cudaStream_t stream, BwdPlan* plan) {
  if (in == nullptr) return Status::invalid("params must not be null.");
  Status status = check_sizes(*in);
  if (status.ok()) status = check_tensors(*in);
  if (!status.ok()) return status;
  if (in->lse == nullptr || in->workspace == nullptr) {
    return Status::invalid("lse and workspace must not be null.");
  }
  DeviceInfo info;
  status = device_info(in->device, &info);
  if (status.ok()) status = check_device(in->device, info);
  if (!status.ok()) return status;
  const CompiledKernel* kernel = find_kernel(*in);
  if (kernel == nullptr) {
    return Status::not_compiled(
        std::string("This build has no backward kernel for ") + dtype_name(in->dtype) +
        " with head dims (" + std::to_string(in->head_dim) + ", " + std::to_string(in->head_dim_v) +
        "); it has " + flash_attn3_build_info() + ".");
  }
  const DeviceScope scope(in->device);
  if (scope.error() != cudaSuccess) return cuda_status("choosing the device", scope.error());
  return kernel->launch(*in, info, stream, plan);
}

// Pairs of batch and KV head whose tiles take turns.
int32_t section_pairs(const BwdParams& in, const DeviceInfo& device, int tile_m,
                      const BwdKernelParams& params) {
  if (is_ragged_k(in)) return 1;
  const bool causal_edge = in.window_right >= 0;
  const double pairs = double(in.batch) * in.heads_kv;
  const double rows = is_ragged_q(in) ? double(in.total_q) / in.batch + 1 : in.max_seqlen_q;
  const double read_bytes = 2.0 * rows * (in.head_dim + in.head_dim_v) * params.group;
  double wanted = 1;
  if (in.deterministic != 0) {
    // A KV tile adds to each query tile about 1.2 steps after the one before it of its pair. So a
    // pair's tiles are best claimed 2.5 steps apart, if Q, dO and the sums of dQ of all that run
    // then fit two thirds of L2. Without that they want 1.75, but under a causal edge (last_first)
    // nothing: there a tile begins a step or two ahead of the one that it follows.
    const double steps = rows / tile_m * params.group * (causal_edge ? 0.5 : 1.0);
    const double sum_bytes = 4.0 * rows * in.head_dim * params.group;
    const double fitting = 0.67 * device.l2_bytes / (read_bytes + sum_bytes);
    const double least = causal_edge ? 1.0 : std::ceil(1.75 * device.sms / steps);
    wanted = std::fmax(least, std::floor(std::fmin(2.5 * device.sms / steps, fitting)));
  } else if (causal_edge) {
    // The longest tiles come first, so that the last to be handed out are short: in sections whose
    // Q and dO fit half of L2, as long as a section is work for three rounds.
    const double by_cache = std::ceil(pairs * read_bytes / (device.l2_bytes / 2.0));
    const double by_rounds = std::floor(params.tiles / (3.0 * device.sms));
    const double sections = std::fmax(1.0, std::fmin(by_cache, by_rounds));
    wanted = std::ceil(pairs / sections);
  }
  return int32_t(std::fmin(pairs, std::fmax(1.0, wanted)));
}

int64_t padded(int64_t bytes) { return (bytes + 255) / 256 * 256; }

}  // namespace

BwdWorkspace bwd_workspace(const BwdParams& in, int tile_m, int compiled_head_dim) {
  const int64_t tiles = q_tiles_of(in, tile_m) * in.heads;
  const int64_t words = is_ragged_k(in) ? BwdTileOrder::words(in.batch) : BwdTileOrder::kHeader;
  return {padded(words * 4), padded(tiles * 2 * tile_m * 4),
          padded(tiles * tile_m * compiled_head_dim * 4),
          in.deterministic != 0 ? padded(tiles * kMostTurnChains * 4) : 0};
}

void fill_bwd_params(const BwdParams& in, const DeviceInfo& device, int tile_m, int tile_n,
                     int compiled_head_dim, BwdKernelParams* out) {
  out->out = in.out;
  out->dout_data = in.dout;
  out->lse = in.lse;
  out->dlse = in.dlse;
  out->dq = in.dq;
  out->dk = in.dk;
  out->dv = in.dv;
  out->cu_seqlens_q = in.cu_seqlens_q;
  out->cu_seqlens_k = in.cu_seqlens_k;
  out->seqused_q = in.seqused_q;
  out->seqused_k = in.seqused_k;

  const BwdWorkspace parts = bwd_workspace(in, tile_m, compiled_head_dim);
  char* at = static_cast<char*>(in.workspace);
  out->plan = reinterpret_cast<int32_t*>(at);
  out->rows = reinterpret_cast<float*>(at + parts.plan);
  out->dq_sum = reinterpret_cast<float*>(at + parts.plan + parts.rows);
  out->turns = parts.turns == 0
                   ? nullptr
                   : reinterpret_cast<int32_t*>(at + parts.plan + parts.rows + parts.dq_sum);

  out->out_strides = in.out_strides;
  out->dout_strides = in.dout_strides;
  out->dq_strides = in.dq_strides;
  out->dk_strides = in.dk_strides;
  out->dv_strides = in.dv_strides;
  out->lse_batch_stride = is_ragged_q(in) ? 0 : int64_t(in.heads) * in.max_seqlen_q;
  out->lse_head_stride = is_ragged_q(in) ? in.total_q : in.max_seqlen_q;
  out->batch = in.batch;
  out->seqlen_q = in.max_seqlen_q;
  out->seqlen_k = in.max_seqlen_k;
  out->total_q = int32_t(in.total_q);
  out->total_k = int32_t(in.total_k);
  out->heads = in.heads;
  out->heads_kv = in.heads_kv;
  out->group = in.heads / in.heads_kv;
  out->head_dim = in.head_dim;
  out->head_dim_v = in.head_dim_v;
  out->mask = {bounded_window(in.window_left), bounded_window(in.window_right),
               in.attention_chunk > 0 ? smaller(in.attention_chunk, kLongestWindow) : 0};

  constexpr float kLog2E = 1.4426950408889634f;
  out->scale = in.softmax_scale;
  out->scale_log2 = in.softmax_scale * kLog2E;
  out->tanh_factor = 0.0f;
  out->tanh_from_log2 = 0.0f;
  if (in.softcap > 0.0f) {
    out->tanh_factor = in.softmax_scale / in.softcap;
    // A factor of 0 means no soft cap to the kernel, and makes all scores 0.
    out->scale_log2 = out->tanh_factor == 0.0f ? 0.0f : in.softcap * kLog2E;
    out->tanh_from_log2 = out->tanh_factor == 0.0f ? 0.0f : 1.0f / out->scale_log2;
  }

  out->q_tiles = is_ragged_q(in) ? 0 : blocks_for(in.max_seqlen_q, tile_m);
  out->q_tiles_all = int32_t(q_tiles_of(in, tile_m));
  out->k_tiles = is_ragged_k(in) ? 0 : blocks_for(in.max_seqlen_k, tile_n);
  const int64_t pairs = int64_t(in.batch) * in.heads_kv;
  out->tiles = int32_t(out->k_tiles * pairs);

  out->section_pairs = section_pairs(in, device, tile_m, *out);
  // Under a causal edge the last KV tile meets the fewest query tiles, and each tile begins at the
  // edge: if all start at once, a query tile gets the last KV tile's part first. So the sums of the
  // deterministic mode run in that order, and nobody waits long for a turn.
  out->last_first = in.deterministic != 0 && in.window_right >= 0;
}

int bwd_grid(const BwdParams& in, const DeviceInfo& device, const BwdKernelParams& params) {
  const int sms = larger(1, device.sms - larger(0, in.sm_margin));
  return is_ragged_k(in) ? sms : smaller(sms, larger(1, params.tiles));
}

std::string bwd_kernel_list() {
  std::string text;
  for (const CompiledKernel& kernel : kCompiled) {
    if (kernel.launch == nullptr) break;
    text += kernel_entry(kernel.dtype, kernel.head_dim, kernel.head_dim_v);
  }
  return text;
}

}  // namespace flash_attn3

using namespace flash_attn3;

int flash_attn3_bwd(const BwdParams* params, cudaStream_t stream, char* message,
                    size_t message_size) {
  return report(run(params, stream, nullptr), message, message_size);
}

int flash_attn3_bwd_plan(const BwdParams* params, BwdPlan* plan, char* message,
                         size_t message_size) {
  if (plan == nullptr) {
    return report(Status::invalid("plan must not be null."), message, message_size);
  }
  return report(run(params, nullptr, plan), message, message_size);
}

int64_t flash_attn3_bwd_workspace_bytes(const BwdParams* params) {
  if (params == nullptr || !check_sizes(*params).ok()) return 0;
  const CompiledKernel* kernel = find_kernel(*params);
  if (kernel == nullptr) return 0;
  return bwd_workspace(*params, kernel->tile_m, kernel->head_dim).total();
}
