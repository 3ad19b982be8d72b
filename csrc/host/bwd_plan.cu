// The device-side plan of a ragged backward call; cost linear in the number of sequences up to
// sorting, nothing comes back to the host.
#include "host/bwd_dispatch.h"
#include "kernels/attn/sequence_plan.h"

namespace flash_attn3 {
namespace {

constexpr int kFillBlocks = 64;  // beside the planning one

// Order of the sequences and prefix sum of their KV tiles.
__device__ void plan_key_tiles(const BwdKernelParams& params, int tile_n) {
  int32_t* sequence = params.plan + BwdTileOrder::kHeader;
  const int most = params.total_k / tile_n + params.batch;
  const int total = plan_sequences(
      params.batch, most, sequence, sequence + params.batch,
      [&](int b) { return q_span(params, b).used; },
      [&](int b) { return blocks_for(k_span(params, b).rows, tile_n); });
  if (threadIdx.x == 0) params.plan[BwdTileOrder::kTiles] = total;
}

// Zeros in rows before the first and after the last sequence, a warp for each row and head.
__device__ void clear_uncovered_rows(void* tensor, const Strides& strides, int heads, int columns,
                                     const int32_t* cu_seqlens, int batch, int total_rows) {
  if (cu_seqlens == nullptr) return;
  const int first = clamp(cu_seqlens[0], 0, total_rows);
  const int last = clamp(cu_seqlens[batch], first, total_rows);
  const int warps = (gridDim.x - 1) * (kPlanThreads / 32);
  const int64_t pairs = int64_t(first + total_rows - last) * heads;
  for (int64_t i = int64_t(blockIdx.x - 1) * (kPlanThreads / 32) + threadIdx.x / 32; i < pairs;
       i += warps) {
    const int nth = int(i / heads);
    const int64_t row = nth < first ? nth : last + (nth - first);
    char* out = static_cast<char*>(tensor) + 2 * (row * strides.row + i % heads * strides.head);
    for (int at = threadIdx.x % 32 * 16; at < 2 * columns; at += 32 * 16) {
      *reinterpret_cast<uint4*>(out + at) = make_uint4(0, 0, 0, 0);
    }
  }
}

__global__ void __launch_bounds__(kPlanThreads)
    bwd_plan_kernel(const __grid_constant__ BwdKernelParams params, int tile_n) {
  if (blockIdx.x == 0) {
    if (params.cu_seqlens_k != nullptr) plan_key_tiles(params, tile_n);
    return;
  }
  clear_uncovered_rows(params.dq, params.dq_strides, params.heads, params.head_dim,
                       params.cu_seqlens_q, params.batch, params.total_q);
  clear_uncovered_rows(params.dk, params.dk_strides, params.heads_kv, params.head_dim,
                       params.cu_seqlens_k, params.batch, params.total_k);
  clear_uncovered_rows(params.dv, params.dv_strides, params.heads_kv, params.head_dim_v,
                       params.cu_seqlens_k, params.batch, params.total_k);
}

}  // namespace

cudaError_t launch_bwd_plan(const BwdKernelParams& params, int tile_n, cudaStream_t stream) {
  bwd_plan_kernel<<<1 + kFillBlocks, kPlanThreads, 0, stream>>>(params, tile_n);
  return cudaGetLastError();
}

}  // namespace flash_attn3
