// What the checks and the kernel parameters of both directions have in common.
#pragma once

#include <cstdint>
#include <string>

#include "host/device.h"
#include "kernels/attn/key_range.h"

namespace flash_attn3 {

constexpr float kLog2E = 1.4426950408889634f;

template <class Params>
bool is_ragged_q(const Params& in) {
  return in.cu_seqlens_q != nullptr;
}
template <class Params>
bool is_ragged_k(const Params& in) {
  return in.cu_seqlens_k != nullptr;
}

// Of one dense sequence, or of all ragged ones.
template <class Params>
int64_t rows_of_q(const Params& in) {
  return is_ragged_q(in) ? in.total_q : in.max_seqlen_q;
}
template <class Params>
int64_t rows_of_k(const Params& in) {
  return is_ragged_k(in) ? in.total_k : in.max_seqlen_k;
}

template <class Params>
Status check_shape(const Params& in) {
  if (in.batch < 1 || in.heads < 1 || in.heads_kv < 1 || in.heads % in.heads_kv != 0) {
    return Status::invalid("batch and heads must be positive, and heads_kv must divide heads.");
  }
  const int32_t head_dims[] = {in.head_dim, in.head_dim_v};
  for (const int32_t d : head_dims) {
    if (d < 8 || d > 256 || d % 8 != 0) {
      return Status::invalid("head dims must be multiples of 8 from 8 to 256, not " +
                             std::to_string(d) + ".");
    }
  }
  const int64_t rows_q = rows_of_q(in), rows_k = rows_of_k(in);
  if (rows_q < 1 || rows_k < 1 || rows_q > kMostRows || rows_k > kMostRows) {
    return Status::invalid("q and k must have between 1 and 2^30 rows.");
  }
  return {};
}

template <class Params, class KernelParams>
void fill_call_fields(const Params& in, KernelParams* out) {
  out->out = in.out;
  out->lse = in.lse;
  out->cu_seqlens_q = in.cu_seqlens_q;
  out->cu_seqlens_k = in.cu_seqlens_k;
  out->seqused_q = in.seqused_q;
  out->seqused_k = in.seqused_k;
  out->out_strides = in.out_strides;
  out->lse_batch_stride = is_ragged_q(in) ? 0 : int64_t(in.heads) * in.max_seqlen_q;
  out->lse_head_stride = rows_of_q(in);
  out->batch = in.batch;
  out->seqlen_q = in.max_seqlen_q;
  out->seqlen_k = in.max_seqlen_k;
  out->total_q = int32_t(in.total_q);
  out->total_k = int32_t(in.total_k);
  out->heads = in.heads;
  out->head_dim_v = in.head_dim_v;
  out->mask = {bounded_window(in.window_left), bounded_window(in.window_right),
               in.attention_chunk > 0 ? smaller(in.attention_chunk, kLongestWindow) : 0};
}

// CTAs of a persistent kernel: an SM each, and no more than a dense call has tiles.
template <class Params>
int persistent_grid(const Params& in, const DeviceInfo& device, bool ragged, int tiles) {
  const int sms = larger(1, device.sms - larger(0, in.sm_margin));
  return ragged ? sms : smaller(sms, larger(1, tiles));
}

}  // namespace flash_attn3
