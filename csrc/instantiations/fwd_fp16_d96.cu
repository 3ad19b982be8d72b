#include "kernels/fwd/fwd_launch.h"

namespace flash_attn3 {

Status launch_fwd_fp16_d96(const FwdParams& params, const DeviceInfo& device, cudaStream_t stream,
                           FwdPlan* plan) {
  return launch_fwd_of<__half, 96, 96>(params, device, stream, plan);
}

}  // namespace flash_attn3
