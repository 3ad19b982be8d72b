// FwdParams to a launch of one compiled forward kernel. Included by the instantiations alone.
#pragma once

#include <atomic>
#include <type_traits>

#include <cuda.h>
#include <cudaTypedefs.h>

#include "host/fwd_dispatch.h"
#include "host/kernel_config.h"
#include "host/tensor_map.h"
#include "kernels/fwd/fwd_kernel.h"

namespace flash_attn3 {

template <class T>
constexpr int fwd_shared_bytes() {
  static_assert(sizeof(typename T::SharedMemory) <= 227 * 1024,
                "more than a CTA of sm_90 can have");
  return int(sizeof(typename T::SharedMemory));
}

template <class T>
Status encode_fwd_maps(const FwdParams& in, FwdKernelParams* out) {
  const MapElement element =
      in.dtype == DType::kBFloat16 ? MapElement::kBFloat16 : MapElement::kFloat16;
  const bool ragged_q = in.cu_seqlens_q != nullptr;
  const bool ragged_k = in.cu_seqlens_k != nullptr;
  const int64_t k_rows = ragged_k ? in.total_k : in.max_seqlen_k;
  const int64_t k_batch = ragged_k ? 1 : in.batch;
  const TensorMapShape q{"q",
                         in.q,
                         element,
                         in.head_dim,
                         ragged_q ? in.total_q : in.max_seqlen_q,
                         in.heads,
                         ragged_q ? 1 : in.batch,
                         in.q_strides.row,
                         in.q_strides.head,
                         in.q_strides.batch,
                         Panel<T::kHeadDim>::kWidth,
                         T::kRowsPerConsumer};
  const TensorMapShape k{"k",
                         in.k,
                         element,
                         in.head_dim,
                         k_rows,
                         in.heads_kv,
                         k_batch,
                         in.k_strides.row,
                         in.k_strides.head,
                         in.k_strides.batch,
                         Panel<T::kHeadDim>::kWidth,
                         T::kBlockN / T::kPair};
  const TensorMapShape v{"v",
                         in.v,
                         element,
                         in.head_dim_v,
                         k_rows,
                         in.heads_kv,
                         k_batch,
                         in.v_strides.row,
                         in.v_strides.head,
                         in.v_strides.batch,
                         Panel<T::kHeadDimV>::kWidth,
                         T::kBlockN / T::kPair};
  Status status = encode_tensor_map(q, &out->q);
  if (status.ok()) status = encode_tensor_map(k, &out->k);
  if (status.ok()) status = encode_tensor_map(v, &out->v);
  if constexpr (T::kStagedOut) {
    const TensorMapShape o{"out",
                           in.out,
                           element,
                           in.head_dim_v,
                           q.rows,
                           in.heads,
                           q.batch,
                           in.out_strides.row,
                           in.out_strides.head,
                           in.out_strides.batch,
                           Panel<T::kHeadDimV>::kWidth,
                           16};
    if (status.ok()) status = encode_tensor_map(o, &out->out_map);
  }
  return status;
}

// Once per device: more than 48 KB of shared memory must be asked for.
template <class T, class Params>
Status prepare_kernel(void (*kernel)(Params), int device) {
  static std::atomic<bool> prepared[kMaxDevices];
  if (device < kMaxDevices && prepared[device].load()) return {};
  const cudaError_t error = cudaFuncSetAttribute(
      kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, fwd_shared_bytes<T>());
  if (error != cudaSuccess) return cuda_status("preparing the forward kernel", error);
  if (device < kMaxDevices) prepared[device].store(true);
  return {};
}

template <class T, class Params>
Status describe_kernel(void (*kernel)(Params), int grid, FwdPlan* plan) {
  cudaFuncAttributes attributes;
  const cudaError_t error = cudaFuncGetAttributes(&attributes, kernel);
  if (error != cudaSuccess) return cuda_status("asking for the forward kernel's resources", error);
  *plan = {T::kBlockM,
           T::kBlockN,
           T::kHeadDim,
           T::kHeadDimV,
           T::kValueStages,
           T::kThreads,
           attributes.numRegs,
           fwd_shared_bytes<T>(),
           int(attributes.localSizeBytes),
           grid};
  return {};
}

template <class T, class Params>
Status launch_kernel(void (*kernel)(Params), const Params& params, int grid, int sm_margin,
                     cudaStream_t stream) {
  // The set-up of this kernel may run while the one before it ends; not on the SMs left free.
  cudaLaunchAttribute attributes[2] = {};
  int count = 0;
  if (T::kPair > 1) {
    attributes[count].id = cudaLaunchAttributeClusterDimension;
    attributes[count].val.clusterDim.x = T::kPair;
    attributes[count].val.clusterDim.y = 1;
    attributes[count].val.clusterDim.z = 1;
    ++count;
  }
  if (sm_margin == 0) {
    attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[count].val.programmaticStreamSerializationAllowed = 1;
    ++count;
  }
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = T::kThreads;
  config.dynamicSmemBytes = fwd_shared_bytes<T>();
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = count;
  const cudaError_t error = cudaLaunchKernelEx(&config, kernel, params);
  return error == cudaSuccess ? Status{} : cuda_status("launching the forward kernel", error);
}

template <class T>
Status launch_fwd(const FwdParams& in, const DeviceInfo& device, cudaStream_t stream,
                  FwdPlan* plan) {
  FwdKernelParams params;
  constexpr int kRows = T::kPair * T::kBlockM;
  fill_fwd_params(in, device, kRows, T::kPair, &params);
  const int grid = fwd_grid(in, device, params, T::kPair);
  Status status = prepare_kernel<T>(fwd_kernel<T>, in.device);
  if (!status.ok()) return status;
  if (plan != nullptr) return describe_kernel<T>(fwd_kernel<T>, grid, plan);
  status = encode_fwd_maps<T>(in, &params);
  if (status.ok()) status = prepare_tile_order(in, kRows, stream, &params);
  if (!status.ok()) return status;
  return launch_kernel<T>(fwd_kernel<T>, params, grid, in.sm_margin, stream);
}

// Long, and without what FwdTraits::kOpenLeft leaves out.
inline bool is_long(const FwdParams& in, const LongFrom& from) {
  return in.window_left < 0 && in.attention_chunk == 0 &&
         smaller(in.max_seqlen_q, in.max_seqlen_k) >=
             (in.window_right < 0 ? from.full : from.causal);
}

// Whether few CTAs, if any, are the idle one of a pair: tiles of a sequence have tile_m rows.
inline bool makes_pairs(const FwdParams& in, int sms, int tile_m) {
  const int tiles = blocks_for(in.max_seqlen_q, tile_m);
  return in.cu_seqlens_q == nullptr && in.seqused_q == nullptr && sms - in.sm_margin >= 2 &&
         (tiles % 2 == 0 || tiles >= kOddTilesFrom);
}

// The kernel of these head dims that suits the call.
template <class Element, int kHeadDim, int kHeadDimV>
Status launch_fwd_of(const FwdParams& in, const DeviceInfo& device, cudaStream_t stream,
                     FwdPlan* plan) {
  using Schedules = FwdScheduleOf<kHeadDim, kHeadDimV>;
  if constexpr (!std::is_void_v<typename Schedules::Pairs>) {
    using T = FwdTraits<Element, kHeadDim, kHeadDimV, typename Schedules::Pairs>;
    if (is_long(in, kPairsFrom) && makes_pairs(in, device.sms, T::kBlockM)) {
      return launch_fwd<T>(in, device, stream, plan);
    }
  }
  if constexpr (!std::is_void_v<typename Schedules::Long>) {
    using T = FwdTraits<Element, kHeadDim, kHeadDimV, typename Schedules::Long>;
    if (is_long(in, kLongFrom)) return launch_fwd<T>(in, device, stream, plan);
  }
  using T = FwdTraits<Element, kHeadDim, kHeadDimV, typename Schedules::Type>;
  return launch_fwd<T>(in, device, stream, plan);
}

}  // namespace flash_attn3
