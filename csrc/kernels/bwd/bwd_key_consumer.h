// A consumer warpgroup that takes 64 keys of each KV tile through all five products.
//
//   S^T = K Q^T     dP^T = V dO^T     P = exp2(S - LSE)     dS = P (dP - delta)
//   dV += P^T dO    dK += dS^T Q      dQ += dS K
//
// P^T and dS^T are A operands straight from registers; only dS goes through shared memory, for dQ,
// of which each consumer makes one piece over all keys. Order of a step, with products in flight:
//
//   issue S(j) | wait dK(j-1), issue dP(j) | wait S(j), exponentiate | issue dV(j) | wait dP(j),
//   make and store dS(j) | wait dV(j), issue dQ(j-1), dK(j) | wait dQ(j-1), add it to the sums
//
// so that a product is queued whenever the warpgroup computes. Registers decide the rest: S and P
// share a place, dP and dQ another; a third of that size would not fit. The additions read their
// registers for up to 700 cycles, under dK(j) and S(j + 1), before dP(j + 1) can be issued, and
// what a warp asks of shared memory meanwhile queues behind them. So with kReadAhead the barriers
// and values of step j + 1 are waited for and read before the additions.
#pragma once

#include <type_traits>

#include "kernels/bwd/bwd_dq.h"
#include "kernels/bwd/bwd_epilogue.h"
#include "kernels/bwd/bwd_scores.h"

namespace flash_attn3 {

template <class T, int kDqColumns, bool kSoftcap>
struct BwdKeyConsumer {
  using Element = typename T::Element;
  static constexpr int kScores = T::kBlockM / 2;
  // The row values of the next step are read before dQ's additions, where there is room for them.
  static constexpr bool kReadAhead = T::kReadAhead;
  using Rows = RowValues<kScores / 8, kReadAhead>;
  static constexpr int kEarlyScores = kReadAhead ? kScores / 2 : 0;  // those of so many scores

  const BwdKernelParams& params;
  typename T::SharedMemory& shared;
  int warpgroup;  // of the consumers
  BwdDqAdder<T> adder;

  uint32_t step_count = 0;  // query tiles, of all KV tiles so far
  uint32_t tile_count = 0;  // KV tiles with any

  static __device__ __forceinline__ int thread() { return threadIdx.x % 128; }

  // Every warp arrives once.
  __device__ __forceinline__ void say(uint64_t* barrier) { warp_arrive(barrier, thread() % 32); }

  __device__ __forceinline__ int kv_stage() const { return ring_slot<T::kKvStages>(tile_count); }
  __device__ __forceinline__ int q_stage() const { return ring_slot<T::kQStages>(step_count); }
  __device__ __forceinline__ int dout_stage() const {
    return ring_slot<T::kDoutStages>(step_count);
  }

  __device__ __forceinline__ void wait_q(uint32_t step) {
    mbarrier_wait(&shared.q_full[ring_slot<T::kQStages>(step)], ring_parity<T::kQStages>(step));
  }
  __device__ __forceinline__ void wait_dout(uint32_t step) {
    mbarrier_wait(&shared.dout_full[ring_slot<T::kDoutStages>(step)],
                  ring_parity<T::kDoutStages>(step));
  }

  __device__ __forceinline__ void issue_scores(float (&s)[kScores]) {
    pin_registers(s);
    wgmma_fence();
    issue_qk_shared<Element, T::kBlockM, T::kHeadDim>(
        shared_address(shared.k[kv_stage()]) + warpgroup * 64 * Panel<T::kHeadDim>::kBytes,
        T::kBlockN, shared_address(shared.q[q_stage()]), s);
    wgmma_commit();
  }

  __device__ __forceinline__ void issue_dp(float (&dp)[kScores]) {
    pin_registers(dp);
    wgmma_fence();
    issue_qk_shared<Element, T::kBlockM, T::kHeadDimV>(
        shared_address(shared.v[kv_stage()]) + warpgroup * 64 * Panel<T::kHeadDimV>::kBytes,
        T::kBlockN, shared_address(shared.dout[dout_stage()]), dp);
    wgmma_commit();
  }

  __device__ __forceinline__ void issue_dv(uint32_t (&p)[kScores / 2],
                                           float (&dv)[T::kHeadDimV / 2]) {
    pin_registers(p);
    pin_registers(dv);
    wgmma_fence();
    issue_pv<Element, T::kHeadDimV, T::kBlockM>(p, shared_address(shared.dout[dout_stage()]), dv,
                                                true);
    wgmma_commit();
  }

