// The largest score of each of a thread's two rows, over the four threads that share them.
// attn/online_softmax.h has the order of scores.
#pragma once

#include "kernels/attn/key_range.h"
#include "kernels/common/ptx.h"

namespace flash_attn3 {

// The first two values of each of four threads, reduced over them.
template <class T, int kSize, class Larger>
__device__ __forceinline__ void over_quad(T (&x)[kSize], const Larger& larger_of) {
#pragma unroll
  for (int distance = 1; distance <= 2; ++distance) {
    T other[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) other[h] = __shfl_xor_sync(0xffffffffu, x[h], distance);
#pragma unroll
    for (int h = 0; h < 2; ++h) x[h] = larger_of(x[h], other[h]);
  }
}

// Four chains a row: a maximum waits five cycles for the last.
template <int kSize>
__device__ __forceinline__ void tops_of_rows(const float (&s)[kSize], float (&top)[2]) {
  float chain[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) chain[i] = fmaxf(s[i], s[i + 8]);
#pragma unroll
  for (int i = 16; i < kSize; ++i) chain[i % 8] = fmaxf(chain[i % 8], s[i]);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    top[h] =
        fmaxf(fmaxf(chain[2 * h], chain[2 * h + 1]), fmaxf(chain[2 * h + 4], chain[2 * h + 5]));
  }
  over_quad(top, [](float a, float b) { return fmaxf(a, b); });
}

// The same with half as many instructions: integers have a maximum of three, and order positive
// numbers as floats do. A row without one comes out negative: then it is another number.
template <int kSize>
__device__ __forceinline__ void quick_tops(const float (&s)[kSize], float (&top)[2]) {
  int chain[4];
#pragma unroll
  for (int c = 0; c < 4; ++c) {
    const auto score = [&](int i) {  // of row c / 2: every second pair of its columns
      return __float_as_int(s[i / 2 * 8 + c % 2 * 4 + c / 2 * 2 + i % 2]);
    };
    chain[c] = larger(score(0), score(1));
#pragma unroll
    for (int i = 2; i < kSize / 4; i += 2) {
      chain[c] = __vimax3_s32(chain[c], score(i), score(i + 1));
    }
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) chain[h] = larger(chain[2 * h], chain[2 * h + 1]);
  over_quad(chain, [](int a, int b) { return larger(a, b); });
  top[0] = __int_as_float(chain[0]);
  top[1] = __int_as_float(chain[1]);
}

}  // namespace flash_attn3
