// What the e4m3 forward gets beside the forward's parameters.
#pragma once

#include "kernels/fwd/fwd_params.h"

namespace flash_attn3 {

// Scales that turn e4m3 values into real ones: one a KV head of a sequence, or one for each block
// of rows of a head.
struct ScaleView {
  const float* data;  // null: 1
  int64_t batch_stride;
  int64_t head_stride;
  int32_t block_rows;  // 0: one a head. Scales of neighbouring blocks are neighbours.
};

struct Fp8KernelParams : FwdKernelParams {
  ScaleView q_scale;
  ScaleView k_scale;
  ScaleView v_scale;
  // Of a V that lies transposed: blocks of one dense sequence.
  int32_t v_blocks;
};

}  // namespace flash_attn3
