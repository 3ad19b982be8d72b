// What both kinds of consumer do with scores in registers. Rows of a fragment are keys here, its
// columns queries: S^T = K Q^T.
#pragma once

#include "kernels/attn/query_range.h"
#include "kernels/bwd/bwd_params.h"
#include "kernels/bwd/bwd_traits.h"
#include "kernels/common/memory.h"

namespace flash_attn3 {

// The values of 16 queries that a thread has scores of lie together: of query r of a tile at this
// place. Blocks of 8 queries i and i + 1 are a thread's x, y and z, w.
__device__ __forceinline__ int row_value_place(int r) {
  return r / 16 * 16 + r / 2 % 4 * 4 + r / 8 % 2 * 2 + r % 2;
}

__device__ __forceinline__ float4 row_values(const float* of_16_queries) {
  return *reinterpret_cast<const float4*>(of_16_queries + 4 * (threadIdx.x % 4));
}

// The same of kCount times 16 queries: in registers if kEarly, since shared memory is best read
// before the wait for products, which keep it busy; else read when they are asked for.
template <int kCount, bool kEarly>
struct RowValues {
  float4 values[kEarly ? kCount : 1];
  const float* rows;

  __device__ __forceinline__ explicit RowValues(const float* from) : rows(from) {}

  // kEarly: now those of kFrom .. kTo - 1.
  template <int kFrom = 0, int kTo = kCount>
  __device__ __forceinline__ void read() {
    if constexpr (kEarly) {
#pragma unroll
      for (int i = kFrom; i < kTo; ++i) values[i] = row_values(rows + 16 * i);
    }
  }

  __device__ __forceinline__ float4 operator[](int i) const {
    if constexpr (kEarly) {
      return values[i];
    } else {
      return row_values(rows + 16 * i);
    }
  }
};

// Scores kFrom .. kTo - 1 to probabilities, in place. rows: the stage's -LSE in log2; a row without
// keys has -inf there, and P = 0.
template <bool kSoftcap, int kFrom, int kTo, int kSize, class Values>
__device__ __forceinline__ void make_probabilities(float (&s)[kSize], const Values& minus_lse,
                                                   const BwdKernelParams& params) {
  if (kSoftcap && params.tanh_factor != 0.0f) [[unlikely]] {
#pragma unroll
    for (int i = kFrom; i < kTo; ++i) s[i] = tanh_by_exp2(params.tanh_factor * s[i]);
  }
  const float scale = params.scale_log2;
#pragma unroll
  for (int i = kFrom / 8; i < kTo / 8; ++i) {
    const float4 lse = minus_lse[i];
#pragma unroll
    for (int h = 0; h < 4; ++h) {
      float* two = s + 8 * i + 2 * h;
      two[0] = exp2_approx(fmaf(two[0], scale, h < 2 ? lse.x : lse.z));
      two[1] = exp2_approx(fmaf(two[1], scale, h < 2 ? lse.y : lse.w));
    }
  }
}

// P of unseen pairs becomes 0. first_key: of this thread's two rows, 8 apart.
template <int kSize>
__device__ __forceinline__ void mask_probabilities(float (&p)[kSize], const Mask& mask,
                                                   const BwdTile& tile, int first_key,
                                                   int first_query) {
  QueryRange queries[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int key = first_key + 8 * h;
    queries[h] = visible_queries(mask, key, tile.q_len, tile.k_len);
    if (key >= tile.k_len) queries[h] = {0, -1};
    queries[h].lo -= first_query;
    queries[h].hi -= first_query;
  }
#pragma unroll
  for (int i = 0; i < kSize; ++i) {
    const int column = i / 4 * 8 + i % 2;
    const QueryRange& range = queries[i / 2 % 2];
    if (column < range.lo || column > range.hi) p[i] = 0.0f;
  }
}

// dP to dS = P (dP - delta), in place, of 16 queries; P from its packed form, which dV's product
// reads too.
template <class Element>
__device__ __forceinline__ void make_score_gradients(float* dp, const uint32_t (&p)[4],
                                                     const float4& delta) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 two = unpack_two<Element>(p[i]);
    dp[2 * i] = two.x * (dp[2 * i] - (i < 2 ? delta.x : delta.z));
    dp[2 * i + 1] = two.y * (dp[2 * i + 1] - (i < 2 ? delta.y : delta.w));
  }
}

// The same in bf16, packed: dP - delta is rounded before it meets P, so that a product of two is
// one instruction and P needs no unpacking. Not for fp16, whose range dP may leave where dS does
// not.
template <int kSize, class Values>
__device__ __forceinline__ void make_packed_score_gradients(const float (&dp)[kSize],
                                                            const uint32_t (&p)[kSize / 2],
                                                            const Values& deltas,
                                                            uint32_t (&ds)[kSize / 2]) {
#pragma unroll
  for (int i = 0; i < kSize / 2; ++i) {
    const float4 delta = deltas[i / 4];
    const uint32_t two = pack_two<__nv_bfloat16>(dp[2 * i] - (i % 4 < 2 ? delta.x : delta.z),
                                                 dp[2 * i + 1] - (i % 4 < 2 ? delta.y : delta.w));
    ds[i] = multiply_two_bf16(two, p[i]);
  }
}

// The soft cap's factor 1 - tanh^2. No register holds the tanh so long: it is had from P again,
// where P is not 0. rows: -LSE in log2.
template <class Element>
__device__ __forceinline__ void apply_softcap_factor(float* ds, const uint32_t (&p)[4],
                                                     const float* rows, float tanh_from_log2) {
  const float4 lse = row_values(rows);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 two = unpack_two<Element>(p[i]);
    const float x = (__log2f(two.x) - (i < 2 ? lse.x : lse.z)) * tanh_from_log2;
    const float y = (__log2f(two.y) - (i < 2 ? lse.y : lse.w)) * tanh_from_log2;
    ds[2 * i] *= two.x == 0.0f ? 0.0f : fmaxf(1.0f - x * x, 0.0f);
    ds[2 * i + 1] *= two.y == 0.0f ? 0.0f : fmaxf(1.0f - y * y, 0.0f);
  }
}

// The accumulator layout is the layout of an A operand, two columns a register.
template <class Element, int kSize>
__device__ __forceinline__ void pack_fragments(const float (&s)[kSize],
                                               uint32_t (&packed)[kSize / 2]) {
#pragma unroll
  for (int i = 0; i < kSize / 2; ++i) packed[i] = pack_two<Element>(s[2 * i], s[2 * i + 1]);
}

// dS^T of 64 keys (rows) x M queries to shared memory as dS: rows of queries, one panel of 64 keys.
template <int kSize>
__device__ __forceinline__ void store_score_gradients(const uint32_t (&ds)[kSize], uint32_t panel) {
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32 % 4;
  const int row = lane / 16 * 8 + lane % 8;
  const int chunk = Panel<64>::swizzle(row, 2 * warp + lane / 8 % 2);
  const uint32_t address = panel + row * 128 + chunk * 16;
#pragma unroll
  for (int k = 0; k < kSize / 4; ++k) {
    const uint32_t four[4] = {ds[4 * k], ds[4 * k + 1], ds[4 * k + 2], ds[4 * k + 3]};
    store_matrix_x4_transposed(address + k * 16 * 128, four);
  }
}

}  // namespace flash_attn3
