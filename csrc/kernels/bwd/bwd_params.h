// What the backward kernels get, and the layout of their workspace.
#pragma once

#include <cstdint>

#include <cuda.h>

#include "host/params.h"
#include "kernels/attn/key_range.h"
#include "kernels/attn/tile_order.h"
#include "kernels/fwd/fwd_scheduler.h"

namespace flash_attn3 {

// Query tiles of all sequences lie one after the other in the workspace; a sequence starts a tile.
// In a ragged call sequence b starts at tile cu_seqlens_q[b] / M + b, which leaves room for all
// before it and needs no sum.
struct BwdTileOrder {
  // 32-bit words at the start of the workspace.
  static constexpr int kCounter = 0;  // the next KV tile to be handed out
  static constexpr int kTiles = 1;    // ragged: KV tiles of all sequences, for one head
  static constexpr int kHeader = 4;
  // ragged, then: sequence[B] (longest first where B allows sorting), first_tile[B + 1]
  static __host__ __device__ int64_t words(int64_t batch) { return kHeader + 2 * batch + 1; }
};

struct BwdKernelParams {
  CUtensorMap q;     // (d, row, head, batch), box: one panel x M rows
  CUtensorMap dout;  // the same
  CUtensorMap k;     // box: one panel x N rows
  CUtensorMap v;

  const void* out;
  const void* dout_data;
  const float* lse;
  const float* dlse;  // or null
  void* dq;
  void* dk;
  void* dv;
  const int32_t* cu_seqlens_q;
  const int32_t* cu_seqlens_k;
  const int32_t* seqused_q;
  const int32_t* seqused_k;

  // Workspace, each by [query tile][head].
  int32_t* plan;
  float* rows;     // -LSE in log2 of M rows, then delta of M rows, as row_value_place() orders them
  float* dq_sum;   // M x D in the order of the threads' fragments (bwd_dq.h)
  int32_t* turns;  // by chain (bwd_dq.h) too: KV tiles that have added; not deterministic: null

  Strides out_strides;
  Strides dout_strides;
  Strides dq_strides;
  Strides dk_strides;
  Strides dv_strides;
  int64_t lse_batch_stride;
  int64_t lse_head_stride;

  int32_t batch;
  int32_t seqlen_q;  // rows of a dense q
  int32_t seqlen_k;
  int32_t total_q;  // rows of a ragged q
  int32_t total_k;
  int32_t heads;
  int32_t heads_kv;
  int32_t group;  // query heads of one KV head
  int32_t head_dim;
  int32_t head_dim_v;

  Mask mask;
  float scale;           // of the gradients of Q and K
  float scale_log2;      // scores (soft cap: their tanh) to exponents of two
  float tanh_factor;     // soft cap: scale / cap; 0 is off
  float tanh_from_log2;  // soft cap: exponents of two back to the tanh

  int32_t q_tiles;      // of a dense sequence
  int32_t q_tiles_all;  // of the workspace
  int32_t k_tiles;      // of a dense sequence
  int32_t tiles;        // KV tiles of a dense call, KV heads counted; whole pairs: pairs
  DenseOrder dense;     // of a dense call, by KV heads
  int32_t whole_pairs;  // a CTA takes all KV tiles of a pair (BwdDqSettler)
  int32_t last_first;  // KV tiles of a pair from the last down: what the order of dQ's sums follows
};

__device__ __forceinline__ SequenceSpan q_span(const BwdKernelParams& params, int sequence) {
  return sequence_span(params.cu_seqlens_q, params.seqused_q, sequence, params.seqlen_q,
                       params.total_q);
}

__device__ __forceinline__ SequenceSpan k_span(const BwdKernelParams& params, int sequence) {
  return sequence_span(params.cu_seqlens_k, params.seqused_k, sequence, params.seqlen_k,
                       params.total_k);
}

// The sequence's first query tile in the workspace.
template <int kBlockM>
__device__ __forceinline__ int first_q_tile(const BwdKernelParams& params, int sequence,
                                            const SequenceSpan& span) {
  return params.cu_seqlens_q == nullptr ? sequence * params.q_tiles
                                        : span.base / kBlockM + sequence;
}

// A query tile of the workspace, found by its number: preprocess and postprocess start from it.
struct WorkspaceTile {
  SequenceSpan q;
  int32_t row0;  // within the sequence; rows from q.rows on do not exist
};

template <int kBlockM>
__device__ __forceinline__ WorkspaceTile find_workspace_tile(const BwdKernelParams& params,
                                                             int tile) {
  int sequence = 0;
  if (params.cu_seqlens_q == nullptr) {
    sequence = tile / params.q_tiles;
  } else {
    int end = params.batch;  // sequence <= the one searched < end
    while (end - sequence > 1) {
      const int middle = (sequence + end) / 2;
      const int base = clamp(params.cu_seqlens_q[middle], 0, params.total_q);
      if (base / kBlockM + middle <= tile) {
        sequence = middle;
      } else {
        end = middle;
      }
    }
  }
  const SequenceSpan span = q_span(params, sequence);
  const int within = tile - first_q_tile<kBlockM>(params, sequence, span);
  return {span, within < 0 ? span.rows : within * kBlockM};  // none before the first sequence
}

}  // namespace flash_attn3
