#define CUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED  // V with eight columns of ones: 72, 136
#include "kernels/fp8/fp8_launch.h"

namespace flash_attn3 {

Status launch_fwd_e4m3_d192_128(const Fp8Params& params, const DeviceInfo& device,
                                cudaStream_t stream, FwdPlan* plan) {
  return launch_fp8_of<192, 128>(params, device, stream, plan);
}

}  // namespace flash_attn3
