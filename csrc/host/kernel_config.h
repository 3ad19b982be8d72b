// The one table of compiled head dims and their schedules. Host and kernels both ask it.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "kernels/fwd/fwd_traits.h"

namespace flash_attn3 {

// Consumers, KV block, stages of K, of V, of Q, where Q lies, how O leaves, scores held back
// behind P V. `Long`, where it stands, is for long calls: larger tiles, which waste more at causal
// edges and where lengths are no multiple. `Pairs` is for long dense calls.
template <int kHeadDim, int kHeadDimV>
struct FwdScheduleOf;

// void: a pair of head dims has none.
struct NoOtherSchedules {
  using Long = void;
  using Pairs = void;
};

// Rows and keys from which one of these is taken, without and with a causal edge.
struct LongFrom {
  int full;
  int causal;
};
constexpr LongFrom kLongFrom = {2048, 6144};
constexpr LongFrom kPairsFrom = {1024, 2048};
// An odd number of tiles is taken by pairs from here on.
constexpr int kOddTilesFrom = 64;

template <>
struct FwdScheduleOf<64, 64> : NoOtherSchedules {
  using Type = FwdSchedule<2, 128, 4, 4, 2, QuerySource::kRegisters, OutPath::kStaged, HeldNone>;
  using Long =
      FwdSchedule<3, 112, 4, 4, 2, QuerySource::kShared, OutPath::kStaged, Held<36, false>>;
};
template <>
struct FwdScheduleOf<96, 96> : NoOtherSchedules {
  using Type = FwdSchedule<2, 128, 3, 3, 2, QuerySource::kRegisters, OutPath::kStaged, HeldNone>;
};
template <>
struct FwdScheduleOf<128, 128> : NoOtherSchedules {
  using Type =
      FwdSchedule<2, 128, 3, 2, 1, QuerySource::kRegisters, OutPath::kStaged, Held<16, true>>;
};
template <>
struct FwdScheduleOf<192, 128> : NoOtherSchedules {
  using Type = FwdSchedule<2, 128, 2, 2, 1, QuerySource::kShared, OutPath::kDirect, HeldNone>;
  using Pairs = Paired<Type>;
};
template <>
struct FwdScheduleOf<192, 192> : NoOtherSchedules {
  using Type = FwdSchedule<2, 96, 2, 2, 1, QuerySource::kShared, OutPath::kDirect, HeldNone>;
  using Pairs = Paired<Type>;
};
template <>
struct FwdScheduleOf<256, 256> : NoOtherSchedules {
  using Type = FwdSchedule<2, 80, 2, 2, 1, QuerySource::kShared, OutPath::kDirect, HeldNone>;
  using Pairs = Paired<Type>;
};

}  // namespace flash_attn3
