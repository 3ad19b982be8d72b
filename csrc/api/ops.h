// The operators of this library as C++ sees them: one signature each, the typed dispatcher handles
// through which they are called, and the functions registered for them.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <tuple>

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/SymInt.h>

namespace flash_attn3::api {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

// The options of a call whose sequences are as long as its tensors, in the order of the schemas.
// Int is c10::SymInt where sizes may be symbols (the autograd key, under a trace), int64_t on a
// device.
#define FLASH_ATTN3_DENSE_PARAMETERS(Int)                                                    \
  double softmax_scale, bool causal, Int window_left, Int window_right, Int attention_chunk, \
      double softcap, bool deterministic, Int sm_margin

#define FLASH_ATTN3_DENSE_ARGUMENTS                                                          \
  softmax_scale, causal, window_left, window_right, attention_chunk, softcap, deterministic, \
      sm_margin

// Everything that the schemas name between v (or lse) and the end, in their order.
#define FLASH_ATTN3_OPTION_PARAMETERS(Int)                                                \
  const OptionalTensor &cu_seqlens_q, const OptionalTensor &cu_seqlens_k,                 \
      const OptionalTensor &seqused_q, const OptionalTensor &seqused_k, Int max_seqlen_q, \
      Int max_seqlen_k, FLASH_ATTN3_DENSE_PARAMETERS(Int)

#define FLASH_ATTN3_OPTION_ARGUMENTS                                            \
  cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, max_seqlen_q, max_seqlen_k, \
      FLASH_ATTN3_DENSE_ARGUMENTS

// What turns the e4m3 values of q, k, v into real ones: a scale each KV head (*_block 0) or each
// block of so many rows of a head.
#define FLASH_ATTN3_SCALE_PARAMETERS(Int)                                                      \
  const OptionalTensor &q_scale, const OptionalTensor &k_scale, const OptionalTensor &v_scale, \
      Int q_block, Int k_block, Int v_block, bool v_transposed, bool exact_lse

#define FLASH_ATTN3_SCALE_ARGUMENTS \
  q_scale, k_scale, v_scale, q_block, k_block, v_block, v_transposed, exact_lse

using FwdResult = std::tuple<Tensor, Tensor>;          // out, lse
using QuantizeResult = std::tuple<Tensor, Tensor>;     // values, scale
using BwdResult = std::tuple<Tensor, Tensor, Tensor>;  // dq, dk, dv

using FwdSignature = FwdResult(const Tensor& q, const Tensor& k, const Tensor& v,
                               FLASH_ATTN3_OPTION_PARAMETERS(c10::SymInt));
using FwdOutSignature = void(const Tensor& q, const Tensor& k, const Tensor& v,
                             FLASH_ATTN3_OPTION_PARAMETERS(c10::SymInt), const Tensor& out,
                             const Tensor& lse);
using BwdSignature = BwdResult(const Tensor& dout, const OptionalTensor& dlse, const Tensor& q,
                               const Tensor& k, const Tensor& v, const Tensor& out,
                               const Tensor& lse, FLASH_ATTN3_OPTION_PARAMETERS(c10::SymInt));

// q, k, v in one tensor, and one gradient of it.
using FwdQkvpackedSignature = FwdResult(const Tensor& qkv, c10::SymInt num_heads_q,
                                        FLASH_ATTN3_DENSE_PARAMETERS(c10::SymInt));
using BwdQkvpackedSignature = Tensor(const Tensor& dout, const OptionalTensor& dlse,
                                     const Tensor& qkv, const Tensor& out, const Tensor& lse,
                                     c10::SymInt num_heads_q,
                                     FLASH_ATTN3_DENSE_PARAMETERS(c10::SymInt));

using FwdE4m3Signature = FwdResult(const Tensor& q, const Tensor& k, const Tensor& v,
                                   FLASH_ATTN3_SCALE_PARAMETERS(c10::SymInt),
                                   FLASH_ATTN3_OPTION_PARAMETERS(c10::SymInt));
using QuantizeSignature = QuantizeResult(const Tensor& x, const OptionalTensor& mean,
                                         const OptionalTensor& cu_seqlens,
                                         const OptionalTensor& seqused, c10::SymInt block,
                                         bool rotate, bool transposed);
using RowMeanSignature = Tensor(const Tensor& x, const OptionalTensor& cu_seqlens,
                                const OptionalTensor& seqused);

const c10::TypedOperatorHandle<FwdSignature>& fwd_op();
const c10::TypedOperatorHandle<FwdOutSignature>& fwd_out_op();
const c10::TypedOperatorHandle<BwdSignature>& bwd_op();
const c10::TypedOperatorHandle<BwdSignature>& bwd_torch_op();
const c10::TypedOperatorHandle<FwdQkvpackedSignature>& fwd_qkvpacked_op();
const c10::TypedOperatorHandle<BwdQkvpackedSignature>& bwd_qkvpacked_op();
const c10::TypedOperatorHandle<FwdE4m3Signature>& fwd_e4m3_op();
const c10::TypedOperatorHandle<QuantizeSignature>& quantize_op();
const c10::TypedOperatorHandle<RowMeanSignature>& row_mean_op();

// fwd.cpp: the CUDA key.
FwdResult fwd_cuda(const Tensor& q, const Tensor& k, const Tensor& v,
                   FLASH_ATTN3_OPTION_PARAMETERS(int64_t));
void fwd_out_cuda(const Tensor& q, const Tensor& k, const Tensor& v,
                  FLASH_ATTN3_OPTION_PARAMETERS(int64_t), const Tensor& out, const Tensor& lse);
FwdResult fwd_qkvpacked_cuda(const Tensor& qkv, int64_t num_heads_q,
                             FLASH_ATTN3_DENSE_PARAMETERS(int64_t));

// bwd.cpp: the CUDA key.
BwdResult bwd_cuda(const Tensor& dout, const OptionalTensor& dlse, const Tensor& q, const Tensor& k,
                   const Tensor& v, const Tensor& out, const Tensor& lse,
                   FLASH_ATTN3_OPTION_PARAMETERS(int64_t));
Tensor bwd_qkvpacked_cuda(const Tensor& dout, const OptionalTensor& dlse, const Tensor& qkv,
                          const Tensor& out, const Tensor& lse, int64_t num_heads_q,
                          FLASH_ATTN3_DENSE_PARAMETERS(int64_t));

// fp8.cpp: the CUDA keys, and the Autograd keys.
FwdResult fwd_e4m3_cuda(const Tensor& q, const Tensor& k, const Tensor& v,
                        FLASH_ATTN3_SCALE_PARAMETERS(int64_t),
                        FLASH_ATTN3_OPTION_PARAMETERS(int64_t));
QuantizeResult quantize_cuda(const Tensor& x, const OptionalTensor& mean,
                             const OptionalTensor& cu_seqlens, const OptionalTensor& seqused,
                             int64_t block, bool rotate, bool transposed);
RowMeanSignature row_mean_cuda;
FwdE4m3Signature fwd_e4m3_autograd;
QuantizeSignature quantize_autograd;
RowMeanSignature row_mean_autograd;

// Whether the backward operators may take this project's kernels; returns what it was before.
bool use_backward_kernels(bool on);

// Why the backward of a call does not take this project's kernels; empty if it does. Without a
// device, those of a Hopper GPU are assumed.
std::string backward_refusal(at::ScalarType dtype, int64_t head_dim, int64_t head_dim_v,
                             std::optional<c10::DeviceIndex> device);

// autograd.cpp: the Autograd key, and for fwd_out ADInplaceOrView too.
FwdSignature fwd_autograd;
FwdOutSignature fwd_out_autograd;
FwdOutSignature fwd_out_inplace;
BwdSignature bwd_autograd;
FwdQkvpackedSignature fwd_qkvpacked_autograd;
BwdQkvpackedSignature bwd_qkvpacked_autograd;

// Why no kernel runs on this device; empty if they do.
std::string device_refusal(c10::DeviceIndex device);

// True if the kernel library was compiled for these; asked of it once for each triple. `device`
// must be one that device_refusal has nothing against.
bool compiled_for(at::ScalarType dtype, int64_t head_dim, int64_t head_dim_v,
                  c10::DeviceIndex device);

}  // namespace flash_attn3::api
