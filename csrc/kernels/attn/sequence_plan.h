// The plans of ragged calls, made by one block: order of the sequences, prefix sum of their tiles.
#pragma once

#include "kernels/attn/key_range.h"

namespace flash_attn3 {

constexpr int kPlanThreads = 1024;

// Inclusive prefix sum over a block of kPlanThreads, not beyond `most`, so that overlapping
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

// Writes sequence[batch] and first_tile[batch + 1], and returns the number of tiles, to every
// thread. length_of(b) is what sequence b's tiles take their time from; tiles_of(b) their number.
template <class LengthOf, class TilesOf>
__device__ int plan_sequences(int batch, int most, int32_t* sequence, int32_t* first_tile,
                              LengthOf length_of, TilesOf tiles_of) {
  __shared__ int warp_sums[32];
  __shared__ int lengths[kPlanThreads];
  const int thread = threadIdx.x;
  // Longest first, so that the last tiles to be handed out are short.
  const bool sorted = batch <= kPlanThreads;
  if (sorted) {
    const int length = thread < batch ? length_of(thread) : -1;
    lengths[thread] = length;
    __syncthreads();
    if (thread < batch) {
      int rank = 0;
      for (int b = 0; b < batch; ++b) {
        rank += lengths[b] > length || (lengths[b] == length && b < thread);
      }
      sequence[rank] = thread;
    }
    __syncthreads();
  }
  int total = 0;
  for (int start = 0; start < batch; start += kPlanThreads) {
    const int index = start + thread;
    int tiles = 0;
    if (index < batch) {
      const int b = sorted ? sequence[index] : index;
      if (!sorted) sequence[index] = index;
      tiles = tiles_of(b);
    }
    const int inclusive = block_prefix_sum(tiles, most - total, warp_sums);
    // Where `most` cuts it off, a sequence has the first of its tiles or none.
    if (index < batch) first_tile[index + 1] = total + inclusive;
    __syncthreads();
    total += warp_sums[31];
    __syncthreads();
  }
  if (thread == 0) first_tile[0] = 0;
  return total;
}

}  // namespace flash_attn3
