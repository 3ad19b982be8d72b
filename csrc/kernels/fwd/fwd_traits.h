// Shapes, shared memory and register budget of one compiled forward kernel.
#pragma once

#include <cstdint>

#include "kernels/attn/key_range.h"
#include "kernels/common/wgmma.h"

namespace flash_attn3 {

// Where consumers read Q from.
enum class QuerySource { kShared, kRegisters };

// How O reaches memory.
enum class OutPath {
  kDirect,  // from registers, four threads transposing among them
  kStaged,  // through a place of its own in shared memory, by the copy engine
};

// Of a thread's scores, the last kScores are held back until P V is done, so that their
// exponentials alternate with the packing of P. The assembler would move them all before the wait,
// and pack afterwards; which is faster differs from kernel to kernel.
template <int kScores_, bool kWithScale_>
struct Held {
  static constexpr int kScores = kScores_;
  // Whether the multiplication by the scale is held back too.
  static constexpr bool kWithScale = kWithScale_;
};
using HeldNone = Held<0, false>;

// What kernel_config.h chooses for a pair of head dims. KV blocks are kBlockN keys.
template <int kConsumers_, int kBlockN_, int kKeyStages_, int kValueStages_, int kQueryStages_,
          QuerySource kQuerySource_, OutPath kOutPath_, class Held_>
struct FwdSchedule {
  using Held = Held_;
  static constexpr int kConsumers = kConsumers_;
  static constexpr int kBlockN = kBlockN_;
  static constexpr int kKeyStages = kKeyStages_;
  static constexpr int kValueStages = kValueStages_;
  static constexpr int kQueryStages = kQueryStages_;
  static constexpr bool kQueryInRegisters = kQuerySource_ == QuerySource::kRegisters;
  static constexpr bool kStagedOut = kOutPath_ == OutPath::kStaged;
  static constexpr int kPair = 1;
};

// The same by pairs of CTAs (clusters of two): each computes a tile of its own, one below the
// other, and brings half of each KV block to both. Fewer bytes leave L2, which is power where that
// is short: 3 to 5 % at head dims 192 and 256, nothing at 64 and 128, where a pair waits for its
// slower CTA as long as it gains.
template <class Schedule>
struct Paired : Schedule {
  static constexpr int kPair = 2;
};

constexpr int kMaxConsumers = 3;

// Where a sequence lies and how long it is.
struct SequenceSpan {
  int32_t batch;  // coordinate in the tensor: 0 when ragged
  int32_t base;   // row of the tensor: 0 when dense
  int32_t rows;   // that exist
  int32_t used;
};

struct PlannedSequence {
  SequenceSpan q;
  SequenceSpan k;
};

// One unit of work, written by the scheduler warp, read by producer, tail warp and all
// consumers.
struct TileInfo {
  float* lse;    // of the tile's first row
  int32_t head;  // of q; -1: no more work
  int32_t head_kv;
  int32_t row0;    // first query row of the tile within its sequence
  int32_t q_len;   // query rows in use
  int32_t q_rows;  // query rows that exist (those not in use get 0)
  int32_t k_len;
  int32_t q_batch;  // where the sequence starts in the tensors (SequenceSpan)
  int32_t q_base;
  int32_t k_batch;
  int32_t k_base;
  int32_t n_begin;  // KV blocks n_begin <= n < n_end, visited from the last
  int32_t n_end;
  RowKeys keys;
  int32_t start[kMaxConsumers];     // each consumer's rows see no key of the blocks from here on
  BlockRange plain[kMaxConsumers];  // of each consumer's rows: blocks that need no mask
};

struct FwdKernelParams;

template <class Element_, int kHeadDim_, int kHeadDimV_, class Schedule>
struct FwdTraits : Schedule {
  using Params = FwdKernelParams;
  using Input = Element_;    // of Q, K, V
  using Element = Element_;  // of O
  using Schedule::kBlockN;
  using Schedule::kConsumers;
  using Schedule::kKeyStages;
  using Schedule::kPair;
  using Schedule::kQueryInRegisters;
  using Schedule::kQueryStages;
  using Schedule::kStagedOut;
  using Schedule::kValueStages;

  static constexpr bool kTurns = true;  // consumers issue their products in turn
  // For calls without a window's left edge or chunks alone: three consumers lack the registers for
  // both kinds of mask (launch_fwd_of() sees to it).
  static constexpr bool kOpenLeft = kConsumers == 3 || kPair > 1;
  static constexpr bool kUniform = true;   // stages' addresses (warp_uniform())
  static constexpr bool kScaled = false;   // Q, K and V have scales
  static constexpr bool kCarried = false;  // by Fp8CarriedConsumer
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kHeadDimV = kHeadDimV_;
  using QueryPanel = Panel<kHeadDim>;  // of K too
  using ValuePanel = Panel<kHeadDimV>;
  static constexpr int kRowsPerConsumer = 64;
  static constexpr int kBlockM = kConsumers * kRowsPerConsumer;
  static constexpr int kThreads = 128 * (1 + kConsumers);
  // A tile not yet stored, the newest, the next, which the producer looks ahead to, and one more.
  static constexpr int kTileSlots = 4;
  // Q of the next tile is loaded during this one: it has a place of its own, or finds the only one
  // empty. Otherwise it waits for this tile's last product with Q.
  static constexpr bool kQueryAhead = kQueryInRegisters || kQueryStages > 1;

