// The one table of compiled head dims of the backward and their schedules.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "kernels/bwd/bwd_traits.h"

namespace flash_attn3 {

// How consumers share the work, query rows a tile, stages of Q and dO and of K and V, registers of
// a consumer. `Whole`, where it stands, is for short calls (takes_whole_pairs() in bwd_api.cu).
template <int kHeadDim, int kHeadDimV>
struct BwdScheduleOf;

template <>
struct BwdScheduleOf<64, 64> {
  using Type = BwdSchedule<BwdSplit::kKeys, 128, 4, 2, 2, 232>;
  using Whole = BwdSchedule<BwdSplit::kKeys, 128, 4, 2, 2, 232, true>;
};
template <>
struct BwdScheduleOf<96, 96> {
  using Type = BwdSchedule<BwdSplit::kKeys, 64, 4, 4, 2, 232>;
  using Whole = BwdSchedule<BwdSplit::kKeys, 64, 4, 4, 2, 232, true>;
};
template <>
struct BwdScheduleOf<128, 128> {
  using Type = BwdSchedule<BwdSplit::kKeys, 64, 4, 2, 1, 240>;
  using Whole = BwdSchedule<BwdSplit::kKeys, 64, 4, 2, 1, 240, true>;
};
template <>
struct BwdScheduleOf<192, 128> {
  using Type = BwdSchedule<BwdSplit::kRoles, 64, 2, 2, 1, 232>;
};
template <>
struct BwdScheduleOf<192, 192> {
  using Type = BwdSchedule<BwdSplit::kRoles, 64, 2, 2, 1, 232>;
};
template <>
struct BwdScheduleOf<256, 256> {
  using Type = BwdSchedule<BwdSplit::kRoles, 64, 2, 2, 1, 240>;
};

}  // namespace flash_attn3
