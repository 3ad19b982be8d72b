// The forward half of the C interface: checks, choice of the instantiation, run-time parameters.
#include <cmath>
#include <cstdint>
#include <string>

#include "host/bwd_dispatch.h"
#include "host/claim_counter.h"
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

bool is_ragged_q(const FwdParams& in) { return in.cu_seqlens_q != nullptr; }

using Launch = Status (*)(const FwdParams&, const FwdContext&, cudaStream_t, FwdPlan*);

struct CompiledKernel {
  DType dtype;
  int head_dim, head_dim_v;
  Launch launch;
};

// In order of growing cost: the first that holds a call's head dims runs it.
const CompiledKernel kCompiled[] = {
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
  Status status = check_fwd(*in);
  FwdContext context;
  if (status.ok()) status = hopper_context(in->device, &context);
  if (!status.ok()) return status;
  for (const CompiledKernel& kernel : kCompiled) {
    if (kernel.launch == nullptr || kernel.dtype != in->dtype || kernel.head_dim < in->head_dim ||
        kernel.head_dim_v < in->head_dim_v) {
      continue;
    }
    const DeviceScope scope(in->device);
    if (scope.error() != cudaSuccess) return cuda_status("choosing the device", scope.error());
    return kernel.launch(*in, context, stream, plan);
  }
  return Status::not_compiled(std::string("This build has no forward kernel for ") +
                              dtype_name(in->dtype) + " with head dims (" +
                              std::to_string(in->head_dim) + ", " + std::to_string(in->head_dim_v) +
                              "); it has " + flash_attn3_build_info() + ".");
}

}  // namespace

Status hopper_context(int device, FwdContext* context) {
  DeviceInfo info;
  Status status = device_info(device, &info);
  if (status.ok()) status = check_device(device, info);
  *context = {info.sms, info.l2_bytes};
  return status;
}

Status check_fwd(const FwdParams& in) {
  if (in.q == nullptr || in.k == nullptr || in.v == nullptr || in.out == nullptr ||
      in.lse == nullptr) {
    return Status::invalid("q, k, v, out and lse must not be null.");
  }
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
  const int64_t rows_k = in.cu_seqlens_k != nullptr ? in.total_k : in.max_seqlen_k;
  if (rows_q < 1 || rows_k < 1 || rows_q > kMostRows || rows_k > kMostRows) {
    return Status::invalid("q and k must have between 1 and 2^30 rows.");
  }
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
// all SMs ended unevenly.
int32_t section_pairs(const FwdParams& in, const FwdContext& context, int32_t q_tiles) {
  const double pairs = double(in.batch) * in.heads;
  const double element_bytes = in.dtype == DType::kE4M3 ? 1.0 : 2.0;
  const double pair_bytes =
      element_bytes * in.max_seqlen_k * (in.head_dim + in.head_dim_v) * in.heads_kv / in.heads;
  const double wanted =
      std::fmax(0.27 * context.l2_bytes / pair_bytes, 2.0 * context.sms / q_tiles);
  // To the nearest power of two, which divides the usual numbers of heads.
  return int32_t(std::fmin(pairs, std::exp2(std::fmax(0.0, std::round(std::log2(wanted))))));
}

bool wants_dynamic_order(const FwdParams& in) {
  if (is_ragged_q(in)) return false;
  const double flops =
      4.0 * in.batch * in.heads * double(in.max_seqlen_q) * in.max_seqlen_k * in.head_dim * 0.5;
  return in.window_right >= 0 && flops >= kDynamicOrderMinimumFlops;
}

void fill_fwd_params(const FwdParams& in, const FwdContext& context, int tile_m,
                     FwdKernelParams* out) {
  out->out = in.out;
  out->lse = in.lse;
  out->cu_seqlens_q = in.cu_seqlens_q;
  out->cu_seqlens_k = in.cu_seqlens_k;
  out->seqused_q = in.seqused_q;
  out->seqused_k = in.seqused_k;
  out->workspace = static_cast<int32_t*>(in.workspace);
  out->out_strides = in.out_strides;
  out->lse_batch_stride = is_ragged_q(in) ? 0 : int64_t(in.heads) * in.max_seqlen_q;
  out->lse_head_stride = is_ragged_q(in) ? in.total_q : in.max_seqlen_q;
  out->batch = in.batch;
  out->seqlen_q = in.max_seqlen_q;
  out->seqlen_k = in.max_seqlen_k;
  out->total_q = int32_t(in.total_q);
  out->total_k = int32_t(in.total_k);
  out->heads = in.heads;
  out->group = in.heads / in.heads_kv;
  out->head_dim_v = in.head_dim_v;
  out->mask = {bounded_window(in.window_left), bounded_window(in.window_right),
               in.attention_chunk > 0 ? smaller(in.attention_chunk, kLongestWindow) : 0};

  // The kernel wants a positive scale, whose exponents it can compare with a row's reference.
  constexpr float kLog2E = 1.4426950408889634f;
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
  out->section_pairs = in.window_right >= 0 && out->order != TileOrder::kRagged
                           ? section_pairs(in, context, out->q_tiles)
                           : 1;
}

int fwd_grid(const FwdParams& in, const FwdContext& context, const FwdKernelParams& params) {
  const int sms = larger(1, context.sms - larger(0, in.sm_margin));
  return params.order == TileOrder::kRagged ? sms : smaller(sms, larger(1, params.tiles));
}

Status prepare_tile_order(const FwdParams& in, int tile_m, int grid, cudaStream_t stream,
                          FwdKernelParams* params) {
  cudaError_t error = cudaSuccess;
  if (params->order == TileOrder::kRagged) {
    params->counter = params->workspace + RaggedPlan::kCounter;
    params->last_claim = -1;
    error = launch_ragged_plan(in, *params, tile_m, stream);
  } else if (params->order == TileOrder::kDynamic) {
    params->last_claim = params->tiles + grid - 1;
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
    for (const CompiledKernel& kernel : kCompiled) {
      if (kernel.launch == nullptr) break;
      text += kernel_entry(kernel.dtype, kernel.head_dim, kernel.head_dim_v);
    }
    return text + compiled_e4m3() + "; bwd:" + bwd_kernel_list();
  }();
  return info.c_str();
}
