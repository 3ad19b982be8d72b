// Shapes, shared memory and register budget of one compiled e4m3 forward kernel.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp8.h>

#include "kernels/fp8/value_layout.h"
#include "kernels/fwd/fwd_traits.h"

namespace flash_attn3 {

// The largest probability of a row is this power of two, which has no rounding error: near the top
// of e4m3's range (448), which reaches 17 binades down.
constexpr int kTopExponent = 8;

// Where P V of a block is summed. The tensor unit keeps about 13 bits of a sum and cuts off the
// rest, so that only one block's sum is left to it, or a few: O adds them up in fp32 by ordinary
// arithmetic.
enum class Promotion {
  kWhole,   // in registers of their own, as many as O has; P V runs under the next softmax
  kChunks,  // part of the columns at a time, before the next Q K^T
  // In O's registers by the products themselves, up to kCarriedBlocks blocks; then a mean of all
  // before, in shared memory, takes them up.
  kCarried,
  // The same without a mean: for tiles of no more than kShortBlocks blocks.
  kShort,
};

// The tensor unit's sums of more blocks have more than 1.1 times the error of the formula where a
// few keys of a row are much larger than the others (docs/fp8.md, "Sums").
constexpr int kCarriedBlocks = 6;
constexpr int kShortBlocks = 8;

// Who adds up a row's probabilities.
enum class RowSums {
  kExact,   // ordinary additions, before P is rounded
  kTensor,  // the tensor unit, of rounded P: eight more columns of V hold ones
};

// Which sums of a row the LSE comes from. O is divided by those of RowSums whatever it is, so that
// its bits do not depend on whether an exact LSE was asked for.
enum class LseSums {
  kRounded,  // the tensor unit's
  kExact,
};

// The scale of a block of V. O is kept in units: the scale of the block that was added last, as
// long as that is neither tiny nor huge.
struct alignas(16) ValueScale {
  // The unit before / this unit; 1 where a tile begins. Of Promotion::kCarried: this / the next.
  float carry;
  float weight;  // the block's scale / the unit
  float unit;
};

// Where V comes from.
enum class ValueSource {
  kRows,        // [key][column]: two warps transpose each block in shared memory
  kTransposed,  // by quantize() or transpose_values.h: as ValueLayout has it, not swizzled
};

// What fp8_config.h chooses for a pair of head dims. The KV block is ValueLayout's.
template <int kConsumers_, int kKeyStages_, int kRawStages_, int kValueStages_, int kQueryStages_,
          QuerySource kQuerySource_, OutPath kOutPath_, Promotion kPromotion_,
          RowSums kSums_ = RowSums::kTensor, bool kTurns_ = true>
struct Fp8Schedule : FwdSchedule<kConsumers_, ValueLayout::kKeys, kKeyStages_, kValueStages_,
                                 kQueryStages_, kQuerySource_, kOutPath_, HeldNone> {
  static constexpr int kRawStages = kRawStages_;
  static constexpr bool kTurns = kTurns_;  // consumers issue their products in turn
  static constexpr bool kInChunks = kPromotion_ == Promotion::kChunks;
  static constexpr bool kHasMean = kPromotion_ == Promotion::kCarried;
  static constexpr bool kCarried = kHasMean || kPromotion_ == Promotion::kShort;
  // Of a row's P, half is summed in one of a thread's two columns and half in the other: sums half
  // as large are cut off half as high.
  static constexpr bool kSplitSums = kCarried && !kHasMean;
  static constexpr bool kTensorSums = kSums_ == RowSums::kTensor;
};

struct Fp8KernelParams;

// What the e4m3 forward knows of a tile beside its TileInfo.
struct TileScales {
  int32_t sequence;
  float q[kMaxConsumers];  // of each consumer's rows
};

template <int kHeadDim_, int kHeadDimV_, ValueSource kValueSource, class Schedule,
          LseSums kLseSums_>
struct Fp8Traits : Schedule {
  using Params = Fp8KernelParams;
  using Input = __nv_fp8_e4m3;    // of Q, K, V
  using Element = __nv_bfloat16;  // of O
  using Schedule::kBlockN;
  using Schedule::kCarried;
  using Schedule::kConsumers;
  using Schedule::kHasMean;
  using Schedule::kKeyStages;
  using Schedule::kPair;
  using Schedule::kQueryInRegisters;
  using Schedule::kQueryStages;
  using Schedule::kRawStages;
  using Schedule::kStagedOut;
  using Schedule::kTensorSums;
  using Schedule::kValueStages;

