// The forward half of the C interface: checks, choice of the instantiation, run-time parameters.
#include <cmath>
#include <cstdint>
#include <string>

#include "host/bwd_dispatch.h"
#include "host/call_fields.h"
#include "host/claim_counter.h"
#include "host/compiled.h"
#include "host/fp8_dispatch.h"
#include "host/fwd_dispatch.h"
#include "host/ragged_plan.h"
#include "kernels/attn/online_softmax.h"

namespace flash_attn3 {
namespace {

// Dynamic order pays where tiles differ in length, and are many enough to differ in their sums.
constexpr double kDynamicOrderMinimumFlops = 2.0e9;

// Tiles of so many keys are short (FwdKernelParams::claim_ahead).
constexpr int32_t kShortTileKeys = 1536;

using Launch = Status (*)(const FwdParams&, const DeviceInfo&, cudaStream_t, FwdPlan*);

const CompiledKernel<Launch> kCompiled[] = {
#if FLASH_ATTN3_HAS_FWD_BF16_D64
    {DType::kBFloat16, 64, 64, launch_fwd_bf16_d64},
#endif
#if FLASH_ATTN3_HAS_FWD_BF16_D96
    {DType::kBFloat16, 96, 96, launch_fwd_bf16_d96},
#endif
#if FLASH_ATTN3_HAS_FWD_BF16_D128
    {DType::kBFloat16, 128, 128, launch_fwd_bf16_d128},
#endif
#if FLASH_ATTN3_HAS_FWD_BF16_D192_128
    {DType::kBFloat16, 192, 128, launch_fwd_bf16_d192_128},
#endif
#if FLASH_ATTN3_HAS_FWD_BF16_D192
    {DType::kBFloat16, 192, 192, launch_fwd_bf16_d192},
#endif
#if FLASH_ATTN3_HAS_FWD_BF16_D256
    {DType::kBFloat16, 256, 256, launch_fwd_bf16_d256},
#endif
#if FLASH_ATTN3_HAS_FWD_FP16_D64
    {DType::kFloat16, 64, 64, launch_fwd_fp16_d64},
#endif
#if FLASH_ATTN3_HAS_FWD_FP16_D96
    {DType::kFloat16, 96, 96, launch_fwd_fp16_d96},
#endif
#if FLASH_ATTN3_HAS_FWD_FP16_D128
    {DType::kFloat16, 128, 128, launch_fwd_fp16_d128},
#endif
#if FLASH_ATTN3_HAS_FWD_FP16_D192_128
    {DType::kFloat16, 192, 128, launch_fwd_fp16_d192_128},
#endif
#if FLASH_ATTN3_HAS_FWD_FP16_D192
    {DType::kFloat16, 192, 192, launch_fwd_fp16_d192},
#endif
#if FLASH_ATTN3_HAS_FWD_FP16_D256
    {DType::kFloat16, 256, 256, launch_fwd_fp16_d256},
#endif
    {DType::kFloat16, 0, 0, nullptr}};

Status run(const FwdParams* in, cudaStream_t stream, FwdPlan* plan) {
  if (in == nullptr) return Status::invalid("params must not be null.");
  const Status status = check_fwd(*in);
  if (!status.ok()) return status;
  return on_device(in->device, [&](const DeviceInfo& device) {
    const auto* kernel = find_kernel(kCompiled, in->dtype, in->head_dim, in->head_dim_v);
    return kernel != nullptr ? kernel->launch(*in, device, stream, plan)
                             : no_kernel("forward", in->dtype, in->head_dim, in->head_dim_v);
  });
}

}  // namespace

Status check_fwd(const FwdParams& in) {
  if (in.q == nullptr || in.k == nullptr || in.v == nullptr || in.out == nullptr ||
      in.lse == nullptr) {
    return Status::invalid("q, k, v, out and lse must not be null.");
  }
  const Status status = check_shape(in);
  if (!status.ok()) return status;
  const int64_t rows_q = rows_of_q(in);
  // Tiles of 128 rows are counted in 32 bits.
  const double tiles =
      is_ragged_q(in) ? double(rows_q) / 128 + in.batch : (double(rows_q) / 128 + 1) * in.batch;
  if (tiles * in.heads >= double(1 << 30)) {
    return Status::invalid("q has too many rows times heads: 2^30 tiles of 128 rows is the limit.");
  }
  if (in.device < 0) return Status::invalid("device must not be negative.");
  if (flash_attn3_fwd_workspace_bytes(&in) > 0 && in.workspace == nullptr) {
    return Status::invalid("workspace must not be null for this call.");
  }
  return {};
}

// Causal: the longest tiles come first, so that the last to be handed out are short. All pairs of
// batch and head at once would read every K and V from memory again for each tile; the tiles of a
// section find them in L2. A quarter of L2 was best at every head dim, and less than two rounds of
// the tiles `at_once` ended unevenly. With a window only the keys near the tiles under way are
// wanted.
int32_t section_pairs(const FwdParams& in, int64_t l2_bytes, int at_once, int32_t q_tiles,
                      int64_t tile_keys) {
  const double pairs = double(in.batch) * in.heads;
  const double element_bytes = in.dtype == DType::kE4M3 ? 1.0 : 2.0;
  const double keys = std::fmin(in.max_seqlen_k, 4.0 * tile_keys);
  const double pair_bytes =
      element_bytes * keys * (in.head_dim + in.head_dim_v) * in.heads_kv / in.heads;
  const double wanted = std::fmax(0.27 * l2_bytes / pair_bytes, 2.0 * at_once / q_tiles);
  // To the nearest power of two, which divides the usual numbers of heads.
  return int32_t(std::fmin(pairs, std::exp2(std::fmax(0.0, std::round(std::log2(wanted))))));
}

bool wants_dynamic_order(const FwdParams& in) {
  if (is_ragged_q(in)) return false;
  const double flops =
      4.0 * in.batch * in.heads * double(in.max_seqlen_q) * in.max_seqlen_k * in.head_dim * 0.5;
  return in.window_right >= 0 && flops >= kDynamicOrderMinimumFlops;
}

void fill_fwd_params(const FwdParams& in, const DeviceInfo& device, int tile_m, int pair,
                     FwdKernelParams* out) {
  fill_call_fields(in, out);
  out->by_group = in.heads / in.heads_kv;
  out->workspace = static_cast<int32_t*>(in.workspace);

  // The kernel wants a positive scale, whose exponents it can compare with a row's reference.
  float scale = in.softmax_scale;
  out->transform = ScoreTransform::kNone;
  out->transform_factor = 1.0f;
  if (in.softcap > 0.0f) {
    out->transform = ScoreTransform::kSoftcap;
    out->transform_factor = in.softmax_scale / in.softcap;
    scale = in.softcap;
  } else if (!(scale > 0.0f)) {
    out->transform = ScoreTransform::kMultiply;
    out->transform_factor = scale;
    scale = 1.0f;
  }
  out->scale_log2 = scale * kLog2E;

  out->order = is_ragged_q(in)           ? TileOrder::kRagged
               : wants_dynamic_order(in) ? TileOrder::kDynamic
                                         : TileOrder::kStatic;
  out->q_tiles = blocks_for(in.max_seqlen_q, tile_m);
  out->tiles = is_ragged_q(in) ? 0 : out->q_tiles * in.heads * in.batch;
  // Keys that a tile sees at most; a tile of 128 rows sees those of its window and 127 more.
  const int64_t tile_keys = out->mask.window_left >= 0 && out->mask.window_right >= 0
                                ? int64_t(out->mask.window_left) + out->mask.window_right + 128
                                : in.max_seqlen_k;
  out->claim_ahead = tile_keys <= kShortTileKeys || in.max_seqlen_k <= kShortTileKeys ? 2 : 1;
  const int32_t pairs =
      in.window_right >= 0 && out->order != TileOrder::kRagged
          ? section_pairs(in, device.l2_bytes, device.sms / pair, out->q_tiles, tile_keys)
          : 1;
  out->dense = dense_order(out->q_tiles, pairs, in.batch, in.heads);
  out->uneven = pairs > 1;
}

int fwd_grid(const FwdParams& in, const DeviceInfo& device, const FwdKernelParams& params,
             int pair) {
  const int ctas =
      persistent_grid(in, device, params.order == TileOrder::kRagged, params.tiles * pair);
  return larger(1, ctas / pair) * pair;
}

Status prepare_tile_order(const FwdParams& in, int tile_m, cudaStream_t stream,
                          FwdKernelParams* params) {
  cudaError_t error = cudaSuccess;
  if (params->order == TileOrder::kRagged) {
    params->counter = params->workspace + RaggedPlan::kCounter;
    params->last_claim = ~0u;
    error = launch_ragged_plan(in, *params, tile_m, stream);
  } else if (params->order == TileOrder::kDynamic) {
    params->last_claim = params->tiles - 1;  // those that fail, one a CTA, make up for the first
    params->counter = claim_counter(in.device, stream);
    if (params->counter == nullptr) {
      params->counter = params->workspace;
      error = cudaMemsetAsync(params->counter, 0, sizeof(int32_t), stream);
    }
  }
  return error == cudaSuccess ? Status{} : cuda_status("preparing the tile order", error);
}

}  // namespace flash_attn3

