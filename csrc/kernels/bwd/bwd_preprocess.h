// Before the main kernel, one CTA for each query tile and head: the two values a row that the main
// kernel wants, zeros in the counters, and where the main kernel adds to the sums of dQ, zeros
// there.
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

// Eight lanes a row. All that is read passes through shared memory: a thread finds there what it
// asked for itself, and neither registers nor the order of code limit how much is on its way.
template <class T>
struct RowValuesPlan {
  static constexpr int kLanes = 8;
  static constexpr int kRowsAtOnce = kBwdSideThreads / kLanes;
  static constexpr int kChunks = (T::kHeadDimV + 8 * kLanes - 1) / (8 * kLanes);
  static constexpr int kRowsOfThread = T::kBlockM / kRowsAtOnce;
  static constexpr int kRows = kRowsOfThread * kChunks <= 4 ? kRowsOfThread : 1;  // of a round

  struct Places {
    uint4 out[kRows][kChunks][kBwdSideThreads];
    uint4 dout[kRows][kChunks][kBwdSideThreads];
    float lse[kRows][kRowsAtOnce];
    float dlse[kRows][kRowsAtOnce];
  };
};

template <class T>
__device__ __forceinline__ void write_row_values(const BwdKernelParams& params,
                                                 const WorkspaceTile& tile, int head, float* rows) {
  using Element = typename T::Element;
  using Plan = RowValuesPlan<T>;
  constexpr float kLog2E = 1.4426950408889634f;
  __shared__ typename Plan::Places places;
  const int lane = threadIdx.x % Plan::kLanes;
  const int nth = threadIdx.x / Plan::kLanes;
#pragma unroll 1
  for (int first = nth; first < T::kBlockM; first += Plan::kRows * Plan::kRowsAtOnce) {
#pragma unroll
    for (int i = 0; i < Plan::kRows; ++i) {
      const int row = tile.row0 + first + i * Plan::kRowsAtOnce;
      const bool used = row < tile.q.used;
      const int64_t at = int64_t(tile.q.base) + row;
      const Element* out = static_cast<const Element*>(params.out) +
                           tile.q.batch * params.out_strides.batch + at * params.out_strides.row +
                           head * params.out_strides.head;
      const Element* dout = static_cast<const Element*>(params.dout_data) +
                            tile.q.batch * params.dout_strides.batch +
                            at * params.dout_strides.row + head * params.dout_strides.head;
#pragma unroll
      for (int c = 0; c < Plan::kChunks; ++c) {
        const int column = (c * Plan::kLanes + lane) * 8;
        const bool wanted = used && column < params.head_dim_v;
        copy_async<16>(&places.out[i][c][threadIdx.x], wanted ? out + column : params.out, wanted);
        copy_async<16>(&places.dout[i][c][threadIdx.x], wanted ? dout + column : params.dout_data,
                       wanted);
      }
      if (lane != 0) continue;
      const int64_t value = tile.q.batch * params.lse_batch_stride + head * params.lse_head_stride +
                            tile.q.base + row;
      const bool has_dlse = used && params.dlse != nullptr;
      copy_async<4>(&places.lse[i][nth], used ? params.lse + value : params.lse, used);
      copy_async<4>(&places.dlse[i][nth], has_dlse ? params.dlse + value : params.lse, has_dlse);
    }
    wait_for_async_copies();
#pragma unroll
    for (int i = 0; i < Plan::kRows; ++i) {
      const int r = first + i * Plan::kRowsAtOnce;
      float delta = 0.0f;
#pragma unroll
      for (int c = 0; c < Plan::kChunks; ++c) {
        delta += dot_eight<Element>(places.out[i][c][threadIdx.x], places.dout[i][c][threadIdx.x]);
      }
#pragma unroll
      for (int distance = 1; distance < Plan::kLanes; distance *= 2) {
        delta += __shfl_xor_sync(0xffffffffu, delta, distance);
      }
      if (lane != 0) continue;
      // Without keys, or out of use: nothing depends on this row, whatever O holds.
      const float lse = places.lse[i][nth];
      const bool none = tile.row0 + r >= tile.q.used || lse == kMinusInfinity;
      rows[row_value_place(r)] = none ? kMinusInfinity : -lse * kLog2E;
      rows[T::kBlockM + row_value_place(r)] = none ? 0.0f : delta - places.dlse[i][nth];
    }
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
  if (!params.whole_pairs) {
    float4* sums = reinterpret_cast<float4*>(params.dq_sum + at * (T::kBlockM * T::kHeadDim));
#pragma unroll 4
    for (int i = threadIdx.x; i < T::kBlockM * T::kHeadDim / 4; i += kBwdSideThreads) {
      sums[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
  }
  write_row_values<T>(params, tile, head, params.rows + at * (2 * T::kBlockM));
}

}  // namespace flash_attn3
