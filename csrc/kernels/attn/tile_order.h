// From the number of a tile to what it is a tile of: what the schedulers of both directions share.
#pragma once

#include <cutlass/fast_math.h>

#include "kernels/attn/key_range.h"

namespace flash_attn3 {

// 32 neighbouring sequences of a ragged plan (sequence_plan.h), one a lane: tiles first <= t < end,
// all heads counted. Tile numbers only grow, so the window only moves on.
struct PlanWindow {
  int at = -32;
  int first = 0;
  int end = 0;

  // Moves to the sequence that holds this tile, and gives its lane; -1 where none does. on_move()
  // is called for each step.
  template <class OnMove>
  __device__ __forceinline__ int find_lane(const int32_t* first_tile, int batch, int heads,
                                           int lane, int tile, OnMove on_move) {
    for (;;) {
      const unsigned holder = __ballot_sync(0xffffffffu, first <= tile && tile < end);
      if (holder != 0) return __ffs(holder) - 1;
      at += 32;
      if (at >= batch) return -1;
      const int index = smaller(at + lane, batch - 1);
      first = first_tile[index] * heads;
      end = first_tile[index + 1] * heads;
      on_move();
    }
  }
};

// Tiles of a dense call by number: pairs of batch and head take turns in sections of so many, the
// first tile of each before the second. Made on the host, since divisions are half of what a
// scheduler does.
struct DenseOrder {
  cutlass::FastDivmod by_section;     // tiles of a section
  cutlass::FastDivmod by_pairs;       // pairs of a section
  cutlass::FastDivmod by_last_pairs;  // of the last section, which may have fewer
  cutlass::FastDivmod by_heads;
  int32_t full_sections;
};

inline DenseOrder dense_order(int32_t tiles_of_pair, int32_t section_pairs, int32_t batch,
                              int32_t heads) {
  const int32_t pairs = batch * heads;
  const int32_t full = pairs / section_pairs;
  return {larger(1, section_pairs * tiles_of_pair), section_pairs,
          larger(1, pairs - full * section_pairs), heads, full};
}

// The nth tile of its pair of batch and head.
struct DenseTile {
  int batch;
  int head;
  int nth;
};

FLASH_ATTN3_HOST_DEVICE DenseTile dense_tile(const DenseOrder& order, int tile) {
  int section, within, nth, pair, batch, head;
  order.by_section(section, within, tile);
  const bool full = section < order.full_sections;
  (full ? order.by_pairs : order.by_last_pairs)(nth, pair, within);
  order.by_heads(batch, head, section * order.by_pairs.divisor + pair);
  return {batch, head, nth};
}

}  // namespace flash_attn3
