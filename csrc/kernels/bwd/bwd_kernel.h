// The persistent backward kernel: set-up, then each warpgroup takes its role.
#pragma once

#include <type_traits>

#include "kernels/bwd/bwd_key_consumer.h"
#include "kernels/bwd/bwd_pair_consumer.h"
#include "kernels/bwd/bwd_producer.h"
#include "kernels/bwd/bwd_role_consumer.h"
#include "kernels/bwd/bwd_scheduler.h"
#include "kernels/common/memory.h"

namespace flash_attn3 {

template <class T>
__device__ __forceinline__ void init_bwd_barriers(typename T::SharedMemory& shared,
                                                  bool deterministic) {
  constexpr int kOfWarpgroup = 4 * kArrivalsPerWarp;
  constexpr int kOfAll = T::kConsumerWarps * kArrivalsPerWarp;
  for (int stage = 0; stage < T::kKvStages; ++stage) {
    mbarrier_init(&shared.k_full[stage], 1);
    mbarrier_init(&shared.v_full[stage], 1);
    mbarrier_init(&shared.k_tail[stage], 1);
    mbarrier_init(&shared.v_tail[stage], 1);
    mbarrier_init(&shared.kv_empty[stage], kOfAll);
  }
  for (int stage = 0; stage < T::kQStages; ++stage) {
    mbarrier_init(&shared.q_full[stage], 1);
    mbarrier_init(&shared.q_tail[stage], 1);
    mbarrier_init(&shared.q_empty[stage], kOfAll);
  }
  for (int stage = 0; stage < T::kDoutStages; ++stage) {
    mbarrier_init(&shared.dout_full[stage], 1);
    mbarrier_init(&shared.dout_tail[stage], 1);
    mbarrier_init(&shared.dout_empty[stage], kOfAll);
  }
  for (int slot = 0; slot < T::kDsSlots; ++slot) {
    mbarrier_init(&shared.ds_full[slot], T::kRoles ? kOfWarpgroup : kOfAll);
    mbarrier_init(&shared.ds_empty[slot], kOfAll);
  }
  for (int slot = 0; slot < T::kPSlots; ++slot) {
    mbarrier_init(&shared.p_full[slot], kOfWarpgroup);
    mbarrier_init(&shared.p_empty[slot], kOfWarpgroup);
  }
  for (int slot = 0; slot < T::kTileSlots; ++slot) {
    mbarrier_init(&shared.tile_full[slot], 1);
    // Producer and tail warp too, and the turn warp's lanes where they run.
    mbarrier_init(&shared.tile_empty[slot],
                  2 * kArrivalsPerWarp + (deterministic ? T::kTurnChains : 0) + kOfAll);
  }
  mbarrier_init(&shared.loaded, 1);
  for (int chain = 0; chain < T::kTurnChains; ++chain) {
    for (int slot = 0; slot < T::kTurnSlots; ++slot) {
      mbarrier_init(&shared.turn_come[chain][slot], 1);
      mbarrier_init(&shared.turn_done[chain][slot], kOfWarpgroup);
    }
  }
  mbarrier_init_fence();
}

template <class T, int kDqColumns, bool kSoftcap>
using BwdKeysConsumer = std::conditional_t<T::kWholePairs, BwdPairConsumer<T, kDqColumns>,
                                           BwdKeyConsumer<T, kDqColumns, kSoftcap>>;

// Code of its own for each consumer only where they differ at compile time.
template <class T, bool kSoftcap>
__device__ __forceinline__ void run_bwd_consumer(const BwdKernelParams& params,
                                                 typename T::SharedMemory& shared, int w) {
  if constexpr (T::kRoles) {
    if (w == 0) {
      consume_tiles<T>(shared, BwdRoleConsumer<T, 0, kSoftcap>{params, shared, {params, shared}});
    } else {
      consume_tiles<T>(shared, BwdRoleConsumer<T, 1, kSoftcap>{params, shared, {params, shared}});
    }
  } else if constexpr (T::kDqColumns0 == T::kDqColumns1) {
    using Consumer = BwdKeysConsumer<T, T::kDqColumns0, kSoftcap>;
    consume_tiles<T>(shared, Consumer{params, shared, w, {params, shared}});
  } else if (w == 0) {
    using Consumer = BwdKeysConsumer<T, T::kDqColumns0, kSoftcap>;
    consume_tiles<T>(shared, Consumer{params, shared, 0, {params, shared}});
  } else {
    using Consumer = BwdKeysConsumer<T, T::kDqColumns1, kSoftcap>;
    consume_tiles<T>(shared, Consumer{params, shared, 1, {params, shared}});
  }
}

template <class T>
__global__ void __launch_bounds__(T::kThreads, 1)
    bwd_kernel(const __grid_constant__ BwdKernelParams params) {
  // Swizzled panels must start at multiples of 1,024 bytes; without static shared memory the
  // dynamic part starts there.
  extern __shared__ __align__(1024) uint8_t raw[];
  auto& shared = *reinterpret_cast<typename T::SharedMemory*>(raw);

  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
  const int lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    init_bwd_barriers<T>(shared, params.turns != nullptr);
    prefetch_tensor_map(&params.q);
    prefetch_tensor_map(&params.dout);
    prefetch_tensor_map(&params.k);
    prefetch_tensor_map(&params.v);
  }
  __syncthreads();
  grid_dependency_wait();

  if (warp < 4) {
    registers_give_back<T::kProducerRegisters>();
    if (warp == 0) {
      BwdProducer<T>{params, shared, lane}.run();
    } else if (warp == 1) {
      BwdScheduler<T>{params, shared, lane}.run();
    } else if (warp == 2) {
      BwdTail<T>{params, shared, lane}.run();
    } else if (params.turns != nullptr) {
      BwdTurns<T>{params, shared, lane}.run();
    }
  } else {
    registers_take<T::kConsumerRegisters>();
    if (T::kWholePairs || (T::kSoftcapApart && params.tanh_factor == 0.0f)) [[likely]] {
      run_bwd_consumer<T, false>(params, shared, warp / 4 - 1);
    } else {
      run_bwd_consumer<T, true>(params, shared, warp / 4 - 1);
    }
  }
}

}  // namespace flash_attn3
