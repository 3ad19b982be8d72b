// Fp8Params to a launch of one compiled e4m3 forward kernel. Included by the instantiations alone.
#pragma once

#include <algorithm>
#include <type_traits>

#include "host/fp8_dispatch.h"
#include "kernels/fp8/fp8_config.h"
#include "kernels/fp8/fp8_kernel.h"
#include "kernels/fwd/fwd_launch.h"

namespace flash_attn3 {

inline ScaleView scale_view(const Fp8Scale& scale) {
  return {scale.data, scale.batch_stride, scale.head_stride, scale.block_rows};
}

template <class T>
Status encode_fp8_maps(const FwdParams& in, Fp8KernelParams* out) {
  const bool ragged_q = in.cu_seqlens_q != nullptr;
  const bool ragged_k = in.cu_seqlens_k != nullptr;
  const int64_t q_rows = ragged_q ? in.total_q : in.max_seqlen_q;
  const int64_t q_batch = ragged_q ? 1 : in.batch;
  const int64_t k_rows = ragged_k ? in.total_k : in.max_seqlen_k;
  const int64_t k_batch = ragged_k ? 1 : in.batch;
  const auto map = [](const char* name, const void* data, MapElement element, int64_t columns,
                      int64_t rows, int64_t heads, int64_t batch, const Strides& strides,
                      int box_columns, int box_rows) {
    return TensorMapShape{name,  data,        element,      columns,       rows,        heads,
                          batch, strides.row, strides.head, strides.batch, box_columns, box_rows};
  };
  constexpr auto kByte = MapElement::kByte;
  Status status = encode_tensor_map(map("q", in.q, kByte, in.head_dim, q_rows, in.heads, q_batch,
                                        in.q_strides, T::QueryPanel::kWidth, T::kRowsPerConsumer),
                                    &out->q);
  if (status.ok()) {
    status = encode_tensor_map(map("k", in.k, kByte, in.head_dim, k_rows, in.heads_kv, k_batch,
                                   in.k_strides, T::QueryPanel::kWidth, T::kBlockN),
                               &out->k);
  }
  if (status.ok() && T::kTransposes) {
    status = encode_tensor_map(map("v", in.v, kByte, in.head_dim_v, k_rows, in.heads_kv, k_batch,
                                   in.v_strides, T::ValuePanel::kWidth, T::kBlockN),
                               &out->v);
  } else if (status.ok()) {
    // [blocks][Hk][Dv][128], as (slot, column, head, block).
    const int64_t head = int64_t(in.head_dim_v) * ValueLayout::kKeys;
    const Strides strides{head * in.heads_kv, ValueLayout::kKeys, head};
    status = encode_tensor_map(map("v", in.v, kByte, ValueLayout::kKeys, in.head_dim_v, in.heads_kv,
                                   value_blocks(in), strides, ValueLayout::kKeys, T::kHeadDimV),
                               &out->v);
  }
  if (status.ok() && T::kStagedOut) {
    status =
        encode_tensor_map(map("out", in.out, MapElement::kBFloat16, in.head_dim_v, q_rows, in.heads,
                              q_batch, in.out_strides, Panel<T::kHeadDimV>::kWidth, 16),
                          &out->out_map);
  }
  return status;
}

template <class T>
Status launch_fp8(const Fp8Params& in, const DeviceInfo& device, cudaStream_t stream,
                  FwdPlan* plan) {
  Fp8KernelParams params;
  fill_fwd_params(in.fwd, device, T::kBlockM, 1, &params);
  params.q_scale = scale_view(in.q_scale);
  params.k_scale = scale_view(in.k_scale);
  params.v_scale = scale_view(in.v_scale);
  params.v_blocks = blocks_for(in.fwd.max_seqlen_k, ValueLayout::kKeys);
  const int grid = fwd_grid(in.fwd, device, params, 1);
  Status status = prepare_kernel<T>(fp8_fwd_kernel<T>, in.fwd.device);
  if (!status.ok()) return status;
  if (plan != nullptr) return describe_kernel<T>(fp8_fwd_kernel<T>, grid, plan);
  status = encode_fp8_maps<T>(in.fwd, &params);
  if (status.ok()) status = prepare_tile_order(in.fwd, T::kBlockM, stream, &params);
  if (!status.ok()) return status;
  return launch_kernel<T>(fp8_fwd_kernel<T>, params, grid, in.fwd.sm_margin, stream);
}

template <int kHeadDim, int kHeadDimV, ValueSource kValueSource, class Schedule>
Status launch_fp8_by(const Fp8Params& in, const DeviceInfo& device, cudaStream_t stream,
                     FwdPlan* plan) {
  if (!Schedule::kTensorSums || in.exact_lse != 0) {
    return launch_fp8<Fp8Traits<kHeadDim, kHeadDimV, kValueSource, Schedule, LseSums::kExact>>(
        in, device, stream, plan);
  }
  if constexpr (Schedule::kTensorSums) {
    return launch_fp8<Fp8Traits<kHeadDim, kHeadDimV, kValueSource, Schedule, LseSums::kRounded>>(
        in, device, stream, plan);
  }
}

// Blocks that a tile can have at most.
inline int64_t most_blocks(const FwdParams& in, int block_m) {
  constexpr int64_t kKeys = ValueLayout::kKeys;
  int64_t blocks = blocks_for(in.max_seqlen_k, kKeys);
  if (in.window_left >= 0 && in.window_right >= 0) {
    const int64_t keys = int64_t(in.window_left) + in.window_right + block_m;
    blocks = std::min(blocks, (keys + kKeys - 2) / kKeys + 1);  // that begin anywhere in a block
  }
  return blocks;
}

template <int kHeadDim, int kHeadDimV>
Status launch_fp8_of(const Fp8Params& in, const DeviceInfo& device, cudaStream_t stream,
                     FwdPlan* plan) {
  using Rows = Fp8ScheduleOf<kHeadDim, kHeadDimV>;
  using Transposed = Fp8TransposedScheduleOf<kHeadDim, kHeadDimV>;
  using Short = typename Fp8ShortScheduleOf<kHeadDim, kHeadDimV>::Type;
  if (in.v_transposed != 0) {
    return launch_fp8_by<kHeadDim, kHeadDimV, ValueSource::kTransposed, typename Transposed::Type>(
        in, device, stream, plan);
  }
  if constexpr (!std::is_void_v<Short>) {
    if (most_blocks(in.fwd, 64 * Short::kConsumers) <= kShortBlocks) {
      return launch_fp8_by<kHeadDim, kHeadDimV, ValueSource::kRows, Short>(in, device, stream,
                                                                           plan);
    }
  }
  return launch_fp8_by<kHeadDim, kHeadDimV, ValueSource::kRows, typename Rows::Type>(in, device,
                                                                                     stream, plan);
}

}  // namespace flash_attn3
