// The rotated half of the quantise kernel: every `rotate_size` columns times a Hadamard matrix H,
// H[i][j] = (-1)^popcount(i & j) / sqrt(size), then as quantize.h.
//
// H is a product of one 2 x 2 matrix for each bit of a column's number. Of a thread's 16
// neighbouring columns (bits 0 to 3; the four threads of a row make bits 4 and 5), the matrix unit
// takes bits 0, 1, 4 and 5: entries of +-1 and 16-bit inputs are exact, sums fp32. Bits 2 and 3 are
// additions in the thread, bits 6 and 7 more products into the same sums, with the sign of H.
// Nothing is exchanged between threads.
//
// A warp has 16 rows. Sums of more than 64 columns are computed twice, for the maximum and for the
// cast, instead of kept: what was read needs half of their registers.
#pragma once

#include "kernels/fp8/quantize.h"

namespace flash_attn3 {

// The sign of an entry of H in the places of +-1, or 0, as two elements in a register.
template <class Element>
__device__ __forceinline__ uint32_t hadamard_entry(int row, int column, int bits) {
  constexpr uint32_t kOne = std::is_same_v<Element, __half> ? 0x3c00 : 0x3f80;
  if (((row ^ column) & ~bits) != 0) return 0;
  return kOne | (__popc(row & column & bits) % 2 == 1 ? 0x8000 : 0);
}

// Entries of the 16 x 16 matrix on bits 0, 1, 4 and 5 as the B operand: B[k][n], of which k and n
// mean the column bits 0 and 1 (2 t + e + 8 j has 2 j + e) and 4 and 5 (t).
template <class Element>
__device__ __forceinline__ void make_hadamard(int size, uint32_t (&b)[2][2]) {
  const int lane = threadIdx.x % 32;
  const auto place = [](int index) { return (index % 2) | (index / 8 * 2) | (index / 2 % 4 << 4); };
#pragma unroll
  for (int tile = 0; tile < 2; ++tile) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int n = place(lane / 4 + 8 * tile);
      const int k = 2 * (lane % 4) + 8 * half;
      b[tile][half] = hadamard_entry<Element>(place(k), n, size - 1) |
                      hadamard_entry<Element>(place(k + 1), n, size - 1) << 16;
    }
  }
}

// Infinite inputs count as kLargestInput. fp16 cannot hold that: there they become 2^15, what is
// finite 0 beside them, and the caller lifts the result by the factor that this returns.
template <class Element>
__device__ __forceinline__ uint32_t tame(uint32_t pair);

template <>
__device__ __forceinline__ uint32_t tame<__nv_bfloat16>(uint32_t pair) {
  constexpr uint32_t kLargest = 0x5880;  // 2^50
#pragma unroll
  for (int shift = 0; shift < 32; shift += 16) {
    const uint32_t magnitude = pair >> shift & 0x7fff;
    if (magnitude > kLargest && magnitude <= 0x7f80) pair ^= (magnitude ^ kLargest) << shift;
  }
  return pair;
}

template <>
__device__ __forceinline__ uint32_t tame<__half>(uint32_t pair) {
#pragma unroll
  for (int shift = 0; shift < 32; shift += 16) {
    const uint32_t magnitude = pair >> shift & 0x7fff;
    const uint32_t becomes = magnitude == 0x7c00 ? 0x7800 : magnitude > 0x7c00 ? magnitude : 0;
    pair ^= (magnitude ^ becomes) << shift;
  }
  return pair;
}

template <class Element>
constexpr float kLift = std::is_same_v<Element, __half> ? 34359738368.0f : 1.0f;

// kParts: of 64 columns. kMixed: H reaches over all of them.
template <class Element, int kParts, bool kMixed>
struct RotatedRows {
  uint32_t raw[kParts][2][8];  // of rows g and g + 8, two columns a register
  uint32_t b[2][2];

