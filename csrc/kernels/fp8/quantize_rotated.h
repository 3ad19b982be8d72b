// The rotated half of the quantise kernel: every `rotate_size` columns times a Hadamard matrix H,
// H[i][j] = (-1)^popcount(i & j) / sqrt(size), then as quantize.h.
//
// H is a product of one 2 x 2 matrix for each bit of a column's number. Of a thread's 16
// neighbouring columns (bits 0 to 3; the four threads of a row make bits 4 and 5), the matrix unit
// takes bits 0, 2, 4 and 5: entries of +-1 and 16-bit inputs are exact, sums fp32. Bits 1 and 3 are
// additions in the thread, bits 6 and 7 more products into the same sums, with the sign of H.
// Nothing is exchanged between threads, and eight columns as they are read are an A operand: its
// rows are eight rows' pairs of columns with bit 1 clear, and those with bit 1 set.
//
// A CTA takes block after block. A warp has 16 rows of each; they come into shared memory two
// blocks ahead, and their sums stay in registers from the maximum to the cast.
#pragma once

#include "kernels/common/memory.h"
#include "kernels/fp8/quantize.h"

namespace flash_attn3 {

constexpr int kRotatedStages = 2;  // blocks of a CTA that are there or on their way
constexpr int kRotatedRows = 16;   // of a block, for each warp
constexpr int kRotatedWarps = ValueLayout::kKeys / kRotatedRows;  // at most

// CTAs of an SM with blocks of 128 rows; twice as many with 64. kParts: of 64 columns.
template <int kParts>
constexpr int kRotatedCtas = kParts <= 2 ? 2 : 1;

// Of a row in shared memory: an odd number of 16, so that the 16 that a thread reads at once, of
// eight rows, lie in different banks.
template <int kParts>
constexpr int kRotatedRowBytes = kParts * 128 + 16;

// What a CTA's warps want to know of a block.
struct RotatedBlock {
  const void* in;
  uint8_t* out;
  float* scale;  // null: there are no more
  int32_t count;
  int32_t exist;
};

// Where the CTA's block n is described: read from the barrier of block n - kRotatedStages until
// that of its own, and written between the former and the one before.
constexpr int kRotatedPlaces = 4;
static_assert(kRotatedPlaces > kRotatedStages);
__device__ __forceinline__ int place_of_block(int n) { return n % kRotatedPlaces; }

template <int kParts>
struct RotatedShared {
  RotatedBlock blocks[kRotatedPlaces];
  alignas(16) float mean[kRotatedPlaces][kParts * 64];
  alignas(16) float tops[2][kRotatedWarps];  // of each warp, for even and odd blocks
};

// The sign of an entry of H in the places of +-1, or 0, as two elements in a register.
template <class Element>
__device__ __forceinline__ uint32_t hadamard_entry(int row, int column, int bits) {
  constexpr uint32_t kOne = std::is_same_v<Element, __half> ? 0x3c00 : 0x3f80;
  if (((row ^ column) & ~bits) != 0) return 0;
  return kOne | (__popc(row & column & bits) % 2 == 1 ? 0x8000 : 0);
}

// Entries of the 16 x 16 matrix on bits 0, 2, 4 and 5 as the B operand: B[k][n], of which k and n
// mean the column bits 0 and 2 (2 t + e + 8 j has 4 j + e) and 4 and 5 (t).
template <class Element>
__device__ __forceinline__ void make_hadamard(int size, uint32_t (&b)[2][2]) {
  const int lane = threadIdx.x % 32;
  const auto place = [](int index) { return (index % 2) | (index / 8 * 4) | (index / 2 % 4 << 4); };
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
// finite 0 beside them, and the row's sums are lifted by kLift.
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

constexpr float kLift = 34359738368.0f;  // 2^35

// Rows with sums beyond this are looked at again. bf16 beyond kLargestInput are multiples of 2^43,
// so sums of them are found in all columns where they aren't 0; those of finite fp16 are less.
constexpr float kSuspicious = 4398046511104.0f;  // 2^42

// Without bit 3, which the threads of quantize_rotated_kernel add: H times the mean, by a warp that
// has eight columns a lane. Columns past the head dim are 0.
template <int kParts>
__device__ __forceinline__ void rotate_mean(const float* mean, int head_dim, int size, float* to) {
  const int lane = threadIdx.x % 32;
  float m[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) m[i] = lane * 8 + i < head_dim ? mean[lane * 8 + i] : 0.0f;
#pragma unroll
  for (int stride = 1; stride < 8; stride *= 2) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if ((i & stride) != 0) continue;
      const float a = m[i], b = m[i + stride];
      m[i] = a + b;
      m[i + stride] = a - b;
    }
  }
  for (int stride = 2; stride * 8 < size; stride *= 2) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float other = __shfl_xor_sync(0xffffffffu, m[i], stride);
      m[i] = (lane & stride) == 0 ? m[i] + other : other - m[i];
    }
  }
  if (lane >= kParts * 8) return;
