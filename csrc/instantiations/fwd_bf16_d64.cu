#include "kernels/fwd/fwd_launch.h"

namespace flash_attn3 {

Status launch_fwd_bf16_d64(const FwdParams& params, const FwdContext& context,
                             cudaStream_t stream, FwdPlan* plan) {
  using Traits = FwdTraits<__nv_bfloat16, 64, 64, FwdScheduleOf<64, 64>::Type>;
  return launch_fwd<Traits>(params, context, stream, plan);
}

}  // namespace flash_attn3
