#include "kernels/fwd/fwd_launch.h"

namespace flash_attn3 {

Status launch_fwd_bf16_d96(const FwdParams& params, const FwdContext& context,
                             cudaStream_t stream, FwdPlan* plan) {
  using Traits = FwdTraits<__nv_bfloat16, 96, 96, FwdScheduleOf<96, 96>::Type>;
  return launch_fwd<Traits>(params, context, stream, plan);
}

}  // namespace flash_attn3