#pragma unroll
  for (int i = 0; i < 8; ++i) to[lane * 8 + i] = m[i];
}

// By one warp: the next block of this CTA that has rows, from the nth of all on.
template <class Element, int kParts>
__device__ __forceinline__ void find_block(const QuantizeArgs& args, unsigned& nth,
                                           RotatedShared<kParts>& shared, int place) {
  const int lane = threadIdx.x % 32;
  const auto blocks = unsigned(blocks_of(args));
  RotatedBlock block = {};
  for (; nth < blocks && block.scale == nullptr; nth += gridDim.x) {
    const HeadBlock at = HeadBlock::of(args, nth);
    if (at.is_empty(args, lane == 0)) continue;
    block = {at.input<Element>(args) + at.rows.first * args.row_stride, at.out(args),
             at.scale(args), at.rows.count, at.rows.exist};
    if (args.mean == nullptr) continue;
    const int64_t head = int64_t(at.rows.sequence) * args.heads + at.head;
    rotate_mean<kParts>(args.mean + head * args.head_dim, args.head_dim, args.rotate_size,
                        shared.mean[place]);
  }
  if (lane == 0) shared.blocks[place] = block;
}

// A warp's rows of a block on their way to `rows`: zeros past the block's end and the head dim.
// Eight lanes have 128 bytes of a row.
template <class Element, int kParts, bool kMixed>
__device__ __forceinline__ void load_rows(const QuantizeArgs& args, RotatedBlock block,
                                          uint8_t* rows) {
  const int lane = threadIdx.x % 32, column = lane % 8 * 8;
#pragma unroll
  for (int i = 0; i < kRotatedRows; i += 4) {
    const int row = i + lane / 8, of_block = threadIdx.x / 32 * kRotatedRows + row;
    const bool exists = of_block < block.count;
    const Element* from = static_cast<const Element*>(exists ? block.in : args.in) + column +
                          (exists ? of_block * args.row_stride : 0);
    uint8_t* to = rows + row * kRotatedRowBytes<kParts> + column * 2;
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const bool there = exists && (kMixed || part * 64 + column < args.head_dim);
      copy_async<16>(to + part * 128, from + part * 64, there);
    }
  }
}

// Of a warp's 16 rows, a thread has g and g + 8, and of every 64 columns 16 neighbouring ones.
// kMixed: H reaches over all parts.
template <class Element, int kParts, bool kMixed>
struct RotatedRows {
  static constexpr int kRowBytes = kRotatedRowBytes<kParts>;
  uint32_t b[2][2];
  float sum[kParts][2][16];

  // So that sums are finite but for NaN, in shared memory. `lifted`: rows that are to be lifted,
  // where a mean is nothing beside what infinities count as.
  static __device__ __forceinline__ void tame_rows(uint8_t* rows, bool (&lifted)[2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const auto for_each_word = [&](const auto& work) {
#pragma unroll 1
        for (int i = 0; i < kParts * 8; ++i) {
          work(*reinterpret_cast<uint32_t*>(rows + r * 8 * kRowBytes + i / 8 * 128 + i % 8 * 4));
        }
      };
      if constexpr (std::is_same_v<Element, __half>) {
        bool infinite = false;
        for_each_word([&](uint32_t pair) {
          infinite |= (pair & 0x7fff) == 0x7c00 || (pair >> 16 & 0x7fff) == 0x7c00;
        });
        const int first_of_row = threadIdx.x % 32 / 4 * 4;
        lifted[r] = (__ballot_sync(0xffffffffu, infinite) >> first_of_row & 0xf) != 0;
        if (!lifted[r]) continue;
      }
      for_each_word([](uint32_t& pair) { pair = tame<Element>(pair); });
    }
  }

