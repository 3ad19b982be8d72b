// The scheduler warp: decides which tile this CTA computes next and writes it into a ring of slots.
#pragma once

#include "kernels/fwd/fwd_params.h"
#include "kernels/fwd/fwd_traits.h"

namespace flash_attn3 {

__device__ __forceinline__ int32_t clamp(int32_t x, int32_t lo, int32_t hi) {
  return larger(lo, smaller(x, hi));
}

// Where a sequence lies and how long it is. Values from device memory are clamped to the tensor: a
// wrong one gives a wrong result, never a fault.
struct SequenceSpan {
  int32_t base;
  int32_t rows;  // that exist
  int32_t used;
};

__device__ __forceinline__ SequenceSpan sequence_span(const int32_t* cu_seqlens,
                                                      const int32_t* seqused, int32_t sequence,
                                                      int32_t dense_rows, int32_t total_rows) {
  SequenceSpan span{0, dense_rows, dense_rows};
  if (cu_seqlens != nullptr) {
    span.base = clamp(cu_seqlens[sequence], 0, total_rows);
    span.rows = clamp(cu_seqlens[sequence + 1], span.base, total_rows) - span.base;
  }
  span.used = seqused == nullptr ? span.rows : clamp(seqused[sequence], 0, span.rows);
  return span;
}

template <class T>
struct FwdScheduler {
  const FwdKernelParams& params;
  int lane;
  int round = 0;     // of the static order
  int position = 0;  // in the ragged plan: tile numbers only grow, so the search goes on from here

  __device__ __forceinline__ int next_tile() {
    if (params.order == TileOrder::kStatic) {
      const int grid = gridDim.x;
      // Tiles lie longest first: turning every other round evens out what the CTAs get.
      const bool turn = params.section_pairs > 1 && (round & 1);
      const int tile = round * grid + (turn ? grid - 1 - int(blockIdx.x) : int(blockIdx.x));
      ++round;
      return tile;
    }
    int tile = 0;
    if (lane == 0) tile = atomicAdd(params.workspace + RaggedPlan::kCounter, 1);
    return __shfl_sync(0xffffffffu, tile, 0);
  }

  // Which sequence of the plan holds this tile (all heads of a sequence lie together).
  __device__ __forceinline__ void find_sequence(int tile) {
    const int32_t* first_tile = params.workspace + RaggedPlan::kHeader + params.batch;
    for (;;) {
      const int candidate = position + 1 + lane;
      const bool before =
          candidate < params.batch && first_tile[candidate] * params.heads <= tile;
      const int passed = __popc(__ballot_sync(0xffffffffu, before));
      position += passed;
      if (passed < 32) return;
    }
  }

  __device__ __forceinline__ bool make_tile(int tile, TileInfo& info) {
    int q_tile;
    if (params.order == TileOrder::kRagged) {
      const int32_t* plan = params.workspace + RaggedPlan::kHeader;
      if (tile >= params.workspace[RaggedPlan::kTiles] * params.heads) return false;
      find_sequence(tile);
      const int first = plan[params.batch + position];
      const int q_tiles = plan[params.batch + position + 1] - first;
      const int within = tile - first * params.heads;
      info.batch = plan[position];
      info.head = within / q_tiles;
      q_tile = q_tiles - 1 - within % q_tiles;
    } else {
      if (tile >= params.tiles) return false;
      const int per_section = params.section_pairs * params.q_tiles;
      const int section = tile / per_section;
      const int first_pair = section * params.section_pairs;
      const int pairs =
          smaller(params.section_pairs, params.batch * params.heads - first_pair);
      const int within = tile - section * per_section;
      const int pair = first_pair + within % pairs;
      q_tile = params.q_tiles - 1 - within / pairs;
      info.batch = pair / params.heads;
      info.head = pair - info.batch * params.heads;
    }
    const SequenceSpan q = sequence_span(params.cu_seqlens_q, params.seqused_q, info.batch,
                                         params.seqlen_q, params.total_q);
    const SequenceSpan k = sequence_span(params.cu_seqlens_k, params.seqused_k, info.batch,
                                         params.seqlen_k, params.total_k);
    info.row0 = q_tile * T::kBlockM;
    info.q_len = q.used;
    info.q_rows = q.rows;
    info.k_len = k.used;
    info.q_base = q.base;
    info.k_base = k.base;
    const BlockRange blocks =
        visible_blocks(params.mask, info.row0, smaller(info.row0 + T::kBlockM, q.used) - 1, q.used,
                       k.used, T::kBlockN);
    info.n_begin = blocks.begin;
    info.n_end = blocks.end;
    for (int w = 0; w < T::kConsumers; ++w) {
      const int first_row = info.row0 + w * T::kRowsPerConsumer;
      const int last_row = smaller(first_row + T::kRowsPerConsumer, q.used) - 1;
      info.plain[w] =
          unmasked_blocks(params.mask, first_row, last_row, q.used, k.used, T::kBlockN);
    }
    return true;
  }

  __device__ __forceinline__ void run(typename T::SharedMemory& shared) {
    RingPosition<T::kTileSlots> ring;
    for (;;) {
      TileInfo info;
      const bool more = make_tile(next_tile(), info);
      if (!more) info.batch = -1;
      mbarrier_wait(&shared.tile_empty[ring.slot()], ring.parity() ^ 1);
      if (lane == 0) {
        shared.tiles[ring.slot()] = info;
        mbarrier_arrive(&shared.tile_full[ring.slot()]);
      }
      __syncwarp();
      if (!more) return;
      ring.advance();
    }
  }
};

}  // namespace flash_attn3
