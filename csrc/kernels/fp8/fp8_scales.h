// Where the scales of a tile's blocks lie.
#pragma once

#include "kernels/fp8/fp8_params.h"
#include "kernels/fwd/fwd_traits.h"

namespace flash_attn3 {

// The first of the scales of a head: `row` is where the sequence starts in a ragged tensor. There
// the blocks of sequence b start at row / block_rows + b, so that no two share one.
__device__ __forceinline__ const float* first_scale(const ScaleView& view, bool ragged,
                                                    int sequence, int head, int row) {
  const float* scale = view.data + head * view.head_stride;
  if (view.block_rows == 0) return scale + sequence * view.batch_stride;
  return ragged ? scale + row / view.block_rows + sequence : scale + sequence * view.batch_stride;
}

// Of 64 rows of Q, for the scheduler, which writes it into the tile's slot.
__device__ __forceinline__ float query_scale(const Fp8KernelParams& params, const TileInfo& tile,
                                             int sequence, int first_row) {
  const ScaleView& view = params.q_scale;
  if (view.data == nullptr) return 1.0f;
  const int head = view.block_rows == 0 ? tile.head_kv : tile.head;
  const float* scales =
      first_scale(view, params.cu_seqlens_q != nullptr, sequence, head, tile.q_base);
  if (view.block_rows == 0) return *scales;
  // Rows behind the end of a sequence have no scale, and need none.
  return scales[smaller(first_row, larger(tile.q_rows - 1, 0)) / view.block_rows];
}

}  // namespace flash_attn3
