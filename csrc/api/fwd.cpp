// flash_attn3::fwd, fwd_out and fwd_qkvpacked on CUDA: tensors -> FwdParams -> flash_attn3_fwd.
//
// Host time counts here: a small call is meant to take under 15 us in all. So nothing on the usual
// path goes through the dispatcher (but the slices of a packed call), outputs come straight from
// the caching allocator, and device properties are the ones that ATen caches.
#include <algorithm>
#include <cmath>

#include <ATen/MemoryOverlap.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "call.h"
#include "device.h"
#include "ops.h"
#include "plan.h"

namespace flash_attn3::api {
namespace {

void run(const Shape& s, const Tensor& q_in, const Tensor& k_in, const Tensor& v_in,
         FLASH_ATTN3_OPTION_PARAMETERS(int64_t), const Tensor& out, const Tensor& lse) {
  const auto device = q_in.device();
  FwdParams p{};
  fill_options(s, device.index(), max_seqlen_q, max_seqlen_k, softmax_scale, causal, window_left,
               window_right, attention_chunk, softcap, sm_margin, &p);

  const c10::cuda::CUDAGuard guard(device);
  if (without_launch(s, out, lse, p.max_seqlen_q, p.max_seqlen_k)) return;

  const Tensor q = readable_by_tma(q_in);
  const Tensor k = readable_by_tma(k_in);
  const Tensor v = readable_by_tma(v_in);
  const Tensor workspace =
      fill_tensors(s, q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, out, lse, &p);
  p.v_strides = strides_of(v, s.ragged_k);
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream(device.index()).stream();
  char message[kMessageSize] = "";
  throw_status(flash_attn3_fwd(&p, stream, message, sizeof(message)), message);
}

}  // namespace

FwdResult fwd_cuda(const Tensor& q, const Tensor& k, const Tensor& v,
                   FLASH_ATTN3_OPTION_PARAMETERS(int64_t)) {
  const Shape s = check_inputs(q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k);
  auto [out, lse] = empty_results(s, q.device(), q.scalar_type());
  run(s, q, k, v, FLASH_ATTN3_OPTION_ARGUMENTS, out, lse);
  return {std::move(out), std::move(lse)};
}

FwdResult fwd_qkvpacked_cuda(const Tensor& qkv, int64_t num_heads_q,
                             FLASH_ATTN3_DENSE_PARAMETERS(int64_t)) {
  const auto [q, k, v] = unpacked(qkv, num_heads_q);
  return fwd_cuda(q, k, v, std::nullopt, std::nullopt, std::nullopt, std::nullopt, q.size(1),
                  k.size(1), FLASH_ATTN3_DENSE_ARGUMENTS);
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
  static HeadDimAnswers answers;
  auto& answer = answers.at(dtype, head_dim, head_dim_v);
  if (const int8_t known = answer.load(std::memory_order_relaxed);
      known != HeadDimAnswers::kUnknown) {
    return known == HeadDimAnswers::kYes;
  }
  PlanRequest request;
  request.head_dim = head_dim;
  request.head_dim_v = head_dim_v;
  request.dtype = dtype_of(dtype);
  request.device = device;
  FwdPlan plan{};
  char message[kMessageSize] = "";
  const int status = ask_plan(request, &plan, message, sizeof(message));
  // An error of CUDA says nothing about what was compiled: let the launch report it.
  if (status == 1 || status == 2) {
    answer.store(HeadDimAnswers::kNo, std::memory_order_relaxed);
    return false;
  }
  if (status == 0) answer.store(HeadDimAnswers::kYes, std::memory_order_relaxed);
  return true;
}

}  // namespace flash_attn3::api
