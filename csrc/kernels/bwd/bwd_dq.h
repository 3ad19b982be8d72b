// Sums of dQ in fp32: from a consumer's registers straight into the workspace, and the order of the
// additions in deterministic calls.
//
// The sums lie in the order of the threads' fragments, so that each thread adds 16 bytes and a warp
// 512 contiguous ones; nothing passes through shared memory, whose bandwidth the products need.
// bwd_postprocess.h undoes the order.
#pragma once

#include "kernels/bwd/bwd_params.h"
#include "kernels/bwd/bwd_traits.h"
#include "kernels/common/memory.h"

namespace flash_attn3 {

// Where fragment i (of 8 columns) of a piece lies, in floats from the piece's start.
__device__ __forceinline__ int dq_fragment_offset(int i, int thread) {
  return (i * 128 + thread) * 4;
}

// Floats of the tile before warpgroup w's piece.
template <class T>
__device__ __forceinline__ int dq_piece_offset(int w) {
  return w * 64 * T::kDqColumns0;
}

template <class T>
struct BwdDqAdder {
  const BwdKernelParams& params;
  typename T::SharedMemory& shared;

  // `at`: query tile of the workspace times heads plus head. dq must be settled; it is a part of
  // the warpgroup's piece from its first_fragment on.
  template <int kSize>
  __device__ __forceinline__ void add(const float (&dq)[kSize], int at, int warpgroup,
                                      int first_fragment) const {
    float* sum = params.dq_sum + int64_t(at) * (T::kBlockM * T::kHeadDim) +
                 dq_piece_offset<T>(warpgroup) +
                 dq_fragment_offset(first_fragment, threadIdx.x % 128);
#pragma unroll
    for (int i = 0; i < kSize / 4; ++i) {
      reduce_add_4(sum + dq_fragment_offset(i, 0), dq[4 * i], dq[4 * i + 1], dq[4 * i + 2],
                   dq[4 * i + 3]);
    }
  }

  // Before the first add() to a tile, and after the last; step: a count of such tiles. They cost
  // a consumer nothing but a barrier, since the turn warp does what waits for other CTAs.
  __device__ __forceinline__ void wait_turn(uint32_t step) const {
    if (params.turns != nullptr) [[unlikely]]
      mbarrier_wait(&shared.turn_come, step & 1);
  }

  __device__ __forceinline__ void end_turn() const {
    if (params.turns == nullptr) [[likely]]
      return;
    __syncwarp();
    if (threadIdx.x % 32 == 0) mbarrier_arrive(&shared.turn_done);
  }
};

// The turn warp of deterministic calls. Every query tile of every head has a counter in the
// workspace: how many KV tiles have added their part. A KV tile waits until that is its rank among
// those that the query tile needs.
template <class T>
struct BwdTurns {
  const BwdKernelParams& params;
  typename T::SharedMemory& shared;
  int lane;

  __device__ __forceinline__ int rank_of(const BwdTile& tile, int m) const {
    const int row0 = m * T::kBlockM;
    const BlockRange blocks =
        visible_blocks(params.mask, row0, smaller(row0 + T::kBlockM, tile.q_len) - 1, tile.q_len,
                       tile.k_len, T::kBlockN);
    return params.last_first ? blocks.end - 1 - tile.n : tile.n - blocks.begin;
  }

  // Waits for the turn, lets the consumers add, and raises the counter. The fence orders their
  // additions, known here through turn_done, before the counter.
  __device__ __forceinline__ void give_turn(int* counter, int rank, uint32_t step) {
    while (load_acquire(counter) != rank) __nanosleep(20);
    mbarrier_arrive(&shared.turn_come);
    mbarrier_wait(&shared.turn_done, step & 1);
    __threadfence();
    store_release(counter, rank + 1);
  }

  __device__ __forceinline__ void run() {
    uint32_t step = 0;
    for (uint32_t count = 0;; ++count) {
      const int slot = ring_slot<T::kTileSlots>(count);
      mbarrier_wait(&shared.tile_full[slot], ring_parity<T::kTileSlots>(count));
      const BwdTile& tile = shared.tiles[slot];
      if (tile.head_kv < 0) return;
      if (lane == 0) {
#pragma unroll 1
        for (int g = 0; g < params.group; ++g) {
#pragma unroll 1
          for (int m = tile.m_begin; m < tile.m_end; ++m, ++step) {
            const int64_t at =
                int64_t(tile.q_tile0 + m) * params.heads + tile.head_kv * params.group + g;
            give_turn(params.turns + at, rank_of(tile, m), step);
          }
        }
        mbarrier_arrive(&shared.tile_empty[slot]);
      }
      __syncwarp();
    }
  }
};

}  // namespace flash_attn3
