#include "kernels/fwd/fwd_launch.h"

namespace flash_attn3 {

Status launch_fwd_bf16_d96(const FwdParams& params, const DeviceInfo& device, cudaStream_t stream,
                           FwdPlan* plan) {
  return launch_fwd_of<__nv_bfloat16, 96, 96>(params, device, stream, plan);
}

}  // namespace flash_attn3
