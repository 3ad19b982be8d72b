// Forward: what every instantiation shares on the host, and the declarations of them all.
#pragma once

#include <cuda_runtime.h>

#include "host/device.h"
#include "host/params.h"
#include "kernels/fwd/fwd_params.h"

namespace flash_attn3 {

// What is wrong with a call, whatever its dtype.
Status check_fwd(const FwdParams& in);

// True where tiles are handed out by an atomic counter (dense calls).
bool wants_dynamic_order(const FwdParams& in);

// Everything but the tensor maps. A tile of tile_m rows is computed by `pair` CTAs.
void fill_fwd_params(const FwdParams& in, const DeviceInfo& device, int tile_m, int pair,
                     FwdKernelParams* out);

// CTAs.
int fwd_grid(const FwdParams& in, const DeviceInfo& device, const FwdKernelParams& params,
             int pair);

// Queues what the kernel expects in its workspace, and gives it a counter for its tiles.
Status prepare_tile_order(const FwdParams& in, int tile_m, cudaStream_t stream,
                          FwdKernelParams* params);

// plan != nullptr: only describe.
#define FLASH_ATTN3_DECLARE_FWD(NAME) \
  Status launch_fwd_##NAME(const FwdParams&, const DeviceInfo&, cudaStream_t, FwdPlan* plan);
FLASH_ATTN3_DECLARE_FWD(bf16_d64)
FLASH_ATTN3_DECLARE_FWD(bf16_d96)
FLASH_ATTN3_DECLARE_FWD(bf16_d128)
FLASH_ATTN3_DECLARE_FWD(bf16_d192_128)
FLASH_ATTN3_DECLARE_FWD(bf16_d192)
FLASH_ATTN3_DECLARE_FWD(bf16_d256)
FLASH_ATTN3_DECLARE_FWD(fp16_d64)
FLASH_ATTN3_DECLARE_FWD(fp16_d96)
FLASH_ATTN3_DECLARE_FWD(fp16_d128)
FLASH_ATTN3_DECLARE_FWD(fp16_d192_128)
FLASH_ATTN3_DECLARE_FWD(fp16_d192)
FLASH_ATTN3_DECLARE_FWD(fp16_d256)
#undef FLASH_ATTN3_DECLARE_FWD

}  // namespace flash_attn3
