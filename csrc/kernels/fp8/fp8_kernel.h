// The persistent e4m3 forward kernel: set-up, then each warpgroup takes its role.
#pragma once

#include "kernels/fp8/fp8_carried_consumer.h"
#include "kernels/fp8/fp8_consumer.h"
#include "kernels/fp8/fp8_producer.h"
#include "kernels/fp8/fp8_scales.h"
#include "kernels/fp8/fp8_transpose.h"
#include "kernels/fwd/fwd_barriers.h"
#include "kernels/fwd/fwd_scheduler.h"

namespace flash_attn3 {

template <class T>
__global__ void __launch_bounds__(T::kThreads, 1)
    fp8_fwd_kernel(const __grid_constant__ Fp8KernelParams params) {
  extern __shared__ __align__(1024) uint8_t raw[];
  auto& shared = *reinterpret_cast<typename T::SharedMemory*>(raw);

  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
  const int lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    // The producer reads tiles too, and so do the transposing warps.
    init_shared_barriers<T>(shared, 1 + T::kTransposers);
    for (int stage = 0; stage < T::kRawStages; ++stage) {
      mbarrier_init(&shared.v_raw_full[stage], 1);
      mbarrier_init(&shared.v_raw_empty[stage], 2);
    }
    for (int stage = 0; stage < T::kValueStages; ++stage) {
      mbarrier_init(&shared.v_full[stage], T::kTransposes ? T::kTransposers : 1);
    }
    mbarrier_init_fence();
    prefetch_tensor_maps<T>(params);
  }
  if constexpr (T::kTensorSums) {
    constexpr int kWords = T::kOnesBytes / 16;
    constexpr int kPlaces = T::kCarried ? 1 : T::kValueStages;
    constexpr uint32_t kOnes = 0x38383838u;
    for (int i = threadIdx.x; i < kPlaces * kWords; i += T::kThreads) {
      uint8_t* place = T::kCarried ? shared.ones() : shared.v[i / kWords] + T::kValueBytes;
      // Split, even columns have the ones of each step's first 16 slots, odd ones of the others.
      const uint32_t word = T::kSplitSums && i % 2 == 1 ? 0 : kOnes;
      reinterpret_cast<uint4*>(place)[i % kWords] = make_uint4(word, word, word, word);
    }
    fence_shared_to_async_proxy();
  }
  __syncthreads();

  if (warp < 4) {
    registers_give_back<T::kProducerRegisters>();
    if (warp == 0) {
      Fp8Producer<T>{{params, shared, lane}}.run();
    } else if (warp == 1) {
      FwdScheduler<T>{params, shared, lane}.run();
    } else if constexpr (T::kTransposes) {
      Fp8Transposer<T>{params, shared, warp - 2, lane}.run();
    }
  } else {
    registers_take<T::kConsumerRegisters>();
    if constexpr (T::kCarried) {
      Fp8CarriedConsumer<T>{{{params, shared, {params}, warp / 4 - 1}, params}}.run();
    } else {
      Fp8Consumer<T>{{params, shared, {params}, warp / 4 - 1}, params}.run();
    }
  }
}

}  // namespace flash_attn3
