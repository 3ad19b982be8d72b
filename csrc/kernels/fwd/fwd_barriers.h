// Set-up that the bf16 and the e4m3 forward kernel share, by one thread before __syncthreads().
#pragma once

#include "kernels/fwd/fwd_params.h"
#include "kernels/fwd/fwd_traits.h"

namespace flash_attn3 {

// The barriers of Q, K, tiles, and v_empty. `tile_readers` are the warps beside the consumers' that
// release a tile.
template <class T>
__device__ __forceinline__ void init_shared_barriers(typename T::SharedMemory& shared,
                                                     int tile_readers) {
  constexpr int kConsumerArrivals = 4 * T::kConsumers * kArrivalsPerWarp;
  for (int stage = 0; stage < T::kQueryStages; ++stage) {
    for (int w = 0; w < T::kConsumers; ++w) {
      mbarrier_init(&shared.q_full[stage][w], 1);
      mbarrier_init(&shared.q_empty[stage][w], 4 * kArrivalsPerWarp);
    }
  }
  for (int stage = 0; stage < T::kKeyStages; ++stage) {
    mbarrier_init(&shared.k_full[stage], 1);
    mbarrier_init(&shared.k_empty[stage], T::kPair * kConsumerArrivals);
  }
  for (int stage = 0; stage < T::kValueStages; ++stage) {
    mbarrier_init(&shared.v_empty[stage], T::kPair * kConsumerArrivals);
  }
  for (int slot = 0; slot < T::kTileSlots; ++slot) {
    mbarrier_init(&shared.tile_full[slot], 1);
    mbarrier_init(&shared.tile_empty[slot], tile_readers * kArrivalsPerWarp + kConsumerArrivals);
  }
  for (int odd = 0; odd < 2; ++odd) mbarrier_init(&shared.tile_wanted[odd], 1);
  if constexpr (T::kPair > 1) {
    for (int odd = 0; odd < 2; ++odd) {
      mbarrier_init(&shared.claim_full[odd], 1);
      mbarrier_init(&shared.claim_empty[odd], 1);
    }
  }
  shared.nonzero = 1;
}

// All threads: barriers are set up from here on, those of the other CTA of a pair too.
template <class T>
__device__ __forceinline__ void barriers_are_ready() {
  if constexpr (T::kPair == 1) {
    __syncthreads();
  } else {
    cluster_sync();
  }
}

template <class T>
__device__ __forceinline__ void prefetch_tensor_maps(const FwdKernelParams& params) {
  prefetch_tensor_map(&params.q);
  prefetch_tensor_map(&params.k);
  prefetch_tensor_map(&params.v);
  if constexpr (T::kStagedOut) prefetch_tensor_map(&params.out_map);
}

}  // namespace flash_attn3
