// Probabilities in e4m3: their range and their packing.
#pragma once

#include "kernels/common/ptx.h"
#include "kernels/fp8/value_layout.h"

namespace flash_attn3 {

// The largest probability of a row is this power of two, which has no rounding error: near the top
// of e4m3's range (448), which reaches 17 binades down.
constexpr int kTopExponent = 8;

// A thread's scores as the A operand of the product with V.
template <int kSize>
__device__ __forceinline__ void pack_probabilities_e4m3(const float (&s)[kSize],
                                                        uint32_t (&p)[kSize / 4]) {
#pragma unroll
  for (int r = 0; r < kSize / 4; ++r) {
    p[r] = pack_four_e4m3(s[ValueLayout::score_of_byte(r, 0)], s[ValueLayout::score_of_byte(r, 1)],
                          s[ValueLayout::score_of_byte(r, 2)], s[ValueLayout::score_of_byte(r, 3)]);
  }
}

}  // namespace flash_attn3
