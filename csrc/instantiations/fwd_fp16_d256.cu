#define CUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED  // KV blocks of 80
#include "kernels/fwd/fwd_launch.h"

namespace flash_attn3 {

Status launch_fwd_fp16_d256(const FwdParams& params, const DeviceInfo& device, cudaStream_t stream,
                            FwdPlan* plan) {
  return launch_fwd_of<__half, 256, 256>(params, device, stream, plan);
}

}  // namespace flash_attn3
