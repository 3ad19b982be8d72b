// The quantising half of the C interface.
#include <algorithm>

#include "host/fp8_dispatch.h"
#include "kernels/fp8/quantize.h"
#include "kernels/fp8/quantize_rotated.h"
#include "kernels/fp8/transpose_values.h"

namespace flash_attn3 {
namespace {

Status check(const QuantizeParams& in) {
  const bool ragged = in.cu_seqlens != nullptr;
  if (in.in == nullptr) return Status::invalid("in must not be null.");
  if (in.dtype != DType::kBFloat16 && in.dtype != DType::kFloat16) {
    return Status::invalid("dtype must be bfloat16 or float16.");
  }
  if (in.head_dim < 16 || in.head_dim > 256 || in.head_dim % 16 != 0) {
    return Status::invalid("the head dim must be a multiple of 16 from 16 to 256, not " +
                           std::to_string(in.head_dim) + ".");
  }
  if (in.block_rows != 64 && in.block_rows != 128) {
    return Status::invalid("block_rows must be 64 or 128, not " + std::to_string(in.block_rows) +
                           ".");
  }
  if (in.transposed != 0 && in.block_rows != ValueLayout::kKeys) {
    return Status::invalid("a transposed tensor has blocks of 128 rows.");
  }
  if (in.batch < 1 || in.heads < 1 || (ragged ? in.total : in.seqlen) < 1 ||
      (ragged ? in.total : in.seqlen) > (1 << 30)) {
    return Status::invalid("batch, heads and rows must be positive, and rows at most 2^30.");
  }
  return {};
}

QuantizeArgs fill(const QuantizeParams& in) {
  const bool ragged = in.cu_seqlens != nullptr;
  QuantizeArgs args;
  args.in = in.in;
  args.mean = in.mean;
  args.cu_seqlens = in.cu_seqlens;
  args.seqused = in.seqused;
  args.out = static_cast<uint8_t*>(in.out);
  args.scale = in.scale;
  args.batch_stride = in.in_strides.batch;
  args.row_stride = in.in_strides.row;
  args.head_stride = in.in_strides.head;
  args.batch = in.batch;
  args.heads = in.heads;
  args.head_dim = in.head_dim;
  args.seqlen = in.seqlen;
  args.total = int32_t(in.total);
  args.block_rows = in.block_rows;
  args.blocks =
      ragged ? int32_t(in.total) / in.block_rows + in.batch : blocks_for(in.seqlen, in.block_rows);
  // The largest power of two that divides the head dim.
  args.rotate_size = in.rotate != 0 ? in.head_dim & -in.head_dim : 0;
  args.transposed = in.transposed;
  return args;
}

constexpr int64_t kMostBlocks = 0x7fffffff;

// The most that a call may ask for, whatever this one does: another thread may launch the same
// kernel between the two calls here.
cudaError_t allow_shared_bytes(void (*kernel)(QuantizeArgs), int bytes) {
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
}

cudaError_t launch_by(void (*kernel)(QuantizeArgs), const QuantizeArgs& args, int threads,
                      cudaStream_t stream) {
  const int bytes = args.transposed != 0
                        ? ValueLayout::kKeys * (quantize_row_bytes(args.head_dim) + args.head_dim)
                        : 0;
  cudaError_t error = cudaSuccess;
  if (bytes > 48 * 1024) {
    error = allow_shared_bytes(kernel, ValueLayout::kKeys * (quantize_row_bytes(256) + 256));
  }
  if (error != cudaSuccess) return error;
  kernel<<<unsigned(blocks_of(args)), threads, bytes, stream>>>(args);
  return cudaGetLastError();
}

template <class Element, int kGroup, bool kCentred>
cudaError_t launch(const QuantizeArgs& args, cudaStream_t stream) {
  const int threads = larger(32, args.block_rows * kGroup / kQuantizePasses);
  return launch_by(quantize_kernel<Element, kGroup, kCentred>, args, threads, stream);
}

template <class Element, bool kCentred>
cudaError_t launch_for(const QuantizeArgs& args, cudaStream_t stream) {
  const int lanes = args.head_dim / 16;
  if (lanes <= 1) return launch<Element, 1, kCentred>(args, stream);
  if (lanes <= 2) return launch<Element, 2, kCentred>(args, stream);
  if (lanes <= 4) return launch<Element, 4, kCentred>(args, stream);
  if (lanes <= 8) return launch<Element, 8, kCentred>(args, stream);
  return launch<Element, 16, kCentred>(args, stream);
}

template <class Element, int kParts, bool kMixed>
cudaError_t launch_rotated(const QuantizeArgs& args, const DeviceInfo& device,
                           cudaStream_t stream) {
  const auto kernel = quantize_rotated_kernel<Element, kParts, kMixed>;
  const int stages = kRotatedStages + (args.transposed != 0);
  const int bytes = stages * args.block_rows * kRotatedRowBytes<kParts>;
  const cudaError_t error = allow_shared_bytes(
      kernel, (kRotatedStages + 1) * ValueLayout::kKeys * kRotatedRowBytes<kParts>);
  if (error != cudaSuccess) return error;
  const int64_t at_once = int64_t(device.sms) * kRotatedCtas<kParts> * (128 / args.block_rows);
  const unsigned ctas = unsigned(std::min(blocks_of(args), at_once));
  kernel<<<ctas, args.block_rows / kRotatedRows * 32, bytes, stream>>>(args);
  return cudaGetLastError();
}

template <class Element>
cudaError_t launch_rotated_for(const QuantizeArgs& args, const DeviceInfo& device,
                               cudaStream_t stream) {
  if (args.rotate_size == 256) return launch_rotated<Element, 4, true>(args, device, stream);
  if (args.rotate_size == 128) return launch_rotated<Element, 2, true>(args, device, stream);
  const int parts = blocks_for(args.head_dim, 64);
  if (parts == 1) return launch_rotated<Element, 1, false>(args, device, stream);
  if (parts == 2) return launch_rotated<Element, 2, false>(args, device, stream);
  if (parts == 3) return launch_rotated<Element, 3, false>(args, device, stream);
  return launch_rotated<Element, 4, false>(args, device, stream);
}

template <class Element>
cudaError_t launch_any(const QuantizeArgs& args, const DeviceInfo& device, cudaStream_t stream) {
  if (args.rotate_size != 0) return launch_rotated_for<Element>(args, device, stream);
  return args.mean != nullptr ? launch_for<Element, true>(args, stream)
                              : launch_for<Element, false>(args, stream);
}

// Checked, and the call's device made current for the time of `work`.
template <class Work>
Status checked(const QuantizeParams* in, const Work& work) {
  if (in == nullptr) return Status::invalid("params must not be null.");
  const Status status = check(*in);
  if (!status.ok()) return status;
  return on_device(in->device, [&](const DeviceInfo& device) { return work(*in, device); });
}

Status quantize(const QuantizeParams& in, const DeviceInfo& device, cudaStream_t stream) {
  if (in.out == nullptr || in.scale == nullptr) {
    return Status::invalid("out and scale must not be null.");
  }
  const QuantizeArgs args = fill(in);
  if (blocks_of(args) > kMostBlocks) return Status::invalid("the tensor has too many blocks.");
  const cudaError_t error = in.dtype == DType::kBFloat16
                                ? launch_any<__nv_bfloat16>(args, device, stream)
                                : launch_any<__half>(args, device, stream);
  return error == cudaSuccess ? Status{} : cuda_status("launching the quantise kernel", error);
}

Status mean(const QuantizeParams& in, float* out, cudaStream_t stream) {
  if (out == nullptr) return Status::invalid("mean must not be null.");
  if (in.heads > 65535 || in.batch > 65535) {
    return Status::invalid("heads and batch must be at most 65535.");
  }
  const QuantizeArgs args = fill(in);
  float* parts = out + int64_t(in.batch) * in.heads * in.head_dim;
  const dim3 grid(in.heads, kMeanParts, in.batch);
  const int threads = blocks_for(in.head_dim, 32) * 32;
  if (in.dtype == DType::kBFloat16) {
    mean_parts_kernel<__nv_bfloat16><<<grid, threads, 0, stream>>>(args, parts);
  } else {
    mean_parts_kernel<__half><<<grid, threads, 0, stream>>>(args, parts);
  }
  mean_kernel<<<dim3(in.heads, in.batch), threads, 0, stream>>>(args, parts, out);
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? Status{} : cuda_status("launching the mean kernel", error);
}

}  // namespace

Status transpose_values(const Fp8Params& in, cudaStream_t stream) {
  const FwdParams& fwd = in.fwd;
  QuantizeParams v{};
  v.in = fwd.v;
  v.cu_seqlens = fwd.cu_seqlens_k;
  v.seqused = fwd.seqused_k;
  v.out = in.v_room;
  v.in_strides = fwd.v_strides;
  v.batch = fwd.batch;
  v.seqlen = fwd.max_seqlen_k;
  v.total = fwd.total_k;
  v.heads = fwd.heads_kv;
  v.head_dim = fwd.head_dim_v;
  v.block_rows = ValueLayout::kKeys;
  v.transposed = 1;
  const QuantizeArgs args = fill(v);
  if (blocks_of(args) > kMostBlocks) return Status::invalid("v has too many blocks.");
  const cudaError_t error = launch_by(transpose_values_kernel, args, kTransposeThreads, stream);
  return error == cudaSuccess ? Status{} : cuda_status("launching the transposing kernel", error);
}

}  // namespace flash_attn3

using namespace flash_attn3;

int flash_attn3_quantize(const QuantizeParams* params, cudaStream_t stream, char* message,
                         size_t message_size) {
  const auto work = [&](const QuantizeParams& in, const DeviceInfo& device) {
    return quantize(in, device, stream);
  };
  return report(checked(params, work), message, message_size);
}

int flash_attn3_mean(const QuantizeParams* params, float* mean_out, cudaStream_t stream,
                     char* message, size_t message_size) {
  const auto work = [&](const QuantizeParams& in, const DeviceInfo&) {
    return mean(in, mean_out, stream);
  };
  return report(checked(params, work), message, message_size);
}
