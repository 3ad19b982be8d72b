// One of Q, K, V to e4m3 in one pass: the largest magnitude of a block of rows, its scale, the
// cast.
//
// A CTA has one block of one head. G lanes share a row, 16 columns each; a thread has kPasses rows,
// which stay in its registers between the maximum and the cast.
#pragma once

#include <cstdint>
#include <type_traits>

#include "kernels/attn/key_range.h"
#include "kernels/common/ptx.h"
#include "kernels/fp8/fp8_transpose.h"
#include "kernels/fp8/value_layout.h"

namespace flash_attn3 {

constexpr float kLargestE4m3 = 448.0f;
constexpr float kSmallestScale = 1.17549435e-38f;  // 2^-126, whose inverse is finite
// Larger inputs, infinities too, count as 2^50: products of two, summed over a head dim, are
// finite, and so are sums over the keys of a value times what P may be.
constexpr float kLargestInput = 1125899906842624.0f;

struct QuantizeArgs {
  const void* in;
  const float* mean;  // [batch, heads, head_dim] or null
  const int32_t* cu_seqlens;
  const int32_t* seqused;
  uint8_t* out;
  float* scale;
  int64_t batch_stride, row_stride, head_stride;
  int32_t batch, heads, head_dim;
  int32_t seqlen;       // dense
  int32_t total;        // ragged
  int32_t block_rows;   // 64 or 128
  int32_t blocks;       // of a dense sequence; ragged: of all
  int32_t rotate_size;  // power of two, at least 16; 0: none
  int32_t transposed;
};

// Of all heads.
FLASH_ATTN3_HOST_DEVICE int64_t blocks_of(const QuantizeArgs& args) {
  return int64_t(args.blocks) * args.heads * (args.cu_seqlens != nullptr ? 1 : args.batch);
}

// Rows of a block: `count` of them in use, `exist` to be written.
struct RowBlock {
  int sequence;
  int64_t first;  // row of the tensor, within its batch when dense
  int count;
  int exist;
};

// Sequence b of a ragged tensor has its blocks from cu_seqlens[b] / rows + b on.
__device__ __forceinline__ int sequence_of_block(const QuantizeArgs& args, int block) {
  int low = 0, high = args.batch - 1;
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (args.cu_seqlens[middle] / args.block_rows + middle <= block) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

// `block` counts within a sequence when dense, over all when ragged.
__device__ __forceinline__ RowBlock find_rows(const QuantizeArgs& args, int batch, int block) {
  int base = 0, rows = args.seqlen, n = block;
  if (args.cu_seqlens != nullptr) {
    batch = sequence_of_block(args, block);
    base = larger(0, smaller(args.cu_seqlens[batch], args.total));
    rows = larger(base, smaller(args.cu_seqlens[batch + 1], args.total)) - base;
    n = block - (base / args.block_rows + batch);
  }
  int used = rows;
  if (args.seqused != nullptr) used = larger(0, smaller(args.seqused[batch], rows));
  const int start = n * args.block_rows;
  return {batch, int64_t(base) + start, larger(0, smaller(used - start, args.block_rows)),
          n < 0 ? 0 : larger(0, smaller(rows - start, args.block_rows))};
}

// A block of a head.
struct HeadBlock {
  int head;
  int slot;  // of all blocks of a head
  bool ragged;
  int batch;  // dense: the sequence
  int block;  // as find_rows() counts
  RowBlock rows;

  // The nth of all, the heads of a slot one after the other.
  static __device__ __forceinline__ HeadBlock of(const QuantizeArgs& args, int nth) {
    HeadBlock at;
    at.head = nth % args.heads;
    at.slot = nth / args.heads;
    at.ragged = args.cu_seqlens != nullptr;
    at.batch = at.ragged ? 0 : at.slot / args.blocks;
    at.block = at.ragged ? at.slot : at.slot - at.batch * args.blocks;
    at.rows = find_rows(args, at.batch, at.block);
    return at;
  }

  // Row 0 of the batch that `rows.first` counts in.
  template <class Element>
  __device__ __forceinline__ const Element* input(const QuantizeArgs& args) const {
    return static_cast<const Element*>(args.in) + head * args.head_stride +
           (ragged ? 0 : rows.sequence * args.batch_stride);
  }

  // The block's first row, contiguous as [batch][row][head][column], or its transposed tile.
  __device__ __forceinline__ uint8_t* out(const QuantizeArgs& args) const {
    const int64_t row = ragged ? rows.first : int64_t(batch) * args.seqlen + rows.first;
    const int64_t first = args.transposed != 0 ? int64_t(slot) * ValueLayout::kRowBytes * args.heads
                                               : row * args.heads;
    const int width = args.transposed != 0 ? ValueLayout::kRowBytes : 1;
    return args.out + (first + int64_t(head) * width) * args.head_dim;
  }

  __device__ __forceinline__ float* scale(const QuantizeArgs& args) const {
    const int64_t first =
        ragged ? int64_t(head) * args.blocks : (int64_t(batch) * args.heads + head) * args.blocks;
    return args.scale + (first + block);
  }

  // True in a slot that no sequence of a ragged tensor has: its scale is written all the same, so
  // that the results of equal calls are equal.
  __device__ __forceinline__ bool is_empty(const QuantizeArgs& args, bool writes) const {
    if (rows.exist != 0) return false;
    if (writes && ragged) *scale(args) = 1.0f;
    return true;
  }
};

template <class Element>
__device__ __forceinline__ float to_float(uint32_t packed, int which);

template <>
__device__ __forceinline__ float to_float<__nv_bfloat16>(uint32_t packed, int which) {
  return __uint_as_float(which == 0 ? packed << 16 : packed & 0xffff0000u);
}

template <>
__device__ __forceinline__ float to_float<__half>(uint32_t packed, int which) {
  return __half2float(__ushort_as_half(which == 0 ? packed & 0xffff : packed >> 16));
}

// The larger magnitudes of two pairs; passes over NaN.
template <class Element>
__device__ __forceinline__ uint32_t larger_magnitudes(uint32_t top, uint32_t x);

template <>
__device__ __forceinline__ uint32_t larger_magnitudes<__nv_bfloat16>(uint32_t top, uint32_t x) {
  uint32_t y;
  asm("max.bf16x2 %0, %1, %2;" : "=r"(y) : "r"(top), "r"(x & 0x7fff7fffu));
  return y;
}

template <>
__device__ __forceinline__ uint32_t larger_magnitudes<__half>(uint32_t top, uint32_t x) {
  uint32_t y;
  asm("max.f16x2 %0, %1, %2;" : "=r"(y) : "r"(top), "r"(x & 0x7fff7fffu));
  return y;
}

__device__ __forceinline__ uint32_t word(const uint4& four, int i) {
  return i == 0 ? four.x : i == 1 ? four.y : i == 2 ? four.z : four.w;
}

// [key][column] bytes in `rows` to [column][slot] in `tile`, then to memory.
__device__ __forceinline__ void store_transposed(const uint8_t* rows, int row_bytes, uint8_t* tile,
                                                 int head_dim, uint8_t* out) {
  using S = TransposeStep;
  const int lane = threadIdx.x % 32;
  const int warps = blockDim.x / 32;
  const TransposeSelectors select = TransposeSelectors::of_lane(lane);
  const int column_steps = head_dim / S::kColumns;
  const int steps = ValueLayout::kKeys / S::kKeys * column_steps;
  for (int step = threadIdx.x / 32; step < steps; step += warps) {
    const int keys = step / column_steps * S::kKeys;
    const int column = step % column_steps * S::kColumns;
    uint32_t loaded[4], stored[4];
    load_matrix_x4_transposed(
        loaded, shared_address(rows + (keys + S::load_key(lane)) * row_bytes + column));
    transpose_bytes(loaded, select, stored);
    store_matrix_x4(shared_address(tile) + ValueLayout::offset(column + S::store_column(lane),
                                                               keys + S::store_half(lane) * 16),
                    stored);
  }
  __syncthreads();
  for (int i = threadIdx.x; i < head_dim * (ValueLayout::kRowBytes / 16); i += blockDim.x) {
    const int column = i / 8, chunk = i % 8;
    reinterpret_cast<uint4*>(out)[i] =
        *reinterpret_cast<const uint4*>(tile + ValueLayout::offset(column, chunk * 16));
  }
}

// Bytes from row to row of the shared tile: an odd number of 16, so that eight rows' chunks lie in
// different banks.
__host__ __device__ inline int quantize_row_bytes(int head_dim) {
  return head_dim / 16 % 2 == 1 ? head_dim : head_dim + 16;
}

// top / 448, rounded to float, up to the next power of two: that of top itself less 2^8, or twice
// as much from a mantissa beyond 1.75 on. Neighbouring blocks then mostly have the same scale, and
// the attention kernel may leave sums of several blocks of V as they are. e4m3 loses a bit at the
// bottom of its range, 14 binades down.
__device__ __forceinline__ float scale_for(float top) {
  static_assert(kLargestE4m3 == 1.75f * 256.0f);
  if (top == 0.0f) return 1.0f;
  const int bits = __float_as_int(fminf(top, kLargestInput)) + 0x1fffff;
  return __int_as_float(larger((bits & 0x7f800000) - (8 << 23), __float_as_int(kSmallestScale)));
}

// Of a power of two.
__device__ __forceinline__ float inverse_of_scale(float scale) {
  return __int_as_float((254 << 23) - __float_as_int(scale));
}

// From the largest magnitude that each thread has seen: writes the block's scale, and gives what
// values are to be multiplied by. All threads of the CTA.
__device__ __forceinline__ float scale_of_block(const QuantizeArgs& args, const HeadBlock& at,
                                                float top) {
  __shared__ float warp_top[16];
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, distance));
  }
  if (threadIdx.x % 32 == 0) warp_top[threadIdx.x / 32] = top;
  __syncthreads();
  top = 0.0f;
  for (int w = 0; w < int(blockDim.x) / 32; ++w) top = fmaxf(top, warp_top[w]);
  const float scale = scale_for(top);
  if (threadIdx.x == 0) *at.scale(args) = scale;
  return inverse_of_scale(scale);
}

