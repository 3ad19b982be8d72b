// Tiles of panels in shared memory: brought by the copy engine, and their rows cleared.
#pragma once

#include <cute/arch/copy_sm90_tma.hpp>

#include "kernels/common/wgmma.h"

namespace flash_attn3 {

// What L2 is told of the data.
constexpr uint64_t kReadOnce = uint64_t(cute::TMA::CacheHintSm90::EVICT_FIRST);
constexpr uint64_t kReadAgain = uint64_t(cute::TMA::CacheHintSm90::EVICT_NORMAL);
constexpr uint64_t kReadOften = uint64_t(cute::TMA::CacheHintSm90::EVICT_LAST);

// One tile of `rows` rows as panels P, one copy each, counted at `barrier`.
template <class P>
__device__ __forceinline__ void copy_panels(const CUtensorMap& map, uint64_t* barrier,
                                            uint64_t hint, uint8_t* destination, int rows, int row,
                                            int head, int batch) {
#pragma unroll
  for (int panel = 0; panel < P::kCount; ++panel) {
    cute::SM90_TMA_LOAD_4D::copy(&map, barrier, hint, destination + panel * rows * P::kBytes,
                                 panel * P::kWidth, row, head, batch);
  }
}

// One half of such a tile of `rows` rows, to both CTAs of a pair; each has it counted at its
// barrier.
template <class P>
__device__ __forceinline__ void copy_half_to_both(const CUtensorMap& map, uint64_t* barrier,
                                                  uint64_t hint, uint8_t* destination, int rows,
                                                  uint32_t half, int row, int head, int batch) {
  const int first = int(half) * (rows / 2);
#pragma unroll
  for (int panel = 0; panel < P::kCount; ++panel) {
    cute::SM90_TMA_LOAD_MULTICAST_4D::copy(&map, barrier, uint16_t(3), hint,
                                           destination + (panel * rows + first) * P::kBytes,
                                           panel * P::kWidth, row + first, head, batch);
  }
}

// Rows first <= row < end of a tile of `rows` rows become 0, by one warp.
template <class P>
__device__ __forceinline__ void clear_panel_rows(uint8_t* tile, int rows, int first, int end,
                                                 int lane) {
#pragma unroll 1
  for (int panel = 0; panel < P::kCount; ++panel) {
    uint8_t* of_panel = tile + panel * rows * P::kBytes;
#pragma unroll 1
    for (int at = first * P::kBytes + lane * 16; at < end * P::kBytes; at += 32 * 16) {
      *reinterpret_cast<uint4*>(of_panel + at) = make_uint4(0, 0, 0, 0);
    }
  }
}

}  // namespace flash_attn3
