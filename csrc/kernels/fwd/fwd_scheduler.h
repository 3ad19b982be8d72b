// The scheduler warp: decides which tile this CTA computes next and writes it into a ring of slots.
#pragma once

#include "kernels/attn/tile_order.h"
#include "kernels/fwd/fwd_params.h"
#include "kernels/fwd/fwd_traits.h"

namespace flash_attn3 {

__device__ __forceinline__ int32_t clamp(int32_t x, int32_t lo, int32_t hi) {
  return larger(lo, smaller(x, hi));
}

// Values from device memory are clamped to the tensor: a wrong one gives a wrong result, never a
// fault.
__device__ __forceinline__ SequenceSpan sequence_span(const int32_t* cu_seqlens,
                                                      const int32_t* seqused, int32_t sequence,
                                                      int32_t dense_rows, int32_t total_rows) {
  SequenceSpan span{sequence, 0, dense_rows, dense_rows};
  if (cu_seqlens != nullptr) {
    span.batch = 0;
    span.base = clamp(cu_seqlens[sequence], 0, total_rows);
    span.rows = clamp(cu_seqlens[sequence + 1], span.base, total_rows) - span.base;
  }
  span.used = seqused == nullptr ? span.rows : clamp(seqused[sequence], 0, span.rows);
  return span;
}

template <class T>
struct FwdScheduler {
  static constexpr int kPairRows = T::kPair * T::kBlockM;  // that share their KV blocks

  const typename T::Params& params;
  typename T::SharedMemory& shared;
  int lane;

  // Each CTA reads the plan once. What else is known of the window's sequences lies in shared
  // memory, since this warp has few registers.
  PlanWindow window;
  bool spans_known = false;
  uint32_t loaded = 0;  // tiles with a Q to load, for consumers that do not count them

  __device__ __forceinline__ bool ragged() const {
    return T::kPair == 1 && params.order == TileOrder::kRagged;  // pairs are for dense calls
  }

  __device__ __forceinline__ int claim() const {
    return int(atomicInc(reinterpret_cast<unsigned*>(params.counter), params.last_claim));
  }

  // The CTAs of a pair get the same number. Nobody claims the first tile of a dense call.
  __device__ __forceinline__ int fetch_tile(int number) {
    const int grid = cta_count() / T::kPair;
    const int place = cta_index() / T::kPair;
    if (number == 0 && !ragged()) return place;
    int fetched = 0;
    if (params.order == TileOrder::kStatic) {
      // Tiles lie longest first: turning every other round evens out what the CTAs get.
      const bool turn = params.uneven && (number & 1);
      fetched = number * grid + (turn ? grid - 1 - place : place);
    } else if (lane == 0) {
      if constexpr (T::kPair == 1) {
        fetched = claim();
      } else if (cluster_rank() == 0) {
        fetched = claim();
        tell_claim(number - 1, fetched);
      } else {
        fetched = hear_claim(number - 1);
      }
      if (params.order == TileOrder::kDynamic) fetched += grid;
    }
    return __shfl_sync(0xffffffffu, fetched, 0);
  }

  // The pair's first CTA claims for both. The second has read a word before the next but one claim
  // takes its place.
  __device__ __forceinline__ void tell_claim(int claims_before, int claimed) {
    const int at = claims_before & 1;
    mbarrier_wait(&shared.claim_empty[at], (claims_before >> 1 & 1) ^ 1);
    store_word_at(&shared.claim[at], claimed, &shared.claim_full[at], 1);
  }

  __device__ __forceinline__ int hear_claim(int claims_before) {
    const int at = claims_before & 1;
    mbarrier_arrive_expect_bytes(&shared.claim_full[at], 4);
    mbarrier_wait(&shared.claim_full[at], claims_before >> 1 & 1);
    const int claimed = *static_cast<const volatile int32_t*>(&shared.claim[at]);
    mbarrier_arrive_at(&shared.claim_empty[at], 0);
    return claimed;
  }

  // Until the second CTA has read the last words: it must find this one's barriers.
  __device__ __forceinline__ void await_reader(int claims) {
    if (params.order == TileOrder::kStatic || cluster_rank() != 0) return;
    for (int before = claims; before < claims + 2; ++before) {
      mbarrier_wait(&shared.claim_empty[before & 1], (before >> 1 & 1) ^ 1);
    }
  }

  __device__ __forceinline__ SequenceSpan q_span(int sequence) const {
    return sequence_span(params.cu_seqlens_q, params.seqused_q, sequence, params.seqlen_q,
                         params.total_q);
  }

  __device__ __forceinline__ SequenceSpan k_span(int sequence) const {
    return sequence_span(params.cu_seqlens_k, params.seqused_k, sequence, params.seqlen_k,
                         params.total_k);
  }

  __device__ __forceinline__ void know_spans() {
    if (spans_known) return;
    const int index = smaller(window.at + lane, params.batch - 1);
    const int sequence = params.workspace[RaggedPlan::kHeader + index];
    shared.window[lane] = {q_span(sequence), k_span(sequence)};
    if constexpr (T::kScaled) shared.window_sequence[lane] = sequence;
    spans_known = true;
    __syncwarp();
  }

