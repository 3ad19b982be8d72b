// What the forward kernel gets: tensor maps, pointers and run-time options.
#pragma once

#include <cstdint>

#include <cuda.h>

#include "host/params.h"
#include "kernels/attn/key_range.h"
#include "kernels/attn/tile_order.h"

namespace flash_attn3 {

enum class TileOrder : int32_t {
  kStatic = 0,   // dense: CTA (or pair) c takes tiles c, c + grid, ...; every other round reversed
                 // where tiles differ in length
  kDynamic = 1,  // dense: an atomic counter
  kRagged = 2,   // the workspace holds a prefix sum of the sequences' tiles, and the counter
};

// What happens to scores before the mask.
enum class ScoreTransform : int32_t {
  kNone = 0,
  kSoftcap = 1,   // tanh(transform_factor * s); the scale is the cap
  kMultiply = 2,  // transform_factor * s: a softmax_scale of 0, or a negative one
};

// Workspace of a ragged call, in 32-bit words.
struct RaggedPlan {
  static constexpr int kCounter = 0;
  static constexpr int kTiles = 1;  // of all sequences, for one head
  static constexpr int kHeader = 4;
  // then: sequence[B] (longest first where B allows sorting), first_tile[B + 1]
  static __host__ __device__ int64_t words(int64_t batch) { return kHeader + 2 * batch + 1; }
};

struct FwdKernelParams {
  CUtensorMap q;  // (d, row, head, batch), box: one panel x 64 rows
  CUtensorMap k;  // box: one panel x one KV block
  CUtensorMap v;
  CUtensorMap out_map;  // box: one panel x 16 rows

  void* out;
  float* lse;
  const int32_t* cu_seqlens_q;
  const int32_t* cu_seqlens_k;
  const int32_t* seqused_q;
  const int32_t* seqused_k;
  int32_t* workspace;
  int32_t* counter;  // of claimed tiles; it returns to 0 after last_claim (claim_counter.h)
  uint32_t last_claim;

  Strides out_strides;
  int64_t lse_batch_stride;
  int64_t lse_head_stride;

  int32_t batch;
  int32_t seqlen_q;  // rows of a dense q
  int32_t seqlen_k;
  int32_t total_q;  // rows of a ragged q
  int32_t total_k;
  int32_t heads;
  cutlass::FastDivmod by_group;  // query heads of one KV head
  int32_t head_dim_v;

  Mask mask;
  float scale_log2;  // > 0: scores after `transform` to exponents of two
  ScoreTransform transform;
  float transform_factor;

  TileOrder order;
  // How many tiles before its turn a tile is claimed: 1 for long ones, so that CTAs end together, 2
  // for short ones, whose numbers and plans would else be waited for.
  int32_t claim_ahead;
  int32_t q_tiles;   // of a dense sequence
  int32_t tiles;     // of a dense call
  DenseOrder dense;  // of a dense call; the first tile of a pair has its last rows
  bool uneven;       // kStatic: tiles differ in length
};

}  // namespace flash_attn3
