// Probabilities in e4m3: their range, their packing, and the sign that a reference is too old.
#pragma once

#include "kernels/common/ptx.h"
#include "kernels/fp8/value_layout.h"

namespace flash_attn3 {

// The largest probability of a row is a power of two when its reference is set, so that it has no
// rounding error. Where every block sets it, 2^8, near the top of e4m3's range (448), which reaches
// 17 binades down. Where references may grow old, 2^6: two binades are left above.
constexpr int kExactTopExponent = 8;
constexpr int kTopExponent = 6;

// A byte from here on (2^8, or NaN) says that the reference lies two binades or more too low.
constexpr uint32_t kTooLargeByte = 0x78;

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