// Where a row's values from `column` on go; null where nowhere.
__device__ __forceinline__ uint8_t* place_of(const QuantizeArgs& args, uint8_t* shared,
                                             const HeadBlock& at, int row, int column) {
  if (args.transposed != 0) return shared + row * quantize_row_bytes(args.head_dim) + column;
  if (row >= at.rows.exist) return nullptr;
  return at.out(args) + int64_t(row) * args.heads * args.head_dim + column;
}

// The rows that lie in `shared`, transposed behind them, to memory.
__device__ __forceinline__ void write_transposed(const QuantizeArgs& args, uint8_t* shared,
                                                 uint8_t* out) {
  __syncthreads();
  const int row_bytes = quantize_row_bytes(args.head_dim);
  store_transposed(shared, row_bytes, shared + ValueLayout::kKeys * row_bytes, args.head_dim, out);
}

constexpr int kQuantizePasses = 4;

// kCentred: less a mean. Otherwise values stay in registers as they came, two in each, which lets
// more CTAs run side by side.
template <class Element, int kGroup, bool kCentred>
__global__ void __launch_bounds__(512) quantize_kernel(const __grid_constant__ QuantizeArgs args) {
  extern __shared__ __align__(1024) uint8_t shared[];
  const HeadBlock at = HeadBlock::of(args, blockIdx.x);
  const RowBlock& rows = at.rows;
  if (at.is_empty(args, threadIdx.x == 0)) return;

  const int member = threadIdx.x % kGroup;
  const int rows_per_pass = blockDim.x / kGroup;
  const bool has_columns = member * 16 < args.head_dim;
  const Element* in = at.input<Element>(args) + member * 16;

  uint4 raw[kQuantizePasses][2];
#pragma unroll
  for (int pass = 0; pass < kQuantizePasses; ++pass) {
    const int row = pass * rows_per_pass + threadIdx.x / kGroup;
    raw[pass][0] = raw[pass][1] = make_uint4(0, 0, 0, 0);
    if (row < rows.count && has_columns) {
      const uint4* from = reinterpret_cast<const uint4*>(in + (rows.first + row) * args.row_stride);
      raw[pass][0] = from[0];
      raw[pass][1] = from[1];
    }
  }
  float top = 0.0f;
  float x[kCentred ? kQuantizePasses : 1][16];
  if constexpr (kCentred) {
    float mean[16];
    const float* from =
        args.mean + (int64_t(rows.sequence) * args.heads + at.head) * args.head_dim + member * 16;
#pragma unroll
    for (int i = 0; i < 16; ++i) mean[i] = has_columns ? from[i] : 0.0f;
#pragma unroll
    for (int pass = 0; pass < kQuantizePasses; ++pass) {
      const float used = pass * rows_per_pass + threadIdx.x / kGroup < rows.count ? 1.0f : 0.0f;
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        x[pass][i] =
            fmaf(-used, mean[i], to_float<Element>(word(raw[pass][i / 8], i / 2 % 4), i % 2));
        top = fmaxf(top, fabsf(x[pass][i]));  // passes over NaN
      }
    }
  } else {
    uint32_t tops = 0;  // in pairs
#pragma unroll
    for (int pass = 0; pass < kQuantizePasses; ++pass) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        tops = larger_magnitudes<Element>(tops, word(raw[pass][i / 4], i % 4));
      }
    }
    top = fmaxf(to_float<Element>(tops, 0), to_float<Element>(tops, 1));
  }
  const float inverse = scale_of_block(args, at, top);

