// The two warps that transpose V, block after block, one stage ahead of the consumers.
#pragma once

#include "kernels/fp8/fp8_params.h"
#include "kernels/fp8/fp8_traits.h"
#include "kernels/fwd/fwd_tail.h"

namespace flash_attn3 {

// Which bytes of a pair of registers stmatrix takes first and second (TransposeStep).
struct TransposeSelectors {
  uint32_t first, second;

  static __device__ __forceinline__ TransposeSelectors of_lane(int lane) {
    return {TransposeStep::selector(lane, 0), TransposeStep::selector(lane, 1)};
  }
};

// The values that stmatrix takes, from those that a transposing ldmatrix gave.
__device__ __forceinline__ void transpose_bytes(const uint32_t (&in)[4],
                                                const TransposeSelectors& select,
                                                uint32_t (&out)[4]) {
  out[0] = __byte_perm(in[0], in[1], select.first);
  out[1] = __byte_perm(in[0], in[1], select.second);
  out[2] = __byte_perm(in[2], in[3], select.first);
  out[3] = __byte_perm(in[2], in[3], select.second);
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
    clear_panel_rows<P>(raw, T::kBlockN, larger(valid_keys, part * kKeysPerWarp),
                        (part + 1) * kKeysPerWarp, lane);
    __syncwarp();
  }

  // Loads under way beside the step that is worked on; two would spill.
  static constexpr int kAhead = 1;

  // Offsets within a panel are constants, so that a step is a load, four permutations, a store and
  // one instruction for an address: this warp has 24 registers, and consumers wait for it.
  __device__ __forceinline__ void transpose(uint32_t raw, uint32_t transposed) const {
    using S = TransposeStep;
    constexpr int kChunks = P::kBytes / S::kColumns;
    int lane = this->lane;
    asm volatile("" : "+r"(lane));  // what it decides is computed for each block, not kept
    const TransposeSelectors select = TransposeSelectors::of_lane(lane);
#pragma unroll 1
    for (int part_keys = 0; part_keys < kKeysPerWarp; part_keys += S::kKeys) {
      const int keys = part * kKeysPerWarp + part_keys;
      const int key = keys + S::load_key(lane);
      // Chunk c of the row lies at this address ^ 16 c: panels' rows start at multiples of theirs.
      uint32_t from = raw + key * P::kBytes + P::swizzle(key, 0) * 16;
      // 16 columns further the swizzle of a row is the same.
      uint32_t to =
          transposed + ValueLayout::offset(S::store_column(lane), keys + S::store_half(lane) * 16);
#pragma unroll 1
      for (int panel = 0; panel < P::kCount; ++panel) {
        uint32_t in[kChunks][4];
#pragma unroll
        for (int c = 0; c < kAhead; ++c) load_matrix_x4_transposed(in[c], from ^ (c * 16));
#pragma unroll
        for (int c = 0; c < kChunks; ++c) {
          if (c + kAhead < kChunks) {
            load_matrix_x4_transposed(in[c + kAhead], from ^ ((c + kAhead) * 16));
          }
          uint32_t out[4];
          transpose_bytes(in[c], select, out);
          store_matrix_x4(to + c * (S::kColumns * ValueLayout::kRowBytes), out);
        }
        from += T::kBlockN * P::kBytes;
        to += kChunks * S::kColumns * ValueLayout::kRowBytes;
      }
    }
  }

  // Only where both rings are as long: registers.
  static constexpr bool kInFlow = T::kCarried;
  static_assert(!kInFlow || T::kRawStages == T::kValueStages);

  // The same with two loads under way all the time, of the next 16 columns and of those after them:
  // one is issued when the one before has been stored, into its registers.
  __device__ __forceinline__ void transpose_in_flow(uint32_t raw, uint32_t transposed) const {
    using S = TransposeStep;
    constexpr int kUnderWay = 2;
    constexpr int kChunks = P::kBytes / S::kColumns;
    constexpr uint32_t kPanel = T::kBlockN * P::kBytes;
    static_assert(P::kCount == 2 && kKeysPerWarp == 2 * S::kKeys);
    int lane = this->lane;
    asm volatile("" : "+r"(lane));  // what it decides is computed for each block, not kept
    const TransposeSelectors select = TransposeSelectors::of_lane(lane);
    const int keys = part * kKeysPerWarp;
    const int key = keys + S::load_key(lane);
    uint32_t from = raw + key * P::kBytes + P::swizzle(key, 0) * 16;
    uint32_t to =
        transposed + ValueLayout::offset(S::store_column(lane), keys + S::store_half(lane) * 16);
    uint32_t in[kUnderWay][4];
#pragma unroll
    for (int c = 0; c < kUnderWay; ++c) load_matrix_x4_transposed(in[c], from ^ (c * 16));
#pragma unroll 1
    for (int half = 0; half < 2; ++half) {
#pragma unroll 1
      for (int panel = 0; panel < 2; ++panel) {
        // After both panels the next 32 keys; at the end loads of others, which nobody takes.
        const uint32_t next = from + (panel == 0 ? kPanel : S::kKeys * P::kBytes - kPanel);
#pragma unroll
        for (int c = 0; c < kChunks; ++c) {
          uint32_t (&x)[4] = in[c % kUnderWay];
          uint32_t out[4];
          transpose_bytes(x, select, out);
          store_matrix_x4(to + c * (S::kColumns * ValueLayout::kRowBytes), out);
          const int ahead = c + kUnderWay;
          load_matrix_x4_transposed(
              x, ahead < kChunks ? from ^ (ahead * 16) : next ^ ((ahead - kChunks) * 16));
        }
        from = next;
        to += kChunks * S::kColumns * ValueLayout::kRowBytes;
      }
      // Two chunks of 16 slots further.
      to = (to - 2 * kChunks * S::kColumns * ValueLayout::kRowBytes) ^ S::kKeys;
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
      const int end = tile.n_begin;
#pragma unroll 1
      for (int n = tile.n_end - 1; n >= (kInFlow ? tile.n_begin : end); --n) {
        if constexpr (kInFlow) raw_ring = v_ring;  // one register for both
        mbarrier_wait(&shared.v_raw_full[raw_ring.slot()], raw_ring.parity());
        if (has_tail<T::kBlockN>(params, tile, n)) {
          clear_rows(shared.v_raw[raw_ring.slot()], tile.k_len - n * T::kBlockN);
        }
        mbarrier_wait(&shared.v_empty[v_ring.slot()], v_ring.parity() ^ 1);
        const uint32_t raw = shared_address(shared.v_raw[raw_ring.slot()]);
        const uint32_t transposed = shared_address(shared.v[v_ring.slot()]);
        if constexpr (kInFlow) {
          transpose_in_flow(raw, transposed);
        } else {
          transpose(raw, transposed);
        }
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
