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

  // Adds a part of warpgroup w's piece of a query tile, from its first_fragment on; dq must be
  // settled. `at`: query tile of the workspace times heads plus head; `step` counts query tiles.
  template <int kSize>
  __device__ __forceinline__ void add(const float (&dq)[kSize], int at, uint32_t step, int w,
                                      int first_fragment) const {
    float* sum = params.dq_sum + int64_t(at) * (T::kBlockM * T::kHeadDim) + dq_piece_offset<T>(w) +
                 dq_fragment_offset(first_fragment, threadIdx.x % 128);
    const int slot = ring_slot<T::kTurnSlots>(step);
    const int chain = T::turn_chain(w, first_fragment);
    if (params.turns != nullptr) [[unlikely]]
      mbarrier_wait(&shared.turn_come[chain][slot], ring_parity<T::kTurnSlots>(step));
#pragma unroll
    for (int i = 0; i < kSize / 4; ++i) {
      reduce_add_4(sum + dq_fragment_offset(i, 0), dq[4 * i], dq[4 * i + 1], dq[4 * i + 2],
                   dq[4 * i + 3]);
    }
    if (params.turns == nullptr) [[likely]]
      return;
    warp_arrive(&shared.turn_done[chain][slot], threadIdx.x % 32);
  }
};

// The turn warp of deterministic calls. Each part of dQ that consumers add by itself is a chain of
// its own: a counter in the workspace for every query tile of every head, of the KV tiles that have
// added that part. A KV tile's turn has come when the counter is its rank among the KV tiles that
// the query tile needs.
//
// A lane serves a chain. It lets consumers know of turns up to kTurnSlots steps before they add,
// and raises the counters behind them: neither the way to L2 nor the wait for the additions' end
// stands in a consumer's way. No lane blocks, since the consumers that one lane waits for may wait
// for those of another.
template <class T>
struct BwdTurns {
  const BwdKernelParams& params;
  typename T::SharedMemory& shared;
  int chain;

  uint32_t announced = 0;  // steps whose turn has come
  uint32_t passed_on = 0;  // steps whose counter has been raised
  uint32_t count = 0;      // tiles

  // The next step to be announced.
  const BwdTile* tile = nullptr;  // none: the tile is not there yet
  int head = 0;
  int m = 0;
  int rank = 0;

  __device__ __forceinline__ int row() const { return (tile->q_tile0 + m) * params.heads + head; }

  __device__ __forceinline__ int* counter(int at) const {
    return params.turns + int64_t(at) * kMostTurnChains + chain;
  }

  __device__ __forceinline__ void find_rank() {
    const int row0 = m * T::kBlockM;
    const int last_row = smaller(row0 + T::kBlockM, tile->q_len) - 1;
    const BlockRange blocks =
        visible_blocks(params.mask, row0, last_row, tile->q_len, tile->k_len, T::kBlockN);
    rank = params.last_first ? blocks.end - 1 - tile->n : tile->n - blocks.begin;
  }

  __device__ __forceinline__ void leave_tile() {
    tile = nullptr;
    mbarrier_arrive(&shared.tile_empty[ring_slot<T::kTileSlots>(count)]);
    ++count;
  }

  // False after the last tile.
  __device__ __forceinline__ bool enter_tile() {
    const int slot = ring_slot<T::kTileSlots>(count);
    if (!mbarrier_test(&shared.tile_full[slot], ring_parity<T::kTileSlots>(count))) return true;
    tile = &shared.tiles[slot];
    if (tile->head_kv < 0) return false;
    head = tile->head_kv * params.group;
    m = tile->m_begin;
    if (m == tile->m_end) {
      leave_tile();
    } else {
      find_rank();
    }
    return true;
  }

  __device__ __forceinline__ void announce() {
    const int slot = ring_slot<T::kTurnSlots>(announced);
    shared.turn_rows[chain][slot] = row();
    mbarrier_arrive(&shared.turn_come[chain][slot]);
    ++announced;
    if (++m == tile->m_end) {
      m = tile->m_begin;
      if (++head == (tile->head_kv + 1) * params.group) {
        leave_tile();
        return;
      }
    }
    find_rank();
  }

  // The consumers' additions, known here through turn_done, come before the counter.
  __device__ __forceinline__ void pass_on() {
    const int slot = ring_slot<T::kTurnSlots>(passed_on);
    if (!mbarrier_test(&shared.turn_done[chain][slot], ring_parity<T::kTurnSlots>(passed_on)))
      return;
    add_release(counter(shared.turn_rows[chain][slot]), 1);
    ++passed_on;
  }

  __device__ __forceinline__ void run() {
    if (chain >= T::kTurnChains) return;
    bool more = true;
    while (more || passed_on != announced) {
      if (passed_on != announced) pass_on();
      if (!more || announced - passed_on == T::kTurnSlots) {
        __nanosleep(32);
      } else if (tile == nullptr) {
        more = enter_tile();
      } else if (load_acquire(counter(row())) >= rank) {  // above it where sequences overlap
        announce();
      }
    }
  }
};

}  // namespace flash_attn3
