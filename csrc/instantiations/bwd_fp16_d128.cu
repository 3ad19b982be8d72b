#include "kernels/bwd/bwd_launch.h"

namespace flash_attn3 {

Status launch_bwd_fp16_d128(const BwdParams& params, const DeviceInfo& device, cudaStream_t stream,
                            BwdPlan* plan) {
  return launch_bwd_of<__half, 128, 128>(params, device, stream, plan);
}

}  // namespace flash_attn3
