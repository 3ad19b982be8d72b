// Tiles from global to shared memory by the copy engine.
#pragma once

#include <cute/arch/copy_sm90_tma.hpp>

#include "kernels/common/wgmma.h"

namespace flash_attn3 {

// What L2 is told of the data.
constexpr uint64_t kReadOnce = uint64_t(cute::TMA::CacheHintSm90::EVICT_FIRST);
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

}  // namespace flash_attn3
