#define CUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED  // KV blocks of 80
#include "kernels/fwd/fwd_launch.h"

namespace flash_attn3 {

Status launch_fwd_bf16_d256(const FwdParams& params, const FwdContext& context,
                             cudaStream_t stream, FwdPlan* plan) {
  using Traits = FwdTraits<__nv_bfloat16, 256, 256, FwdScheduleOf<256, 256>::Type>;
  return launch_fwd<Traits>(params, context, stream, plan);
}

}  // namespace flash_attn3
