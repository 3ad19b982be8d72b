// Before the main kernel, one CTA for each query tile and head: the two values a row that the main
// kernel wants, zeros in the sums of dQ, zeros in the counters.
#pragma once

#include "kernels/attn/online_softmax.h"
#include "kernels/bwd/bwd_params.h"
#include "kernels/bwd/bwd_scores.h"
#include "kernels/bwd/bwd_traits.h"
#include "kernels/common/memory.h"

namespace flash_attn3 {

constexpr int kBwdSideThreads = 256;

// The product of 8 elements of O and dO, summed.
template <class Element>
__device__ __forceinline__ float dot_eight(const uint4& a, const uint4& b) {
  const uint32_t x[4] = {a.x, a.y, a.z, a.w};
  const uint32_t y[4] = {b.x, b.y, b.z, b.w};
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 p = unpack_two<Element>(x[i]);
    const float2 q = unpack_two<Element>(y[i]);
    sum = fmaf(p.x, q.x, fmaf(p.y, q.y, sum));
  }
  return sum;
}

template <class T>
__device__ __forceinline__ void write_row_values(const BwdKernelParams& params,
                                                 const WorkspaceTile& tile, int head, float* rows) {
  using Element = typename T::Element;
  constexpr int kLanes = 8;  // of a row
  constexpr float kLog2E = 1.4426950408889634f;
  const int lane = threadIdx.x % kLanes;
#pragma unroll 1
  for (int r = threadIdx.x / kLanes; r < T::kBlockM; r += kBwdSideThreads / kLanes) {
    const int row = tile.row0 + r;
    const bool used = row < tile.q.used;
    float delta = 0.0f;
    if (used) {
      const int64_t at = int64_t(tile.q.base) + row;
      const Element* out = static_cast<const Element*>(params.out) +
                           tile.q.batch * params.out_strides.batch + at * params.out_strides.row +
                           head * params.out_strides.head;
      const Element* dout = static_cast<const Element*>(params.dout_data) +
                            tile.q.batch * params.dout_strides.batch +
                            at * params.dout_strides.row + head * params.dout_strides.head;
      for (int column = lane * 8; column < params.head_dim_v; column += kLanes * 8) {
        delta += dot_eight<Element>(*reinterpret_cast<const uint4*>(out + column),
                                    *reinterpret_cast<const uint4*>(dout + column));
      }
    }
#pragma unroll
    for (int distance = 1; distance < kLanes; distance *= 2) {
      delta += __shfl_xor_sync(0xffffffffu, delta, distance);
    }
    if (lane != 0) continue;
    float minus_lse = kMinusInfinity;
    if (used) {
      const int64_t at = tile.q.batch * params.lse_batch_stride + head * params.lse_head_stride +
                         tile.q.base + row;
      const float lse = params.lse[at];
      if (lse == kMinusInfinity) {
        delta = 0.0f;  // no keys: nothing depends on this row, whatever O holds
      } else {
        minus_lse = -lse * kLog2E;
        if (params.dlse != nullptr) delta -= params.dlse[at];
      }
    }
    rows[row_value_place(r)] = minus_lse;
    rows[T::kBlockM + row_value_place(r)] = used ? delta : 0.0f;
  }
}

template <class T>
__global__ void __launch_bounds__(kBwdSideThreads)
    bwd_preprocess_kernel(const __grid_constant__ BwdKernelParams params) {
  grid_dependents_launch();
  // [query tile][head]. From the end: what the main kernel adds to first is then still in L2.
  const int64_t at = gridDim.x - 1 - blockIdx.x;
  const int head = int(at % params.heads);
  if (at == 0 && threadIdx.x == 0) params.plan[BwdTileOrder::kCounter] = 0;

  // Before anything else: overlapping sequences take turns in tiles that belong to none.
  if (params.turns != nullptr && threadIdx.x < kMostTurnChains) {
    params.turns[at * kMostTurnChains + threadIdx.x] = 0;
  }
  const WorkspaceTile tile = find_workspace_tile<T::kBlockM>(params, int(at / params.heads));
  if (tile.row0 >= tile.q.rows) return;  // a tile between sequences: nobody reads it
  float4* sums = reinterpret_cast<float4*>(params.dq_sum + at * (T::kBlockM * T::kHeadDim));
#pragma unroll 4
  for (int i = threadIdx.x; i < T::kBlockM * T::kHeadDim / 4; i += kBwdSideThreads) {
    sums[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  }
  write_row_values<T>(params, tile, head, params.rows + at * (2 * T::kBlockM));
}

}  // namespace flash_attn3
