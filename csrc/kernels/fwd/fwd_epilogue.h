// Epilogue: O / l and the LSE go from registers to global memory, without shared memory, so that a
// finishing warpgroup waits for nobody and takes no space from the K and V ring.
#pragma once

#include "kernels/attn/online_softmax.h"
#include "kernels/fwd/fwd_params.h"
#include "kernels/fwd/fwd_traits.h"

namespace flash_attn3 {

// The four threads of a row hold two columns each of four neighbouring 8-column blocks. Afterwards
// thread t of them holds all eight columns (16 bytes) of block t.
__device__ __forceinline__ void transpose_quad(uint32_t (&r)[4], int t) {
  const bool odd = t & 1;
  const uint32_t a = __shfl_xor_sync(0xffffffffu, odd ? r[0] : r[1], 1);
  const uint32_t b = __shfl_xor_sync(0xffffffffu, odd ? r[2] : r[3], 1);
  if (odd) {
    r[0] = a;
    r[2] = b;
  } else {
    r[1] = a;
    r[3] = b;
  }
  const bool high = t & 2;
  const uint32_t c = __shfl_xor_sync(0xffffffffu, high ? r[0] : r[2], 2);
  const uint32_t d = __shfl_xor_sync(0xffffffffu, high ? r[1] : r[3], 2);
  if (high) {
    r[0] = c;
    r[1] = d;
  } else {
    r[2] = c;
    r[3] = d;
  }
}

constexpr float kLn2 = 0.6931471805599453f;

template <class T>
struct FwdEpilogue {
  const FwdKernelParams& params;

  // This thread's first row in its tile; the second lies 8 further. Not kept in a register.
  static __device__ __forceinline__ int row_in_tile() {
    return (threadIdx.x - 128) / 32 * 16 + threadIdx.x % 32 / 4;
  }
  static __device__ __forceinline__ int quad() { return threadIdx.x % 4; }

  __device__ __forceinline__ typename T::Element* out_row(const TileInfo& tile, int row) const {
    return static_cast<typename T::Element*>(params.out) +
           int64_t(tile.q_batch) * params.out_strides.batch +
           (int64_t(tile.q_base) + row) * params.out_strides.row +
           int64_t(tile.head) * params.out_strides.head;
  }

  __device__ __forceinline__ float* lse_row(const TileInfo& tile, int row) const {
    return params.lse + tile.q_batch * params.lse_batch_stride +
           tile.head * params.lse_head_stride + tile.q_base + row;
  }

  // Writes the LSE and gives what O must be multiplied by; 0 for rows that exist but are not in
  // use, or see no key. rows.sum must be finished.
  __device__ __forceinline__ void store_lse(const TileInfo& tile, const SoftmaxRows& rows,
                                            float (&inverse)[2]) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = tile.row0 + row_in_tile() + 8 * h;
      const float sum = rows.sum[h];
      const bool seen = row < tile.q_len && sum != 0.0f;  // NaN counts as seen, and stays
      inverse[h] = seen ? 1.0f / sum : 0.0f;
      if (row < tile.q_rows && quad() == 0) {
        *lse_row(tile, row) = seen ? (rows.reference[h] + __log2f(sum)) * kLn2 : kMinusInfinity;
      }
    }
  }

  __device__ __forceinline__ void store_out(const TileInfo& tile, const float (&inverse)[2],
                                            const float (&o)[T::kHeadDimV / 2]) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = tile.row0 + row_in_tile() + 8 * h;
      const bool exists = row < tile.q_rows;
      typename T::Element* out = out_row(tile, row);
#pragma unroll
      for (int i = 0; i < T::kHeadDimV / 8; i += 4) {
        uint32_t r[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float* pair = o + 4 * (i + j) + 2 * h;
          // O of a row without keys is no number that 0 would clear where V holds NaN.
          r[j] = inverse[h] == 0.0f
                     ? 0u
                     : pack_two<typename T::Element>(pair[0] * inverse[h], pair[1] * inverse[h]);
        }
        transpose_quad(r, quad());
        const int column = (i + quad()) * 8;
        if (exists && column < params.head_dim_v) {
          *reinterpret_cast<uint4*>(out + column) = make_uint4(r[0], r[1], r[2], r[3]);
        }
      }
    }
  }

  // A tile none of whose rows sees a key.
  __device__ __forceinline__ void store_nothing(const TileInfo& tile) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = tile.row0 + row_in_tile() + 8 * h;
      if (row >= tile.q_rows) continue;
      typename T::Element* out = out_row(tile, row);
      for (int column = 8 * quad(); column < params.head_dim_v; column += 32) {
        *reinterpret_cast<uint4*>(out + column) = make_uint4(0, 0, 0, 0);
      }
      if (quad() == 0) *lse_row(tile, row) = kMinusInfinity;
    }
  }
};

}  // namespace flash_attn3