  // All but bit 3.
  __device__ __forceinline__ void multiply(const uint8_t* rows) {
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
#pragma unroll
      for (int i = 0; i < 32; ++i) sum[part][i / 16][i % 16] = 0.0f;
    }
    __syncwarp();
#pragma unroll
    for (int from = 0; from < kParts; ++from) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int r = i / 2, half = i % 2;
        const uint4 eight =
            *reinterpret_cast<const uint4*>(rows + r * 8 * kRowBytes + from * 128 + half * 16);
        const uint32_t a[4] = {eight.x, eight.y, eight.z, eight.w};
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
          if (!kMixed && from != part) continue;
          const uint32_t flip = kMixed && __popc(from & part) % 2 == 1 ? 0x80008000u : 0;
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            mma_16x8<Element>(sum[part][r] + half * 8 + j * 4, a, b[j][0] ^ flip, b[j][1] ^ flip);
          }
        }
      }
    }
    for_each_row([](float (&x)[16], int) {
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        if (i / 2 % 2 == 1) continue;
        const float low = x[i], high = x[i + 2];
        x[i] = low + high;
        x[i + 2] = low - high;
      }
    });
  }

  // work(columns of a part, part * 2 + which row).
  template <class Work>
  __device__ __forceinline__ void for_each_row(const Work& work) {
#pragma unroll
    for (int i = 0; i < kParts * 2; ++i) work(sum[i / 2][i % 2], i);
  }

  __device__ __forceinline__ void lift(const bool (&lifted)[2]) {
    for_each_row([&](float (&x)[16], int nth) {
      if (!lifted[nth % 2]) return;
#pragma unroll
      for (int i = 0; i < 16; ++i) x[i] *= kLift;
    });
  }

  // Less a mean that rotate_mean() made, of the rows that there are.
  __device__ __forceinline__ void subtract(const float* mean, const bool (&there)[2]) {
    for_each_row([&](float (&x)[16], int nth) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float4 four = *reinterpret_cast<const float4*>(mean + nth / 2 * 64 + i * 4);
        x[4 * i] -= there[nth % 2] ? four.x : 0.0f;
        x[4 * i + 1] -= there[nth % 2] ? four.y : 0.0f;
        x[4 * i + 2] -= there[nth % 2] ? four.z : 0.0f;
        x[4 * i + 3] -= there[nth % 2] ? four.w : 0.0f;
      }
    });
  }

  // The largest magnitude: of a + b and a - b it is |a| + |b|. As an integer, which orders these as
  // floats do, has a maximum of three, and makes NaN the largest.
  __device__ __forceinline__ int top() {
    int chain[4] = {0, 0, 0, 0};
    for_each_row([&](float (&x)[16], int) {
#pragma unroll
      for (int i = 0; i < 8; i += 2) {
        const float first = fabsf(x[i]) + fabsf(x[i + 8]);
        const float second = fabsf(x[i + 1]) + fabsf(x[i + 9]);
        chain[i / 2] = __vimax3_s32(chain[i / 2], __float_as_int(first), __float_as_int(second));
      }
    });
    return larger(larger(chain[0], chain[1]), larger(chain[2], chain[3]));
  }

  // The same, passing over NaN.
  __device__ __forceinline__ int top_of_numbers() {
    float top = 0.0f;
    for_each_row([&](float (&x)[16], int) {
#pragma unroll
      for (int i = 0; i < 8; ++i) top = fmaxf(top, fabsf(x[i]) + fabsf(x[i + 8]));
    });
    return __float_as_int(top);
  }

  // A row's 16 columns, with bit 3, times a factor.
  static __device__ __forceinline__ uint4 cast(const float (&x)[16], float factor) {
    float y[16];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float low = x[i] * factor;
      y[i] = fmaf(x[i + 8], factor, low);
      y[i + 8] = fmaf(-x[i + 8], factor, low);
    }
    return make_uint4(
        pack_four_e4m3(y[0], y[1], y[2], y[3]), pack_four_e4m3(y[4], y[5], y[6], y[7]),
        pack_four_e4m3(y[8], y[9], y[10], y[11]), pack_four_e4m3(y[12], y[13], y[14], y[15]));
  }
};

