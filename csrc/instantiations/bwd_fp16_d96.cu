#include "kernels/bwd/bwd_launch.h"

namespace flash_attn3 {

Status launch_bwd_fp16_d96(const BwdParams& params, const DeviceInfo& device, cudaStream_t stream,
                           BwdPlan* plan) {
  return launch_bwd_of<__half, 96, 96>(params, device, stream, plan);
}

}  // namespace flash_attn3