  __device__ __forceinline__ void issue_dk(uint32_t (&ds)[kScores / 2],
                                           float (&dk)[T::kHeadDim / 2]) {
    pin_registers(ds);
    pin_registers(dk);
    wgmma_fence();
    issue_pv<Element, T::kHeadDim, T::kBlockM>(ds, shared_address(shared.q[q_stage()]), dk, true);
    wgmma_commit();
  }

  // This warpgroup's piece of `step`'s dQ, once both have stored its dS.
  __device__ __forceinline__ void issue_dq(uint32_t step, float (&dq)[kDqColumns / 2]) {
    using P = Panel<T::kHeadDim>;
    const int slot = ring_slot<T::kDsSlots>(step);
    mbarrier_wait(&shared.ds_full[slot], ring_parity<T::kDsSlots>(step));
    const uint32_t ds = shared_address(shared.ds[slot]);
    const uint32_t k = shared_address(shared.k[kv_stage()]);
    const uint32_t a = T::kDqByRows ? ds + warpgroup * 64 * 128 : ds;
    const uint32_t b =
        T::kDqByRows ? k : k + warpgroup * (T::kDqColumns0 / P::kWidth) * (T::kBlockN * P::kBytes);
    pin_registers(dq);
    wgmma_fence();
    issue_shared_row_major<Element, P, kDqColumns, T::kBlockN>(a, T::kBlockM, b, dq);
    wgmma_commit();
  }

  // dQ of `step` has been computed: its dS may be overwritten once both consumers say so.
  __device__ __forceinline__ void release_ds(uint32_t step) {
    say(&shared.ds_empty[ring_slot<T::kDsSlots>(step)]);
  }

  __device__ __forceinline__ int first_key(const BwdTile& tile) const {
    return tile.n * T::kBlockN + warpgroup * 64 + thread() / 32 * 16 + thread() % 32 / 4;
  }

  // What a step needs of shared memory before its products do.
  struct StepValues {
    Rows minus_lse{nullptr};
    int from_mask = 0;  // negative: some pair of the step is masked
  };

  __device__ __forceinline__ bool is_masked(const BwdTile& tile, int m,
                                            const StepValues& values) const {
    if constexpr (kReadAhead) return values.from_mask < 0;
    const BlockRange plain = tile.plain[warpgroup];
    return m < plain.begin || m >= plain.end;
  }

  // kReadAhead: waits for Q and dO of a step, and reads what there are registers for so early.
  __device__ __forceinline__ void read_ahead(const BwdTile& tile, uint32_t step, int m,
                                             StepValues& values) {
    if constexpr (kReadAhead) {
      const BlockRange plain = tile.plain[warpgroup];
      values.from_mask = (m - plain.begin) | (plain.end - 1 - m);
      wait_q(step);
      wait_dout(step);
      values.minus_lse.rows = shared.rows[ring_slot<T::kDoutStages>(step)];
      values.minus_lse.template read<0, kEarlyScores / 8>();
    }
  }

  // S and dP are issued, and P made of S. dK of the step before is in flight at first.
  __device__ __forceinline__ void make_p(const BwdTile& tile, int m, bool first, StepValues& values,
                                         uint32_t (&ds)[kScores / 2], float (&s)[kScores],
                                         float (&dp)[kScores]) {
    if constexpr (!kReadAhead) wait_q(step_count);
    issue_scores(s);
    // dK of the step before is done: its Q may go, and dP may take the place of dQ.
    wgmma_wait<1>();
    pin_registers(ds);
    Rows& minus_lse = values.minus_lse;
    if constexpr (kReadAhead) minus_lse.template read<kEarlyScores / 8, kScores / 8>();
    if (!first) say(&shared.q_empty[ring_slot<T::kQStages>(step_count - 1)]);
    if constexpr (kReadAhead) {
      wgmma_wait<0>();
      pin_registers(s);
      // ptxas puts the products of dP among these, as soon as the additions let go of its place.
      make_probabilities<kSoftcap, 0, kEarlyScores>(s, minus_lse, params);
      pin_registers(s);
      issue_dp(dp);
    } else {
      wait_dout(step_count);
      issue_dp(dp);
      minus_lse.rows = shared.rows[dout_stage()];
      wgmma_wait<1>();
      pin_registers(s);
    }
    make_probabilities<kSoftcap, kEarlyScores, kScores>(s, minus_lse, params);
  }

