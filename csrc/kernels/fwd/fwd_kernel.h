// The persistent forward kernel: set-up, then each warpgroup takes its role.
#pragma once

#include "kernels/fwd/fwd_barriers.h"
#include "kernels/fwd/fwd_consumer.h"
#include "kernels/fwd/fwd_producer.h"
#include "kernels/fwd/fwd_scheduler.h"
#include "kernels/fwd/fwd_tail.h"

namespace flash_attn3 {

template <class T>
__global__ void __launch_bounds__(T::kThreads, 1)
    fwd_kernel(const __grid_constant__ FwdKernelParams params) {
  // Swizzled panels must start at multiples of 1,024 bytes; without static shared memory the
  // dynamic part starts there.
  extern __shared__ __align__(1024) uint8_t raw[];
  auto& shared = *reinterpret_cast<typename T::SharedMemory*>(raw);

  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
  const int lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    init_shared_barriers<T>(shared, 2);  // producer and tail warp read tiles too
    for (int stage = 0; stage < T::kValueStages; ++stage) {
      mbarrier_init(&shared.v_full[stage], 1);
      mbarrier_init(&shared.v_tail[stage], 1);
    }
    mbarrier_init_fence();
    prefetch_tensor_maps<T>(params);
  }
  barriers_are_ready<T>();

  if (warp < 4) {
    registers_give_back<T::kProducerRegisters>();
    if (warp == 0) {
      FwdProducer<T>{{params, shared, lane}}.run();
    } else if (warp == 1) {
      FwdScheduler<T>{params, shared, lane}.run();
    } else if (warp == 2) {
      FwdTail<T>{params, shared, lane}.run();
    }
  } else {
    registers_take<T::kConsumerRegisters>();
    FwdConsumer<T>{params, shared, {params}, warp / 4 - 1}.run();
  }
}

}  // namespace flash_attn3