  // Addresses of stages in uniform registers. The carried consumer makes its own; with the first
  // block's beside them fewer are.
  static constexpr bool kUniform = !kCarried;
  static constexpr bool kScaled = true;  // Q, K and V have scales
  static constexpr LseSums kLseSums = kLseSums_;
  static constexpr bool kOpenLeft = false;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kHeadDimV = kHeadDimV_;
  using QueryPanel = Panel<kHeadDim, 1>;  // of K too
  using ValuePanel = Panel<kHeadDimV, 1>;
  static constexpr bool kTransposes = kValueSource == ValueSource::kRows;
  static constexpr int kTransposers = kTransposes ? 2 : 0;  // warps
  static constexpr int kRowsPerConsumer = 64;
  static constexpr int kBlockM = kConsumers * kRowsPerConsumer;
  static constexpr int kThreads = 128 * (1 + kConsumers);
  static constexpr int kTileSlots = 4;
  static constexpr bool kQueryAhead = kQueryStages > 1;
  static_assert(!kQueryInRegisters, "nobody would give Q's place back");
  // No block is taller than a tile: nothing to leave out (FwdTraits).
  static constexpr int kMostUnseen = 0;

  // What the CTA has at launch, 168 a thread of three warpgroups or 128 of four, is all there is to
  // hand round: a warpgroup that asks for more waits forever.
  static constexpr int kProducerRegisters = kConsumers == 2 ? 24 : 32;
  static constexpr int kConsumerRegisters = kConsumers == 2 ? 240 : 160;
  static_assert(kProducerRegisters + kConsumers * kConsumerRegisters ==
                (kConsumers == 2 ? 3 * 168 : 4 * 128));

  static constexpr int kQueryBytes = kRowsPerConsumer * kHeadDim;
  static constexpr int kKeyBytes = kBlockN * kHeadDim;
  static constexpr int kValueBytes = kBlockN * kHeadDimV;
  // Ones, written once: behind the columns of V, or in a place of their own where O's columns are
  // as many as a product can have.
  static constexpr int kOnesBytes = kTensorSums ? 8 * kBlockN : 0;
  static constexpr int kOnesBehind = kCarried ? 0 : kOnesBytes;
  static constexpr int kRawBytes = kTransposes ? kValueBytes : kCarried ? kOnesBytes : 16;
  static constexpr bool kOnesInOut = kCarried && kTransposes;
  static_assert(!(kOnesInOut && kStagedOut));
  static constexpr int kOutBytes = kStagedOut   ? kRowsPerConsumer * kHeadDimV * 2
                                   : kOnesInOut ? kOnesBytes / kConsumers
                                                : 16;

  struct SharedMemory {
    alignas(1024) uint8_t q[kQueryStages][kConsumers][kQueryBytes];
    alignas(1024) uint8_t k[kKeyStages][kKeyBytes];
    alignas(1024) uint8_t v[kValueStages][kValueBytes + kOnesBehind];  // transposed
    // Or the ones (Promotion::kCarried), where V is not transposed here.
    alignas(1024) uint8_t v_raw[kTransposes ? kRawStages : 1][kRawBytes];
    // Also the mean of what has been summed of a tile, in fp16 (kHasMean); or the ones, where V is
    // transposed here and O is not staged.
    alignas(kStagedOut || kOnesInOut ? 1024 : 16) uint8_t o[kConsumers][kOutBytes];

    alignas(8) uint64_t q_full[kQueryStages][kConsumers];
    uint64_t q_empty[kQueryStages][kConsumers];
    uint64_t k_full[kKeyStages];
    uint64_t k_empty[kKeyStages];
    uint64_t v_raw_full[kRawStages];   // the copy engine has written V as it lies in memory
    uint64_t v_raw_empty[kRawStages];  // the transposing warps have read it
    uint64_t v_full[kValueStages];
    uint64_t v_empty[kValueStages];
    uint64_t tile_full[kTileSlots];
    uint64_t tile_empty[kTileSlots];
    uint64_t tile_wanted[2];
    // Of the block in the stage; written before the arrival that its full barrier waits for.
    float k_scale[kKeyStages];
    ValueScale v_scale[kValueStages];
    ValueScale v_raw_scale[kRawStages];
    alignas(16) TileInfo tiles[kTileSlots];
    TileScales scales[kTileSlots];
    uint32_t nonzero;
    PlannedSequence window[32];
    int32_t window_sequence[32];
    // Of Promotion::kCarried, whose consumers have no registers to count in: how many tiles came
    // before a slot's, and how many of them had a Q to load.
    uint32_t tiles_before[kTileSlots];
    uint32_t loads_before[kTileSlots];

    // Where the ones of a carried consumer are.
    __device__ __forceinline__ uint8_t* ones() { return kOnesInOut ? o[0] : v_raw[0]; }
  };
};

}  // namespace flash_attn3