  // dP and P to dS, packed.
  __device__ __forceinline__ void make_ds(float (&dp)[kScores], const uint32_t (&p)[kScores / 2],
                                          const Rows& deltas, const float* rows,
                                          uint32_t (&ds)[kScores / 2]) const {
    if constexpr (!kSoftcap && T::kSoftcapApart && std::is_same_v<Element, __nv_bfloat16>) {
      make_packed_score_gradients(dp, p, deltas, ds);
      return;
    }
    if (!kSoftcap || params.tanh_factor == 0.0f) [[likely]] {
#pragma unroll
      for (int i = 0; i < kScores / 8; ++i) {
        const uint32_t four[4] = {p[4 * i], p[4 * i + 1], p[4 * i + 2], p[4 * i + 3]};
        make_score_gradients<Element>(dp + 8 * i, four, deltas[i]);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kScores / 8; ++i) {
        const uint32_t four[4] = {p[4 * i], p[4 * i + 1], p[4 * i + 2], p[4 * i + 3]};
        make_score_gradients<Element>(dp + 8 * i, four, deltas[i]);
        apply_softcap_factor<Element>(dp + 8 * i, four, rows + 16 * i, params.tanh_from_log2);
      }
    }
    pack_fragments<Element>(dp, ds);
  }

  // One query tile. dK of the step before is still in flight at its start, dK of its own at its
  // end. `before` is the row in the workspace, [query tile][head], of the step before, whose dQ is
  // made here (whole pairs: BwdDqSettler's row); -1 in the first. next_m: the next step's query
  // tile, -1 in the last.
  __device__ __forceinline__ void step(const BwdTile& tile, int m, int next_m, int before,
                                       float (&dk)[T::kHeadDim / 2], float (&dv)[T::kHeadDimV / 2],
                                       uint32_t (&ds)[kScores / 2], StepValues& values) {
    float s[kScores], dp[kScores];
    const float* rows = shared.rows[dout_stage()];
    make_p(tile, m, before < 0, values, ds, s, dp);
    Rows deltas(rows + T::kBlockM);
    deltas.read();
    if (is_masked(tile, m, values)) [[unlikely]] {
      mask_probabilities(s, params.mask, tile, first_key(tile),
                         m * T::kBlockM + 2 * (thread() % 4));
    }
    uint32_t p[kScores / 2];
    pack_fragments<Element>(s, p);
    issue_dv(p, dv);
    wgmma_wait<1>();
    pin_registers(dp);
    make_ds(dp, p, deltas, rows, ds);
    const int slot = ring_slot<T::kDsSlots>(step_count);
    mbarrier_wait(&shared.ds_empty[slot], ring_parity<T::kDsSlots>(step_count) ^ 1);
    store_score_gradients(ds, shared_address(shared.ds[slot]) + warpgroup * (T::kBlockM * 128));
    fence_shared_to_async_proxy();
    say(&shared.ds_full[slot]);
    wgmma_wait<0>();  // dV
    pin_registers(p);
    say(&shared.dout_empty[dout_stage()]);
    if (before < 0) {
      issue_dk(ds, dk);
      if (next_m >= 0) read_ahead(tile, step_count + 1, next_m, values);
    } else {
      float dq[kDqColumns / 2];
      issue_dq(step_count - 1, dq);
      issue_dk(ds, dk);
      if constexpr (T::kWholePairs) {
        const BwdDqSettler<T, kDqColumns> settler{params, tile, before, warpgroup};
        float sum[kDqColumns / 2];
        settler.fetch(sum);
        if (next_m >= 0) read_ahead(tile, step_count + 1, next_m, values);
        wgmma_wait<1>();
        pin_registers(dq);
        release_ds(step_count - 1);
        settler.settle(dq, sum);
      } else {
        if (next_m >= 0) read_ahead(tile, step_count + 1, next_m, values);
        wgmma_wait<1>();
        pin_registers(dq);
        release_ds(step_count - 1);
        adder.add(dq, before, step_count - 1, warpgroup, 0);
      }
    }
    ++step_count;
  }

