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
// so that a product is queued whenever the warpgroup computes. Registers decide the rest: dQ takes
// the place of S and P, and dP that of dS, dK's operand; a third place of that size would not fit.
#pragma once

#include "kernels/bwd/bwd_dq.h"
#include "kernels/bwd/bwd_epilogue.h"
#include "kernels/bwd/bwd_scores.h"

namespace flash_attn3 {

template <class T, int kDqColumns, bool kSoftcap>
struct BwdKeyConsumer {
  using Element = typename T::Element;
  static constexpr int kScores = T::kBlockM / 2;
  // LSE and delta are in registers before the wait for scores, where there is room for them.
  static constexpr bool kReadEarly = T::kSoftcapApart;

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

  __device__ __forceinline__ void issue_scores(float (&s)[kScores]) {
    mbarrier_wait(&shared.q_full[q_stage()], ring_parity<T::kQStages>(step_count));
    pin_registers(s);
    wgmma_fence();
    issue_qk_shared<Element, T::kBlockM, T::kHeadDim>(
        shared_address(shared.k[kv_stage()]) + warpgroup * 64 * Panel<T::kHeadDim>::kBytes,
        T::kBlockN, shared_address(shared.q[q_stage()]), s);
    wgmma_commit();
  }

  __device__ __forceinline__ void issue_dp(float (&dp)[kScores]) {
    mbarrier_wait(&shared.dout_full[dout_stage()], ring_parity<T::kDoutStages>(step_count));
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

  // One query tile. dK of the step before is still in flight at its start, dK of its own at its
  // end. `before` is the row in the workspace, [query tile][head], of the step before, whose dQ is
  // made here; -1 in the first.
  __device__ __forceinline__ void step(const BwdTile& tile, int m, int before,
                                       float (&dk)[T::kHeadDim / 2], float (&dv)[T::kHeadDimV / 2],
                                       uint32_t (&ds)[kScores / 2]) {
    float s[kScores], dp[kScores];
    issue_scores(s);
    // dK of the step before is done: its Q may go, and dP may take the place of its operand.
    wgmma_wait<1>();
    pin_registers(ds);
    if (before >= 0) say(&shared.q_empty[ring_slot<T::kQStages>(step_count - 1)]);
    issue_dp(dp);
    const float* rows = shared.rows[dout_stage()];
    const RowValues<kScores / 8, kReadEarly> minus_lse(rows);
    wgmma_wait<1>();
    pin_registers(s);
    make_probabilities<kSoftcap>(s, minus_lse, params);
    const BlockRange plain = tile.plain[warpgroup];
    if (m < plain.begin || m >= plain.end) [[unlikely]] {
      mask_probabilities(s, params.mask, tile, first_key(tile),
                         m * T::kBlockM + 2 * (thread() % 4));
    }
    uint32_t p[kScores / 2];
    pack_fragments<Element>(s, p);
    issue_dv(p, dv);
    const RowValues<kScores / 8, kReadEarly> deltas(rows + T::kBlockM);
    wgmma_wait<1>();
    pin_registers(dp);
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
    } else {
      float dq[kDqColumns / 2];
      issue_dq(step_count - 1, dq);
      issue_dk(ds, dk);
      wgmma_wait<1>();
      pin_registers(dq);
      release_ds(step_count - 1);
      adder.add(dq, before, step_count - 1, warpgroup, 0);
    }
    ++step_count;
  }

  __device__ __forceinline__ void compute(const BwdTile& tile) {
    float dk[T::kHeadDim / 2], dv[T::kHeadDimV / 2];
    uint32_t ds[kScores / 2];
    // Sums from 0 on rather than a first step of its own: ptxas serialises the products otherwise.
#pragma unroll
    for (int i = 0; i < T::kHeadDim / 2; ++i) dk[i] = 0.0f;
#pragma unroll
    for (int i = 0; i < T::kHeadDimV / 2; ++i) dv[i] = 0.0f;
    mbarrier_wait(&shared.k_full[kv_stage()], ring_parity<T::kKvStages>(tile_count));
    mbarrier_wait(&shared.v_full[kv_stage()], ring_parity<T::kKvStages>(tile_count));
    int m = tile.m_begin;
    int at = (tile.q_tile0 + m) * params.heads + tile.head_kv * params.group;
    int before = -1;
#pragma unroll 1
    for (int left = (tile.m_end - m) * params.group;;) {
      step(tile, m, before, dk, dv, ds);
      if (--left == 0) break;
      before = at;
      at += params.heads;
      if (++m == tile.m_end) {  // the next head of the group
        m = tile.m_begin;
        at += 1 - (tile.m_end - m) * params.heads;
      }
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
    store_key_gradients<Element, T::kHeadDimV>(dv, 1.0f, params.dv, params.dv_strides, tile,
                                               first_key(tile), params.head_dim_v);
    store_key_gradients<Element, T::kHeadDim>(dk, params.scale, params.dk, params.dk_strides, tile,
                                              first_key(tile), params.head_dim);
  }

  // A tile that no query sees.
  __device__ __forceinline__ void store_zeros(const BwdTile& tile) const {
    float dk[T::kHeadDim / 2] = {}, dv[T::kHeadDimV / 2] = {};
    store(tile, dk, dv);
  }
};

}  // namespace flash_attn3
