// Every named barrier of the kernels, so that no id is used twice.
#pragma once

namespace flash_attn3 {

enum NamedBarrier : int {
  // 0 is __syncthreads().
  kTurn = 1,  // kTurn + w: consumer warpgroup w may go; w waits, the warpgroup before it arrives
  kQueryCleared = 4,  // kQueryCleared + w: w's warps have cleared its unused rows of Q
};

}  // namespace flash_attn3
