// dK or dV of 64 keys from registers to global memory, without shared memory.
#pragma once

#include "kernels/bwd/bwd_params.h"
#include "kernels/bwd/bwd_traits.h"
#include "kernels/common/memory.h"
#include "kernels/fwd/fwd_epilogue.h"

namespace flash_attn3 {

// first_key: of this thread's two rows, 8 apart. The tensor is dK's or dV's.
template <class T, int kColumns>
__device__ __forceinline__ void store_key_gradients(const float (&acc)[kColumns / 2], float scale,
                                                    void* tensor, const Strides& strides,
                                                    const BwdTile& tile, int first_key,
                                                    int columns) {
  using Element = typename T::Element;
  const int quad = threadIdx.x % 4;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int key = first_key + 8 * h;
    Element* row = static_cast<Element*>(tensor) + int64_t(tile.k_batch) * strides.batch +
                   (int64_t(tile.k_base) + key) * strides.row +
                   int64_t(tile.head_kv) * strides.head;
#pragma unroll
    for (int i = 0; i < kColumns / 8; i += 4) {
      uint32_t r[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float* pair = acc + 4 * (i + j) + 2 * h;
        r[j] = pack_two<Element>(pair[0] * scale, pair[1] * scale);
      }
      transpose_quad(r, quad);
      const int column = (i + quad) * 8;
      if (key < tile.k_rows && column < columns) {
        store_16_bytes<T::kWholePairs>(row + column, r);
      }
    }
  }
}

}  // namespace flash_attn3
