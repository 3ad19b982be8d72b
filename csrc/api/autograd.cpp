// The Autograd key of flash_attn3::fwd, fwd_out, bwd, fwd_qkvpacked and bwd_qkvpacked.
//
// Forward and backward are called through the dispatcher below this key, so a trace (AOTAutograd,
// export) records these operators, never this code.
#include <ATen/Context.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/custom_function.h>

#include "ops.h"

namespace flash_attn3::api {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::Variable;
using torch::autograd::variable_list;

// q, k, v and the fourteen options; and dout, dlse, q, k, v, out, lse and the options.
constexpr size_t kFwdArguments = 17;
constexpr size_t kBwdArguments = 21;
// qkv, num_heads_q and the eight options without lengths; and dout, dlse, qkv, out, lse and these.
constexpr size_t kFwdQkvpackedArguments = 10;
constexpr size_t kBwdQkvpackedArguments = 14;

// Forward-mode tangents count: Function refuses them with a sentence, a plain call would drop them.
bool is_differentiated(const Tensor& t) {
  return (at::GradMode::is_enabled() && t.requires_grad()) ||
         (t.defined() && t._fw_grad(/*level=*/0).defined());
}

OptionalTensor optional_of(const Tensor& t) {
  return t.defined() ? OptionalTensor(t) : std::nullopt;
}

void save_options(AutogradContext* ctx, FLASH_ATTN3_DENSE_PARAMETERS(c10::SymInt)) {
  auto& data = ctx->saved_data;
  data.reserve(10);
  data["scale"] = softmax_scale;
  data["causal"] = causal;
  data["window_left"] = window_left;
  data["window_right"] = window_right;
  data["chunk"] = attention_chunk;
  data["softcap"] = softcap;
  data["deterministic"] = deterministic;
  data["sm_margin"] = sm_margin;
  // Most losses don't use lse: its gradient then stays undefined instead of becoming zeros that
  // the backward would have to read.
  ctx->set_materialize_grads(false);
}

// call(the options that save_options kept, as a backward takes them).
template <class Call>
auto with_saved_options(AutogradContext* ctx, const Call& call) {
  auto& data = ctx->saved_data;
  const bool deterministic =
      data["deterministic"].toBool() || at::globalContext().deterministicAlgorithms();
  return call(data["scale"].toDouble(), data["causal"].toBool(), data["window_left"].toSymInt(),
              data["window_right"].toSymInt(), data["chunk"].toSymInt(), data["softcap"].toDouble(),
              deterministic, data["sm_margin"].toSymInt());
}

void refuse_second_derivative() {
  TORCH_CHECK(false,
              "flash_attn3 has no second derivative of attention: differentiate its gradients "
              "with torch.nn.functional.scaled_dot_product_attention under "
              "sdpa_kernel(SDPBackend.MATH) instead, or call backward without create_graph");
}

class FwdFunction : public Function<FwdFunction> {
 public:
  static constexpr bool is_traceable = true;  // compiled autograd may look into backward()

  static variable_list forward(AutogradContext* ctx, const Tensor& q, const Tensor& k,
                               const Tensor& v, FLASH_ATTN3_OPTION_PARAMETERS(c10::SymInt)) {
    at::AutoDispatchBelowADInplaceOrView guard;
    auto [out, lse] = fwd_op().call(q, k, v, FLASH_ATTN3_OPTION_ARGUMENTS);

    ctx->save_for_backward({q, k, v, out, lse, cu_seqlens_q.value_or(Tensor()),
                            cu_seqlens_k.value_or(Tensor()), seqused_q.value_or(Tensor()),
                            seqused_k.value_or(Tensor())});
    save_options(ctx, FLASH_ATTN3_DENSE_ARGUMENTS);
    ctx->saved_data["max_seqlen_q"] = max_seqlen_q;
    ctx->saved_data["max_seqlen_k"] = max_seqlen_k;
    return {out, lse};
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    variable_list result(kFwdArguments);
    if (!grads[0].defined() && !grads[1].defined()) return result;

    // Raises if one of them, out included, was changed in place since.
    const variable_list saved = ctx->get_saved_variables();
    const Tensor& out = saved[3];
    const Tensor dout = grads[0].defined() ? grads[0] : at::zeros_like(out);
    auto [dq, dk, dv] = with_saved_options(ctx, [&](FLASH_ATTN3_DENSE_PARAMETERS(c10::SymInt)) {
      auto& data = ctx->saved_data;
      return bwd_op().call(dout, optional_of(grads[1]), saved[0], saved[1], saved[2], out, saved[4],
                           optional_of(saved[5]), optional_of(saved[6]), optional_of(saved[7]),
                           optional_of(saved[8]), data["max_seqlen_q"].toSymInt(),
                           data["max_seqlen_k"].toSymInt(), FLASH_ATTN3_DENSE_ARGUMENTS);
    });
    result[0] = dq;
    result[1] = dk;
    result[2] = dv;
    return result;
  }
};

class BwdFunction : public Function<BwdFunction> {
 public:
  static constexpr bool is_traceable = true;