using namespace flash_attn3;

int flash_attn3_fwd(const FwdParams* params, cudaStream_t stream, char* message,
                    size_t message_size) {
  return report(run(params, stream, nullptr), message, message_size);
}

int flash_attn3_fwd_plan(const FwdParams* params, FwdPlan* plan, char* message,
                         size_t message_size) {
  if (plan == nullptr)
    return report(Status::invalid("plan must not be null."), message, message_size);
  return report(run(params, nullptr, plan), message, message_size);
}

int64_t flash_attn3_fwd_workspace_bytes(const FwdParams* params) {
  if (is_ragged_q(*params)) return RaggedPlan::words(params->batch) * int64_t(sizeof(int32_t));
  return wants_dynamic_order(*params) ? RaggedPlan::kHeader * int64_t(sizeof(int32_t)) : 0;
}

const char* flash_attn3_build_info() {
  static const std::string info = [] {
    std::string text = "nvcc " + std::to_string(__CUDACC_VER_MAJOR__) + "." +
                       std::to_string(__CUDACC_VER_MINOR__) + "." +
                       std::to_string(__CUDACC_VER_BUILD__) + "; fwd:";
    return text + list_kernels(kCompiled) + compiled_e4m3() + "; bwd:" + bwd_kernel_list();
  }();
  return info.c_str();
}
