// BwdParams to the launches of one compiled backward. Included by the instantiations alone.
#pragma once

#include <atomic>
#include <type_traits>

#include <cuda.h>
#include <cudaTypedefs.h>

#include "host/bwd_config.h"
#include "host/bwd_dispatch.h"
#include "host/tensor_map.h"
#include "kernels/bwd/bwd_kernel.h"
#include "kernels/bwd/bwd_postprocess.h"
#include "kernels/bwd/bwd_preprocess.h"

namespace flash_attn3 {

template <class T>
constexpr int bwd_shared_bytes() {
  static_assert(sizeof(typename T::SharedMemory) <= 227 * 1024,
                "more than a CTA of sm_90 can have");
  return int(sizeof(typename T::SharedMemory));
}

// The map of a tensor of queries (rows of q) or keys, whose box is one panel x box_rows.
inline Status encode_bwd_map(const BwdParams& in, const char* name, const void* data, bool queries,
                             int columns, const Strides& strides, int panel_columns, int box_rows,
                             CUtensorMap* map) {
  const bool ragged = queries ? in.cu_seqlens_q != nullptr : in.cu_seqlens_k != nullptr;
  const int64_t ragged_rows = queries ? in.total_q : in.total_k;
  const int64_t dense_rows = queries ? in.max_seqlen_q : in.max_seqlen_k;
  const MapElement element =
      in.dtype == DType::kBFloat16 ? MapElement::kBFloat16 : MapElement::kFloat16;
  return encode_tensor_map({name, data, element, columns, ragged ? ragged_rows : dense_rows,
                            queries ? in.heads : in.heads_kv, ragged ? 1 : in.batch, strides.row,
                            strides.head, strides.batch, panel_columns, box_rows},
                           map);
}

template <class T>
Status encode_bwd_maps(const BwdParams& in, BwdKernelParams* out) {
  constexpr int kPanel = Panel<T::kHeadDim>::kWidth;
  constexpr int kPanelV = Panel<T::kHeadDimV>::kWidth;
  Status status =
      encode_bwd_map(in, "q", in.q, true, in.head_dim, in.q_strides, kPanel, T::kBlockM, &out->q);
  if (status.ok()) {
    status = encode_bwd_map(in, "dout", in.dout, true, in.head_dim_v, in.dout_strides, kPanelV,
                            T::kBlockM, &out->dout);
  }
  if (status.ok()) {
    status = encode_bwd_map(in, "k", in.k, false, in.head_dim, in.k_strides, kPanel, T::kBlockN,
                            &out->k);
  }
  if (status.ok()) {
    status = encode_bwd_map(in, "v", in.v, false, in.head_dim_v, in.v_strides, kPanelV, T::kBlockN,
                            &out->v);
  }
  return status;
}

// Once per device: more than 48 KB of shared memory must be asked for.
template <class T>
Status prepare_bwd_kernel(int device) {
  static std::atomic<bool> prepared[kMaxDevices];
  if (device < kMaxDevices && prepared[device].load()) return {};
  const cudaError_t error = cudaFuncSetAttribute(
      bwd_kernel<T>, cudaFuncAttributeMaxDynamicSharedMemorySize, bwd_shared_bytes<T>());
  if (error != cudaSuccess) return cuda_status("preparing the backward kernel", error);
  if (device < kMaxDevices) prepared[device].store(true);
  return {};
}

template <class T>
Status describe_bwd(int grid, BwdPlan* plan) {
  cudaFuncAttributes attributes;
  const cudaError_t error = cudaFuncGetAttributes(&attributes, bwd_kernel<T>);
  if (error != cudaSuccess) return cuda_status("asking for the backward kernel's resources", error);
  *plan = {T::kBlockM,
           T::kBlockN,
           T::kHeadDim,
           T::kHeadDimV,
           T::kQStages,
           T::kThreads,
           attributes.numRegs,
           bwd_shared_bytes<T>(),
           int(attributes.localSizeBytes),
           grid};
  return {};
}

// Queues a kernel that may start while the one before it in the stream still runs, and waits in its
// own code for that one's results.
template <class Kernel>
cudaError_t launch_overlapped(Kernel kernel, unsigned grid, int threads, int shared_bytes,
                              cudaStream_t stream, const BwdKernelParams& params) {
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(grid);
  config.blockDim = dim3(unsigned(threads));
  config.dynamicSmemBytes = size_t(shared_bytes);
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, params);
}

template <class T>
Status launch_bwd(const BwdParams& in, const DeviceInfo& device, cudaStream_t stream,
                  BwdPlan* plan) {
  BwdKernelParams params;
  fill_bwd_params(in, device, T::kBlockM, T::kBlockN, T::kHeadDim, T::kWholePairs, &params);
  const int grid = bwd_grid(in, device, params);
  Status status = prepare_bwd_kernel<T>(in.device);
  if (!status.ok()) return status;
  if (plan != nullptr) return describe_bwd<T>(grid, plan);
  status = encode_bwd_maps<T>(in, &params);
  if (!status.ok()) return status;

  cudaError_t error = cudaSuccess;
  if (in.cu_seqlens_q != nullptr || in.cu_seqlens_k != nullptr) {
    error = launch_bwd_plan(params, T::kBlockN, stream);
    if (error != cudaSuccess) return cuda_status("planning the backward", error);
  }
  const unsigned side_grid = unsigned(params.q_tiles_all) * unsigned(params.heads);
  bwd_preprocess_kernel<T><<<side_grid, kBwdSideThreads, 0, stream>>>(params);
  error = cudaGetLastError();
  if (error != cudaSuccess) return cuda_status("launching the backward's first kernel", error);
  error = launch_overlapped(bwd_kernel<T>, unsigned(grid), T::kThreads, bwd_shared_bytes<T>(),
                            stream, params);
  if (error != cudaSuccess) return cuda_status("launching the backward kernel", error);
  if constexpr (!T::kWholePairs) {
    error =
        launch_overlapped(bwd_postprocess_kernel<T>, side_grid, kBwdSideThreads, 0, stream, params);
    if (error != cudaSuccess) return cuda_status("launching the backward's last kernel", error);
  }
  return {};
}

template <class Schedules, class = void>
struct HasWhole : std::false_type {};
template <class Schedules>
struct HasWhole<Schedules, std::void_t<typename Schedules::Whole>> : std::true_type {};

// The kernels of these head dims.
template <class Element, int kHeadDim, int kHeadDimV>
Status launch_bwd_of(const BwdParams& in, const DeviceInfo& device, cudaStream_t stream,
                     BwdPlan* plan) {
  using Schedules = BwdScheduleOf<kHeadDim, kHeadDimV>;
  if constexpr (HasWhole<Schedules>::value) {
    using Whole = typename Schedules::Whole;
    static_assert(Whole::kBlockM == Schedules::Type::kBlockM, "they share the workspace's sizes");
    if (takes_whole_pairs(in, device)) {
      return launch_bwd<BwdTraits<Element, kHeadDim, kHeadDimV, Whole>>(in, device, stream, plan);
    }
  }
  return launch_bwd<BwdTraits<Element, kHeadDim, kHeadDimV, typename Schedules::Type>>(
      in, device, stream, plan);
}

}  // namespace flash_attn3
