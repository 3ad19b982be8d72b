// flash_attn3::bwd and bwd_qkvpacked on CUDA: tensors -> BwdParams -> flash_attn3_bwd, or
// flash_attn3::bwd_torch where the kernels do not cover the call.
#include <algorithm>
#include <atomic>
#include <cmath>

#include <ATen/Context.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "call.h"
#include "device.h"

namespace flash_attn3::api {
namespace {

std::atomic<bool> backward_kernels_on{false};

// Needs no device: only the compiled list decides. The call is one that no size check refuses.
bool bwd_compiled_for(at::ScalarType dtype, int64_t head_dim, int64_t head_dim_v) {
  static HeadDimAnswers answers;
  auto& answer = answers.at(dtype, head_dim, head_dim_v);
  if (answer.load(std::memory_order_relaxed) == HeadDimAnswers::kUnknown) {
    BwdParams p{};
    p.batch = p.heads = p.heads_kv = p.max_seqlen_q = p.max_seqlen_k = 1;
    p.head_dim = static_cast<int32_t>(head_dim);
    p.head_dim_v = static_cast<int32_t>(head_dim_v);
    p.dtype = dtype_of(dtype);
    answer.store(
        flash_attn3_bwd_workspace_bytes(&p) > 0 ? HeadDimAnswers::kYes : HeadDimAnswers::kNo,
        std::memory_order_relaxed);
  }
  return answer.load(std::memory_order_relaxed) == HeadDimAnswers::kYes;
}

// The rule of ops.py's fake too: gradients lie as their inputs do where the kernel can write so. A
// tensor without holes and with a unit last stride has rows that are multiples of 16 bytes apart,
// and so have the parts of a packed one.
bool keeps_layout(const Tensor& t) {
  return !t.is_contiguous() && t.stride(-1) == 1 && t.is_non_overlapping_and_dense();
}

Tensor gradient_like(const Tensor& t) {
  if (keeps_layout(t)) return at::empty_strided(t.sizes(), t.strides(), t.options());
  return empty_on(t.device(), t.sizes(), t.scalar_type());
}

// The LSE, or its gradient, as the kernel reads it.
Tensor row_values(const Tensor& t, const char* name, const Shape& s, c10::Device device) {
  check_cuda_tensor(t, name, device);
  TORCH_CHECK_TYPE(at::isFloatingType(t.scalar_type()), name, " has dtype ", t.scalar_type(),
                   "; expected torch.float32");
  if (s.ragged_q) {
    check_shape(t, name, {s.heads, s.rows_q});
  } else {
    check_shape(t, name, {s.batch, s.heads, s.rows_q});
  }
  return t.to(at::kFloat).contiguous();
}

// out and its gradient; a caller's merged out may be float32.
Tensor output_rows(const Tensor& t, const char* name, const Shape& s, const Tensor& q) {
  check_cuda_tensor(t, name, q.device());
  TORCH_CHECK_TYPE(at::isFloatingType(t.scalar_type()), name, " has dtype ", t.scalar_type(),
                   "; expected ", q.scalar_type(), ", the dtype of q");
  if (s.ragged_q) {
    check_shape(t, name, {s.rows_q, s.heads, s.head_dim_v});
  } else {
    check_shape(t, name, {s.batch, s.rows_q, s.heads, s.head_dim_v});
  }
  return readable_by_tma(t.to(q.scalar_type()));
}

// Into dq, dk, dv of the shapes of q, k, v, with strides that TMA could read.
void run(const Shape& s, const Tensor& dout_in, const OptionalTensor& dlse_in, const Tensor& q_in,
         const Tensor& k_in, const Tensor& v_in, const Tensor& out_in, const Tensor& lse_in,
         FLASH_ATTN3_OPTION_PARAMETERS(int64_t), const Tensor& dq, const Tensor& dk,
         const Tensor& dv) {
  const auto device = q_in.device();
  BwdParams p{};
  fill_options(s, device.index(), max_seqlen_q, max_seqlen_k, softmax_scale, causal, window_left,
               window_right, attention_chunk, softcap, sm_margin, &p);

  // Nothing here outlives the call: the allocator hands a freed block on to work of the same stream
  // only, so neither the workspace nor the copies need a record_stream.
  const c10::cuda::CUDAGuard guard(device);
  const Tensor dout = output_rows(dout_in, "dout", s, q_in);
  const Tensor out = output_rows(out_in, "out", s, q_in);
  const Tensor lse = row_values(lse_in, "lse", s, device);
  Tensor dlse;
  if (dlse_in.has_value() && dlse_in->defined()) dlse = row_values(*dlse_in, "dlse", s, device);

  if (s.batch == 0 || s.rows_q == 0 || s.rows_k == 0 || p.max_seqlen_q == 0 ||
      p.max_seqlen_k == 0) {
    for (const Tensor* gradient : {&dq, &dk, &dv}) gradient->zero_();
    return;
  }
  const Tensor q = readable_by_tma(q_in);
  const Tensor k = readable_by_tma(k_in);
  const Tensor v = readable_by_tma(v_in);

  fill_inputs(s, q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, &p);
  p.out = out.const_data_ptr();
  p.dout = dout.const_data_ptr();
  p.lse = lse.const_data_ptr<float>();
  p.dlse = dlse.defined() ? dlse.const_data_ptr<float>() : nullptr;
  p.dq = dq.mutable_data_ptr();
  p.dk = dk.mutable_data_ptr();
  p.dv = dv.mutable_data_ptr();
  p.v_strides = strides_of(v, s.ragged_k);
  p.out_strides = strides_of(out, s.ragged_q);
  p.dout_strides = strides_of(dout, s.ragged_q);
  p.dq_strides = strides_of(dq, s.ragged_q);
  p.dk_strides = strides_of(dk, s.ragged_k);
  p.dv_strides = strides_of(dv, s.ragged_k);
  p.deterministic = deterministic || at::globalContext().deterministicAlgorithms() ? 1 : 0;

  // dQ in fp32, two fp32 values a row and head, the counters of the deterministic mode. 0 bytes:
  // the library refuses the call, and says why itself; it wants an address all the same.
  const int64_t bytes = std::max<int64_t>(flash_attn3_bwd_workspace_bytes(&p), 16);
  const Tensor workspace = empty_on(device, {bytes}, at::kByte);
  p.workspace = workspace.mutable_data_ptr();
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream(device.index()).stream();
  char message[kMessageSize] = "";
  throw_status(flash_attn3_bwd(&p, stream, message, sizeof(message)), message);
}

bool takes_kernels(const Tensor& q, const Tensor& v) {
  return q.is_cuda() && q.dim() >= 1 && v.dim() >= 1 &&
         backward_refusal(q.scalar_type(), q.size(-1), v.size(-1), q.device().index()).empty();
}

}  // namespace

bool use_backward_kernels(bool on) { return backward_kernels_on.exchange(on); }

std::string backward_refusal(at::ScalarType dtype, int64_t head_dim, int64_t head_dim_v,
                             std::optional<c10::DeviceIndex> device) {
  if (!backward_kernels_on.load(std::memory_order_relaxed)) {
    return "FLASH_ATTN3_BACKWARD is torch";
  }
  if (!is_half(dtype)) {
    return c10::str("the backward kernels take float16 and bfloat16, not ", dtype);
  }
  if (!fits_head_dim(head_dim, 8) || !fits_head_dim(head_dim_v, 8) ||
      !bwd_compiled_for(dtype, head_dim, head_dim_v)) {
    return c10::str("this build holds no backward kernel for ", dtype, " with head dims (",
                    head_dim, ", ", head_dim_v, ")");
  }
  return device.has_value() ? device_refusal(*device) : "";
}

BwdResult bwd_cuda(const Tensor& dout, const OptionalTensor& dlse, const Tensor& q, const Tensor& k,
                   const Tensor& v, const Tensor& out, const Tensor& lse,
                   FLASH_ATTN3_OPTION_PARAMETERS(int64_t)) {
  if (!takes_kernels(q, v)) {
    return bwd_torch_op().call(dout, dlse, q, k, v, out, lse, FLASH_ATTN3_OPTION_ARGUMENTS);
  }
  const Shape s = check_inputs(q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k);
  BwdResult gradients{gradient_like(q), gradient_like(k), gradient_like(v)};
  const auto& [dq, dk, dv] = gradients;
  run(s, dout, dlse, q, k, v, out, lse, FLASH_ATTN3_OPTION_ARGUMENTS, dq, dk, dv);
  return gradients;
}

Tensor bwd_qkvpacked_cuda(const Tensor& dout, const OptionalTensor& dlse, const Tensor& qkv,
                          const Tensor& out, const Tensor& lse, int64_t num_heads_q,
                          FLASH_ATTN3_DENSE_PARAMETERS(int64_t)) {
  const auto [q, k, v] = unpacked(qkv, num_heads_q);
  const OptionalTensor cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k;
  const int64_t max_seqlen_q = q.size(1);
  const int64_t max_seqlen_k = k.size(1);
  if (takes_kernels(q, v)) {
    const Shape s = check_inputs(q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k);
    Tensor dqkv = gradient_like(qkv);
    const auto [dq, dk, dv] = unpacked(dqkv, num_heads_q);
    run(s, dout, dlse, q, k, v, out, lse, FLASH_ATTN3_OPTION_ARGUMENTS, dq, dk, dv);
    return dqkv;
  }
  const auto [dq, dk, dv] =
      bwd_torch_op().call(dout, dlse, q, k, v, out, lse, FLASH_ATTN3_OPTION_ARGUMENTS);
  Tensor dqkv = keeps_layout(qkv) ? at::empty_strided(qkv.sizes(), qkv.strides(), qkv.options())
                                  : at::empty(qkv.sizes(), qkv.options());
  const auto parts = unpacked(dqkv, num_heads_q);
  parts[0].copy_(dq);
  parts[1].copy_(dk);
  parts[2].copy_(dv);
  return dqkv;
}

}  // namespace flash_attn3::api
