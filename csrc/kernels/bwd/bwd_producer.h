// The producer warp (K and V once a tile, Q and dO in a ring) and the tail warp, which clears rows
// that lie past a sequence's end before anybody multiplies them.
//
// Such rows may hold anything, and 0 times NaN is NaN. With Q, K, V and dO of 0 there, scores and
// dP of rows past the end are finite, P is 0 by the LSE or by the mask, and all sums stay clean.
// Only the last tile of a sequence has such rows, and only where the tensor goes on behind it: at
// the tensor's own end the copy engine fills zeros by itself.
#pragma once

#include "kernels/bwd/bwd_params.h"
#include "kernels/bwd/bwd_traits.h"
#include "kernels/common/memory.h"
#include "kernels/common/panels.h"

namespace flash_attn3 {

template <class T>
__device__ __forceinline__ bool has_key_tail(const BwdKernelParams& params, const BwdTile& tile) {
  return (tile.n + 1) * T::kBlockN > tile.k_len &&
         (params.cu_seqlens_k != nullptr || params.seqused_k != nullptr);
}

template <class T>
__device__ __forceinline__ bool has_query_tail(const BwdKernelParams& params, const BwdTile& tile,
                                               int m) {
  return (m + 1) * T::kBlockM > tile.q_len &&
         (params.cu_seqlens_q != nullptr || params.seqused_q != nullptr);
}

template <class T>
struct BwdProducer {
  // Whole pairs: one CTA alone reads them, and they are of no use once its pair is done.
  static constexpr uint64_t kQueryHint = T::kWholePairs ? kReadAgain : kReadOften;

  const BwdKernelParams& params;
  typename T::SharedMemory& shared;
  int lane;

  __device__ __forceinline__ void load_k(const BwdTile& tile, int stage) {
    uint64_t* barrier =
        has_key_tail<T>(params, tile) ? &shared.k_tail[stage] : &shared.k_full[stage];
    mbarrier_arrive_expect_bytes(barrier, T::kKeyBytes);
    copy_panels<Panel<T::kHeadDim>>(params.k, barrier, kReadOnce, shared.k[stage], T::kBlockN,
                                    tile.k_base + tile.n * T::kBlockN, tile.head_kv, tile.k_batch);
  }

  __device__ __forceinline__ void load_v(const BwdTile& tile, int stage) {
    uint64_t* barrier =
        has_key_tail<T>(params, tile) ? &shared.v_tail[stage] : &shared.v_full[stage];
    mbarrier_arrive_expect_bytes(barrier, T::kValueBytes);
    copy_panels<Panel<T::kHeadDimV>>(params.v, barrier, kReadOnce, shared.v[stage], T::kBlockN,
                                     tile.k_base + tile.n * T::kBlockN, tile.head_kv, tile.k_batch);
  }

  __device__ __forceinline__ void load_q(const BwdTile& tile, int head, int m, uint32_t count) {
    const int stage = ring_slot<T::kQStages>(count);
    mbarrier_wait(&shared.q_empty[stage], ring_parity<T::kQStages>(count) ^ 1);
    if (lane == 0) {
      uint64_t* barrier =
          has_query_tail<T>(params, tile, m) ? &shared.q_tail[stage] : &shared.q_full[stage];
      mbarrier_arrive_expect_bytes(barrier, T::kQueryBytes);
      copy_panels<Panel<T::kHeadDim>>(params.q, barrier, kQueryHint, shared.q[stage], T::kBlockM,
                                      tile.q_base + m * T::kBlockM, head, tile.q_batch);
    }
    __syncwarp();
  }

  __device__ __forceinline__ void load_dout(const BwdTile& tile, int head, int m, uint32_t count) {
    const int stage = ring_slot<T::kDoutStages>(count);
    mbarrier_wait(&shared.dout_empty[stage], ring_parity<T::kDoutStages>(count) ^ 1);
    if (lane == 0) {
      uint64_t* barrier =
          has_query_tail<T>(params, tile, m) ? &shared.dout_tail[stage] : &shared.dout_full[stage];
      mbarrier_arrive_expect_bytes(barrier, T::kDoutBytes + T::kRowBytes);
      copy_panels<Panel<T::kHeadDimV>>(params.dout, barrier, kQueryHint, shared.dout[stage],
                                       T::kBlockM, tile.q_base + m * T::kBlockM, head,
                                       tile.q_batch);
      const int64_t at = int64_t(tile.q_tile0 + m) * params.heads + head;
      bulk_copy_to_shared(shared.rows[stage], params.rows + at * (2 * T::kBlockM), T::kRowBytes,
                          barrier);
    }
    __syncwarp();
  }

  template <int kColumns>
  __device__ __forceinline__ void prefetch_panels(const CUtensorMap& map, const BwdTile& tile) {
    using P = Panel<kColumns>;
#pragma unroll
    for (int panel = 0; panel < P::kCount; ++panel) {
      cute::SM90_TMA_LOAD_4D::PREFETCH::copy(
          &map, panel * P::kWidth, tile.k_base + tile.n * T::kBlockN, tile.head_kv, tile.k_batch);
    }
  }

