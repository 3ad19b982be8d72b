// Sums of dQ in fp32: from a consumer's registers straight into the workspace.
//
// The sums lie in the order of the threads' fragments, so that each thread adds 16 bytes and a warp
// 512 contiguous ones; nothing passes through shared memory, whose bandwidth the products need.
// bwd_postprocess.h undoes the order.
//
// Deterministic calls: every warp adds to a part of the tile that no other warp of its CTA touches,
// so each has a turn counter of its own there: how many KV tiles have been added. It waits until
// the count is its tile's rank, and says so later when its additions have surely arrived. What is
// to be said then lies in shared memory: the consumers have no register for it.
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
  // the warpgroup's piece from its first_fragment on. The turn must have come.
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

  // Before the first add() to a tile.
  __device__ __forceinline__ void wait_turn(const BwdTile& tile, int at) const {
    if (params.turns == nullptr) [[likely]]
      return;
    if (threadIdx.x % 32 == 0) {
      const int row0 = (at / params.heads - tile.q_tile0) * T::kBlockM;
      const BlockRange blocks =
          visible_blocks(params.mask, row0, smaller(row0 + T::kBlockM, tile.q_len) - 1, tile.q_len,
                         tile.k_len, T::kBlockN);
      const int rank = params.last_first ? blocks.end - 1 - tile.n : tile.n - blocks.begin;
      const int warp = threadIdx.x / 32 - 4;
      const int index = at * kTurnsPerTile + warp;
      while (load_acquire(params.turns + index) != rank) __nanosleep(20);
      shared.turns[warp] = {index, rank + 1};
    }
    __syncwarp();
  }

  // Lets the next KV tile have its turn. Costs the time until the last additions have arrived, so
  // it is called a while after them, but before the next wait_turn().
  __device__ __forceinline__ void pass_turn() const {
    if (params.turns == nullptr) [[likely]]
      return;
    __threadfence();
    __syncwarp();
    BwdTurn& turn = shared.turns[threadIdx.x / 32 - 4];
    if (threadIdx.x % 32 == 0 && turn.next > 0) {
      store_release(params.turns + turn.index, turn.next);
      turn.next = 0;
    }
  }
};

}  // namespace flash_attn3
