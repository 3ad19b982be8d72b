// The other side of key_range.h: which queries see a key, and which query tiles a KV block needs.
#pragma once

#include "kernels/attn/key_range.h"

namespace flash_attn3 {

// Queries lo <= i <= hi; empty when hi < lo.
struct QueryRange {
  int32_t lo;
  int32_t hi;
};

// Both ends grow with the key, which the two functions below rest on.
FLASH_ATTN3_HOST_DEVICE QueryRange visible_queries(const Mask& mask, int32_t key, int32_t q_len,
                                                   int32_t k_len) {
  const int32_t shift = q_len - k_len;  // added to a position: the query there
  QueryRange queries{0, q_len - 1};
  if (mask.window_right >= 0) queries.lo = larger(0, key + shift - mask.window_right);
  if (mask.window_left >= 0) queries.hi = smaller(queries.hi, key + shift + mask.window_left);
  if (mask.chunk > 0) {
    const int32_t start = key / mask.chunk * mask.chunk + shift;
    queries.lo = larger(queries.lo, start);
    queries.hi = smaller(queries.hi, start + mask.chunk - 1);
  }
  return queries;
}

// Tiles of `tile` queries that the keys first_key .. last_key < k_len need. Tile m is among them
// exactly when the KV block is among visible_blocks() of the tile's rows: the deterministic mode
// counts on that.
FLASH_ATTN3_HOST_DEVICE BlockRange query_tiles(const Mask& mask, int32_t first_key,
                                               int32_t last_key, int32_t q_len, int32_t k_len,
                                               int32_t tile) {
  if (last_key < first_key || q_len <= 0) return {0, 0};
  const int32_t lo = visible_queries(mask, first_key, q_len, k_len).lo;
  const int32_t hi = visible_queries(mask, last_key, q_len, k_len).hi;
  if (hi < 0 || lo >= q_len || hi / tile < lo / tile) return {0, 0};
  return {lo / tile, hi / tile + 1};
}

// Tiles of which every query sees all keys first_key .. last_key: no mask code is needed there.
// Rows past q_len count as seeing everything.
FLASH_ATTN3_HOST_DEVICE BlockRange unmasked_query_tiles(const Mask& mask, int32_t first_key,
                                                        int32_t last_key, int32_t q_len,
                                                        int32_t k_len, int32_t tile) {
  if (last_key >= k_len || q_len <= 0) return {0, 0};
  const int32_t lo = visible_queries(mask, last_key, q_len, k_len).lo;
  const int32_t hi = visible_queries(mask, first_key, q_len, k_len).hi;
  const int32_t end = hi >= q_len - 1 ? blocks_for(q_len, tile) : hi < 0 ? 0 : (hi + 1) / tile;
  return {blocks_for(lo, tile), end};
}

}  // namespace flash_attn3
