// The one table of compiled head dims of the e4m3 forward and their schedules.
#pragma once

#include "kernels/fp8/fp8_traits.h"

namespace flash_attn3 {

// Consumers, stages of K, of V as it lies in memory, of V transposed, of Q, where Q lies, how O
// leaves, where P V is summed; then who adds up P, and whether consumers take turns.
template <int kHeadDim, int kHeadDimV>
struct Fp8ScheduleOf;

// Where V lies transposed already.
template <int kHeadDim, int kHeadDimV>
struct Fp8TransposedScheduleOf : Fp8ScheduleOf<kHeadDim, kHeadDimV> {};

template <>
struct Fp8ScheduleOf<64, 64> {
  using Type =
      Fp8Schedule<3, 4, 3, 4, 2, QuerySource::kShared, OutPath::kStaged, Promotion::kChunks>;
};
template <>
struct Fp8ScheduleOf<128, 128> {
  using Type =
      Fp8Schedule<2, 3, 2, 4, 2, QuerySource::kShared, OutPath::kStaged, Promotion::kWhole>;
};
template <>
struct Fp8ScheduleOf<192, 128> {
  using Type = Fp8Schedule<2, 4, 2, 2, 1, QuerySource::kShared, OutPath::kStaged, Promotion::kWhole,
                           RowSums::kExact>;
};
template <>
struct Fp8ScheduleOf<256, 256> {
  using Type = Fp8Schedule<2, 2, 2, 2, 1, QuerySource::kShared, OutPath::kDirect,
                           Promotion::kChunks, RowSums::kExact>;
};
template <>
struct Fp8TransposedScheduleOf<256, 256> {
  using Type =
      Fp8Schedule<2, 2, 1, 2, 1, QuerySource::kShared, OutPath::kStaged, Promotion::kCarried>;
};

// Where V lies as rows and no tile has more than kShortBlocks blocks; void: no schedule of its own.
template <int kHeadDim, int kHeadDimV>
struct Fp8ShortScheduleOf {
  using Type = void;
};
template <>
struct Fp8ShortScheduleOf<256, 256> {
  using Type =
      Fp8Schedule<2, 2, 2, 2, 1, QuerySource::kShared, OutPath::kDirect, Promotion::kShort>;
};

}  // namespace flash_attn3
