// flash_attn3::fwd_e4m3, quantize and row_mean on CUDA, and their Autograd keys, which refuse:
// e4m3 values have no gradient here.
#include <cmath>

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/clone.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "call.h"
#include "device.h"
#include "ops.h"

namespace flash_attn3::api {
namespace {

constexpr int64_t kHeadDimStep = 16;
constexpr int64_t kValueBlock = 128;  // keys of a block of a transposed V
// flash_attn3_mean wants room for so many times the mean.
constexpr int64_t kMeanRoom = 33;

// Blocks of `block` rows: of a dense sequence, or of all ragged ones, where sequence b starts at
// cu_seqlens[b] / block + b.
int64_t block_count(bool ragged, int64_t batch, int64_t rows, int64_t block) {
  return ragged ? rows / block + batch : (rows + block - 1) / block;
}

void check_block(int64_t block, const char* name, bool is_query) {
  if (is_query) {
    TORCH_CHECK_VALUE(block == 0 || block == 64 || block == 128, name, " is ", block,
                      "; expected 0 (one scale a KV head), 64 or 128");
  } else {
    TORCH_CHECK_VALUE(block == 0 || block == 128, name, " is ", block,
                      "; expected 0 (one scale a KV head) or 128");
  }
}

void check_float(const Tensor& t, const char* name, c10::Device device) {
  check_cuda_tensor(t, name, device);
  TORCH_CHECK_TYPE(t.scalar_type() == at::kFloat, name, " has dtype ", t.scalar_type(),
                   "; expected torch.float32");
}

// What one of q, k, v is multiplied by; the copy, if one was needed, must outlive the launch.
struct Scale {
  Fp8Scale view{};
  Tensor kept;
};

Scale scale_of(const OptionalTensor& given, const char* name, int64_t block, int64_t heads,
               int64_t rows, bool ragged, const Shape& s, c10::Device device) {
  Scale scale;
  if (!given.has_value()) {
    TORCH_CHECK_VALUE(block == 0, name, " is None; expected the scales of blocks of ", block,
                      " rows");
    return scale;
  }
  check_float(*given, name, device);
  if (block == 0) {
    check_shape(*given, name, {s.batch, s.heads_kv});
    scale.kept = *given;
    scale.view = {scale.kept.const_data_ptr<float>(), scale.kept.stride(0), scale.kept.stride(1),
                  0};
    return scale;
  }
  const int64_t blocks = block_count(ragged, s.batch, rows, block);
  if (ragged) {
    check_shape(*given, name, {heads, blocks});
  } else {
    check_shape(*given, name, {s.batch, heads, blocks});
  }
  const bool neighbours = blocks <= 1 || given->stride(-1) == 1;
  scale.kept = neighbours ? *given : at::clone(*given, at::MemoryFormat::Contiguous);
  scale.view = {scale.kept.const_data_ptr<float>(), ragged ? 0 : scale.kept.stride(0),
                scale.kept.stride(-2), static_cast<int32_t>(block)};
  return scale;
}

bool is_differentiated(const Tensor& t) {
  return (at::GradMode::is_enabled() && t.requires_grad()) || t._fw_grad(/*level=*/0).defined();
}

void refuse_gradient(const char* op, std::initializer_list<std::pair<const char*, Tensor>> inputs) {
  for (const auto& [name, t] : inputs) {
    if (!t.defined()) continue;
    TORCH_CHECK_NOT_IMPLEMENTED(
        !is_differentiated(t), name, " requires a gradient, which flash_attn3::", op,
        " does not have: use flash_attn3.flash_attn_fp8_func, or call under torch.no_grad()");
  }
}

// A tensor to quantise, as the kernels are told of it.
struct QuantizeInput {
  Tensor x;
  QuantizeParams params{};
  bool ragged = false;
  bool empty = false;
};

QuantizeInput quantize_input(const Tensor& x, const OptionalTensor& cu_seqlens,
                             const OptionalTensor& seqused) {
  TORCH_CHECK_VALUE(x.defined() && x.is_cuda(), "x is not on a CUDA device");
  const auto device = x.device();
  check_cuda_tensor(x, "x", device);
  const auto dtype = x.scalar_type();
  TORCH_CHECK_TYPE(is_half(dtype), "x has dtype ", dtype,
                   "; expected torch.float16 or torch.bfloat16");
  QuantizeInput in;
  in.ragged = cu_seqlens.has_value();
  check_rank(x, "x", in.ragged, "cu_seqlens");
  check_head_dim(x.size(-1), "x", kHeadDimStep);
  int64_t batch = x.size(0);
  if (in.ragged) {
    TORCH_CHECK_VALUE(cu_seqlens->dim() == 1 && cu_seqlens->size(0) >= 1, "cu_seqlens has shape ",
                      cu_seqlens->sizes(), "; expected (batch + 1,)");
    batch = cu_seqlens->size(0) - 1;
    check_int_vector(*cu_seqlens, "cu_seqlens", batch + 1, device);
  }
  if (seqused.has_value()) check_int_vector(*seqused, "seqused", batch, device);
  const std::string refusal = device_refusal(device.index());
  TORCH_CHECK_NOT_IMPLEMENTED(refusal.empty(), refusal);

  in.empty = x.numel() == 0 || batch == 0;
  in.x = in.empty ? x : readable_by_tma(x);  // the kernel too reads 16 bytes at a time
  QuantizeParams& p = in.params;
  p.in = in.x.const_data_ptr();
  p.cu_seqlens = int_pointer(cu_seqlens);
  p.seqused = int_pointer(seqused);
  p.in_strides = strides_of(in.x, in.ragged);
  p.batch = check_int32(batch, "batch size", 0);
  const int32_t rows = check_int32(x.size(in.ragged ? 0 : 1), "rows of x", 0);
  p.seqlen = in.ragged ? 0 : rows;
  p.total = in.ragged ? rows : 0;
  p.max_seqlen = rows;
  p.heads = check_int32(x.size(-2), "heads of x", 0);
  p.head_dim = static_cast<int32_t>(x.size(-1));
  p.dtype = dtype_of(dtype);
  p.block_rows = kValueBlock;
  p.device = device.index();
  return in;
}

cudaStream_t stream_of(c10::Device device) {
  return c10::cuda::getCurrentCUDAStream(device.index()).stream();
}

}  // namespace

FwdResult fwd_e4m3_cuda(const Tensor& q_in, const Tensor& k_in, const Tensor& v_in,
                        FLASH_ATTN3_SCALE_PARAMETERS(int64_t),
                        FLASH_ATTN3_OPTION_PARAMETERS(int64_t)) {
  TORCH_CHECK_TYPE(q_in.scalar_type() == at::kFloat8_e4m3fn, "q has dtype ", q_in.scalar_type(),
                   "; expected torch.float8_e4m3fn");
  Shape s = check_queries_and_keys(q_in, k_in, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k);
  const auto device = q_in.device();
  check_block(q_block, "q_block", true);
  check_block(k_block, "k_block", false);
  check_block(v_block, "v_block", false);
  if (v_transposed) {
    check_cuda_tensor(v_in, "v", device);
    check_same_dtype(v_in, "v", at::kFloat8_e4m3fn);
    TORCH_CHECK_VALUE(v_in.dim() == 4, "v has shape ", v_in.sizes(),
                      "; expected (blocks, KV heads, head dim, 128), since it is transposed");
    s.head_dim_v = v_in.size(2);
    const int64_t tiles =
        block_count(s.ragged_k, s.batch, s.rows_k, kValueBlock) * (s.ragged_k ? 1 : s.batch);
    check_shape(v_in, "v", {tiles, s.heads_kv, s.head_dim_v, kValueBlock});
  } else {
    check_value_rows(v_in, q_in, &s);
  }
  check_head_dim(s.head_dim, "q", kHeadDimStep);
  check_head_dim(s.head_dim_v, "v", kHeadDimStep);
  const Scale of_q =
      scale_of(q_scale, "q_scale", q_block, s.heads, s.rows_q, s.ragged_q, s, device);
  const Scale of_k =
      scale_of(k_scale, "k_scale", k_block, s.heads_kv, s.rows_k, s.ragged_k, s, device);
  const Scale of_v =
      scale_of(v_scale, "v_scale", v_block, s.heads_kv, s.rows_k, s.ragged_k, s, device);

  Fp8Params p{};
  fill_options(s, device.index(), max_seqlen_q, max_seqlen_k, softmax_scale, causal, window_left,
               window_right, attention_chunk, softcap, sm_margin, &p.fwd);
  const c10::cuda::CUDAGuard guard(device);
  auto [out, lse] = empty_results(s, device, at::kBFloat16);
  if (without_launch(s, out, lse, p.fwd.max_seqlen_q, p.fwd.max_seqlen_k)) {
    return {std::move(out), std::move(lse)};
  }
  const Tensor q = readable_by_tma(q_in);
  const Tensor k = readable_by_tma(k_in);
  // A transposed V is read as one contiguous piece.
  const Tensor v = v_transposed && !v_in.is_contiguous()
                       ? at::clone(v_in, at::MemoryFormat::Contiguous)
                       : readable_by_tma(v_in);
  const Tensor workspace =
      fill_tensors(s, q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, out, lse, &p.fwd);
  if (!v_transposed) p.fwd.v_strides = strides_of(v, s.ragged_k);
  p.q_scale = of_q.view;
  p.k_scale = of_k.view;
  p.v_scale = of_v.view;
  p.v_transposed = v_transposed ? 1 : 0;
  p.exact_lse = exact_lse ? 1 : 0;
  const int64_t room_bytes = flash_attn3_fp8_room_bytes(&p);
  Tensor room;
  if (room_bytes > 0) {
    room = empty_on(device, {room_bytes}, at::kByte);
    p.v_room = room.mutable_data_ptr();
  }
  char message[kMessageSize] = "";
  throw_status(flash_attn3_fp8_fwd(&p, stream_of(device), message, sizeof(message)), message);
  return {std::move(out), std::move(lse)};
}

QuantizeResult quantize_cuda(const Tensor& x, const OptionalTensor& mean,
                             const OptionalTensor& cu_seqlens, const OptionalTensor& seqused,
                             int64_t block, bool rotate, bool transposed) {
  QuantizeInput in = quantize_input(x, cu_seqlens, seqused);
  const auto device = x.device();
  TORCH_CHECK_VALUE(block == 64 || block == 128, "block is ", block, "; expected 64 or 128");
  TORCH_CHECK_VALUE(!transposed || block == kValueBlock, "block is ", block,
                    "; expected 128 for a transposed result");
  QuantizeParams& p = in.params;
  const int64_t batch = p.batch, heads = p.heads, dim = p.head_dim;
  const int64_t blocks = block_count(in.ragged, batch, in.ragged ? p.total : p.seqlen, block);
  const c10::cuda::CUDAGuard guard(device);
  Tensor values =
      transposed ? empty_on(device, {blocks * (in.ragged ? 1 : batch), heads, dim, kValueBlock},
                            at::kFloat8_e4m3fn)
                 : empty_on(device, x.sizes(), at::kFloat8_e4m3fn);
  Tensor scale = in.ragged ? empty_on(device, {heads, blocks}, at::kFloat)
                           : empty_on(device, {batch, heads, blocks}, at::kFloat);
  Tensor mean_kept;
  if (mean.has_value()) {
    check_float(*mean, "mean", device);
    check_shape(*mean, "mean", {batch, heads, dim});
    mean_kept = mean->is_contiguous() ? *mean : at::clone(*mean, at::MemoryFormat::Contiguous);
    p.mean = mean_kept.const_data_ptr<float>();
  }
  if (in.empty) {
    scale.fill_(1.0);
    return {std::move(values), std::move(scale)};
  }
  p.out = values.mutable_data_ptr();
  p.scale = scale.mutable_data_ptr<float>();
  p.block_rows = static_cast<int32_t>(block);
  p.rotate = rotate ? 1 : 0;
  p.transposed = transposed ? 1 : 0;
  char message[kMessageSize] = "";
  throw_status(flash_attn3_quantize(&p, stream_of(device), message, sizeof(message)), message);
  return {std::move(values), std::move(scale)};
}

Tensor row_mean_cuda(const Tensor& x, const OptionalTensor& cu_seqlens,
                     const OptionalTensor& seqused) {
  const QuantizeInput in = quantize_input(x, cu_seqlens, seqused);
  const QuantizeParams& p = in.params;
  const c10::cuda::CUDAGuard guard(x.device());
  if (in.empty) {
    return empty_on(x.device(), {p.batch, p.heads, p.head_dim}, at::kFloat).zero_();
  }
  const Tensor room = empty_on(x.device(), {kMeanRoom, p.batch, p.heads, p.head_dim}, at::kFloat);
  char message[kMessageSize] = "";
  throw_status(flash_attn3_mean(&p, room.mutable_data_ptr<float>(), stream_of(x.device()), message,
                                sizeof(message)),
               message);
  // A copy: what is returned must not keep the partial sums alive.
  return at::clone(room.select(0, 0), at::MemoryFormat::Contiguous);
}

FwdResult fwd_e4m3_autograd(const Tensor& q, const Tensor& k, const Tensor& v,
                            FLASH_ATTN3_SCALE_PARAMETERS(c10::SymInt),
                            FLASH_ATTN3_OPTION_PARAMETERS(c10::SymInt)) {
  refuse_gradient("fwd_e4m3", {{"q", q},
                               {"k", k},
                               {"v", v},
                               {"q_scale", q_scale.value_or(Tensor())},
                               {"k_scale", k_scale.value_or(Tensor())},
                               {"v_scale", v_scale.value_or(Tensor())}});
  at::AutoDispatchBelowADInplaceOrView guard;
  return fwd_e4m3_op().call(q, k, v, FLASH_ATTN3_SCALE_ARGUMENTS, FLASH_ATTN3_OPTION_ARGUMENTS);
}

QuantizeResult quantize_autograd(const Tensor& x, const OptionalTensor& mean,
                                 const OptionalTensor& cu_seqlens, const OptionalTensor& seqused,
                                 c10::SymInt block, bool rotate, bool transposed) {
  refuse_gradient("quantize", {{"x", x}, {"mean", mean.value_or(Tensor())}});
  at::AutoDispatchBelowADInplaceOrView guard;
  return quantize_op().call(x, mean, cu_seqlens, seqused, block, rotate, transposed);
}

Tensor row_mean_autograd(const Tensor& x, const OptionalTensor& cu_seqlens,
                         const OptionalTensor& seqused) {
  refuse_gradient("row_mean", {{"x", x}});
  at::AutoDispatchBelowADInplaceOrView guard;
  return row_mean_op().call(x, cu_seqlens, seqused);
}

}  // namespace flash_attn3::api
