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

// The reference of a row may lie this far under its true maximum (exponents of two): P then reaches
// 2^8, which fp16 and bf16 hold with the same relative precision, and O is seldom rescaled.
constexpr float kReferenceSlack = 8.0f;

// Probabilities relative to an old reference stand while no thread's sum over a block reaches this:
// far from the overflow of fp16 and of the products, and NaN fails the comparison too.
constexpr float kLargestBlockSum = 16384.0f;

// The reference of a row that has seen no key. Finite, so that a masked score (-inf) minus it is no
// NaN; below every score, so that the first key moves it.
constexpr float kNoReference = -3.4028234e38f;

struct SoftmaxRows {
  float reference[2];  // what exponents are relative to, after the scale: an exponent of two
  float sum[2];        // of this thread's columns alone, until finish()

  __device__ __forceinline__ void reset() {
    reference[0] = reference[1] = kNoReference;
    sum[0] = sum[1] = 0.0f;
  }

  // Moves the references if these scores ask for it. scale_log2 turns scores into exponents of two.
  // True when a reference of the warp's rows moved: O must then be multiplied by `rescale`
  // (warp-uniform, so that the common case has neither shuffles nor multiplications).
  // The largest probability becomes 2^kTop; below 2^(kTop + kSlack) it may stay what it is.
  template <int kTop = 0, int kSlack = int(kReferenceSlack), int kSize>
  __device__ __forceinline__ bool move_references(const float (&s)[kSize], float scale_log2,
                                                  float (&rescale)[2]) {
    constexpr float kMove = kTop + kSlack;
    float top[2][2] = {{s[0], s[1]}, {s[2], s[3]}};
#pragma unroll
    for (int i = 4; i < kSize; i += 4) {
      top[0][0] = fmaxf(top[0][0], s[i]);
      top[0][1] = fmaxf(top[0][1], s[i + 1]);
      top[1][0] = fmaxf(top[1][0], s[i + 2]);
      top[1][1] = fmaxf(top[1][1], s[i + 3]);
    }
    float row_top[2] = {fmaxf(top[0][0], top[0][1]) * scale_log2,
                        fmaxf(top[1][0], top[1][1]) * scale_log2};
    const bool moved = __any_sync(
        0xffffffffu, row_top[0] > reference[0] + kMove || row_top[1] > reference[1] + kMove);
    if (moved) [[unlikely]] {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        row_top[h] = fmaxf(row_top[h], __shfl_xor_sync(0xffffffffu, row_top[h], 1));
        row_top[h] = fmaxf(row_top[h], __shfl_xor_sync(0xffffffffu, row_top[h], 2));
        const float next = fmaxf(reference[h], row_top[h] - float(kTop));
        rescale[h] = exp2_approx(reference[h] - next);
        reference[h] = next;
        sum[h] *= rescale[h];
      }
    }
    return moved;
  }

  // Scores kBegin .. kEnd of a thread to probabilities, in place; their sums are added to `part`.
  template <int kBegin, int kEnd, int kSize>
  __device__ __forceinline__ void exponentiate(float (&s)[kSize], float scale_log2,
                                               float (&part)[2]) const {
    exponentiate_by<kBegin, kEnd>(s, scale_log2, part, [](float x) { return exp2_approx(x); });
  }

  // The same where `nonzero` is known: the assembler moves no exponential above that point.
  template <int kBegin, int kEnd, int kSize>
  __device__ __forceinline__ void exponentiate_if(float (&s)[kSize], float scale_log2,
                                                  float (&part)[2], uint32_t nonzero) const {
    exponentiate_by<kBegin, kEnd>(s, scale_log2, part,
                                  [=](float x) { return exp2_approx_if(x, nonzero); });
  }

  template <int kBegin, int kEnd, int kSize, class Exp2>
  __device__ __forceinline__ void exponentiate_by(float (&s)[kSize], float scale_log2,
                                                  float (&part)[2], Exp2 exp2) const {
    float other[2] = {0.0f, 0.0f};  // two chains a row: an addition waits four cycles for the last
#pragma unroll
    for (int i = kBegin; i < kEnd; ++i) {
      const int h = i / 2 % 2;
      s[i] = exp2(fmaf(s[i], scale_log2, -reference[h]));
      (i % 2 == 0 ? part[h] : other[h]) += s[i];
    }
    part[0] += other[0];
    part[1] += other[1];
  }

  __device__ __forceinline__ void add(const float (&part)[2]) {
    sum[0] += part[0];
    sum[1] += part[1];
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

// The accumulator layout is the layout of P V's A operand, two columns a register.
template <class Element, int kBegin, int kEnd, int kSize>
__device__ __forceinline__ void pack_probabilities(const float (&s)[kSize],
                                                   uint32_t (&p)[kSize / 2]) {
#pragma unroll
  for (int i = kBegin / 2; i < kEnd / 2; ++i) p[i] = pack_two<Element>(s[2 * i], s[2 * i + 1]);
}

// How many of a thread's columns in a row (0, 1, 8, 9, 16, 17, ...) lie below `end`, which counts
// from the thread's first column. 8 further there are 2 more, also below 0 and past the block.
__device__ __forceinline__ int32_t columns_before(int32_t end) {
  return (end >> 3) * 2 + smaller(end & 7, 2);
}

// A bit for each of the first `count` of 32 columns; none below 0, all from 32 on.
__device__ __forceinline__ uint32_t first_columns(int32_t count) {
  return ~shift_left(0xffffffffu, larger(count, 0));
}

// Scores of keys that a row does not see become -inf. seen[h] has a bit for each of the row's
// columns here: the assembler turns seven bits at a time into predicates, where a comparison of
// every column would be an instruction each.
template <int kSize>
__device__ __forceinline__ void mask_scores(float (&s)[kSize], const uint32_t (&seen)[2]) {
  static_assert(kSize <= 64);
#pragma unroll
  for (int i = 0; i < kSize; ++i) {
    if (!(seen[i / 2 % 2] >> (i / 4 * 2 + i % 2) & 1)) s[i] = kMinusInfinity;
  }
}

}  // namespace flash_attn3