  // A consumer leaves out so many blocks of a tile at most. Their V is released only after the last
  // block of the tile before, whose V it holds meanwhile: with more, the other consumers would wait
  // for V, and it for its turn (tests/cpu/test_pipeline_model.py).
  // Tiles no taller than a KV block have no such block at a causal edge.
  static constexpr int kMostUnseen = kBlockN < kPair * kBlockM ? kValueStages / 2 : 0;

  // Of 168 registers a thread of three warpgroups at launch, or 128 of four: what the producer
  // warpgroup gives back, the consumers take.
  static constexpr int kProducerRegisters = kConsumers == 2 ? 24 : 32;
  static constexpr int kConsumerRegisters = kConsumers == 2 ? 240 : 160;
  static_assert(kProducerRegisters + kConsumers * kConsumerRegisters ==
                (kConsumers == 2 ? 3 * 168 : 4 * 128));

  static constexpr int kQueryBytes = kRowsPerConsumer * kHeadDim * 2;  // of one consumer
  static constexpr int kKeyBytes = kBlockN * kHeadDim * 2;             // of one stage
  static constexpr int kValueBytes = kBlockN * kHeadDimV * 2;
  static constexpr int kOutBytes = kStagedOut ? kRowsPerConsumer * kHeadDimV * 2 : 16;

  struct SharedMemory {
    alignas(1024) uint8_t q[kQueryStages][kConsumers][kQueryBytes];
    alignas(1024) uint8_t k[kKeyStages][kKeyBytes];
    alignas(1024) uint8_t v[kValueStages][kValueBytes];
    alignas(kStagedOut ? 1024 : 16) uint8_t o[kConsumers][kOutBytes];  // each warp its 16 rows

    // full: the copy engine has written; empty: every consumer warp has finished reading.
    alignas(8) uint64_t q_full[kQueryStages][kConsumers];
    uint64_t q_empty[kQueryStages][kConsumers];
    uint64_t k_full[kKeyStages];
    uint64_t k_empty[kKeyStages];
    uint64_t v_full[kValueStages];
    uint64_t v_empty[kValueStages];
    uint64_t v_tail[kValueStages];  // a V block has arrived whose last rows are to be cleared
    uint64_t tile_full[kTileSlots];
    uint64_t tile_empty[kTileSlots];
    uint64_t tile_wanted[2];  // the producer nears the end of an even, odd tile
    uint64_t claim_full[2];   // of a pair: its first CTA tells the second of its claims
    uint64_t claim_empty[2];
    int32_t claim[2];
    alignas(16) TileInfo tiles[kTileSlots];
    uint32_t nonzero;            // FwdConsumer::exponentiate_late()
    PlannedSequence window[32];  // the scheduler's own
  };
};

// A position in a ring of slots, and the parity of the phase that completes next there.
template <int kSlots>
class RingPosition {
 public:
  __device__ __forceinline__ int slot() const {
    return kPowerOfTwo ? at_ & (kSlots - 1) : at_ >> 1;
  }
  __device__ __forceinline__ uint32_t parity() const {
    return kPowerOfTwo ? at_ / kSlots & 1 : at_ & 1;
  }
  __device__ __forceinline__ void advance() {
    if constexpr (kPowerOfTwo) {
      ++at_;
    } else {
      at_ = at_ >= 2 * (kSlots - 1) ? (at_ & 1) ^ 1 : at_ + 2;
    }
  }
  static __device__ __forceinline__ RingPosition at(uint32_t count) {
    static_assert(kPowerOfTwo);
    RingPosition position;
    position.at_ = count;
    return position;
  }
  // So many places ago.
  __device__ __forceinline__ RingPosition before(uint32_t places) const {
    static_assert(kPowerOfTwo);
    RingPosition position;
    position.at_ = at_ - places;
    return position;
  }
  // The compiler computes anew what it derived from the position before, instead of keeping it.
  __device__ __forceinline__ void forget_derived() { asm volatile("" : "+r"(at_)); }

 private:
  static constexpr bool kPowerOfTwo = (kSlots & (kSlots - 1)) == 0;
  uint32_t at_ = 0;  // one register: a running count, or slot * 2 + parity
};

}  // namespace flash_attn3
