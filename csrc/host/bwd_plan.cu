// The device-side plan of a ragged backward call; cost linear in the number of sequences up to
// sorting, nothing comes back to the host.
#include "host/bwd_dispatch.h"
#include "kernels/attn/block_prefix_sum.h"

namespace flash_attn3 {
namespace {

constexpr int kPlanThreads = 1024;
constexpr int kFillBlocks = 64;  // beside the planning one

// Order of the sequences and prefix sum of their KV tiles.
__device__ void plan_key_tiles(const BwdKernelParams& params, int tile_n) {
  __shared__ int warp_sums[32];
  __shared__ int lengths[kPlanThreads];
  int32_t* sequence = params.plan + BwdTileOrder::kHeader;
  int32_t* first_tile = sequence + params.batch;
  const int thread = threadIdx.x;

  // Longest queries first, so that the last tiles to be handed out are short.
  const bool sorted = params.batch <= kPlanThreads;
  if (sorted) {
    const int length = thread < params.batch ? q_span(params, thread).used : -1;
    lengths[thread] = length;
    __syncthreads();
    if (thread < params.batch) {
      int rank = 0;
      for (int b = 0; b < params.batch; ++b) {
        rank += lengths[b] > length || (lengths[b] == length && b < thread);
      }
      sequence[rank] = thread;
    }
    __syncthreads();
  }
  const int most = params.total_k / tile_n + params.batch;
  int total = 0;
  for (int start = 0; start < params.batch; start += kPlanThreads) {
    const int index = start + thread;
    int tiles = 0;
    if (index < params.batch) {
      const int b = sorted ? sequence[index] : index;
      if (!sorted) sequence[index] = index;
      tiles = blocks_for(k_span(params, b).rows, tile_n);
    }
    const int inclusive = block_prefix_sum(tiles, most - total, warp_sums);
    if (index < params.batch) first_tile[index] = total + larger(inclusive - tiles, 0);
    __syncthreads();
    total += warp_sums[31];
    __syncthreads();
  }
  if (thread == 0) {
    first_tile[params.batch] = total;
    params.plan[BwdTileOrder::kTiles] = total;
  }
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
