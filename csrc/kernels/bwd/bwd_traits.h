// Shapes, shared memory and register budget of one compiled backward kernel.
#pragma once

#include <cstdint>

#include "kernels/attn/key_range.h"
#include "kernels/common/wgmma.h"
#include "kernels/fwd/fwd_traits.h"

namespace flash_attn3 {

// Counters of the deterministic mode for each query tile and head: 16 bytes, a cache sector's half.
constexpr int kMostTurnChains = 4;

// How two consumer warpgroups share the work of a tile.
enum class BwdSplit {
  kKeys,   // 128 keys a tile: each takes 64 of them through all products
  kRoles,  // 64 keys a tile: one makes P and dV, the other dS and dK; P passes through shared
           // memory
};

// What bwd_config.h chooses for a pair of head dims: query rows a tile, places for Q, for
// dO, and for K and V, registers of a consumer's thread. kWholePairs: a CTA takes all KV tiles of a
// pair of batch and KV head, one after the other, and makes dQ from its sums itself.
template <BwdSplit kSplit_, int kBlockM_, int kQStages_, int kDoutStages_, int kKvStages_,
          int kConsumerRegisters_, bool kWholePairs_ = false>
struct BwdSchedule {
  static constexpr BwdSplit kSplit = kSplit_;
  static constexpr int kBlockM = kBlockM_;
  static constexpr int kBlockN = kSplit_ == BwdSplit::kKeys ? 128 : 64;
  static constexpr int kQStages = kQStages_;
  static constexpr int kDoutStages = kDoutStages_;
  static constexpr int kKvStages = kKvStages_;
  static constexpr int kConsumerRegisters = kConsumerRegisters_;
  static constexpr bool kWholePairs = kWholePairs_;
};

// One unit of work: a KV tile of one KV head. Written by the scheduler warp, read by all others.
struct alignas(64) BwdTile {
  int32_t head_kv;  // -1: no more work
  int32_t n;        // KV tile within its sequence
  int32_t k_len;    // keys in use
  int32_t k_rows;   // keys that exist (those not in use get gradients of 0)
  int32_t q_len;
  int32_t k_batch;  // where the sequence starts in the tensors (SequenceSpan)
  int32_t k_base;
  int32_t q_batch;
  int32_t q_base;
  int32_t q_tile0;  // of the workspace: the sequence's first query tile
  int32_t m_begin;  // query tiles m_begin <= m < m_end, head after head (visits_down())
  int32_t m_end;
  BlockRange plain[2];  // of each half of the keys: query tiles that need no mask
  int32_t m_first[2];   // of each half: the first query tile that sees any of its keys
  // Whole pairs: rows of the sums, as BwdDqSettler counts them, that get their first part of dQ
  // here (from fresh_from on), and their last one (below final_to).
  int32_t fresh_from;
  int32_t final_to;
};

// Whole pairs: every second KV tile visits its query tiles downwards, so that of Q, dO and dQ's
// sums those come first which are in L2 for certain.
template <class T>
__device__ __forceinline__ bool visits_down(const BwdTile& tile) {
  return T::kWholePairs && tile.n % 2 != 0;
}

template <class Element_, int kHeadDim_, int kHeadDimV_, class Schedule>
struct BwdTraits : Schedule {
  using Element = Element_;
  using Schedule::kBlockM;
  using Schedule::kBlockN;
  using Schedule::kConsumerRegisters;
  using Schedule::kDoutStages;
  using Schedule::kKvStages;
  using Schedule::kQStages;
  using Schedule::kSplit;
  using Schedule::kWholePairs;

  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kHeadDimV = kHeadDimV_;
  static constexpr int kConsumers = 2;
  static constexpr int kConsumerWarps = 4 * kConsumers;
  static constexpr int kThreads = 128 * (1 + kConsumers);
  static constexpr int kTileSlots = 2;
  // A thread has 168 at launch; what the producers give back is all that consumers can take.
  static constexpr int kProducerRegisters = 3 * 168 - kConsumers * kConsumerRegisters;
  static_assert(kProducerRegisters >= 24 && kProducerRegisters % 8 == 0);
  static constexpr bool kRoles = kSplit == BwdSplit::kRoles;
  // The soft cap has code of its own: in a step without one it would be 8 KB to jump over. With 128
  // query rows ptxas serialises the products of a step that has no branch in it, and at head dim 96
  // it is slower so (6 %).
  static constexpr bool kSoftcapApart = kBlockM == 64 && kHeadDim != 96;
  // With half the keys each: barriers and row values of the next step before dQ's additions. At
  // head dims 64 (no registers for the values) and 96 it gains nothing.
  static constexpr bool kReadAhead = kHeadDim == 128;

