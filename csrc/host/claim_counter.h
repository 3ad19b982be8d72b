// Counters by which CTAs claim tiles, without a memset before each launch.
//
// A launch makes as many claims as it has tiles: the first tile of each CTA is not claimed, and
// each claims until it gets no tile; one of a pair of CTAs claims for both. The kernel counts with
// wrap-around at that number, so a counter is 0 again when the launch ends. What remains is that no
// two launches that may run at once share one: each stream has its own, and each launch captured
// into a graph gets one for good. (A graph instantiated twice and run twice at once shares it; its
// outputs would be one another's too.)
#pragma once

#include <cstdint>

#include <cuda_runtime.h>

namespace flash_attn3 {

// Null where there is none to be had: a first call under capture, or all taken. The caller then
// zeros one in its workspace. The device must be current.
int32_t* claim_counter(int device, cudaStream_t stream);

}  // namespace flash_attn3
