// The two warps that transpose V, block after block, one stage ahead of the consumers.
#pragma once

#include "kernels/fp8/fp8_params.h"
#include "kernels/fp8/fp8_traits.h"
#include "kernels/fwd/fwd_tail.h"

namespace flash_attn3 {

// The values that stmatrix takes, from those that a transposing ldmatrix gave (TransposeStep).
__device__ __forceinline__ void transpose_bytes(const uint32_t (&in)[4], bool swaps,
                                                uint32_t (&out)[4]) {
  using S = TransposeStep;
  const uint32_t a0 = swaps ? in[2] : in[0];
  const uint32_t a1 = swaps ? in[3] : in[1];
  const uint32_t b0 = swaps ? in[0] : in[2];
  const uint32_t b1 = swaps ? in[1] : in[3];
  out[0] = __byte_perm(a0, a1, S::kEvenColumn);
  out[1] = __byte_perm(a0, a1, S::kOddColumn);
  out[2] = __byte_perm(b0, b1, S::kEvenColumn);
  out[3] = __byte_perm(b0, b1, S::kOddColumn);
}

template <class T>
struct Fp8Transposer {
  using P = typename T::ValuePanel;
  static constexpr int kKeysPerWarp = T::kBlockN / 2;

  const Fp8KernelParams& params;
  typename T::SharedMemory& shared;
  int part;  // which half of a block's keys is this warp's
  int lane;

  // This warp's keys that lie past the end become 0: they may hold NaN, and P = 0 times NaN is NaN.
  __device__ __forceinline__ void clear_rows(uint8_t* raw, int valid_keys) {
    const int first = larger(valid_keys, part * kKeysPerWarp);
#pragma unroll 1
    for (int panel = 0; panel < P::kCount; ++panel) {
      uint8_t* rows = raw + panel * T::kBlockN * P::kBytes;
#pragma unroll 1
      for (int at = first * P::kBytes + lane * 16; at < (part + 1) * kKeysPerWarp * P::kBytes;
           at += 32 * 16) {
        *reinterpret_cast<uint4*>(rows + at) = make_uint4(0, 0, 0, 0);
      }
    }
    __syncwarp();
  }

  // Loads that are under way at a time: one by one, their latency would be most of a block's time.
  // Four spill: this warpgroup has 32 registers.
  static constexpr int kBatch = 2;
  static_assert(P::kBytes / TransposeStep::kColumns % kBatch == 0);

  __device__ __forceinline__ void transpose(uint32_t raw, uint32_t transposed) const {
    using S = TransposeStep;
    constexpr int kChunksPerPanel = P::kBytes / 16;
    const bool swaps = S::swaps_keys(lane);
#pragma unroll 1
    for (int keys = part * kKeysPerWarp; keys < (part + 1) * kKeysPerWarp; keys += S::kKeys) {
      const int key = keys + S::load_key(lane);
      const uint32_t from = raw + key * P::kBytes;
      const int slots = keys / 16 + S::store_half(lane);
      // 16 columns further the swizzle of a row is the same.
      uint32_t to = transposed + ValueLayout::offset(S::store_column(lane), slots * 16);
#pragma unroll 1
      for (int first = 0; first < T::kHeadDimV / S::kColumns; first += kBatch) {
        // Chunks of a row's batch differ in two bits of the address, whatever the swizzle.
        const uint32_t source = from + first / kChunksPerPanel * (T::kBlockN * P::kBytes) +
                                P::swizzle(key, first % kChunksPerPanel) * 16;
        uint32_t in[kBatch][4];
#pragma unroll
        for (int i = 0; i < kBatch; ++i) load_matrix_x4_transposed(in[i], source ^ (i * 16));
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          uint32_t out[4];
          transpose_bytes(in[i], swaps, out);
          store_matrix_x4(to + i * S::kColumns * ValueLayout::kRowBytes, out);
        }
        to += kBatch * S::kColumns * ValueLayout::kRowBytes;
      }
    }
  }

  __device__ __forceinline__ void run() {
    RingPosition<T::kTileSlots> tile_ring;
    RingPosition<T::kRawStages> raw_ring;
    RingPosition<T::kValueStages> v_ring;
    for (;;) {
      mbarrier_wait(&shared.tile_full[tile_ring.slot()], tile_ring.parity());
      const TileInfo& tile = shared.tiles[tile_ring.slot()];
      if (tile.head < 0) return;
#pragma unroll 1
      for (int n = tile.n_end - 1; n >= tile.n_begin; --n) {
        mbarrier_wait(&shared.v_raw_full[raw_ring.slot()], raw_ring.parity());
        if (has_tail<T::kBlockN>(params, tile, n)) {
          clear_rows(shared.v_raw[raw_ring.slot()], tile.k_len - n * T::kBlockN);
        }
        mbarrier_wait(&shared.v_empty[v_ring.slot()], v_ring.parity() ^ 1);
        transpose(shared_address(shared.v_raw[raw_ring.slot()]),
                  shared_address(shared.v[v_ring.slot()]));
        // Written for the products, and read before the copy engine writes here again.
        fence_shared_to_async_proxy();
        __syncwarp();
        if (lane == 0) {
          // Both warps write the same.
          shared.v_scale[v_ring.slot()] = shared.v_raw_scale[raw_ring.slot()];
          mbarrier_arrive(&shared.v_full[v_ring.slot()]);
          mbarrier_arrive(&shared.v_raw_empty[raw_ring.slot()]);
        }
        raw_ring.advance();
        v_ring.advance();
      }
      warp_arrive(&shared.tile_empty[tile_ring.slot()], lane);
      tile_ring.advance();
    }
  }
};

}  // namespace flash_attn3
