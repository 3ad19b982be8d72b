#include "host/ragged_plan.h"

#include "kernels/attn/block_prefix_sum.h"
#include "kernels/attn/online_softmax.h"
#include "kernels/fwd/fwd_scheduler.h"

namespace flash_attn3 {
namespace {

constexpr int kPlanThreads = 1024;
constexpr int kFillBlocks = 64;  // beside the planning one

__device__ void plan_sequences(const FwdKernelParams& params, int tile_m) {
  __shared__ int warp_sums[32];
  __shared__ int keys[kPlanThreads];
  int32_t* sequence = params.workspace + RaggedPlan::kHeader;
  int32_t* first_tile = sequence + params.batch;
  const int thread = threadIdx.x;

  auto span = [&](int b) {
    return sequence_span(params.cu_seqlens_q, params.seqused_q, b, params.seqlen_q, params.total_q);
  };
  // Longest keys first, so that the last tiles to be handed out are short.
  const bool sorted = params.batch <= kPlanThreads;
  if (sorted) {
    int length = -1;
    if (thread < params.batch) {
      length = sequence_span(params.cu_seqlens_k, params.seqused_k, thread, params.seqlen_k,
                             params.total_k)
                   .used;
    }
    keys[thread] = length;
    __syncthreads();
    if (thread < params.batch) {
      int rank = 0;
      for (int b = 0; b < params.batch; ++b) {
        rank += keys[b] > length || (keys[b] == length && b < thread);
      }
      sequence[rank] = thread;
    }
    __syncthreads();
  }
  const int most = params.total_q / tile_m + params.batch;
  int total = 0;
  for (int start = 0; start < params.batch; start += kPlanThreads) {
    const int index = start + thread;
    int tiles = 0;
    if (index < params.batch) {
      const int b = sorted ? sequence[index] : index;
      if (!sorted) sequence[index] = index;
      tiles = blocks_for(span(b).rows, tile_m);
    }
    const int inclusive = block_prefix_sum(tiles, most - total, warp_sums);
    if (index < params.batch) first_tile[index] = total + larger(inclusive - tiles, 0);
    __syncthreads();
    total += warp_sums[31];
    __syncthreads();
  }
  if (thread == 0) {
    first_tile[params.batch] = total;
    params.workspace[RaggedPlan::kTiles] = total;
    params.workspace[RaggedPlan::kCounter] = 0;
  }
}

// Rows before the first and after the last sequence.
__device__ void fill_uncovered_rows(const FwdKernelParams& params, int element_bytes) {
  const int first = clamp(params.cu_seqlens_q[0], 0, params.total_q);
  const int last = clamp(params.cu_seqlens_q[params.batch], first, params.total_q);
  const int rows = first + params.total_q - last;
  const int warps = (gridDim.x - 1) * (kPlanThreads / 32);
  const int64_t pairs = int64_t(rows) * params.heads;  // a warp each
  for (int64_t i = int64_t(blockIdx.x - 1) * (kPlanThreads / 32) + threadIdx.x / 32; i < pairs;
       i += warps) {
    const int nth = int(i / params.heads);
    const int head = int(i % params.heads);
    const int64_t row = nth < first ? nth : last + (nth - first);
    char* out = static_cast<char*>(params.out) +
                element_bytes * (row * params.out_strides.row + head * params.out_strides.head);
    for (int at = threadIdx.x % 32 * 16; at < element_bytes * params.head_dim_v; at += 32 * 16) {
      *reinterpret_cast<uint4*>(out + at) = make_uint4(0, 0, 0, 0);
    }
    if (threadIdx.x % 32 == 0) params.lse[head * params.lse_head_stride + row] = kMinusInfinity;
  }
}

__global__ void __launch_bounds__(kPlanThreads)
    ragged_plan_kernel(const __grid_constant__ FwdKernelParams params, int tile_m,
                       int element_bytes) {
  if (blockIdx.x == 0) {
    plan_sequences(params, tile_m);
  } else {
    fill_uncovered_rows(params, element_bytes);
  }
}

}  // namespace

cudaError_t launch_ragged_plan(const FwdParams& in, const FwdKernelParams& params, int tile_m,
                               cudaStream_t stream) {
  ragged_plan_kernel<<<1 + kFillBlocks, kPlanThreads, 0, stream>>>(params, tile_m, 2);
  return cudaGetLastError();
}

}  // namespace flash_attn3
