// From the number of a tile to what it is a tile of: what the schedulers of both directions share.
#pragma once

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

// A tile of a dense call: the nth of its pair of batch and head.
struct DenseTile {
  int pair;
  int nth;
};

// Pairs take turns in sections of so many: the first tile of each before the second.
__device__ __forceinline__ DenseTile dense_tile(int tile, int tiles_of_pair, int section_pairs,
                                                int all_pairs) {
  const int per_section = section_pairs * tiles_of_pair;
  const int section = tile / per_section;
  const int first_pair = section * section_pairs;
  const int pairs = smaller(section_pairs, all_pairs - first_pair);
  const int within = tile - section * per_section;
  return {first_pair + within % pairs, within / pairs};
}

}  // namespace flash_attn3