  // dQ of a query tile is made in two pieces, one by each consumer: half of its rows where there
  // are 128, else some of its columns (whole panels of K).
  static constexpr bool kDqByRows = kBlockM == 128;
  static constexpr int kDqColumns0 = kDqByRows         ? kHeadDim
                                     : kHeadDim == 96  ? 64
                                     : kHeadDim == 192 ? 128
                                                       : kHeadDim / 2;
  static constexpr int kDqColumns1 = kDqByRows ? kHeadDim : kHeadDim - kDqColumns0;
  static_assert(kBlockM == 64 || kBlockM == 128);
  static_assert((kQStages & (kQStages - 1)) == 0, "slots are counted with a mask");
  static_assert((kDoutStages & (kDoutStages - 1)) == 0);
  static_assert(kKvStages == 1 || kKvStages == 2);
  static_assert(!(kRoles && kWholePairs));

  static constexpr int kKeyBytes = kBlockN * kHeadDim * 2;
  static constexpr int kValueBytes = kBlockN * kHeadDimV * 2;
  static constexpr int kQueryBytes = kBlockM * kHeadDim * 2;  // of one stage
  static constexpr int kDoutBytes = kBlockM * kHeadDimV * 2;
  static constexpr int kRowBytes = 2 * kBlockM * 4;
  static constexpr int kDsBytes = kBlockM * kBlockN * 2;
  static constexpr int kDsSlots = 2;
  static constexpr int kPSlots = kRoles ? 2 : 1;

  // Parts of dQ that are added by themselves: a piece, or with roles 64 columns of it.
  static constexpr int kTurnChains = kRoles ? kHeadDim / 64 : kConsumers;
  static_assert(kTurnChains <= kMostTurnChains);
  static constexpr int kTurnSlots = 4;
  static __device__ __forceinline__ constexpr int turn_chain(int warpgroup, int first_fragment) {
    return kRoles ? (warpgroup * kDqColumns0 + first_fragment * 8) / 64 : warpgroup;
  }

  static constexpr int kPBytes = kRoles ? kBlockM * kBlockN * 2 : 16;

  struct SharedMemory {
    alignas(1024) uint8_t k[kKvStages][kKeyBytes];
    alignas(1024) uint8_t v[kKvStages][kValueBytes];
    alignas(1024) uint8_t q[kQStages][kQueryBytes];
    alignas(1024) uint8_t dout[kDoutStages][kDoutBytes];
    alignas(1024) uint8_t ds[kDsSlots][kDsBytes];  // queries x keys, panels of 64 keys
    alignas(16) uint8_t p[kPSlots][kPBytes];       // kRoles: fragments, in the threads' own order
    alignas(16) float rows[kDoutStages][2 * kBlockM];  // -LSE in log2, then delta; comes with dO

    // full: the data is there; empty: every reader has finished; tail: data has arrived whose last
    // rows the tail warp clears before it says full.
    alignas(8) uint64_t k_full[kKvStages];
    uint64_t v_full[kKvStages];
    uint64_t k_tail[kKvStages];
    uint64_t v_tail[kKvStages];
    uint64_t kv_empty[kKvStages];
    uint64_t q_full[kQStages];
    uint64_t q_tail[kQStages];
    uint64_t q_empty[kQStages];
    uint64_t dout_full[kDoutStages];
    uint64_t dout_tail[kDoutStages];
    uint64_t dout_empty[kDoutStages];
    uint64_t ds_full[kDsSlots];
    uint64_t ds_empty[kDsSlots];
    uint64_t p_full[kPSlots];
    uint64_t p_empty[kPSlots];
    uint64_t tile_full[kTileSlots];
    uint64_t loaded;  // a tile's last copy has been issued
    uint64_t tile_empty[kTileSlots];
    // Deterministic calls: the step's part of dQ may be added, and has been added.
    uint64_t turn_come[kTurnChains][kTurnSlots];
    uint64_t turn_done[kTurnChains][kTurnSlots];
    int32_t turn_rows[kTurnChains][kTurnSlots];  // the turn warp's own: the step's counter
    BwdTile tiles[kTileSlots];
  };
};

// A running count of uses of a ring of kSlots (a power of two): which slot, and its parity.
template <int kSlots>
__device__ __forceinline__ int ring_slot(uint32_t count) {
  return int(count & (kSlots - 1));
}
template <int kSlots>
__device__ __forceinline__ uint32_t ring_parity(uint32_t count) {
  return count / kSlots & 1;
}

}  // namespace flash_attn3