  // K and V, as soon as no product reads those of an earlier tile in their place. Until then they
  // are brought into L2.
  __device__ __forceinline__ void load_kv(const BwdTile& tile, uint32_t tiles_with_work) {
    const int stage = ring_slot<T::kKvStages>(tiles_with_work);
    if (lane == 0) {
      prefetch_panels<T::kHeadDim>(params.k, tile);
      prefetch_panels<T::kHeadDimV>(params.v, tile);
    }
    mbarrier_wait(&shared.kv_empty[stage], ring_parity<T::kKvStages>(tiles_with_work) ^ 1);
    if (lane == 0) {
      load_k(tile, stage);
      load_v(tile, stage);
    }
    __syncwarp();
  }

  // The order is that in which consumers first read, but that places for Q come free before those
  // for K and V.
  __device__ __forceinline__ void run() {
    uint32_t tiles_with_work = 0;
    uint32_t count = 0;  // of query tiles
    for (uint32_t at = 0;; ++at) {
      const int slot = ring_slot<T::kTileSlots>(at);
      mbarrier_wait(&shared.tile_full[slot], ring_parity<T::kTileSlots>(at));
      // Read where it lies: this warp has few registers.
      const BwdTile& tile = shared.tiles[slot];
      if (tile.head_kv < 0) return;
#pragma unroll 1
      for (int g = 0; g < params.group; ++g) {
        const int head = tile.head_kv * params.group + g;
#pragma unroll 1
        for (int nth = 0; nth < tile.m_end - tile.m_begin; ++nth, ++count) {
          const int m = visits_down<T>(tile) ? tile.m_end - 1 - nth : tile.m_begin + nth;
          load_q(tile, head, m, count);
          if (g == 0 && nth == 0) load_kv(tile, tiles_with_work++);
          load_dout(tile, head, m, count);
        }
      }
      if (lane == 0) mbarrier_arrive(&shared.loaded);
      warp_arrive(&shared.tile_empty[slot], lane);
    }
  }
};

template <class T>
struct BwdTail {
  const BwdKernelParams& params;
  typename T::SharedMemory& shared;
  int lane;

  template <int kColumns, int kRows>
  __device__ __forceinline__ void clear(uint8_t* tile, int valid_rows, uint64_t* full) {
    clear_panel_rows<Panel<kColumns>>(tile, kRows, valid_rows, kRows, lane);
    // Each lane's zeros are to be seen by wgmma before consumers learn of the tile.
    fence_shared_to_async_proxy();
    __syncwarp();
    if (lane == 0) mbarrier_arrive(full);
  }

  __device__ __forceinline__ void run() {
    uint32_t tiles_with_work = 0;
    uint32_t key_parities = 0;  // a bit a stage
    uint32_t count = 0;         // of query tiles, as the producer counts
    uint32_t q_parities = 0;    // a bit a stage
    uint32_t dout_parities = 0;
    for (uint32_t at = 0;; ++at) {
      const int slot = ring_slot<T::kTileSlots>(at);
      mbarrier_wait(&shared.tile_full[slot], ring_parity<T::kTileSlots>(at));
      const BwdTile& tile = shared.tiles[slot];
      if (tile.head_kv < 0) return;
      if (tile.m_begin < tile.m_end) {
        const int kv_stage = ring_slot<T::kKvStages>(tiles_with_work);
        ++tiles_with_work;
        if (has_key_tail<T>(params, tile)) {
          const int valid = tile.k_len - tile.n * T::kBlockN;
          mbarrier_wait(&shared.k_tail[kv_stage], key_parities >> kv_stage & 1);
          clear<T::kHeadDim, T::kBlockN>(shared.k[kv_stage], valid, &shared.k_full[kv_stage]);
          mbarrier_wait(&shared.v_tail[kv_stage], key_parities >> kv_stage & 1);
          clear<T::kHeadDimV, T::kBlockN>(shared.v[kv_stage], valid, &shared.v_full[kv_stage]);
          key_parities ^= 1u << kv_stage;
        }
        const int last = tile.m_end - 1;
        const bool tail = has_query_tail<T>(params, tile, last);
        const int valid = tile.q_len - last * T::kBlockM;
#pragma unroll 1
        for (int g = 0; g < params.group; ++g) {
          count += tile.m_end - tile.m_begin;
          if (!tail) continue;
          const int q_stage = ring_slot<T::kQStages>(count - 1);
          mbarrier_wait(&shared.q_tail[q_stage], q_parities >> q_stage & 1);
          q_parities ^= 1u << q_stage;
          clear<T::kHeadDim, T::kBlockM>(shared.q[q_stage], valid, &shared.q_full[q_stage]);
          const int stage = ring_slot<T::kDoutStages>(count - 1);
          mbarrier_wait(&shared.dout_tail[stage], dout_parities >> stage & 1);
          dout_parities ^= 1u << stage;
          clear<T::kHeadDimV, T::kBlockM>(shared.dout[stage], valid, &shared.dout_full[stage]);
        }
      }
      warp_arrive(&shared.tile_empty[slot], lane);
    }
  }
};

}  // namespace flash_attn3
