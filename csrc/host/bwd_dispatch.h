// Backward: what every instantiation shares on the host, and the declarations of them all.
#pragma once

#include <string>

#include <cuda_runtime.h>

#include "host/device.h"
#include "host/params.h"
#include "kernels/bwd/bwd_params.h"

namespace flash_attn3 {

// Bytes of each part of the workspace, in its order; every part starts at a multiple of 256.
struct BwdWorkspace {
  int64_t plan, rows, dq_sum, turns;

  int64_t total() const { return plan + rows + dq_sum + turns; }
};

BwdWorkspace bwd_workspace(const BwdParams& in, int tile_m, int compiled_head_dim);

// Whether a call takes the schedule `Whole` of its head dims, where there is one.
bool takes_whole_pairs(const BwdParams& in, const DeviceInfo& device);

// Everything but the tensor maps.
void fill_bwd_params(const BwdParams& in, const DeviceInfo& device, int tile_m, int tile_n,
                     int compiled_head_dim, bool whole_pairs, BwdKernelParams* out);

int bwd_grid(const BwdParams& in, const DeviceInfo& device, const BwdKernelParams& params);

// Ragged calls: the order of the KV tiles, and zeros in rows that no sequence covers.
cudaError_t launch_bwd_plan(const BwdKernelParams& params, int tile_n, cudaStream_t stream);

// " bf16 (64,64) ...": the compiled kernels, for flash_attn3_build_info().
std::string bwd_kernel_list();

// plan != nullptr: only describe.
#define FLASH_ATTN3_DECLARE_BWD(NAME) \
  Status launch_bwd_##NAME(const BwdParams&, const DeviceInfo&, cudaStream_t, BwdPlan* plan);
FLASH_ATTN3_DECLARE_BWD(bf16_d64)
FLASH_ATTN3_DECLARE_BWD(bf16_d96)
FLASH_ATTN3_DECLARE_BWD(bf16_d128)
FLASH_ATTN3_DECLARE_BWD(bf16_d192_128)
FLASH_ATTN3_DECLARE_BWD(bf16_d192)
FLASH_ATTN3_DECLARE_BWD(bf16_d256)
FLASH_ATTN3_DECLARE_BWD(fp16_d64)
FLASH_ATTN3_DECLARE_BWD(fp16_d96)
FLASH_ATTN3_DECLARE_BWD(fp16_d128)
FLASH_ATTN3_DECLARE_BWD(fp16_d192_128)
FLASH_ATTN3_DECLARE_BWD(fp16_d192)
FLASH_ATTN3_DECLARE_BWD(fp16_d256)
#undef FLASH_ATTN3_DECLARE_BWD

}  // namespace flash_attn3
