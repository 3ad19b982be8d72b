// The operators: schemas, and which function serves which dispatch key. The fakes, and
// bwd_torch (the backward by PyTorch's kernels), are registered from flash_attn3/ops.py.
//
// Autocast: no kernel is registered for it, so the dtype of a call is left alone, as with every
// other attention operator of this kind. q, k and v of mixed dtypes raise under autocast too.
#include <string>

#include <torch/library.h>

#include "ops.h"

#define FLASH_ATTN3_DENSE_SCHEMA                                                \
  "float softmax_scale, bool causal, SymInt window_left, SymInt window_right, " \
  "SymInt attention_chunk, float softcap, bool deterministic, SymInt sm_margin"

#define FLASH_ATTN3_OPTION_SCHEMA                                                      \
  "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? seqused_q, Tensor? seqused_k, " \
  "SymInt max_seqlen_q, SymInt max_seqlen_k, " FLASH_ATTN3_DENSE_SCHEMA

namespace flash_attn3::api {
namespace {

template <class Signature>
c10::TypedOperatorHandle<Signature> find(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

}  // namespace

const c10::TypedOperatorHandle<FwdSignature>& fwd_op() {
  static const auto op = find<FwdSignature>("flash_attn3::fwd");
  return op;
}

const c10::TypedOperatorHandle<FwdOutSignature>& fwd_out_op() {
  static const auto op = find<FwdOutSignature>("flash_attn3::fwd_out");
  return op;
}

const c10::TypedOperatorHandle<FwdQkvpackedSignature>& fwd_qkvpacked_op() {
  static const auto op = find<FwdQkvpackedSignature>("flash_attn3::fwd_qkvpacked");
  return op;
}

const c10::TypedOperatorHandle<BwdQkvpackedSignature>& bwd_qkvpacked_op() {
  static const auto op = find<BwdQkvpackedSignature>("flash_attn3::bwd_qkvpacked");
  return op;
}

const c10::TypedOperatorHandle<FwdE4m3Signature>& fwd_e4m3_op() {
  static const auto op = find<FwdE4m3Signature>("flash_attn3::fwd_e4m3");
  return op;
}

const c10::TypedOperatorHandle<QuantizeSignature>& quantize_op() {
  static const auto op = find<QuantizeSignature>("flash_attn3::quantize");
  return op;
}

const c10::TypedOperatorHandle<RowMeanSignature>& row_mean_op() {
  static const auto op = find<RowMeanSignature>("flash_attn3::row_mean");
  return op;
}

const c10::TypedOperatorHandle<BwdSignature>& bwd_op() {
  static const auto op = find<BwdSignature>("flash_attn3::bwd");
  return op;
}

const c10::TypedOperatorHandle<BwdSignature>& bwd_torch_op() {
  static const auto op = find<BwdSignature>("flash_attn3::bwd_torch");
  return op;
}

TORCH_LIBRARY(flash_attn3, m) {
  const auto tags = std::vector<at::Tag>{at::Tag::pt2_compliant_tag};
  m.def("fwd(Tensor q, Tensor k, Tensor v, " FLASH_ATTN3_OPTION_SCHEMA
        ") -> (Tensor out, Tensor lse)",
        tags);
  m.def("fwd_out(Tensor q, Tensor k, Tensor v, " FLASH_ATTN3_OPTION_SCHEMA
        ", Tensor(a!) out, Tensor(b!) lse) -> ()",
        tags);
  m.def(
      "bwd(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor "
      "lse, " FLASH_ATTN3_OPTION_SCHEMA ") -> (Tensor dq, Tensor dk, Tensor dv)",
      tags);
  m.def(
      "bwd_torch(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor "
      "lse, " FLASH_ATTN3_OPTION_SCHEMA ") -> (Tensor dq, Tensor dk, Tensor dv)",
      tags);
  m.def("fwd_qkvpacked(Tensor qkv, SymInt num_heads_q, " FLASH_ATTN3_DENSE_SCHEMA
        ") -> (Tensor out, Tensor lse)",
        tags);
  m.def(
      "bwd_qkvpacked(Tensor dout, Tensor? dlse, Tensor qkv, Tensor out, Tensor lse, "
      "SymInt num_heads_q, " FLASH_ATTN3_DENSE_SCHEMA ") -> Tensor",
      tags);
  m.def(
      "fwd_e4m3(Tensor q, Tensor k, Tensor v, Tensor? q_scale, Tensor? k_scale, Tensor? v_scale, "
      "SymInt q_block, SymInt k_block, SymInt v_block, bool "
      "v_transposed, bool exact_lse, " FLASH_ATTN3_OPTION_SCHEMA ") -> (Tensor out, Tensor lse)",
      tags);
  m.def(
      "quantize(Tensor x, Tensor? mean, Tensor? cu_seqlens, Tensor? seqused, SymInt block, "
      "bool rotate, bool transposed) -> (Tensor values, Tensor scale)",
      tags);
  m.def("row_mean(Tensor x, Tensor? cu_seqlens, Tensor? seqused) -> Tensor", tags);
}

TORCH_LIBRARY_IMPL(flash_attn3, CUDA, m) {
  m.impl("fwd", &fwd_cuda);
  m.impl("fwd_out", &fwd_out_cuda);
  m.impl("bwd", &bwd_cuda);
  m.impl("fwd_qkvpacked", &fwd_qkvpacked_cuda);
  m.impl("bwd_qkvpacked", &bwd_qkvpacked_cuda);
  m.impl("fwd_e4m3", &fwd_e4m3_cuda);
  m.impl("quantize", &quantize_cuda);
  m.impl("row_mean", &row_mean_cuda);
}

TORCH_LIBRARY_IMPL(flash_attn3, Autograd, m) {
  m.impl("fwd", &fwd_autograd);
  m.impl("fwd_out", &fwd_out_autograd);
  m.impl("bwd", &bwd_autograd);
  m.impl("fwd_qkvpacked", &fwd_qkvpacked_autograd);
  m.impl("bwd_qkvpacked", &bwd_qkvpacked_autograd);
  m.impl("fwd_e4m3", &fwd_e4m3_autograd);
  m.impl("quantize", &quantize_autograd);
  m.impl("row_mean", &row_mean_autograd);
}

TORCH_LIBRARY_IMPL(flash_attn3, ADInplaceOrView, m) { m.impl("fwd_out", &fwd_out_inplace); }

}  // namespace flash_attn3::api
