// The device-side plan of a ragged call: order of the sequences and prefix sum of their tiles.
#pragma once

#include <cuda_runtime.h>

#include "kernels/fwd/fwd_params.h"

namespace flash_attn3 {

// One small kernel: cost linear in the number of sequences, nothing comes back to the host. It also
// writes 0 and -inf into rows that no sequence covers.
cudaError_t launch_ragged_plan(const FwdParams& in, const FwdKernelParams& params, int tile_m,
                               cudaStream_t stream);

}  // namespace flash_attn3
