// Online softmax on the accumulator fragment of a 64 x N score tile.
//
// A thread holds rows g and g + 8 of its warp's 16 (g = lane / 4): s[4 i + 2 h + c] is the score of
// row g + 8 h, column 8 i + 2 (lane % 4) + c. Index h below is that row.
#pragma once

#include <cstdint>

#include "kernels/attn/key_range.h"
#include "kernels/common/ptx.h"

namespace flash_attn3 {

constexpr float kMinusInfinity = -__builtin_huge_valf();

// The reference of a row may lie this far (in log2) under its true maximum: P then reaches 2^8, which
// fp16 and bf16 hold with the same relative precision, and the rescale of O is seldom needed.
constexpr float kReferenceSlack = 8.0f;

struct SoftmaxRows {
  float reference[2];  // what the exponents are relative to, in units of raw scores; -inf at first
  float sum[2];        // of this thread's columns alone, until finish()

  __device__ __forceinline__ void reset() {
    reference[0] = reference[1] = kMinusInfinity;
    sum[0] = sum[1] = 0.0f;
  }

  // Scores to probabilities, packed as the A operand of P V (the accumulator layout is the operand
  // layout, two columns a register). scale_log2 turns scores into exponents of two. True when a
  // reference of the warp's rows moved: O must then be multiplied by `rescale` (warp-uniform, so that
  // the common case has neither shuffles nor multiplications).
  template <class Element, int kSize>
  __device__ __forceinline__ bool exponentiate(float (&s)[kSize], uint32_t (&p)[kSize / 2],
                                               float scale_log2, float slack, float (&rescale)[2]) {
    float top[2][2] = {{s[0], s[1]}, {s[2], s[3]}};
#pragma unroll
    for (int i = 4; i < kSize; i += 4) {
      top[0][0] = fmaxf(top[0][0], s[i]);
      top[0][1] = fmaxf(top[0][1], s[i + 1]);
      top[1][0] = fmaxf(top[1][0], s[i + 2]);
      top[1][1] = fmaxf(top[1][1], s[i + 3]);
    }
    float row_top[2] = {fmaxf(top[0][0], top[0][1]), fmaxf(top[1][0], top[1][1])};
    const bool moved = __any_sync(0xffffffffu, row_top[0] > reference[0] + slack ||
                                                   row_top[1] > reference[1] + slack);
    if (moved) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        row_top[h] = fmaxf(row_top[h], __shfl_xor_sync(0xffffffffu, row_top[h], 1));
        row_top[h] = fmaxf(row_top[h], __shfl_xor_sync(0xffffffffu, row_top[h], 2));
        const float next = fmaxf(reference[h], row_top[h]);
        // -inf minus -inf would be NaN: a row that has seen no key yet has nothing to rescale.
        rescale[h] = next == kMinusInfinity ? 1.0f
                                            : exp2_approx((reference[h] - next) * scale_log2);
        reference[h] = next;
        sum[h] *= rescale[h];
      }
    }
    const float shift[2] = {
        reference[0] == kMinusInfinity ? 0.0f : reference[0] * scale_log2,
        reference[1] == kMinusInfinity ? 0.0f : reference[1] * scale_log2};
    float part[2][2] = {{sum[0], 0.0f}, {sum[1], 0.0f}};
#pragma unroll
    for (int i = 0; i < kSize; i += 4) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float a = exp2_approx(fmaf(s[i + 2 * h], scale_log2, -shift[h]));
        const float b = exp2_approx(fmaf(s[i + 2 * h + 1], scale_log2, -shift[h]));
        part[h][0] += a;
        part[h][1] += b;
        p[i / 2 + h] = pack_two<Element>(a, b);
      }
    }
    sum[0] = part[0][0] + part[0][1];
    sum[1] = part[1][0] + part[1][1];
    // Nothing of this may sink below the waits that follow: it is to run under matrix work.
    asm volatile("" : "+f"(sum[0]), "+f"(sum[1])::"memory");
    return moved;
  }

  // Adds up the sums of the four threads that share a row.
  __device__ __forceinline__ void finish() {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      sum[h] += __shfl_xor_sync(0xffffffffu, sum[h], 1);
      sum[h] += __shfl_xor_sync(0xffffffffu, sum[h], 2);
    }
  }
};

// Scores of keys that a row does not see become -inf. keys[h] is the row's range relative to this
// thread's first column.
template <int kSize>
__device__ __forceinline__ void mask_scores(float (&s)[kSize], const KeyRange (&keys)[2],
                                            bool upper_end_only) {
  if (upper_end_only) {
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      const int column = i / 4 * 8 + i % 2;
      if (column > keys[i / 2 % 2].hi) s[i] = kMinusInfinity;
    }
  } else {
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      const int column = i / 4 * 8 + i % 2;
      const KeyRange& range = keys[i / 2 % 2];
      if (column > range.hi || column < range.lo) s[i] = kMinusInfinity;
    }
  }
}

}  // namespace flash_attn3
