// After the main kernel, one CTA for each query tile and head: sums of dQ to dQ.
#pragma once

#include "kernels/bwd/bwd_dq.h"
#include "kernels/bwd/bwd_preprocess.h"
#include "kernels/fwd/fwd_epilogue.h"

namespace flash_attn3 {

// A thread reads what the thread of the same number of consumer w added, and writes it as that
// thread would have.
template <class T, int kColumns>
__device__ __forceinline__ void write_dq_piece(const BwdKernelParams& params,
                                               const WorkspaceTile& tile, int head, int w,
                                               const float* sums) {
  using Element = typename T::Element;
  const int thread = threadIdx.x % 128;
  const int quad = thread % 4;
  const int first_row =
      tile.row0 + (T::kDqByRows ? w * 64 : 0) + thread / 32 * 16 + thread % 32 / 4;
  const int first_column = T::kDqByRows ? 0 : w * T::kDqColumns0;
#pragma unroll 2
  for (int i = 0; i < kColumns / 8; i += 4) {
    float4 four[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      four[j] = *reinterpret_cast<const float4*>(sums + dq_fragment_offset(i + j, thread));
    }
    const int column = first_column + (i + quad) * 8;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = first_row + 8 * h;
      // What lies in a row that is not in use is no number that matters: it gets 0.
      const bool used = row < tile.q.used;
      uint32_t r[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float low = h == 0 ? four[j].x : four[j].z;
        const float high = h == 0 ? four[j].y : four[j].w;
        r[j] = used ? pack_two<Element>(low * params.scale, high * params.scale) : 0u;
      }
      transpose_quad(r, quad);
      if (row < tile.q.rows && column < params.head_dim) {
        Element* out = static_cast<Element*>(params.dq) + tile.q.batch * params.dq_strides.batch +
                       (int64_t(tile.q.base) + row) * params.dq_strides.row +
                       head * params.dq_strides.head;
        *reinterpret_cast<uint4*>(out + column) = make_uint4(r[0], r[1], r[2], r[3]);
      }
    }
  }
}

template <class T>
__global__ void __launch_bounds__(kBwdSideThreads)
    bwd_postprocess_kernel(const __grid_constant__ BwdKernelParams params) {
  grid_dependency_wait();
  // [query tile][head]. From the end: what was added to last is then still in L2.
  const int64_t at = gridDim.x - 1 - blockIdx.x;
  const int head = int(at % params.heads);
  const WorkspaceTile tile = find_workspace_tile<T::kBlockM>(params, int(at / params.heads));
  if (tile.row0 >= tile.q.rows) return;
  const float* sums = params.dq_sum + at * (T::kBlockM * T::kHeadDim);
  if (threadIdx.x < 128) {
    write_dq_piece<T, T::kDqColumns0>(params, tile, head, 0, sums);
  } else {
    write_dq_piece<T, T::kDqColumns1>(params, tile, head, 1, sums + dq_piece_offset<T>(1));
  }
}

}  // namespace flash_attn3
