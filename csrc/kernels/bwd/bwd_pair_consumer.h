// The consumer that takes all KV tiles of a pair of batch and KV head, one after the other.
//
// Its steps are BwdKeyConsumer's; what differs is the way that a part of dQ takes (BwdDqSettler),
// and that every second KV tile visits its query tiles downwards.
#pragma once

#include "kernels/bwd/bwd_key_consumer.h"

namespace flash_attn3 {

template <class T, int kDqColumns>
struct BwdPairConsumer : BwdKeyConsumer<T, kDqColumns, false> {
  using Base = BwdKeyConsumer<T, kDqColumns, false>;
  using Base::params;
  using Base::shared;
  using Base::step_count;
  using Base::tile_count;
  using Base::warpgroup;
  using Settler = BwdDqSettler<T, kDqColumns>;

  __device__ __forceinline__ void compute(const BwdTile& tile) {
    float dk[T::kHeadDim / 2], dv[T::kHeadDimV / 2];
    uint32_t ds[Base::kScores / 2];
    this->begin_tile(dk, dv);
    const int way = visits_down<T>(tile) ? -1 : 1;
    const int first = way > 0 ? tile.m_begin : tile.m_end - 1;
    const int behind = way > 0 ? tile.m_end : tile.m_begin - 1;
    int m = first;
    int at = m * params.group;
    int before = -1;
    int left = (tile.m_end - tile.m_begin) * params.group;
    const auto advance = [&] {
      before = at;
      at += way * params.group;
      m += way;
      if (m == behind) {  // the next head of the group
        m = first;
        at += 1 - (tile.m_end - tile.m_begin) * way * params.group;
      }
    };
    const bool skips = tile.m_begin < tile.m_first[warpgroup] && left > 1;
    if (skips) --left;
    if (skips && way > 0) {
      this->skip_step();
      advance();
    }
    typename Base::StepValues values;
    this->read_ahead(tile, step_count, m, values);
#pragma unroll 1
    for (;;) {
      int next_m = -1;
      if (Base::kReadAhead && left > 1) next_m = m + way == behind ? first : m + way;
      this->step(tile, m, next_m, before, dk, dv, ds, values);
      if (--left == 0) break;
      advance();
    }
    // Parts of dQ that are not made yet: the last step's, and if that is skipped, the one before.
    int rest = 1;
    if (skips && way < 0) {
      this->skip_step();
      rest = 2;
    }
#pragma unroll 1
    for (; rest > 0; --rest) {
      const uint32_t of = step_count - rest;
      float dq[kDqColumns / 2], sum[kDqColumns / 2];
      this->issue_dq(of, dq);
      const Settler settler{params, tile, at, warpgroup};
      settler.fetch(sum);
      wgmma_wait<0>();
      pin_registers(ds);
      pin_registers(dq);
      pin_registers(dk);
      pin_registers(dv);
      this->release_ds(of);
      this->say(&shared.q_empty[ring_slot<T::kQStages>(of)]);
      if (rest == 1) this->say(&shared.kv_empty[this->kv_stage()]);
      settler.settle(dq, sum);
      at -= params.group;  // another one only where the way is down
    }
    ++tile_count;
    this->store(tile, dk, dv);
  }
};

}  // namespace flash_attn3
