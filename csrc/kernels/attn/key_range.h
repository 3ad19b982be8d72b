// Which keys a query sees, and which KV blocks a tile of queries needs. Plain integer arithmetic
// that the host can run too, so that it is tested exhaustively without a GPU.
#pragma once

#include <cstdint>

namespace flash_attn3 {

#if defined(__CUDACC__)
#define FLASH_ATTN3_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define FLASH_ATTN3_HOST_DEVICE inline
#endif

// The mask of a call: -1 is unlimited, chunk 0 is none (params.h has the meanings).
struct Mask {
  int32_t window_left;
  int32_t window_right;
  int32_t chunk;
};

// Keys lo <= j <= hi; empty when hi < lo.
struct KeyRange {
  int32_t lo;
  int32_t hi;
};

// KV blocks begin <= n < end.
struct BlockRange {
  int32_t begin;
  int32_t end;
};

FLASH_ATTN3_HOST_DEVICE int32_t smaller(int32_t a, int32_t b) { return a < b ? a : b; }
FLASH_ATTN3_HOST_DEVICE int32_t larger(int32_t a, int32_t b) { return a > b ? a : b; }

FLASH_ATTN3_HOST_DEVICE int32_t floor_divide(int32_t a, int32_t b) {
  return a >= 0 ? a / b : -((-a + b - 1) / b);
}

FLASH_ATTN3_HOST_DEVICE int32_t blocks_for(int32_t rows, int32_t block) {
  return (rows + block - 1) / block;
}

// Both ends grow with the row, which the two functions below rest on.
FLASH_ATTN3_HOST_DEVICE KeyRange visible_keys(const Mask& mask, int32_t row, int32_t q_len,
                                              int32_t k_len) {
  const int32_t position = row - q_len + k_len;  // in this order nothing wraps
  KeyRange keys{0, k_len - 1};
  if (mask.window_left >= 0) keys.lo = larger(0, position - mask.window_left);
  if (mask.window_right >= 0) keys.hi = smaller(keys.hi, position + mask.window_right);
  if (mask.chunk > 0) {
    const int32_t start = floor_divide(position, mask.chunk) * mask.chunk;
    keys.lo = larger(keys.lo, start);
    keys.hi = smaller(keys.hi, start + mask.chunk - 1);
  }
  return keys;
}

// Keys of a tile's rows where no chunk cuts: row r of it sees first + r <= j < end + r, of those
// that exist.
struct RowKeys {
  int32_t first;
  int32_t end;
};

// Of the tile of `rows` rows from row0 on. Ends that say nothing stay near 0 and k_len, where
// nothing wraps.
FLASH_ATTN3_HOST_DEVICE RowKeys row_keys(const Mask& mask, int32_t row0, int32_t rows,
                                         int32_t q_len, int32_t k_len) {
  const int32_t position = row0 - q_len + k_len;
  RowKeys keys{-rows, k_len};
  if (mask.window_left >= 0) keys.first = larger(keys.first, position - mask.window_left);
  if (mask.window_right >= 0 && mask.window_right < k_len - position) {
    keys.end = position + mask.window_right + 1;
  }
  return keys;
}

// Blocks of `block` keys of which some row of first_row .. last_row sees a key.
FLASH_ATTN3_HOST_DEVICE BlockRange visible_blocks(const Mask& mask, int32_t first_row,
                                                  int32_t last_row, int32_t q_len, int32_t k_len,
                                                  int32_t block) {
  if (last_row < first_row) return {0, 0};
  const int32_t lo = visible_keys(mask, first_row, q_len, k_len).lo;
  const int32_t hi = visible_keys(mask, last_row, q_len, k_len).hi;
  if (hi < lo) return {0, 0};
  return {lo / block, hi / block + 1};
}

// Blocks of which every row of first_row .. last_row sees every key: no mask code is needed there.
FLASH_ATTN3_HOST_DEVICE BlockRange unmasked_blocks(const Mask& mask, int32_t first_row,
                                                   int32_t last_row, int32_t q_len, int32_t k_len,
                                                   int32_t block) {
  const int32_t lo = visible_keys(mask, larger(first_row, last_row), q_len, k_len).lo;
  const int32_t hi = visible_keys(mask, first_row, q_len, k_len).hi;
  return {blocks_for(lo, block), hi < 0 ? 0 : (hi + 1) / block};
}

}  // namespace flash_attn3
