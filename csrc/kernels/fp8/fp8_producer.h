// The producer warp of the e4m3 forward: Q, K, V by TMA, and their scales beside them.
#pragma once

#include "kernels/fp8/fp8_scales.h"
#include "kernels/fp8/fp8_traits.h"
#include "kernels/fwd/fwd_producer.h"

namespace flash_attn3 {

template <class T>
struct Fp8Producer : ProducerLoop<T, Fp8Producer<T>> {
  // Scales of 32 blocks, one a lane, from the block of the last reading downwards.
  float k_scales = 1.0f;
  float v_scales = 1.0f;
  float value_unit = 1.0f;  // of the block before; of Promotion::kCarried: of this one
  float largest_unit = 1.0f;

  __device__ __forceinline__ int sequence_of_tile() const {
    return this->shared.scales[this->tile_ring.slot()].sequence;
  }

  __device__ __forceinline__ float read_scales(const ScaleView& view, const TileInfo& tile,
                                               int n) const {
    if (view.data == nullptr) return 1.0f;
    const float* scales = first_scale(view, this->params.cu_seqlens_k != nullptr,
                                      sequence_of_tile(), tile.head_kv, tile.k_base);
    return scales[view.block_rows == 0 ? 0 : larger(n - this->lane, 0)];
  }

  // The scale of block n; blocks come one after the other, from the tile's last.
  __device__ __forceinline__ float next_scale(const ScaleView& view, const TileInfo& tile, int n,
                                              float& held) const {
    const int visited = tile.n_end - 1 - n;
    if (visited % 32 == 0) held = read_scales(view, tile, n);
    return __shfl_sync(0xffffffffu, held, visited % 32);
  }

  __device__ __forceinline__ void note_k(const TileInfo& tile, int n) {
    const float scale = next_scale(this->params.k_scale, tile, n, k_scales);
    if (this->lane == 0) this->shared.k_scale[this->k_ring.slot()] = scale;
  }

  // Of Promotion::kCarried the scale is the unit, and `carry` leads to the next block's: scales are
  // read one block ahead. One that is 2^80 times smaller than the largest before it in the tile
  // counts as that, so that O, relative to it, does not overflow.
  __device__ __forceinline__ ValueScale next_carried_scale(const TileInfo& tile, int n) {
    constexpr float kSmallest = 1.1754944e-38f, kOfLargest = 8.2718061e-25f;
    const bool first = n == tile.n_end - 1;
    float largest = first ? kSmallest : largest_unit;
    const auto scale_of = [&](int block) {
      const float scale = next_scale(this->params.v_scale, tile, block, v_scales);
      const float least = fmaxf(largest * kOfLargest, kSmallest);
      const float unit = scale < least ? least : scale;  // NaN stays
      largest = fmaxf(largest, unit);
      return unit;
    };
    const float unit = first ? scale_of(n) : value_unit;
    value_unit = scale_of(n - 1);  // a block that is not there has the first one's
    largest_unit = largest;
    return {unit == value_unit ? 1.0f : __fdividef(unit, value_unit), 1.0f, unit};
  }

  // Units between 2^-40 and 2^40 leave O's sums far from both ends of fp32.
  __device__ __forceinline__ ValueScale next_value_scale(const TileInfo& tile, int n) {
    constexpr float kSmallestUnit = 9.094947e-13f, kLargestUnit = 1.0995116e12f;
    const float scale = next_scale(this->params.v_scale, tile, n, v_scales);
    const float before = value_unit;
    value_unit = fminf(fmaxf(scale, kSmallestUnit), kLargestUnit);
    const bool same = n == tile.n_end - 1 || before == value_unit;
    return {same ? 1.0f : __fdividef(before, value_unit),
            scale == value_unit ? 1.0f : __fdividef(scale, value_unit), value_unit};
  }

  __device__ __forceinline__ void load_v(const TileInfo& tile, int n) {
    const ValueScale scale = T::kCarried ? next_carried_scale(tile, n) : next_value_scale(tile, n);
    if constexpr (T::kTransposes) {
      const int stage = raw_ring.slot();
      mbarrier_wait(&this->shared.v_raw_empty[stage], raw_ring.parity() ^ 1);
      if (this->lane == 0) {
        this->shared.v_raw_scale[stage] = scale;
        mbarrier_arrive_expect_bytes(&this->shared.v_raw_full[stage], T::kValueBytes);
        copy_panels<typename T::ValuePanel>(
            this->params.v, &this->shared.v_raw_full[stage], kReadOften, this->shared.v_raw[stage],
            T::kBlockN, tile.k_base + n * T::kBlockN, tile.head_kv, tile.k_batch);
      }
      __syncwarp();
      raw_ring.advance();
    } else {
      const int stage = this->v_ring.slot();
      mbarrier_wait(&this->shared.v_empty[stage], this->v_ring.parity() ^ 1);
      if (this->lane == 0) {
        this->shared.v_scale[stage] = scale;
        const bool ragged = this->params.cu_seqlens_k != nullptr;
        const int first = ragged ? tile.k_base / T::kBlockN + sequence_of_tile()
                                 : sequence_of_tile() * this->params.v_blocks;
        mbarrier_arrive_expect_bytes(&this->shared.v_full[stage], T::kValueBytes);
        cute::SM90_TMA_LOAD_4D::copy(&this->params.v, &this->shared.v_full[stage], kReadOften,
                                     this->shared.v[stage], 0, 0, tile.head_kv, first + n);
      }
      __syncwarp();
      this->v_ring.advance();
    }
  }

  RingPosition<T::kRawStages> raw_ring;
};

}  // namespace flash_attn3
