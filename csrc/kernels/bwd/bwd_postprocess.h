// After the main kernel, one CTA for each query tile and head: sums of dQ to dQ.
#pragma once

#include "kernels/bwd/bwd_dq.h"
#include "kernels/bwd/bwd_preprocess.h"

namespace flash_attn3 {

// A thread reads what the thread of the same number of consumer w added, and writes it as that
// thread would have.
template <class T, int kColumns>
__device__ __forceinline__ void write_dq_piece(const BwdKernelParams& params,
                                               const WorkspaceTile& tile, int head, int w,
                                               const float* sums) {
  const int thread = threadIdx.x % 128;
  const BwdDqRows<T> rows{params, tile.q, head, tile.row0 + dq_row_in_tile<T>(w),
                          dq_first_column<T>(w)};
#pragma unroll 2
  for (int i = 0; i < kColumns / 8; i += 4) {
    float4 four[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      four[j] = *reinterpret_cast<const float4*>(sums + dq_fragment_offset(i + j, thread));
    }
    rows.store(i, 0, {four[0].x, four[1].x, four[2].x, four[3].x},
               {four[0].y, four[1].y, four[2].y, four[3].y});
    rows.store(i, 1, {four[0].z, four[1].z, four[2].z, four[3].z},
               {four[0].w, four[1].w, four[2].w, four[3].w});
  }
}

template <class T>
__global__ void __launch_bounds__(kBwdSideThreads)
    bwd_postprocess_kernel(const __grid_constant__ BwdKernelParams params) {
  grid_dependency_wait();
  // [query tile][head]. From the end: what was added to last is then still in L2.
  const int64_t at = gridDim.x - 1 - blockIdx.x;
  const int head = int(at % params.heads);
  const WorkspaceTile tile = find_workspace_tile<T::kBlockM>(params, int(at / params.heads));
  if (tile.row0 >= tile.q.rows) return;
  const float* sums = params.dq_sum + at * (T::kBlockM * T::kHeadDim);
  if (threadIdx.x < 128) {
    write_dq_piece<T, T::kDqColumns0>(params, tile, head, 0, sums);
  } else {
    write_dq_piece<T, T::kDqColumns1>(params, tile, head, 1, sums + dq_piece_offset<T>(1));
  }
}

}  // namespace flash_attn3
