// The tail warp: rows of V past the end of a sequence become 0 before anybody multiplies them.
//
// They may hold anything, and P = 0 times NaN is NaN. Only the block that holds the sequence's last
// key can have such rows, and only where the tensor goes on behind the sequence: at the tensor's
// own end the copy engine fills zeros by itself. A warp of its own waits for these blocks, so that
// the producer goes on with the next tile meanwhile.
#pragma once

#include "kernels/common/panels.h"
#include "kernels/fwd/fwd_params.h"
#include "kernels/fwd/fwd_traits.h"

namespace flash_attn3 {

template <int kBlockN>
__device__ __forceinline__ bool has_tail(const FwdKernelParams& params, const TileInfo& tile,
                                         int n) {
  return (n + 1) * kBlockN > tile.k_len &&
         (params.cu_seqlens_k != nullptr || params.seqused_k != nullptr);
}

template <class T>
struct FwdTail {
  const FwdKernelParams& params;
  typename T::SharedMemory& shared;
  int lane;

  __device__ __forceinline__ void clear(int stage, int valid_rows) {
    clear_panel_rows<typename T::ValuePanel>(shared.v[stage], T::kBlockN, valid_rows, T::kBlockN,
                                             lane);
    // Each lane's zeros are to be seen by wgmma before consumers learn of the block.
    fence_shared_to_async_proxy();
    __syncwarp();
    if (lane == 0) mbarrier_arrive(&shared.v_full[stage]);
  }

  __device__ __forceinline__ void run() {
    RingPosition<T::kTileSlots> tile_ring;
    RingPosition<T::kValueStages> v_ring;  // follows the producer's
    uint32_t parities = 0;                 // of v_tail, a bit a stage
    for (;;) {
      mbarrier_wait(&shared.tile_full[tile_ring.slot()], tile_ring.parity());
      const TileInfo& tile = shared.tiles[tile_ring.slot()];
      if (tile.head < 0) return;
      if (tile.n_begin < tile.n_end) {
        const int last = tile.n_end - 1;  // visited first
        if (has_tail<T::kBlockN>(params, tile, last)) {
          const int stage = v_ring.slot();
          mbarrier_wait(&shared.v_tail[stage], parities >> stage & 1);
          parities ^= 1u << stage;
          clear(stage, tile.k_len - last * T::kBlockN);
        }
        for (int n = tile.n_begin; n < tile.n_end; ++n) v_ring.advance();
      }
      warp_arrive(&shared.tile_empty[tile_ring.slot()], lane);
      tile_ring.advance();
    }
  }
};

}  // namespace flash_attn3
