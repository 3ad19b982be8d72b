// e4m3 rows of V to the tiles that the attention kernel takes as they are (ValueLayout): for calls
// whose KV blocks meet so many query tiles that transposing each time costs more than once ahead.
#pragma once

#include "kernels/fp8/quantize.h"

namespace flash_attn3 {

constexpr int kTransposeThreads = 256;

// A CTA has one block of one head. Rows past a sequence's end, which may hold NaN, become 0.
__global__ void __launch_bounds__(kTransposeThreads)
    transpose_values_kernel(const __grid_constant__ QuantizeArgs args) {
  extern __shared__ __align__(1024) uint8_t shared[];
  const HeadBlock at = HeadBlock::of(args, blockIdx.x);
  const RowBlock& rows = at.rows;
  if (rows.exist == 0) return;
  const uint8_t* in = at.input<uint8_t>(args);
  const int row_bytes = quantize_row_bytes(args.head_dim);
  const int chunks = args.head_dim / 16;
  constexpr int kAhead = 4;  // loads under way
  for (int from = threadIdx.x; from < ValueLayout::kKeys * chunks;
       from += kAhead * kTransposeThreads) {
    uint4 bytes[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int nth = from + i * kTransposeThreads;
      const int row = nth / chunks, chunk = nth - row * chunks;
      bytes[i] = make_uint4(0, 0, 0, 0);
      if (row < rows.count) {
        bytes[i] =
            *reinterpret_cast<const uint4*>(in + (rows.first + row) * args.row_stride + chunk * 16);
      }
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int nth = from + i * kTransposeThreads;
      const int row = nth / chunks, chunk = nth - row * chunks;
      if (row < ValueLayout::kKeys) {
        *reinterpret_cast<uint4*>(shared + row * row_bytes + chunk * 16) = bytes[i];
      }
    }
  }
  write_transposed(args, shared, at.out(args));
}

}  // namespace flash_attn3
