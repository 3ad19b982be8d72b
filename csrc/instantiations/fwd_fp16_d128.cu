#include "kernels/fwd/fwd_launch.h"

namespace flash_attn3 {

Status launch_fwd_fp16_d128(const FwdParams& params, const DeviceInfo& device, cudaStream_t stream,
                            FwdPlan* plan) {
  return launch_fwd_of<__half, 128, 128>(params, device, stream, plan);
}

}  // namespace flash_attn3
