// TMA descriptors, encoded by one checked call.
#pragma once

#include <cstdint>

#include <cuda.h>

#include "host/status.h"

namespace flash_attn3 {

enum class MapElement { kFloat16, kBFloat16, kByte };

// A 4-D view (d, row, head, batch) with unit stride along d; strides in elements. The box is
// box_columns x box_rows, stored with the swizzle of its width (128 or 64 bytes). What lies outside
// the tensor reads as 0.
struct TensorMapShape {
  const char* name;
  const void* data;
  MapElement element;
  int64_t columns, rows, heads, batch;
  int64_t row_stride, head_stride, batch_stride;
  int box_columns, box_rows;
};

Status encode_tensor_map(const TensorMapShape& shape, CUtensorMap* map);

}  // namespace flash_attn3
