#define CUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED  // KV blocks of 112
#include "kernels/fwd/fwd_launch.h"

namespace flash_attn3 {

Status launch_fwd_fp16_d64(const FwdParams& params, const DeviceInfo& device, cudaStream_t stream,
                           FwdPlan* plan) {
  return launch_fwd_of<__half, 64, 64>(params, device, stream, plan);
}

}  // namespace flash_attn3