  static variable_list forward(AutogradContext*, const Tensor& dout, const OptionalTensor& dlse,
                               const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out,
                               const Tensor& lse, FLASH_ATTN3_OPTION_PARAMETERS(c10::SymInt)) {
    at::AutoDispatchBelowADInplaceOrView guard;
    auto [dq, dk, dv] = bwd_op().call(dout, dlse, q, k, v, out, lse, FLASH_ATTN3_OPTION_ARGUMENTS);
    return {dq, dk, dv};
  }

  static variable_list backward(AutogradContext*, variable_list) {
    refuse_second_derivative();
    return variable_list(kBwdArguments);
  }
};

class FwdQkvpackedFunction : public Function<FwdQkvpackedFunction> {
 public:
  static constexpr bool is_traceable = true;

  static variable_list forward(AutogradContext* ctx, const Tensor& qkv, c10::SymInt num_heads_q,
                               FLASH_ATTN3_DENSE_PARAMETERS(c10::SymInt)) {
    at::AutoDispatchBelowADInplaceOrView guard;
    auto [out, lse] = fwd_qkvpacked_op().call(qkv, num_heads_q, FLASH_ATTN3_DENSE_ARGUMENTS);
    ctx->save_for_backward({qkv, out, lse});
    save_options(ctx, FLASH_ATTN3_DENSE_ARGUMENTS);
    ctx->saved_data["num_heads_q"] = num_heads_q;
    return {out, lse};
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    variable_list result(kFwdQkvpackedArguments);
    if (!grads[0].defined() && !grads[1].defined()) return result;

    const variable_list saved = ctx->get_saved_variables();
    const Tensor& out = saved[1];
    const Tensor dout = grads[0].defined() ? grads[0] : at::zeros_like(out);
    result[0] = with_saved_options(ctx, [&](FLASH_ATTN3_DENSE_PARAMETERS(c10::SymInt)) {
      return bwd_qkvpacked_op().call(dout, optional_of(grads[1]), saved[0], out, saved[2],
                                     ctx->saved_data["num_heads_q"].toSymInt(),
                                     FLASH_ATTN3_DENSE_ARGUMENTS);
    });
    return result;
  }
};

class BwdQkvpackedFunction : public Function<BwdQkvpackedFunction> {
 public:
  static constexpr bool is_traceable = true;

  static Tensor forward(AutogradContext*, const Tensor& dout, const OptionalTensor& dlse,
                        const Tensor& qkv, const Tensor& out, const Tensor& lse,
                        c10::SymInt num_heads_q, FLASH_ATTN3_DENSE_PARAMETERS(c10::SymInt)) {
    at::AutoDispatchBelowADInplaceOrView guard;
    return bwd_qkvpacked_op().call(dout, dlse, qkv, out, lse, num_heads_q,
                                   FLASH_ATTN3_DENSE_ARGUMENTS);
  }

  static variable_list backward(AutogradContext*, variable_list) {
    refuse_second_derivative();
    return variable_list(kBwdQkvpackedArguments);
  }
};

}  // namespace

