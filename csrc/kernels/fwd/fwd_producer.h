// The producer warp: brings Q, K and V of one tile after the other into shared memory by TMA.
#pragma once

#include "kernels/common/panels.h"
#include "kernels/fwd/fwd_tail.h"

namespace flash_attn3 {

// The loop over tiles and blocks. Loads is the struct that derives from this one: it brings V, and
// may note what else a block or a tile has beside its data.
template <class T, class Loads>
struct ProducerLoop {
  const typename T::Params& params;
  typename T::SharedMemory& shared;
  int lane;

  // One KV block of K or V, or this CTA's half of it for both of a pair.
  template <class P>
  __device__ __forceinline__ void copy_block(const CUtensorMap& map, uint64_t* barrier,
                                             uint8_t* destination, int row, int head, int batch) {
    if constexpr (T::kPair == 1) {
      copy_panels<P>(map, barrier, kReadOften, destination, T::kBlockN, row, head, batch);
    } else {
      copy_half_to_both<P>(map, barrier, kReadOften, destination, T::kBlockN, cluster_rank(), row,
                           head, batch);
    }
  }

  RingPosition<T::kTileSlots> tile_ring;
  RingPosition<T::kKeyStages> k_ring;
  RingPosition<T::kValueStages> v_ring;
  RingPosition<T::kQueryStages> q_ring;

  __device__ __forceinline__ Loads& loads() { return static_cast<Loads&>(*this); }
  // Before K of block n is asked for: by the whole warp.
  __device__ __forceinline__ void note_k(const TileInfo&, int /*n*/) {}

  __device__ __forceinline__ void load_q(const TileInfo& tile) {
#pragma unroll 1
    for (int w = 0; w < T::kConsumers; ++w) {
      // Waits until consumer w has read its part of the tile before.
      mbarrier_wait(&shared.q_empty[q_ring.slot()][w], q_ring.parity() ^ 1);
      if (lane == 0) {
        mbarrier_arrive_expect_bytes(&shared.q_full[q_ring.slot()][w], T::kQueryBytes);
        copy_panels<typename T::QueryPanel>(params.q, &shared.q_full[q_ring.slot()][w], kReadOnce,
                                            shared.q[q_ring.slot()][w], T::kRowsPerConsumer,
                                            tile.q_base + tile.row0 + w * T::kRowsPerConsumer,
                                            tile.head, tile.q_batch);
      }
      __syncwarp();
    }
    q_ring.advance();
  }

  __device__ __forceinline__ void load_k(const TileInfo& tile, int n) {
    const int stage = k_ring.slot();
    mbarrier_wait(&shared.k_empty[stage], k_ring.parity() ^ 1);
    loads().note_k(tile, n);
    if (lane == 0) {
      mbarrier_arrive_expect_bytes(&shared.k_full[stage], T::kKeyBytes);
      copy_block<typename T::QueryPanel>(params.k, &shared.k_full[stage], shared.k[stage],
                                         tile.k_base + n * T::kBlockN, tile.head_kv, tile.k_batch);
    }
    __syncwarp();
    k_ring.advance();
  }

  // Tells the scheduler that the next tile will soon be needed: once a tile.
  __device__ __forceinline__ void want_tile() {
    if (lane == 0) mbarrier_arrive(&shared.tile_wanted[tile_ring.slot() % 2]);
  }

  // Q of the next tile, before this one's last block. Asking L2 for the next tile's first K and V
  // here as well was tried: the requests stand in the copy engine's way (20 % at head dim 256, S
  // 512).
  __device__ __forceinline__ void look_ahead() {
    RingPosition<T::kTileSlots> next = tile_ring;
    next.advance();
    mbarrier_wait(&shared.tile_full[next.slot()], next.parity());
    const TileInfo& tile = shared.tiles[next.slot()];
    if (tile.head >= 0 && tile.n_begin < tile.n_end) load_q(tile);
  }

  // The order is that in which consumers read: K of a block comes before V of the block before it.
  __device__ __forceinline__ void run() {
    grid_dependency_wait();
    bool first = true;
    for (;;) {
      mbarrier_wait(&shared.tile_full[tile_ring.slot()], tile_ring.parity());
      // Read where it lies: this warp has few registers.
      const TileInfo& tile = shared.tiles[tile_ring.slot()];
      if (tile.head < 0) break;
      const bool any_block = tile.n_begin < tile.n_end;
      // From here two more blocks are to be loaded, while consumers are at those before.
      const int wanted_at = smaller(tile.n_begin + 2, tile.n_end - 1);
      if (any_block) {
        if (first && T::kQueryAhead) load_q(tile);
        if (tile.n_end - 1 == wanted_at) want_tile();
        load_k(tile, tile.n_end - 1);
        // Q comes free later than the first place for K.
        if (!T::kQueryAhead) load_q(tile);
#pragma unroll 1
        for (int n = tile.n_end - 2; n >= tile.n_begin; --n) {
          if (n == wanted_at) want_tile();
          load_k(tile, n);
          loads().load_v(tile, n + 1);
        }
      } else {
        want_tile();
      }
      first = false;
      if constexpr (T::kQueryAhead) look_ahead();
      if (any_block) loads().load_v(tile, tile.n_begin);
      warp_arrive(&shared.tile_empty[tile_ring.slot()], lane);
      tile_ring.advance();
    }
    if constexpr (T::kPair > 1) await_both();
  }

  // Until the other CTA of the pair has told of all stages that it has read: it must find this
  // one's barriers.
  __device__ __forceinline__ void await_both() {
    for (int stage = 0; stage < T::kKeyStages; ++stage) {
      mbarrier_wait(&shared.k_empty[k_ring.slot()], k_ring.parity() ^ 1);
      k_ring.advance();
    }
    for (int stage = 0; stage < T::kValueStages; ++stage) {
      mbarrier_wait(&shared.v_empty[v_ring.slot()], v_ring.parity() ^ 1);
      v_ring.advance();
    }
  }
};

template <class T>
struct FwdProducer : ProducerLoop<T, FwdProducer<T>> {
  __device__ __forceinline__ void load_v(const TileInfo& tile, int n) {
    const int stage = this->v_ring.slot();
    mbarrier_wait(&this->shared.v_empty[stage], this->v_ring.parity() ^ 1);
    if (this->lane == 0) {
      // The tail warp says v_full where it has rows to clear first.
      uint64_t* barrier = has_tail<T::kBlockN>(this->params, tile, n) ? &this->shared.v_tail[stage]
                                                                      : &this->shared.v_full[stage];
      mbarrier_arrive_expect_bytes(barrier, T::kValueBytes);
      this->template copy_block<typename T::ValuePanel>(
          this->params.v, barrier, this->shared.v[stage], tile.k_base + n * T::kBlockN,
          tile.head_kv, tile.k_batch);
    }
    __syncwarp();
    this->v_ring.advance();
  }
};

}  // namespace flash_attn3