  // A tile's first step (visits_down(): its last) where its queries see no key of this warpgroup:
  // dS is 0, for the other's piece of dQ too.
  __device__ __forceinline__ void skip_step() {
    const int slot = ring_slot<T::kDsSlots>(step_count);
    mbarrier_wait(&shared.ds_empty[slot], ring_parity<T::kDsSlots>(step_count) ^ 1);
    uint8_t* ds = shared.ds[slot] + warpgroup * (T::kBlockM * 128) + thread() * 16;
#pragma unroll
    for (int i = 0; i < T::kBlockM / 16; ++i) {
      *reinterpret_cast<uint4*>(ds + i * 128 * 16) = make_uint4(0, 0, 0, 0);
    }
    fence_shared_to_async_proxy();
    say(&shared.ds_full[slot]);
    // No place is given back before it has been filled. Q's is given back by the next step.
    wait_q(step_count);
    wait_dout(step_count);
    say(&shared.dout_empty[dout_stage()]);
    ++step_count;
  }

  // Waits for K and V of a tile. Sums from 0 on rather than a first step of its own: ptxas
  // serialises the products otherwise.
  __device__ __forceinline__ void begin_tile(float (&dk)[T::kHeadDim / 2],
                                             float (&dv)[T::kHeadDimV / 2]) {
#pragma unroll
    for (int i = 0; i < T::kHeadDim / 2; ++i) dk[i] = 0.0f;
#pragma unroll
    for (int i = 0; i < T::kHeadDimV / 2; ++i) dv[i] = 0.0f;
    mbarrier_wait(&shared.k_full[kv_stage()], ring_parity<T::kKvStages>(tile_count));
    mbarrier_wait(&shared.v_full[kv_stage()], ring_parity<T::kKvStages>(tile_count));
  }

  __device__ __forceinline__ void compute(const BwdTile& tile) {
    float dk[T::kHeadDim / 2], dv[T::kHeadDimV / 2];
    uint32_t ds[kScores / 2];
    begin_tile(dk, dv);
    const int m_end_ahead = tile.m_end, m_begin_ahead = tile.m_begin;
    const auto m_begin = [&] { return kReadAhead ? m_begin_ahead : tile.m_begin; };
    const auto m_end = [&] { return kReadAhead ? m_end_ahead : tile.m_end; };
    int m = tile.m_begin;
    int at = (tile.q_tile0 + m) * params.heads + tile.head_kv * params.group;
    int before = -1;
    int left = (tile.m_end - m) * params.group;
    const auto advance = [&] {
      before = at;
      at += params.heads;
      if (++m == m_end()) {  // the next head of the group
        m = m_begin();
        at += 1 - (m_end() - m) * params.heads;
      }
    };
    if (m < tile.m_first[warpgroup] && left > 1) {
      skip_step();
      --left;
      advance();
    }
    StepValues values;
    read_ahead(tile, step_count, m, values);
#pragma unroll 1
    for (;;) {
      int next_m = -1;
      if (kReadAhead && left > 1) next_m = m + 1 == m_end() ? m_begin() : m + 1;
      step(tile, m, next_m, before, dk, dv, ds, values);
      if (--left == 0) break;
      advance();
    }
    float dq[kDqColumns / 2];
    issue_dq(step_count - 1, dq);
    wgmma_wait<0>();
    pin_registers(ds);
    pin_registers(dq);
    pin_registers(dk);
    pin_registers(dv);
    release_ds(step_count - 1);
    say(&shared.q_empty[ring_slot<T::kQStages>(step_count - 1)]);
    say(&shared.kv_empty[kv_stage()]);
    ++tile_count;
    adder.add(dq, at, step_count - 1, warpgroup, 0);
    store(tile, dk, dv);
  }

  __device__ __forceinline__ void store(const BwdTile& tile, const float (&dk)[T::kHeadDim / 2],
                                        const float (&dv)[T::kHeadDimV / 2]) const {
    store_key_gradients<T, T::kHeadDimV>(dv, 1.0f, params.dv, params.dv_strides, tile,
                                         first_key(tile), params.head_dim_v);
    store_key_gradients<T, T::kHeadDim>(dk, params.scale, params.dk, params.dk_strides, tile,
                                        first_key(tile), params.head_dim);
  }

  // A tile that no query sees.
  __device__ __forceinline__ void store_zeros(const BwdTile& tile) const {
    float dk[T::kHeadDim / 2] = {}, dv[T::kHeadDimV / 2] = {};
    store(tile, dk, dv);
  }
};

}  // namespace flash_attn3