  // Rows' columns 64 part + 16 t to 64 part + 16 t + 15, rotated: sum[4 h + 2 j + e][row] is column
  // 4 h + 2 j + e.
  __device__ __forceinline__ void rotate(int part, float (&sum)[16][2]) const {
    float c[4][2][4] = {};
    __syncwarp();  // lanes without columns come from elsewhere
#pragma unroll
    for (int from = 0; from < kParts; ++from) {
      if (!kMixed && from != part) continue;
      const uint32_t flip = kMixed && __popc(from & part) % 2 == 1 ? 0x80008000u : 0;
#pragma unroll
      for (int h = 0; h < 4; ++h) {
        const uint32_t a[4] = {raw[from][0][2 * h], raw[from][1][2 * h], raw[from][0][2 * h + 1],
                               raw[from][1][2 * h + 1]};
#pragma unroll
        for (int tile = 0; tile < 2; ++tile) {
          mma_16x8<Element>(c[h][tile], a, b[tile][0] ^ flip, b[tile][1] ^ flip);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const auto at = [&](int h) -> float& { return c[h][i / 4][i % 4]; };
      const float low = at(0) + at(1), low_less = at(0) - at(1);
      const float high = at(2) + at(3), high_less = at(2) - at(3);
      const int column = i / 4 * 2 + i % 2, row = i % 4 / 2;
      sum[column][row] = low + high;
      sum[4 + column][row] = low_less + high_less;
      sum[8 + column][row] = low - high;
      sum[12 + column][row] = low_less - high_less;
    }
  }
};

// H times the mean, in `turned`, by all threads of the CTA.
__device__ __forceinline__ void rotate_mean(const float* mean, int head_dim, int size,
                                            float* turned) {
  for (int i = threadIdx.x; i < head_dim; i += blockDim.x) turned[i] = mean[i];
  for (int stride = 1; stride < size; stride *= 2) {
    __syncthreads();
    for (int i = threadIdx.x; i < head_dim / 2; i += blockDim.x) {
      const int at = i / stride * 2 * stride + i % stride;
      const float a = turned[at], b = turned[at + stride];
      turned[at] = a + b;
      turned[at + stride] = a - b;
    }
  }
  __syncthreads();
}

// CTAs of an SM whose registers hold everything.
template <class Element, int kParts>
constexpr int kRotatedCtas = (kParts == 1   ? 4
                              : kParts == 2 ? 3
                                            : 2) -
                             (std::is_same_v<Element, __half> && kParts > 1);

template <class Element, int kParts, bool kMixed>
__global__ void __launch_bounds__(256, kRotatedCtas<Element, kParts>)
    quantize_rotated_kernel(const __grid_constant__ QuantizeArgs args) {
  extern __shared__ __align__(1024) uint8_t shared[];
  __shared__ float turned[256];
  const CtaBlock at = CtaBlock::of(args);
  const RowBlock& rows = at.rows;
  if (at.is_empty(args)) return;

  const int first_row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;
  const int first_column = threadIdx.x % 4 * 16;
  const Element* in = at.input<Element>(args) + first_column;
  RotatedRows<Element, kParts, kMixed> x;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = first_row + 8 * r;
    const uint4* from = reinterpret_cast<const uint4*>(in + (rows.first + row) * args.row_stride);
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const bool there = row < rows.count && part * 64 + first_column < args.head_dim;
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const uint4 four = there ? from[part * 8 + j] : make_uint4(0, 0, 0, 0);
        x.raw[part][r][4 * j] = four.x;
        x.raw[part][r][4 * j + 1] = four.y;
        x.raw[part][r][4 * j + 2] = four.z;
        x.raw[part][r][4 * j + 3] = four.w;
      }
    }
  }
  make_hadamard<Element>(args.rotate_size, x.b);
  bool centred = args.mean != nullptr;
  if (centred) {
    rotate_mean(args.mean + (int64_t(rows.sequence) * args.heads + at.head) * args.head_dim,
                args.head_dim, args.rotate_size, turned);
  }

  // Beyond finite numbers, as integers, which order magnitudes as floats do; NaN is the largest.
  constexpr uint32_t kTooLarge = std::is_same_v<Element, __half> ? 0x7bff : 0x5800;
  uint32_t largest = 0;
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      largest = __vmaxu2(largest, x.raw[part][i / 8][i % 8] & 0x7fff7fffu);
    }
  }
  float lift = 1.0f;
  if (__any_sync(0xffffffffu, max(largest & 0xffff, largest >> 16) > kTooLarge)) [[unlikely]] {
    const uint32_t infinite = std::is_same_v<Element, __half> ? 0x7c00 : 0;
    bool any = infinite == 0;
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        const uint32_t pair = x.raw[part][i / 8][i % 8];
        any |= (pair & 0x7fff) == infinite || (pair >> 16 & 0x7fff) == infinite;
      }
    }
    if (__any_sync(0xffffffffu, any)) {
      lift = kLift<Element>;
      // It would be lifted too. A mean of fp16 is nothing beside what infinities count as.
      if (lift != 1.0f) centred = false;
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
#pragma unroll
        for (int i = 0; i < 16; ++i) {
          x.raw[part][i / 8][i % 8] = tame<Element>(x.raw[part][i / 8][i % 8]);
        }
      }
    }
  }

  const float factor = rsqrtf(float(args.rotate_size)) * lift;
  const auto less_mean = [&](int part, float (&sum)[16][2]) {
    if (!centred) return;
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const float mean = turned[(part * 64 + first_column + i) % 256];
#pragma unroll
      for (int r = 0; r < 2; ++r) sum[i][r] -= first_row + 8 * r < rows.count ? mean : 0.0f;
    }
  };
  float top = 0.0f;
  float sum[16][2];
#pragma unroll kMixed ? 1 : kParts
  for (int part = 0; part < kParts; ++part) {
    x.rotate(part, sum);
    less_mean(part, sum);
    if (part * 64 + first_column >= args.head_dim) continue;
#pragma unroll
    for (int i = 0; i < 32; ++i) top = fmaxf(top, fabsf(sum[i / 2][i % 2]));  // passes over NaN
  }
  const float inverse = scale_of_block(args, at, top * factor) * factor;

#pragma unroll kMixed ? 1 : kParts
  for (int part = 0; part < kParts; ++part) {
    if constexpr (kParts > 1) {
      x.rotate(part, sum);
      less_mean(part, sum);
    }
    if (part * 64 + first_column >= args.head_dim) continue;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      uint8_t* to = place_of(args, shared, at, first_row + 8 * r, part * 64 + first_column);
      if (to == nullptr) continue;
      uint32_t packed[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        packed[i] = pack_four_e4m3(sum[4 * i][r] * inverse, sum[4 * i + 1][r] * inverse,
                                   sum[4 * i + 2][r] * inverse, sum[4 * i + 3][r] * inverse);
      }
      *reinterpret_cast<uint4*>(to) = make_uint4(packed[0], packed[1], packed[2], packed[3]);
    }
  }
  if (args.transposed != 0) write_transposed(args, shared, at);
}

}  // namespace flash_attn3
