#include "kernels/bwd/bwd_launch.h"

namespace flash_attn3 {

Status launch_bwd_bf16_d192(const BwdParams& params, const DeviceInfo& device, cudaStream_t stream,
                            BwdPlan* plan) {
  return launch_bwd_of<__nv_bfloat16, 192, 192>(params, device, stream, plan);
}

}  // namespace flash_attn3