FwdResult fwd_autograd(const Tensor& q, const Tensor& k, const Tensor& v,
                       FLASH_ATTN3_OPTION_PARAMETERS(c10::SymInt)) {
  if (is_differentiated(q) || is_differentiated(k) || is_differentiated(v)) {
    auto results = FwdFunction::apply(q, k, v, FLASH_ATTN3_OPTION_ARGUMENTS);
    return {std::move(results[0]), std::move(results[1])};
  }
  at::AutoDispatchBelowADInplaceOrView guard;
  return fwd_op().call(q, k, v, FLASH_ATTN3_OPTION_ARGUMENTS);
}

void fwd_out_autograd(const Tensor& q, const Tensor& k, const Tensor& v,
                      FLASH_ATTN3_OPTION_PARAMETERS(c10::SymInt), const Tensor& out,
                      const Tensor& lse) {
  for (const Tensor* t : {&q, &k, &v, &out, &lse}) {
    TORCH_CHECK(!is_differentiated(*t),
                "flash_attn3::fwd_out(): functions with out=... arguments don't support automatic "
                "differentiation, but one of the arguments requires grad.");
  }
  at::AutoDispatchBelowAutograd guard;
  fwd_out_op().call(q, k, v, FLASH_ATTN3_OPTION_ARGUMENTS, out, lse);
}

// A graph that saved out or lse before this call must notice that they changed.
void fwd_out_inplace(const Tensor& q, const Tensor& k, const Tensor& v,
                     FLASH_ATTN3_OPTION_PARAMETERS(c10::SymInt), const Tensor& out,
                     const Tensor& lse) {
  {
    at::AutoDispatchBelowADInplaceOrView guard;
    fwd_out_op().call(q, k, v, FLASH_ATTN3_OPTION_ARGUMENTS, out, lse);
  }
  for (const Tensor* t : {&out, &lse}) {
    if (!t->is_inference()) t->unsafeGetTensorImpl()->bump_version();
  }
}

BwdResult bwd_autograd(const Tensor& dout, const OptionalTensor& dlse, const Tensor& q,
                       const Tensor& k, const Tensor& v, const Tensor& out, const Tensor& lse,
                       FLASH_ATTN3_OPTION_PARAMETERS(c10::SymInt)) {
  const bool differentiated = is_differentiated(dout) || is_differentiated(q) ||
                              is_differentiated(k) || is_differentiated(v) ||
                              (dlse.has_value() && is_differentiated(*dlse));
  if (differentiated) {
    auto results = BwdFunction::apply(dout, dlse, q, k, v, out, lse, FLASH_ATTN3_OPTION_ARGUMENTS);
    return {std::move(results[0]), std::move(results[1]), std::move(results[2])};
  }
  at::AutoDispatchBelowADInplaceOrView guard;
  return bwd_op().call(dout, dlse, q, k, v, out, lse, FLASH_ATTN3_OPTION_ARGUMENTS);
}

FwdResult fwd_qkvpacked_autograd(const Tensor& qkv, c10::SymInt num_heads_q,
                                 FLASH_ATTN3_DENSE_PARAMETERS(c10::SymInt)) {
  if (is_differentiated(qkv)) {
    auto results = FwdQkvpackedFunction::apply(qkv, num_heads_q, FLASH_ATTN3_DENSE_ARGUMENTS);
    return {std::move(results[0]), std::move(results[1])};
  }
  at::AutoDispatchBelowADInplaceOrView guard;
  return fwd_qkvpacked_op().call(qkv, num_heads_q, FLASH_ATTN3_DENSE_ARGUMENTS);
}

Tensor bwd_qkvpacked_autograd(const Tensor& dout, const OptionalTensor& dlse, const Tensor& qkv,
                              const Tensor& out, const Tensor& lse, c10::SymInt num_heads_q,
                              FLASH_ATTN3_DENSE_PARAMETERS(c10::SymInt)) {
  if (is_differentiated(dout) || is_differentiated(qkv) ||
      (dlse.has_value() && is_differentiated(*dlse))) {
    return BwdQkvpackedFunction::apply(dout, dlse, qkv, out, lse, num_heads_q,
                                       FLASH_ATTN3_DENSE_ARGUMENTS);
  }
  at::AutoDispatchBelowADInplaceOrView guard;
  return bwd_qkvpacked_op().call(dout, dlse, qkv, out, lse, num_heads_q,
                                 FLASH_ATTN3_DENSE_ARGUMENTS);
}

}  // namespace flash_attn3::api
