// A prefix sum over a block, for the plans of ragged calls.
#pragma once

#include "kernels/attn/key_range.h"

namespace flash_attn3 {

// Inclusive prefix sum over a block of 1,024 threads, not beyond `most`, so that overlapping
// sequences can make neither more tiles than the tensor has nor a sum that wraps.
__device__ inline int block_prefix_sum(int value, int most, int* warp_sums) {
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const int other = __shfl_up_sync(0xffffffffu, value, distance);
    if (lane >= distance) value = smaller(value + other, most);
  }
  if (lane == 31) warp_sums[warp] = value;
  __syncthreads();
  if (warp == 0) {
    int sum = warp_sums[lane];
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const int other = __shfl_up_sync(0xffffffffu, sum, distance);
      if (lane >= distance) sum = smaller(sum + other, most);
    }
    warp_sums[lane] = sum;
  }
  __syncthreads();
  const int before = warp == 0 ? 0 : warp_sums[warp - 1];
  __syncthreads();
  return smaller(before + value, most);
}

}  // namespace flash_attn3