  // Lane 0 writes the tile's slot; false where there is no such tile.
  __device__ __forceinline__ bool write_tile(int tile, int slot) {
    TileInfo& info = shared.tiles[slot];
    int holder = 0;
    if (ragged()) {
      holder = window.find_lane(params.workspace + RaggedPlan::kHeader + params.batch, params.batch,
                                params.heads, lane, tile, [this] { spans_known = false; });
      if (holder < 0) return false;  // only overlapping sequences bring that about
      know_spans();
    }
    const int first_tile = __shfl_sync(0xffffffffu, window.first, holder);
    const int end_tile = __shfl_sync(0xffffffffu, window.end, holder);
    if (lane == 0) {
      int q_tile;
      PlannedSequence sequence;
      if (ragged()) {
        sequence = shared.window[holder];
        if constexpr (T::kScaled) {
          shared.scales[slot].sequence = shared.window_sequence[holder];
        }
        const int q_tiles = (end_tile - first_tile) / params.heads;
        const int within = tile - first_tile;
        info.head = within / q_tiles;
        q_tile = q_tiles - 1 - within % q_tiles;
      } else {
        const DenseTile dense = dense_tile(params.dense, tile);
        q_tile = params.q_tiles - 1 - dense.nth;
        info.head = dense.head;
        sequence = {q_span(dense.batch), k_span(dense.batch)};
        if constexpr (T::kScaled) shared.scales[slot].sequence = dense.batch;
      }
      fill_tile(sequence, q_tile * kPairRows, slot);
    }
    __syncwarp();
    // After that barrier, so that the values are read back: this warp has few registers.
    if (lane == 0) {
      info.keys = row_keys(mask(), info.row0, T::kBlockM, info.q_len, info.k_len);
      info.lse = params.lse + info.q_batch * params.lse_batch_stride +
                 info.head * params.lse_head_stride + info.q_base + info.row0;
    }
    return true;
  }

  __device__ __forceinline__ Mask mask() const {
    return {T::kOpenLeft ? -1 : params.mask.window_left, params.mask.window_right,
            T::kOpenLeft ? 0 : params.mask.chunk};
  }

  __device__ __forceinline__ void fill_tile(const PlannedSequence& sequence, int first_of_pair,
                                            int slot) const {
    TileInfo& info = shared.tiles[slot];
    const int row0 = first_of_pair + (T::kPair == 1 ? 0 : int(cluster_rank()) * T::kBlockM);
    info.row0 = row0;
    const int q_len = sequence.q.used;
    const int k_len = sequence.k.used;
    info.head_kv = params.by_group.div(info.head);
    info.q_len = q_len;
    info.q_rows = sequence.q.rows;
    info.k_len = k_len;
    info.q_batch = sequence.q.batch;
    info.q_base = sequence.q.base;
    info.k_batch = sequence.k.batch;
    info.k_base = sequence.k.base;
    const Mask mask = this->mask();
    const int last_of_pair = smaller(first_of_pair + kPairRows, q_len) - 1;
    const BlockRange blocks =
        visible_blocks(mask, first_of_pair, last_of_pair, q_len, k_len, T::kBlockN);
    info.n_begin = blocks.begin;
    info.n_end = blocks.end;
#pragma unroll 1
    for (int w = 0; w < T::kConsumers; ++w) {
      const int first_row = row0 + w * T::kRowsPerConsumer;
      const int last_row = smaller(first_row + T::kRowsPerConsumer, q_len) - 1;
      if constexpr (T::kScaled) {
        shared.scales[slot].q[w] =
            query_scale(params, info, shared.scales[slot].sequence, first_row);
      }
      info.plain[w] = unmasked_blocks(mask, first_row, last_row, q_len, k_len, T::kBlockN);
      if constexpr (T::kMostUnseen > 0) {
        // Every consumer has a block, so that all streams begin and end with the same tiles.
        const BlockRange seen = visible_blocks(mask, first_row, last_row, q_len, k_len, T::kBlockN);
        info.start[w] = larger(larger(seen.end, blocks.begin + 1), blocks.end - T::kMostUnseen);
      }
    }
  }

  __device__ __forceinline__ void count_tile(int number, int slot) {
    shared.tiles_before[slot] = number;
    shared.loads_before[slot] = loaded;
    const TileInfo& info = shared.tiles[slot];
    loaded += info.n_begin < info.n_end;
  }

  // Whether the first tile's slot can be written while the kernel before this one ends: nothing is
  // read from device memory. (A tile without blocks is stored at once: that must wait.)
  __device__ __forceinline__ bool begins_early() const {
    return !T::kScaled && !ragged() && params.cu_seqlens_k == nullptr &&
           params.seqused_q == nullptr && params.seqused_k == nullptr;
  }

  __device__ __forceinline__ void run() {
    if (!begins_early()) grid_dependency_wait();
    const int tiles = ragged() ? params.workspace[RaggedPlan::kTiles] * params.heads : params.tiles;
    RingPosition<T::kTileSlots> ring;
    for (int number = 0;; ++number) {
      if (number == 1) grid_dependency_wait();
      // The producer nears the end of tile number - claim_ahead; it cannot be two tiles further,
      // for which one barrier would do.
      const int wanted_by = number - params.claim_ahead;
      if (wanted_by >= 0) {
        mbarrier_wait(&shared.tile_wanted[wanted_by & 1], wanted_by >> 1 & 1);
      }
      const int tile = fetch_tile(number);
      bool more = tile < tiles;
      mbarrier_wait(&shared.tile_empty[ring.slot()], ring.parity() ^ 1);
      TileInfo& info = shared.tiles[ring.slot()];
      more = more && write_tile(tile, ring.slot());
      if constexpr (T::kCarried) {
        if (lane == 0) count_tile(number, ring.slot());
      }
      if (!more && lane == 0) info.head = -1;
      if (number == 0 && info.n_begin >= info.n_end) grid_dependency_wait();
      if (lane == 0) mbarrier_arrive(&shared.tile_full[ring.slot()]);
      __syncwarp();
      if (!more) {
        if constexpr (T::kPair > 1) await_reader(number);
        break;
      }
      ring.advance();
    }
    grid_dependents_launch();
  }
};

}  // namespace flash_attn3
