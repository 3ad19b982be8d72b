// Powers of two in e4m3 without an exponential.
//
// An e4m3 number is nearly the logarithm of its value: the code of 2^x, -6 <= x <= 8, is
// 8 (x + 7) + 8 (2^f - 1 - f) before it is rounded, f being the fraction of x. The last term lies
// between -0.69 and 0. Here its mean, weighted by the value, takes its place: an error of 0.21 of a
// last place (RMS) beside the rounding's 0.29. The largest P of a row has none, its f being 0.
// Below 2^-6 a value falls off faster than it should, to 0 at 2^-7.
//
// An exponential takes eight cycles of a warp, in which the softmax has little else to do; this is
// ordinary arithmetic, as much as packs exponentials.
#pragma once

#include <cstdint>

namespace flash_attn3 {

struct PowerCode {
  static constexpr float kOctave = 8.0f;  // codes from one power of two to the next
  static constexpr float kOne = 55.548f;  // 8 * 7 - 0.452

  // From four kOctave * x + kOne, the first for the lowest byte. Below 0 they become 0; NaN stays
  // NaN.
  static __device__ __forceinline__ uint32_t pack_scaled(const float (&y)[4]) {
    uint32_t low, high;
    asm("cvt.rn.relu.f16x2.f32 %0, %2, %1;\n" : "=r"(low) : "f"(y[0]), "f"(y[1]));
    asm("cvt.rn.relu.f16x2.f32 %0, %2, %1;\n" : "=r"(high) : "f"(y[2]), "f"(y[3]));
    return low_bytes(low, high);
  }

 private:
  // From 1024 on the last place of a half float is 1: the low byte is the rounded number.
  static __device__ __forceinline__ uint32_t low_bytes(uint32_t low, uint32_t high) {
    asm("add.rn.f16x2 %0, %0, %1;\n" : "+r"(low) : "r"(0x64006400));
    asm("add.rn.f16x2 %0, %0, %1;\n" : "+r"(high) : "r"(0x64006400));
    return __byte_perm(low, high, 0x6420);
  }
};

}  // namespace flash_attn3
