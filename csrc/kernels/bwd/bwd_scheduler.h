// The scheduler warp: claims KV tiles from a counter and writes them into a ring of slots.
//
// Tiles are claimed in the order of their numbers, and the deterministic mode lets a tile wait only
// for tiles with lower numbers: of the tiles not finished, the lowest has been claimed by a CTA
// that has finished all it claimed before, so it never waits, whatever the number of CTAs.
#pragma once

#include "kernels/attn/query_range.h"
#include "kernels/attn/tile_order.h"
#include "kernels/bwd/bwd_params.h"
#include "kernels/bwd/bwd_traits.h"

namespace flash_attn3 {

template <class T>
struct BwdScheduler {
  const BwdKernelParams& params;
  typename T::SharedMemory& shared;
  int lane;

  PlanWindow window;

  // Lane 0 writes the tile's slot; false where there is no such tile.
  __device__ __forceinline__ bool write_tile(int tile, BwdTile& info) {
    const bool ragged = params.cu_seqlens_k != nullptr;
    int holder = 0;
    if (ragged) {
      holder = window.find_lane(params.plan + BwdTileOrder::kHeader + params.batch, params.batch,
                                params.heads_kv, lane, tile, [] {});
      if (holder < 0) return false;  // only overlapping sequences bring that about
    }
    const int first_tile = __shfl_sync(0xffffffffu, window.first, holder);
    const int end_tile = __shfl_sync(0xffffffffu, window.end, holder);
    if (lane == 0) {
      int sequence, n;
      if (ragged) {
        sequence =
            params.plan[BwdTileOrder::kHeader + smaller(window.at + holder, params.batch - 1)];
        const int tiles = (end_tile - first_tile) / params.heads_kv;
        const int within = tile - first_tile;
        info.head_kv = within / tiles;
        n = within % tiles;
      } else {
        const DenseTile dense = dense_tile(params.dense, tile);
        n = dense.nth;
        sequence = dense.batch;
        info.head_kv = dense.head;
      }
      fill_tile(sequence, n, info);
    }
    __syncwarp();
    return true;
  }

  __device__ __forceinline__ void fill_tile(int sequence, int n, BwdTile& info) const {
    const SequenceSpan q = q_span(params, sequence);
    const SequenceSpan k = k_span(params, sequence);
    if (params.last_first) n = blocks_for(k.rows, T::kBlockN) - 1 - n;
    info.n = n;
    info.k_len = k.used;
    info.k_rows = k.rows;
    info.q_len = q.used;
    info.k_batch = k.batch;
    info.k_base = k.base;
    info.q_batch = q.batch;
    info.q_base = q.base;
    info.q_tile0 = first_q_tile<T::kBlockM>(params, sequence, q);
    const int key0 = n * T::kBlockN;
    const BlockRange tiles = query_tiles(params.mask, key0, smaller(key0 + T::kBlockN, k.used) - 1,
                                         q.used, k.used, T::kBlockM);
    info.m_begin = tiles.begin;
    info.m_end = tiles.end;
#pragma unroll 1
    for (int half = 0; half < T::kBlockN / 64; ++half) {
      const int first_key = key0 + half * 64;
      info.plain[half] =
          unmasked_query_tiles(params.mask, first_key, first_key + 63, q.used, k.used, T::kBlockM);
      const int last_key = smaller(first_key + 64, k.used) - 1;
      info.m_first[half] =
          query_tiles(params.mask, first_key, last_key, q.used, k.used, T::kBlockM).begin;
    }
  }

  // Whole pairs: a claim is for all KV tiles of a pair, in their order. Ranges of query tiles only
  // move up with the KV tile; an empty one can stand before all others or behind them
  // (tests/cpu/test_key_range.py). `loaded` is not asked at each tile, and may be two phases behind
  // when it is: its parity lets the claim pass then, two KV tiles early, which does no harm.
  __device__ __forceinline__ void run_pairs() {
    uint32_t count = 0;
    for (;;) {
      int pair = 0;
      if (count > 0) mbarrier_wait(&shared.loaded, (count - 1) & 1);
      if (lane == 0) pair = atomicAdd(params.plan + BwdTileOrder::kCounter, 1);
      pair = __shfl_sync(0xffffffffu, pair, 0);
      const bool more = pair < params.tiles && params.k_tiles > 0;
      int fresh_from = 0;
#pragma unroll 1
      for (int n = 0; n < (more ? params.k_tiles : 1); ++n, ++count) {
        const int slot = ring_slot<T::kTileSlots>(count);
        mbarrier_wait(&shared.tile_empty[slot], ring_parity<T::kTileSlots>(count) ^ 1);
        BwdTile& info = shared.tiles[slot];
        if (lane == 0) {
          info.head_kv = -1;
          if (more) {
            const int sequence = pair / params.heads_kv;
            info.head_kv = pair - sequence * params.heads_kv;
            fill_tile(sequence, n, info);
            const int next_key = (n + 1) * T::kBlockN;
            const BlockRange next =
                query_tiles(params.mask, next_key, smaller(next_key + T::kBlockN, info.k_len) - 1,
                            info.q_len, info.k_len, T::kBlockM);
            info.fresh_from = fresh_from * params.group;
            info.final_to = (next.begin < next.end ? next.begin : info.m_end) * params.group;
            fresh_from = info.m_end;
          }
          mbarrier_arrive(&shared.tile_full[slot]);
        }
        __syncwarp();
      }
      if (!more) return;
    }
  }

  __device__ __forceinline__ void run() {
    if constexpr (T::kWholePairs) {
      run_pairs();
    } else {
      run_tiles();
    }
  }

  __device__ __forceinline__ void run_tiles() {
    const int tiles = params.cu_seqlens_k != nullptr
                          ? params.plan[BwdTileOrder::kTiles] * params.heads_kv
                          : params.tiles;
    for (uint32_t count = 0;; ++count) {
      const int slot = ring_slot<T::kTileSlots>(count);
      mbarrier_wait(&shared.tile_empty[slot], ring_parity<T::kTileSlots>(count) ^ 1);
      // A tile is claimed when the one before is all but done: one that lies claimed and does not
      // run would hold up all that wait for its turn. The answer travels during the last steps.
      if (count > 0) mbarrier_wait(&shared.loaded, (count - 1) & 1);
      int tile = 0;
      if (lane == 0) tile = atomicAdd(params.plan + BwdTileOrder::kCounter, 1);
      tile = __shfl_sync(0xffffffffu, tile, 0);
      BwdTile& info = shared.tiles[slot];
      const bool more = tile < tiles && write_tile(tile, info);
      if (!more && lane == 0) info.head_kv = -1;
      if (lane == 0) mbarrier_arrive(&shared.tile_full[slot]);
      __syncwarp();
      if (!more) return;
    }
  }
};

}  // namespace flash_attn3
