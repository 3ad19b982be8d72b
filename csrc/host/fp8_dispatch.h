// e4m3 forward: the declarations of its instantiations.
#pragma once

#include "host/fwd_dispatch.h"
#include "kernels/fp8/value_layout.h"

namespace flash_attn3 {

// Blocks of V of all sequences, for one head.
inline int64_t value_blocks(const FwdParams& in) {
  const bool ragged = in.cu_seqlens_k != nullptr;
  return ragged ? in.total_k / ValueLayout::kKeys + in.batch
                : int64_t(blocks_for(in.max_seqlen_k, ValueLayout::kKeys)) * in.batch;
}

// V's rows, transposed, into in.v_room.
Status transpose_values(const Fp8Params& in, cudaStream_t stream);

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