template <class Element, int kParts, bool kMixed>
__global__ void __launch_bounds__(kRotatedWarps * 32, kRotatedCtas<kParts>)
    quantize_rotated_kernel(const __grid_constant__ QuantizeArgs args) {
  extern __shared__ __align__(1024) uint8_t ring[];
  __shared__ RotatedShared<kParts> shared;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int stage_bytes = args.block_rows * kRotatedRowBytes<kParts>;
  uint8_t* own = ring + warp * kRotatedRows * kRotatedRowBytes<kParts>;  // in stage 0

  if (threadIdx.x < 2 * kRotatedWarps) shared.tops[threadIdx.x % 2][threadIdx.x / 2] = 0.0f;
  unsigned nth = blockIdx.x;  // warp 0 knows
#pragma unroll 1
  for (int i = 0; i < kRotatedStages; ++i) {
    if (warp == 0) find_block<Element>(args, nth, shared, i);
    __syncthreads();
    load_rows<Element, kParts, kMixed>(args, shared.blocks[i], own + i * stage_bytes);
    commit_async_copies();
  }
  if (warp == 0) find_block<Element>(args, nth, shared, kRotatedStages);

  const int row = warp * kRotatedRows + lane / 4;
  const int column = lane % 4 * 16;
  const bool transposed = args.transposed != 0;
  uint8_t* tiles = ring + kRotatedStages * stage_bytes;
  const int out_stride =
      transposed ? quantize_row_bytes(args.head_dim) : args.heads * args.head_dim;
  RotatedRows<Element, kParts, kMixed> x;
  make_hadamard<Element>(args.rotate_size, x.b);
#pragma unroll 1
  for (int n = 0;; ++n) {
    const int place = place_of_block(n);
    uint8_t* stage = own + n % kRotatedStages * stage_bytes;
    uint8_t* rows = stage + lane / 4 * kRotatedRowBytes<kParts> + column * 2;
    const RotatedBlock block = shared.blocks[place];
    if (block.scale == nullptr) break;
    wait_for_async_groups<kRotatedStages - 1>();
    __syncwarp();

    bool tamed = false, lifted[2] = {};
    int top;
#pragma unroll 1
    for (;;) {
      x.multiply(rows);
      if (std::is_same_v<Element, __half> && tamed) x.lift(lifted);
      if (args.mean != nullptr) {
        bool there[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) there[r] = row + 8 * r < block.count && !lifted[r];
        x.subtract(shared.mean[place] + column, there);
      }
      top = x.top();
      if (!__any_sync(0xffffffffu, top >= __float_as_int(kSuspicious))) break;
      // Too large, infinite or NaN.
      if (tamed) {
        top = x.top_of_numbers();
        break;
      }
      x.tame_rows(rows, lifted);
      tamed = true;
    }

    top = __reduce_max_sync(0xffffffffu, top);
    if (lane == 0) shared.tops[n % 2][warp] = __int_as_float(top);
    __syncthreads();
    load_rows<Element, kParts, kMixed>(args, shared.blocks[place_of_block(n + kRotatedStages)],
                                       stage);
    commit_async_copies();
    float largest = 0.0f;
#pragma unroll
    for (int w = 0; w < kRotatedWarps; ++w) largest = fmaxf(largest, shared.tops[n % 2][w]);
    float factor = rsqrtf(float(args.rotate_size));
    const float scale = scale_for(largest * factor);
    if (threadIdx.x == 0) *block.scale = scale;
    factor *= inverse_of_scale(scale);

#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (row + 8 * r >= block.exist && !transposed) continue;
      uint8_t* to = (transposed ? tiles : block.out) + int64_t(row + 8 * r) * out_stride + column;
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        if (!kMixed && part * 64 + column >= args.head_dim) continue;
        *reinterpret_cast<uint4*>(to + part * 64) = x.cast(x.sum[part][r], factor);
      }
    }
    if (transposed) write_transposed(args, tiles, block.out);
    if (warp == 0) find_block<Element>(args, nth, shared, place_of_block(n + kRotatedStages + 1));
  }
  wait_for_async_copies();  // zeros of blocks that there are not
}

}  // namespace flash_attn3
