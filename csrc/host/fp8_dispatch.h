// e4m3 forward: the declarations of its instantiations.
#pragma once

#include "host/fwd_dispatch.h"

namespace flash_attn3 {

// plan != nullptr: only describe.
#define FLASH_ATTN3_DECLARE_FWD(NAME) \
  Status launch_fwd_##NAME(const Fp8Params&, const DeviceInfo&, cudaStream_t, FwdPlan* plan);
FLASH_ATTN3_DECLARE_FWD(e4m3_d64)
FLASH_ATTN3_DECLARE_FWD(e4m3_d128)
FLASH_ATTN3_DECLARE_FWD(e4m3_d192_128)
FLASH_ATTN3_DECLARE_FWD(e4m3_d256)
#undef FLASH_ATTN3_DECLARE_FWD

// " e4m3 (64,64) ...": what this build has, for flash_attn3_build_info().
std::string compiled_e4m3();

}  // namespace flash_attn3
