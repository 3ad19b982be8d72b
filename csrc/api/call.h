// What forward and backward share of the way from tensors to the parameters of a launch.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>

#include <ATen/cuda/EmptyTensor.h>
#include <ATen/ops/clone.h>
#include <c10/core/MemoryFormat.h>

#include "checks.h"
#include "device.h"
#include "host/params.h"
#include "ops.h"

namespace flash_attn3::api {

constexpr size_t kMessageSize = 512;
constexpr int64_t kTmaAlignment = 16;                  // bytes: base pointer and every stride
constexpr int64_t kTmaStrideLimit = int64_t{1} << 40;  // bytes

struct Shape {
  bool ragged_q = false;
  bool ragged_k = false;
  int64_t batch = 0;
  int64_t rows_q = 0;  // of one dense sequence, or of all ragged ones
  int64_t rows_k = 0;
  int64_t heads = 0;
  int64_t heads_kv = 0;
  int64_t head_dim = 0;
  int64_t head_dim_v = 0;
};

// q, k, v where they lie in one tensor: (batch, rows, 3, heads, head dim), or the heads of q, of k
// and of v one behind another, (batch, rows, heads, head dim).
inline std::array<Tensor, 3> unpacked(const Tensor& qkv, int64_t num_heads_q) {
  TORCH_CHECK_VALUE(qkv.defined() && (qkv.dim() == 4 || qkv.dim() == 5), "qkv has ",
                    qkv.defined() ? qkv.dim() : 0, " dimensions; expected 4 or 5");
  if (qkv.dim() == 5) {
    TORCH_CHECK_VALUE(qkv.size(2) == 3, "qkv has shape ", qkv.sizes(),
                      "; expected (batch, rows, 3, heads, head dim)");
    TORCH_CHECK_VALUE(num_heads_q == qkv.size(3), "num_heads_q is ", num_heads_q, "; expected ",
                      qkv.size(3), ", the heads of qkv");
    return {qkv.select(2, 0), qkv.select(2, 1), qkv.select(2, 2)};
  }
  const int64_t rest = qkv.size(2) - num_heads_q;
  TORCH_CHECK_VALUE(num_heads_q >= 1 && rest >= 2 && rest % 2 == 0, "num_heads_q is ", num_heads_q,
                    "; expected qkv's ", qkv.size(2), " heads less an even number of KV heads");
  TORCH_CHECK_VALUE(num_heads_q % (rest / 2) == 0, "num_heads_q is ", num_heads_q,
                    "; expected a multiple of ", rest / 2,
                    ", the KV heads that it leaves of qkv's ", qkv.size(2), " heads");
  return {qkv.narrow(2, 0, num_heads_q), qkv.narrow(2, num_heads_q, rest / 2),
          qkv.narrow(2, num_heads_q + rest / 2, rest / 2)};
}

// Of the three that have kernels.
inline DType dtype_of(at::ScalarType dtype) {
  return dtype == at::kHalf       ? DType::kFloat16
         : dtype == at::kBFloat16 ? DType::kBFloat16
                                  : DType::kE4M3;
}

inline void throw_status(int status, const char* message) {
  switch (status) {
    case 0:
      return;
    case 1:
      C10_THROW_ERROR(ValueError, message);
    case 2:
      C10_THROW_ERROR(NotImplementedError, message);
    default:
      C10_THROW_ERROR(Error, message);
  }
}

// A dimension of one element is never stepped over, so its stride does not matter.
inline bool tma_can_read(const Tensor& t) {
  const int64_t item = static_cast<int64_t>(t.element_size());
  const int64_t last = t.dim() - 1;
  if (reinterpret_cast<uintptr_t>(t.const_data_ptr()) % kTmaAlignment != 0 || t.stride(last) != 1) {
    return false;
  }
  for (int64_t d = 0; d < last; ++d) {
    const int64_t bytes = t.stride(d) * item;
    if (t.size(d) > 1 && (bytes <= 0 || bytes % kTmaAlignment != 0 || bytes >= kTmaStrideLimit)) {
      return false;
    }
  }
  return true;
}

inline Tensor readable_by_tma(const Tensor& t) {
  // clone, not contiguous(): a contiguous tensor at a misaligned address is returned as it is.
  return tma_can_read(t) ? t : at::clone(t, at::MemoryFormat::Contiguous);
}

// Strides of size-1 dimensions may be anything (C49); the kernel gets those of a contiguous tensor.
inline Strides strides_of(const Tensor& t, bool ragged) {
  const int64_t row = ragged ? 0 : 1;
  const int64_t head = row + 1;
  const int64_t dim = t.size(head + 1);
  Strides s;
  s.head = t.size(head) > 1 ? t.stride(head) : dim;
  s.row = t.size(row) > 1 ? t.stride(row) : dim * t.size(head);
  s.batch = ragged ? 0 : t.size(0) > 1 ? t.stride(0) : dim * t.size(head) * t.size(row);
  return s;
}

inline void check_rank(const Tensor& t, const char* name, bool ragged, const char* cu_name) {
  TORCH_CHECK_VALUE(
      t.dim() == (ragged ? 3 : 4), name, " has shape ", t.sizes(), "; expected ",
      ragged ? "(total, heads, head dim) with " : "(batch, rows, heads, head dim) without ",
      cu_name);
}

// q, k, the lengths, and all of a call's shape but v's head dim.
inline Shape check_queries_and_keys(const Tensor& q, const Tensor& k,
                                    const OptionalTensor& cu_seqlens_q,
                                    const OptionalTensor& cu_seqlens_k,
                                    const OptionalTensor& seqused_q,
                                    const OptionalTensor& seqused_k) {
  TORCH_CHECK_VALUE(q.defined() && q.is_cuda(), "q is not on a CUDA device");
  const auto device = q.device();
  check_cuda_tensor(q, "q", device);
  check_cuda_tensor(k, "k", device);
  check_same_dtype(k, "k", q.scalar_type());

  Shape s;
  s.ragged_q = cu_seqlens_q.has_value();
  s.ragged_k = cu_seqlens_k.has_value();
  check_rank(q, "q", s.ragged_q, "cu_seqlens_q");
  check_rank(k, "k", s.ragged_k, "cu_seqlens_k");

  s.rows_q = q.size(s.ragged_q ? 0 : 1);
  s.rows_k = k.size(s.ragged_k ? 0 : 1);
  s.heads = q.size(-2);
  s.heads_kv = k.size(-2);
  s.head_dim = q.size(-1);
  if (s.ragged_q) {
    TORCH_CHECK_VALUE(cu_seqlens_q->dim() == 1 && cu_seqlens_q->size(0) >= 1,
                      "cu_seqlens_q has shape ", cu_seqlens_q->sizes(), "; expected (batch + 1,)");
    s.batch = cu_seqlens_q->size(0) - 1;
    check_int_vector(*cu_seqlens_q, "cu_seqlens_q", s.batch + 1, device);
  } else {
    s.batch = q.size(0);
  }
  if (s.ragged_k) {
    check_int_vector(*cu_seqlens_k, "cu_seqlens_k", s.batch + 1, device);
    check_shape(k, "k", {s.rows_k, s.heads_kv, s.head_dim});
  } else {
    check_shape(k, "k", {s.batch, s.rows_k, s.heads_kv, s.head_dim});
  }
  TORCH_CHECK_VALUE(s.heads_kv >= 1 && s.heads >= 1 && s.heads % s.heads_kv == 0, "q has ", s.heads,
                    " heads and k has ", s.heads_kv, "; expected a multiple of the heads of k");
  if (seqused_q.has_value()) check_int_vector(*seqused_q, "seqused_q", s.batch, device);
  if (seqused_k.has_value()) check_int_vector(*seqused_k, "seqused_k", s.batch, device);
  return s;
}

// v as rows like those of k.
inline void check_value_rows(const Tensor& v, const Tensor& q, Shape* s) {
  check_cuda_tensor(v, "v", q.device());
  check_same_dtype(v, "v", q.scalar_type());
  check_rank(v, "v", s->ragged_k, "cu_seqlens_k");
  s->head_dim_v = v.size(-1);
  if (s->ragged_k) {
    check_shape(v, "v", {s->rows_k, s->heads_kv, s->head_dim_v});
  } else {
    check_shape(v, "v", {s->batch, s->rows_k, s->heads_kv, s->head_dim_v});
  }
}

// Those of a call in float16 or bfloat16.
inline Shape check_inputs(const Tensor& q, const Tensor& k, const Tensor& v,
                          const OptionalTensor& cu_seqlens_q, const OptionalTensor& cu_seqlens_k,
                          const OptionalTensor& seqused_q, const OptionalTensor& seqused_k) {
  const auto dtype = q.scalar_type();
  TORCH_CHECK_TYPE(is_half(dtype), "q has dtype ", dtype,
                   "; expected torch.float16 or torch.bfloat16");
  Shape s = check_queries_and_keys(q, k, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k);
  check_value_rows(v, q, &s);
  check_head_dim(s.head_dim, "q", 8);
  check_head_dim(s.head_dim_v, "v", 8);
  return s;
}

inline const int32_t* int_pointer(const OptionalTensor& t) {
  return t.has_value() ? t->const_data_ptr<int32_t>() : nullptr;
}

// A window that reaches past every position is none: that is exact, and it keeps the kernel's
// int32 sums of a position and a window from overflowing.
inline int32_t window(int64_t value, const char* name, int64_t rows) {
  TORCH_CHECK_VALUE(value >= -1, name, " is ", value, "; expected -1 (unlimited) or more");
  return value >= rows ? -1 : static_cast<int32_t>(value);
}

// Checks the options and sizes of a call and fills the fields that both directions have of them.
template <class Params>
void fill_options(const Shape& s, c10::DeviceIndex device, int64_t max_seqlen_q,
                  int64_t max_seqlen_k, double softmax_scale, bool causal, int64_t window_left,
                  int64_t window_right, int64_t attention_chunk, double softcap, int64_t sm_margin,
                  Params* p) {
  if (!s.ragged_q) max_seqlen_q = s.rows_q;
  if (!s.ragged_k) max_seqlen_k = s.rows_k;
  // A sequence is never longer than all of them together.
  max_seqlen_q = std::min<int64_t>(check_int32(max_seqlen_q, "max_seqlen_q", 0), s.rows_q);
  max_seqlen_k = std::min<int64_t>(check_int32(max_seqlen_k, "max_seqlen_k", 0), s.rows_k);

  p->window_left = window(window_left, "window_left", max_seqlen_k);
  p->window_right = causal ? 0 : window(window_right, "window_right", max_seqlen_q);
  p->attention_chunk = check_int32(attention_chunk, "attention_chunk", 0);
  p->sm_margin = check_int32(sm_margin, "sm_margin", 0);
  p->softmax_scale = static_cast<float>(softmax_scale);
  p->softcap = static_cast<float>(softcap);
  TORCH_CHECK_VALUE(std::isfinite(p->softmax_scale), "softmax_scale is ", softmax_scale,
                    "; expected a finite number");
  TORCH_CHECK_VALUE(std::isfinite(p->softcap) && p->softcap >= 0.0f, "softcap is ", softcap,
                    "; expected a finite number of at least 0");
  const auto* properties = at::cuda::getDeviceProperties(device);
  TORCH_CHECK_NOT_IMPLEMENTED(properties->major == 9 && properties->minor == 0,
                              device_refusal(device));
  TORCH_CHECK_VALUE(p->sm_margin < properties->multiProcessorCount, "sm_margin is ", sm_margin,
                    "; expected less than ", properties->multiProcessorCount,
                    ", the SMs of the device");

  p->batch = check_int32(s.batch, "batch size", 0);
  p->max_seqlen_q = static_cast<int32_t>(max_seqlen_q);
  p->max_seqlen_k = static_cast<int32_t>(max_seqlen_k);
  p->total_q = s.rows_q;
  p->total_k = s.rows_k;
  p->heads = check_int32(s.heads, "heads of q", 1);
  p->heads_kv = static_cast<int32_t>(s.heads_kv);
  p->head_dim = static_cast<int32_t>(s.head_dim);
  p->head_dim_v = static_cast<int32_t>(s.head_dim_v);
  p->device = device;
}

// Fills out and lse where no query has a key; returns false if a launch is needed instead.
inline bool without_launch(const Shape& s, const Tensor& out, const Tensor& lse,
                           int64_t max_seqlen_q, int64_t max_seqlen_k) {
  const bool no_query = s.rows_q == 0 || (!s.ragged_q && s.batch == 0);
  if (no_query) return true;
  if (s.batch == 0 || max_seqlen_q == 0 || s.rows_k == 0 || max_seqlen_k == 0) {
    out.zero_();
    lse.fill_(-std::numeric_limits<double>::infinity());
    return true;
  }
  return false;
}

inline Tensor empty_on(c10::Device device, at::IntArrayRef sizes, at::ScalarType dtype) {
  // Not at::empty: this code is the CUDA kernel of the operator, so the dispatcher adds nothing.
  return Tensor(at::detail::empty_cuda(sizes, dtype, device, std::nullopt));
}

inline FwdResult empty_results(const Shape& s, c10::Device device, at::ScalarType dtype) {
  if (s.ragged_q) {
    return {empty_on(device, {s.rows_q, s.heads, s.head_dim_v}, dtype),
            empty_on(device, {s.heads, s.rows_q}, at::kFloat)};
  }
  return {empty_on(device, {s.batch, s.rows_q, s.heads, s.head_dim_v}, dtype),
          empty_on(device, {s.batch, s.heads, s.rows_q}, at::kFloat)};
}

// The fields that both directions have of their inputs. v's strides are the caller's to give: a
// transposed v has none.
template <class Params>
void fill_inputs(const Shape& s, const Tensor& q, const Tensor& k, const Tensor& v,
                 const OptionalTensor& cu_seqlens_q, const OptionalTensor& cu_seqlens_k,
                 const OptionalTensor& seqused_q, const OptionalTensor& seqused_k, Params* p) {
  p->q = q.const_data_ptr();
  p->k = k.const_data_ptr();
  p->v = v.const_data_ptr();
  p->cu_seqlens_q = int_pointer(cu_seqlens_q);
  p->cu_seqlens_k = int_pointer(cu_seqlens_k);
  p->seqused_q = int_pointer(seqused_q);
  p->seqused_k = int_pointer(seqused_k);
  p->q_strides = strides_of(q, s.ragged_q);
  p->k_strides = strides_of(k, s.ragged_k);
  p->dtype = dtype_of(q.scalar_type());
}

// The fields of a forward launch that the tensors give; returns the workspace, to be kept until it.
inline Tensor fill_tensors(const Shape& s, const Tensor& q, const Tensor& k, const Tensor& v,
                           const OptionalTensor& cu_seqlens_q, const OptionalTensor& cu_seqlens_k,
                           const OptionalTensor& seqused_q, const OptionalTensor& seqused_k,
                           const Tensor& out, const Tensor& lse, FwdParams* p) {
  fill_inputs(s, q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, p);
  p->out = out.mutable_data_ptr();
  p->lse = lse.mutable_data_ptr<float>();
  p->out_strides = strides_of(out, s.ragged_q);
  // The allocator hands a freed block on to work of the same stream only, so neither the workspace
  // nor copies of the inputs need a record_stream.
  Tensor workspace;
  const int64_t workspace_bytes = flash_attn3_fwd_workspace_bytes(p);
  if (workspace_bytes > 0) {
    workspace = empty_on(q.device(), {workspace_bytes}, at::kByte);
    p->workspace = workspace.mutable_data_ptr();
  }
  return workspace;
}

// What was found about a dtype and head dims; asked of the kernel library once for each triple.
class HeadDimAnswers {
 public:
  enum Answer : int8_t { kUnknown = 0, kYes = 1, kNo = 2 };

  // Head dims must be multiples of 8 up to 256.
  std::atomic<int8_t>& at(at::ScalarType dtype, int64_t head_dim, int64_t head_dim_v) {
    const int64_t row = static_cast<int64_t>(dtype_of(dtype)) * kDims + head_dim / 8;
    return answers_[row * kDims + head_dim_v / 8];
  }

 private:
  static constexpr int64_t kDims = 256 / 8 + 1;
  std::array<std::atomic<int8_t>, 3 * kDims * kDims> answers_{};
};

}  // namespace flash_attn3::api