#pragma unroll
  for (int pass = 0; pass < kQuantizePasses; ++pass) {
    const int row = pass * rows_per_pass + threadIdx.x / kGroup;
    if constexpr (!kCentred) {
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        x[0][i] = to_float<Element>(word(raw[pass][i / 8], i / 2 % 4), i % 2);
      }
    }
    const auto& from = x[kCentred ? pass : 0];
    uint32_t packed[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      packed[i] = pack_four_e4m3(from[4 * i] * inverse, from[4 * i + 1] * inverse,
                                 from[4 * i + 2] * inverse, from[4 * i + 3] * inverse);
    }
    if (!has_columns || row >= args.block_rows) continue;
    uint8_t* to = place_of(args, shared, at, row, member * 16);
    if (to == nullptr) continue;
    *reinterpret_cast<uint4*>(to) = make_uint4(packed[0], packed[1], packed[2], packed[3]);
  }
  if (args.transposed != 0) write_transposed(args, shared, at.out(args));
}

// --- the mean of K's rows -----------------------------------------------------------------------

constexpr int kMeanParts = 32;

// Sums of a part of the rows of a head of a sequence; a thread has one column.
template <class Element>
__global__ void __launch_bounds__(256)
    mean_parts_kernel(const __grid_constant__ QuantizeArgs args, float* parts) {
  const int head = blockIdx.x, part = blockIdx.y, sequence = blockIdx.z;
  const bool ragged = args.cu_seqlens != nullptr;
  int base = 0, rows = args.seqlen;
  if (ragged) {
    base = larger(0, smaller(args.cu_seqlens[sequence], args.total));
    rows = larger(base, smaller(args.cu_seqlens[sequence + 1], args.total)) - base;
  }
  if (args.seqused != nullptr) rows = larger(0, smaller(args.seqused[sequence], rows));
  const int per_part = blocks_for(rows, kMeanParts);
  const int end = smaller(rows, (part + 1) * per_part);
  const int column = threadIdx.x;
  if (column >= args.head_dim) return;
  const Element* in = static_cast<const Element*>(args.in) + head * args.head_stride + column +
                      (ragged ? int64_t(base) * args.row_stride : sequence * args.batch_stride);
  float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
  int row = part * per_part;
  for (; row + 4 <= end; row += 4) {
#pragma unroll
    for (int i = 0; i < 4; ++i) sum[i] += float(in[(row + i) * args.row_stride]);
  }
  for (; row < end; ++row) sum[0] += float(in[row * args.row_stride]);
  parts[((int64_t(sequence) * args.heads + head) * kMeanParts + part) * args.head_dim + column] =
      (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

__global__ void __launch_bounds__(256)
    mean_kernel(const __grid_constant__ QuantizeArgs args, const float* parts, float* mean) {
  const int head = blockIdx.x, sequence = blockIdx.y;
  int rows = args.seqlen;
  if (args.cu_seqlens != nullptr) {
    const int base = larger(0, smaller(args.cu_seqlens[sequence], args.total));
    rows = larger(base, smaller(args.cu_seqlens[sequence + 1], args.total)) - base;
  }
  if (args.seqused != nullptr) rows = larger(0, smaller(args.seqused[sequence], rows));
  const int column = threadIdx.x;
  if (column >= args.head_dim) return;
  const int64_t pair = int64_t(sequence) * args.heads + head;
  float sum = 0.0f;
  for (int part = 0; part < kMeanParts; ++part) {
    sum += parts[(pair * kMeanParts + part) * args.head_dim + column];
  }
  // Infinite or NaN: a mean that would spoil every row is none.
  const float value = rows > 0 ? sum / float(rows) : 0.0f;
  mean[pair * args.head_dim + column] = fabsf(value) < kLargestInput ? value : 0.0f;
}

}  // namespace flash_attn3
