// flash_attn3::fwd and fwd_out on CUDA: tensors -> FwdParams -> flash_attn3_fwd.
//
// Host time counts here: a small call is meant to take under 15 us in all. So nothing on the usual
// path goes through the dispatcher, outputs come straight from the caching allocator, and device
// properties are the ones that ATen caches.
#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>

#include <ATen/MemoryOverlap.h>
#include <ATen/cuda/EmptyTensor.h>
#include <ATen/ops/clone.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "checks.h"
#include "device.h"
#include "host/params.h"
#include "ops.h"
#include "plan.h"

namespace flash_attn3::api {
namespace {

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

void throw_status(int status, const char* message) {
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
bool tma_can_read(const Tensor& t) {
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

Tensor readable_by_tma(const Tensor& t) {
  // clone, not contiguous(): a contiguous tensor at a misaligned address is returned as it is.
  return tma_can_read(t) ? t : at::clone(t, at::MemoryFormat::Contiguous);
}

// Strides of size-1 dimensions may be anything (C49); the kernel gets those of a contiguous tensor.
Strides strides_of(const Tensor& t, bool ragged) {
  const int64_t row = ragged ? 0 : 1;
  const int64_t head = row + 1;
  const int64_t dim = t.size(head + 1);
  Strides s;
  s.head = t.size(head) > 1 ? t.stride(head) : dim;
  s.row = t.size(row) > 1 ? t.stride(row) : dim * t.size(head);
  s.batch = ragged ? 0 : t.size(0) > 1 ? t.stride(0) : dim * t.size(head) * t.size(row);
  return s;
}

void check_rank(const Tensor& t, const char* name, bool ragged, const char* cu_name) {
  TORCH_CHECK_VALUE(
      t.dim() == (ragged ? 3 : 4), name, " has shape ", t.sizes(), "; expected ",
      ragged ? "(total, heads, head dim) with " : "(batch, rows, heads, head dim) without ",
      cu_name);
}

Shape check_inputs(const Tensor& q, const Tensor& k, const Tensor& v,
                   const OptionalTensor& cu_seqlens_q, const OptionalTensor& cu_seqlens_k,
                   const OptionalTensor& seqused_q, const OptionalTensor& seqused_k) {
  TORCH_CHECK_VALUE(q.defined() && q.is_cuda(), "q is not on a CUDA device");
  const auto device = q.device();
  check_cuda_tensor(q, "q", device);
  check_cuda_tensor(k, "k", device);
  check_cuda_tensor(v, "v", device);
  const auto dtype = q.scalar_type();
  TORCH_CHECK_TYPE(dtype == at::kHalf || dtype == at::kBFloat16, "q has dtype ", dtype,
                   "; expected torch.float16 or torch.bfloat16");
  check_same_dtype(k, "k", dtype);
  check_same_dtype(v, "v", dtype);

  Shape s;
  s.ragged_q = cu_seqlens_q.has_value();
  s.ragged_k = cu_seqlens_k.has_value();
  check_rank(q, "q", s.ragged_q, "cu_seqlens_q");
  check_rank(k, "k", s.ragged_k, "cu_seqlens_k");
  check_rank(v, "v", s.ragged_k, "cu_seqlens_k");

  s.rows_q = q.size(s.ragged_q ? 0 : 1);
  s.rows_k = k.size(s.ragged_k ? 0 : 1);
  s.heads = q.size(-2);
  s.heads_kv = k.size(-2);
  s.head_dim = q.size(-1);
  s.head_dim_v = v.size(-1);
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
    check_shape(v, "v", {s.rows_k, s.heads_kv, s.head_dim_v});
  } else {
    check_shape(k, "k", {s.batch, s.rows_k, s.heads_kv, s.head_dim});
    check_shape(v, "v", {s.batch, s.rows_k, s.heads_kv, s.head_dim_v});
  }
  check_head_dim(s.head_dim, "q");
  check_head_dim(s.head_dim_v, "v");
  TORCH_CHECK_VALUE(s.heads_kv >= 1 && s.heads >= 1 && s.heads % s.heads_kv == 0, "q has ", s.heads,
                    " heads and k has ", s.heads_kv, "; expected a multiple of the heads of k");
  if (seqused_q.has_value()) check_int_vector(*seqused_q, "seqused_q", s.batch, device);
  if (seqused_k.has_value()) check_int_vector(*seqused_k, "seqused_k", s.batch, device);
  return s;
}

const int32_t* int_pointer(const OptionalTensor& t) {
  return t.has_value() ? t->const_data_ptr<int32_t>() : nullptr;
}

// A window that reaches past every position is none: that is exact, and it keeps the kernel's
// int32 sums of a position and a window from overflowing.
int32_t window(int64_t value, const char* name, int64_t rows) {
  TORCH_CHECK_VALUE(value >= -1, name, " is ", value, "; expected -1 (unlimited) or more");
  return value >= rows ? -1 : static_cast<int32_t>(value);
}

// Fills out and lse where no query has a key; returns false if a launch is needed instead.
bool without_launch(const Shape& s, const Tensor& out, const Tensor& lse, int64_t max_seqlen_q,
                    int64_t max_seqlen_k) {
  const bool no_query = s.rows_q == 0 || (!s.ragged_q && s.batch == 0);
  if (no_query) return true;
  if (s.batch == 0 || max_seqlen_q == 0 || s.rows_k == 0 || max_seqlen_k == 0) {
    out.zero_();
    lse.fill_(-std::numeric_limits<double>::infinity());
    return true;
  }
  return false;
}

Tensor empty_on(c10::Device device, at::IntArrayRef sizes, at::ScalarType dtype) {
  // Not at::empty: this code is the CUDA kernel of the operator, so the dispatcher adds nothing.
  return Tensor(at::detail::empty_cuda(sizes, dtype, device, std::nullopt));
}

void run(const Shape& s, const Tensor& q_in, const Tensor& k_in, const Tensor& v_in,
         FLASH_ATTN3_OPTION_PARAMETERS(int64_t), const Tensor& out, const Tensor& lse) {
  const auto device = q_in.device();
  if (!s.ragged_q) max_seqlen_q = s.rows_q;
  if (!s.ragged_k) max_seqlen_k = s.rows_k;
  // A sequence is never longer than all of them together.
  max_seqlen_q = std::min<int64_t>(check_int32(max_seqlen_q, "max_seqlen_q", 0), s.rows_q);
  max_seqlen_k = std::min<int64_t>(check_int32(max_seqlen_k, "max_seqlen_k", 0), s.rows_k);

  FwdParams p{};
  p.window_left = window(window_left, "window_left", max_seqlen_k);
  p.window_right = causal ? 0 : window(window_right, "window_right", max_seqlen_q);
  p.attention_chunk = check_int32(attention_chunk, "attention_chunk", 0);
  p.sm_margin = check_int32(sm_margin, "sm_margin", 0);
  p.softmax_scale = static_cast<float>(softmax_scale);
  p.softcap = static_cast<float>(softcap);
  TORCH_CHECK_VALUE(std::isfinite(p.softmax_scale), "softmax_scale is ", softmax_scale,
                    "; expected a finite number");
  TORCH_CHECK_VALUE(std::isfinite(p.softcap) && p.softcap >= 0.0f, "softcap is ", softcap,
                    "; expected a finite number of at least 0");
  const auto* properties = at::cuda::getDeviceProperties(device.index());
  TORCH_CHECK_NOT_IMPLEMENTED(properties->major == 9 && properties->minor == 0,
                              device_refusal(device.index()));
  TORCH_CHECK_VALUE(p.sm_margin < properties->multiProcessorCount, "sm_margin is ", sm_margin,
                    "; expected less than ", properties->multiProcessorCount,
                    ", the SMs of the device");

  const c10::cuda::CUDAGuard guard(device);
  if (without_launch(s, out, lse, max_seqlen_q, max_seqlen_k)) return;

  const Tensor q = readable_by_tma(q_in);
  const Tensor k = readable_by_tma(k_in);
  const Tensor v = readable_by_tma(v_in);
  p.q = q.const_data_ptr();
  p.k = k.const_data_ptr();
  p.v = v.const_data_ptr();
  p.out = out.mutable_data_ptr();
  p.lse = lse.mutable_data_ptr<float>();
  p.cu_seqlens_q = int_pointer(cu_seqlens_q);
  p.cu_seqlens_k = int_pointer(cu_seqlens_k);
  p.seqused_q = int_pointer(seqused_q);
  p.seqused_k = int_pointer(seqused_k);
  p.q_strides = strides_of(q, s.ragged_q);
  p.k_strides = strides_of(k, s.ragged_k);
  p.v_strides = strides_of(v, s.ragged_k);
  p.out_strides = strides_of(out, s.ragged_q);
  p.batch = check_int32(s.batch, "batch size", 0);
  p.max_seqlen_q = static_cast<int32_t>(max_seqlen_q);
  p.max_seqlen_k = static_cast<int32_t>(max_seqlen_k);
  p.total_q = s.rows_q;
  p.total_k = s.rows_k;
  p.heads = check_int32(s.heads, "heads of q", 1);
  p.heads_kv = static_cast<int32_t>(s.heads_kv);
  p.head_dim = static_cast<int32_t>(s.head_dim);
  p.head_dim_v = static_cast<int32_t>(s.head_dim_v);
  p.dtype = q.scalar_type() == at::kHalf ? DType::kFloat16 : DType::kBFloat16;
  p.device = device.index();

  // The allocator hands a freed block on to work of the same stream only, so neither the workspace
  // nor the copies above need a record_stream.
  Tensor workspace;
  const int64_t workspace_bytes = flash_attn3_fwd_workspace_bytes(&p);
  if (workspace_bytes > 0) {
    workspace = empty_on(device, {workspace_bytes}, at::kByte);
    p.workspace = workspace.mutable_data_ptr();
  }
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream(device.index()).stream();
  char message[kMessageSize] = "";
  throw_status(flash_attn3_fwd(&p, stream, message, sizeof(message)), message);
}

}  // namespace

FwdResult fwd_cuda(const Tensor& q, const Tensor& k, const Tensor& v,
                   FLASH_ATTN3_OPTION_PARAMETERS(int64_t)) {
  const Shape s = check_inputs(q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k);
  Tensor out;
  Tensor lse;
  if (s.ragged_q) {
    out = empty_on(q.device(), {s.rows_q, s.heads, s.head_dim_v}, q.scalar_type());
    lse = empty_on(q.device(), {s.heads, s.rows_q}, at::kFloat);
  } else {
    out = empty_on(q.device(), {s.batch, s.rows_q, s.heads, s.head_dim_v}, q.scalar_type());
    lse = empty_on(q.device(), {s.batch, s.heads, s.rows_q}, at::kFloat);
  }
  run(s, q, k, v, FLASH_ATTN3_OPTION_ARGUMENTS, out, lse);
  return {std::move(out), std::move(lse)};
}

void fwd_out_cuda(const Tensor& q, const Tensor& k, const Tensor& v,
                  FLASH_ATTN3_OPTION_PARAMETERS(int64_t), const Tensor& out, const Tensor& lse) {
  const Shape s = check_inputs(q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k);
  check_cuda_tensor(out, "out", q.device());
  check_cuda_tensor(lse, "lse", q.device());
  check_same_dtype(out, "out", q.scalar_type());
  TORCH_CHECK_TYPE(lse.scalar_type() == at::kFloat, "lse has dtype ", lse.scalar_type(),
                   "; expected torch.float32");
  if (s.ragged_q) {
    check_shape(out, "out", {s.rows_q, s.heads, s.head_dim_v});
    check_shape(lse, "lse", {s.heads, s.rows_q});
  } else {
    check_shape(out, "out", {s.batch, s.rows_q, s.heads, s.head_dim_v});
    check_shape(lse, "lse", {s.batch, s.heads, s.rows_q});
  }
  at::assert_no_internal_overlap(out);
  at::assert_no_internal_overlap(lse);
  at::assert_no_overlap(out, lse);
  for (const Tensor* input : {&q, &k, &v}) {
    at::assert_no_overlap(out, *input);
    at::assert_no_overlap(lse, *input);
  }

  // Where the kernel can't write as it would to a tensor of its own, it writes to one of those.
  const bool direct_out = tma_can_read(out);
  const bool direct_lse = lse.is_contiguous();
  const Tensor to_out = direct_out ? out : empty_on(q.device(), out.sizes(), out.scalar_type());
  const Tensor to_lse = direct_lse ? lse : empty_on(q.device(), lse.sizes(), at::kFloat);
  run(s, q, k, v, FLASH_ATTN3_OPTION_ARGUMENTS, to_out, to_lse);
  if (!direct_out) out.copy_(to_out);
  if (!direct_lse) lse.copy_(to_lse);
}

std::string device_refusal(c10::DeviceIndex device) {
  const auto* properties = at::cuda::getDeviceProperties(device);
  if (properties->major == 9 && properties->minor == 0) return "";
  return c10::str("the kernels of flash_attn3 need compute capability 9.0 (Hopper); cuda:",
                  static_cast<int>(device), " is ", properties->name, " with ", properties->major,
                  ".", properties->minor);
}

bool compiled_for(at::ScalarType dtype, int64_t head_dim, int64_t head_dim_v,
                  c10::DeviceIndex device) {
  constexpr int64_t kDims = 256 / 8 + 1;
  enum Answer : int8_t { kUnknown = 0, kYes = 1, kNo = 2 };
  static std::array<std::atomic<int8_t>, 2 * kDims * kDims> answers{};
  const bool half = dtype == at::kHalf;
  auto& answer = answers[((half ? 0 : 1) * kDims + head_dim / 8) * kDims + head_dim_v / 8];
  if (const int8_t known = answer.load(std::memory_order_relaxed); known != kUnknown) {
    return known == kYes;
  }
  PlanRequest request;
  request.head_dim = head_dim;
  request.head_dim_v = head_dim_v;
  request.half = half;
  request.device = device;
  const FwdParams p = plan_params(request);
  FwdPlan plan{};
  char message[kMessageSize] = "";
  const int status = flash_attn3_fwd_plan(&p, &plan, message, sizeof(message));
  // An error of CUDA says nothing about what was compiled: let the launch report it.
  if (status == 1 || status == 2) {
    answer.store(kNo, std::memory_order_relaxed);
    return false;
  }
  if (status == 0) answer.store(kYes, std::memory_order_relaxed);
  return true;
}

}  // namespace flash_attn3::api
