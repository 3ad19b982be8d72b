// Parameters of a call that is asked about, never launched: contiguous tensors at addresses that
// are valid for TMA and not read.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>

#include "host/params.h"

namespace flash_attn3::api {

struct PlanRequest {
  int64_t head_dim = 128;
  int64_t head_dim_v = 128;
  DType dtype = DType::kBFloat16;
  int64_t batch = 1;
  int64_t seqlen_q = 4096;
  int64_t seqlen_k = 4096;
  int64_t heads = 16;
  int64_t heads_kv = 16;
  int64_t window_left = -1;
  int64_t window_right = -1;
  int64_t device = 0;
  int64_t sm_margin = 0;
};

inline FwdParams plan_params(const PlanRequest& r) {
  const auto contiguous = [](int64_t rows, int64_t heads, int64_t dim) {
    return Strides{rows * heads * dim, heads * dim, dim};
  };
  const auto address = [](uintptr_t page) { return reinterpret_cast<void*>(page << 12); };
  FwdParams p{};
  p.q = address(1);
  p.k = address(2);
  p.v = address(3);
  p.out = address(4);
  p.lse = static_cast<float*>(address(5));
  p.workspace = address(6);
  p.q_strides = contiguous(r.seqlen_q, r.heads, r.head_dim);
  p.k_strides = contiguous(r.seqlen_k, r.heads_kv, r.head_dim);
  p.v_strides = contiguous(r.seqlen_k, r.heads_kv, r.head_dim_v);
  p.out_strides = contiguous(r.seqlen_q, r.heads, r.head_dim_v);
  p.batch = static_cast<int32_t>(r.batch);
  p.max_seqlen_q = static_cast<int32_t>(r.seqlen_q);
  p.max_seqlen_k = static_cast<int32_t>(r.seqlen_k);
  p.total_q = r.seqlen_q;
  p.total_k = r.seqlen_k;
  p.heads = static_cast<int32_t>(r.heads);
  p.heads_kv = static_cast<int32_t>(r.heads_kv);
  p.head_dim = static_cast<int32_t>(r.head_dim);
  p.head_dim_v = static_cast<int32_t>(r.head_dim_v);
  p.dtype = r.dtype;
  p.softmax_scale = 1.0f / std::sqrt(static_cast<float>(r.head_dim));
  p.window_left = static_cast<int32_t>(r.window_left);
  p.window_right = static_cast<int32_t>(r.window_right);
  p.device = static_cast<int32_t>(r.device);
  p.sm_margin = static_cast<int32_t>(r.sm_margin);
  return p;
}

// The plan of such a call; 0, or what flash_attn3_fwd_plan says of errors. e4m3: V as rows.
inline int ask_plan(const PlanRequest& r, FwdPlan* plan, char* message, size_t message_size) {
  const FwdParams p = plan_params(r);
  if (r.dtype != DType::kE4M3) return flash_attn3_fwd_plan(&p, plan, message, message_size);
  Fp8Params fp8{};
  fp8.fwd = p;
  return flash_attn3_fp8_fwd_plan(&fp8, plan, message, message_size);
}

}  // namespace flash_attn3::api
