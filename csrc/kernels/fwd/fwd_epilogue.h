// Epilogue: O / l and the LSE to global memory. Every warp stores its own 16 rows and waits for
// nobody. Where shared memory has a place for O, the copy engine takes it from there; at the end of
// a ragged sequence, and where K, V and Q need all shared memory, O is written row by row.
#pragma once

#include <cute/arch/copy_sm90_tma.hpp>

#include "kernels/attn/online_softmax.h"
#include "kernels/common/wgmma.h"
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

  // Writes the LSE and gives what O must be multiplied by; 0 for rows that exist but are not in
  // use, or see no key. rows.sum must be finished.
  __device__ __forceinline__ void store_lse(const TileInfo& tile, const SoftmaxRows& rows,
                                            float (&inverse)[2]) const {
    store_lse(tile, rows, rows.sum, inverse);
  }

  // With other sums for the LSE.
  __device__ __forceinline__ void store_lse(const TileInfo& tile, const SoftmaxRows& rows,
                                            const float (&lse_sum)[2], float (&inverse)[2]) const {
    const int first_row = row_in_tile();
    const int used = tile.q_len - tile.row0;
    bool seen[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      // NaN counts as seen, and stays.
      seen[h] = first_row + 8 * h < used && rows.sum[h] != 0.0f;
      inverse[h] = seen[h] ? reciprocal_approx(rows.sum[h]) : 0.0f;
    }
    // Of the four threads of both rows, one writes the first and one the second.
    const bool second = quad() == 1;
    const int row = first_row + 8 * second;
    const float sum = second ? lse_sum[1] : lse_sum[0];
    const float reference = second ? rows.reference[1] : rows.reference[0];
    const float lse = (reference + __log2f(sum)) * kLn2;
    if (row < tile.q_rows - tile.row0 && quad() < 2) {
      tile.lse[row] = (second ? seen[1] : seen[0]) ? lse : kMinusInfinity;
    }
  }

  // `place`: this warpgroup's part of shared.o.
  __device__ __forceinline__ void store_out(const TileInfo& tile, const float (&inverse)[2],
                                            float (&o)[T::kHeadDimV / 2], uint8_t* place) const {
    clear_unseen(inverse, o);
    if constexpr (T::kStagedOut) {
      store_staged(tile, inverse, o, place);
    } else {
      store_direct(tile, inverse, o);
    }
  }

  // O of a row without keys is no number that a factor of 0 would clear where V holds NaN.
  __device__ __forceinline__ static void clear_unseen(const float (&inverse)[2],
                                                      float (&o)[T::kHeadDimV / 2]) {
    if (__any_sync(0xffffffffu, inverse[0] == 0.0f || inverse[1] == 0.0f)) [[unlikely]] {
#pragma unroll
      for (int i = 0; i < T::kHeadDimV / 2; ++i) {
        if (inverse[i / 2 % 2] == 0.0f) o[i] = 0.0f;
      }
    }
  }

  // Columns 8 i + 2 quad, + 1 of row g + 8 h.
  __device__ __forceinline__ static uint32_t packed_out(const float (&inverse)[2],
                                                        const float (&o)[T::kHeadDimV / 2], int i,
                                                        int h) {
    return pack_two<typename T::Element>(o[4 * i + 2 * h] * inverse[h],
                                         o[4 * i + 2 * h + 1] * inverse[h]);
  }

  __device__ __forceinline__ void store_direct(const TileInfo& tile, const float (&inverse)[2],
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
        for (int j = 0; j < 4; ++j) r[j] = packed_out(inverse, o, i + j, h);
        transpose_quad(r, quad());
        const int column = (i + quad()) * 8;
        if (exists && column < params.head_dim_v) {
          *reinterpret_cast<uint4*>(out + column) = make_uint4(r[0], r[1], r[2], r[3]);
        }
      }
    }
  }

  // The warp's 16 rows as panels in `place`; the panels of the warpgroup have 64 rows.
  __device__ __forceinline__ void store_staged(const TileInfo& tile, const float (&inverse)[2],
                                               const float (&o)[T::kHeadDimV / 2],
                                               uint8_t* place) const {
    using P = Panel<T::kHeadDimV>;
    constexpr int kChunks = P::kBytes / 16;
    const int thread = thread_index();
    const int lane = thread % 32;
    uint8_t* rows = place + thread % 128 / 32 * 16 * P::kBytes;
    // The copy that lane 0 started for the tile before has read this place.
    if (lane == 0) bulk_store_wait_read();
    __syncwarp();
    const int row = lane % 16;
    const uint32_t row_address = shared_address(rows) + row * P::kBytes;
#pragma unroll
    for (int i = 0; i < T::kHeadDimV / 8; i += 2) {
      const uint32_t r[4] = {packed_out(inverse, o, i, 0), packed_out(inverse, o, i, 1),
                             packed_out(inverse, o, i + 1, 0), packed_out(inverse, o, i + 1, 1)};
      store_matrix_x4(row_address + i / kChunks * T::kRowsPerConsumer * P::kBytes +
                          P::swizzle(row, i % kChunks + lane / 16) * 16,
                      r);
    }
    const int first_row = tile.row0 + (thread - 128) / 32 * 16;
    if (params.cu_seqlens_q == nullptr || first_row + 16 <= tile.q_rows) {
      // At the end of a dense sequence the tensor map ends too.
      fence_shared_to_async_proxy();
      __syncwarp();
      // Known to be uniform, or each copy would be a loop over the lanes' values.
      const int row_in_tensor = warp_uniform(tile.q_base + first_row);
      const int head = warp_uniform(tile.head);
      const int batch = warp_uniform(tile.q_batch);
      auto* of_warp =
          static_cast<uint8_t*>(__cvta_shared_to_generic(warp_uniform(shared_address(rows))));
      if (lane == 0) {
#pragma unroll
        for (int panel = 0; panel < P::kCount; ++panel) {
          cute::SM90_TMA_STORE_4D::copy(&params.out_map,
                                        of_warp + panel * T::kRowsPerConsumer * P::kBytes,
                                        panel * P::kWidth, row_in_tensor, head, batch);
        }
        bulk_store_commit();
      }
    } else {
      __syncwarp();
      copy_existing_rows(tile, first_row, rows);
    }
  }

  // Rows of the next sequence follow in the tensor: only those of this one are written.
  __device__ __forceinline__ void copy_existing_rows(const TileInfo& tile, int first_row,
                                                     const uint8_t* rows) const {
    using P = Panel<T::kHeadDimV>;
    constexpr int kChunks = P::kBytes / 16;
    const int chunk = threadIdx.x % kChunks;
#pragma unroll 1
    for (int row = threadIdx.x % 32 / kChunks; row < smaller(16, tile.q_rows - first_row);
         row += 32 / kChunks) {
      typename T::Element* out = out_row(tile, first_row + row);
#pragma unroll 1
      for (int panel = 0; panel < P::kCount; ++panel) {
        const int column = panel * P::kWidth + chunk * 8;
        if (column < params.head_dim_v) {
          *reinterpret_cast<uint4*>(out + column) = *reinterpret_cast<const uint4*>(
              rows + (panel * T::kRowsPerConsumer + row) * P::kBytes + P::swizzle(row, chunk) * 16);
        }
      }
    }
    __syncwarp();  // read before the next tile is written here
  }

  // Shared memory must last until the copy engine has read it.
  __device__ __forceinline__ static void finish() {
    if (T::kStagedOut && threadIdx.x % 32 == 0) bulk_store_wait_read();
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
      if (quad() == 0) tile.lse[row - tile.row0] = kMinusInfinity;
    }
  }
};

}  // namespace flash_attn3
