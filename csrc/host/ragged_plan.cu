#include "host/ragged_plan.h"

#include "kernels/attn/online_softmax.h"
#include "kernels/attn/sequence_plan.h"
#include "kernels/fwd/fwd_scheduler.h"

namespace flash_attn3 {
namespace {

constexpr int kFillBlocks = 64;  // beside the planning one

__device__ void plan_query_tiles(const FwdKernelParams& params, int tile_m) {
  int32_t* sequence = params.workspace + RaggedPlan::kHeader;
  const int most = params.total_q / tile_m + params.batch;
  const int total = plan_sequences(
      params.batch, most, sequence, sequence + params.batch,
      [&](int b) {
        return sequence_span(params.cu_seqlens_k, params.seqused_k, b, params.seqlen_k,
                             params.total_k)
            .used;
      },
      [&](int b) {
        return blocks_for(
            sequence_span(params.cu_seqlens_q, params.seqused_q, b, params.seqlen_q, params.total_q)
                .rows,
            tile_m);
      });
  if (threadIdx.x == 0) {
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
    plan_query_tiles(params, tile_m);
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
