// Probabilities in e4m3: their range, their packing, and the sign that a reference is too old.
#pragma once

#include "kernels/common/ptx.h"

namespace flash_attn3 {

// The largest probability of a row is 2^kTopExponent when its reference is set: a power of two, so
// that it has no rounding error. Below it lie 15 binades (2^-9 is e4m3's smallest number), above it
// two, in which a larger one may stay before the reference moves: at most 448 is there to hold it.
constexpr int kTopExponent = 6;

// A byte from here on (2^8, or NaN) says that the reference lies two binades or more too low.
constexpr uint32_t kTooLargeByte = 0x78;

// Scores of columns 32 c + 8 i + 2 t + e (fp8/value_layout.h) of rows g and g + 8, as the A operand
// of the product with slots 32 c to 32 c + 31 of V.
template <int kSize>
__device__ __forceinline__ void pack_probabilities_e4m3(const float (&s)[kSize],
                                                        uint32_t (&p)[kSize / 4]) {
#pragma unroll
  for (int c = 0; c < kSize / 16; ++c) {
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      // r = 0, 1: rows g, g + 8 of the first 16 slots; r = 2, 3: of the others.
      const int at = 16 * c + r / 2 * 8 + r % 2 * 2;
      p[4 * c + r] = pack_four_e4m3(s[at], s[at + 1], s[at + 4], s[at + 5]);
    }
  }
}

// Bytes are 0x7f at most, so that adding to all four of a register carries nowhere.
template <int kSize>
__device__ __forceinline__ bool any_too_large(const uint32_t (&p)[kSize]) {
  constexpr uint32_t kToSign = (0x80 - kTooLargeByte) * 0x01010101u;
  uint32_t signs = 0;
#pragma unroll
  for (int i = 0; i < kSize; ++i) signs |= p[i] + kToSign;
  return (signs & 0x80808080u) != 0;
}

}  // namespace flash_attn3
