// Consumers of large head dims: 64 keys a tile, and one warpgroup holds all of dV, the other all of
// dK, since no thread has registers for parts of both.
//
//   role 0: S^T = K Q^T,   P = exp2(S - LSE),                          dV += P^T dO
//   role 1: dP^T = V dO^T, dS = P (dP - delta) with P from role 0,     dK += dS^T Q
//   both:   some columns of dQ += dS K
//
// P passes through shared memory in the order of the threads' fragments, dS as a swizzled tile. A
// step, with products in flight (first: S or dP, second: dV or dK):
//
//   wait for dS(j-1), issue dQ's low part | wait second(j-1) and that part, issue first(j) | add
//   the low part to the sums, issue dQ's high part | wait first(j), make P or dS | issue second(j)
//   | wait for the high part, add it
//
// The parts are of 64 columns, so that one place of 32 registers serves both.
// While one role computes, the products of the other keep the tensor unit busy.
#pragma once

#include "kernels/bwd/bwd_dq.h"
#include "kernels/bwd/bwd_epilogue.h"
#include "kernels/bwd/bwd_scores.h"

namespace flash_attn3 {

template <class T, int kRole, bool kSoftcap>
struct BwdRoleConsumer {
  using Element = typename T::Element;
  static constexpr int kScores = T::kBlockM / 2;
  static constexpr int kFirstDim = kRole == 0 ? T::kHeadDim : T::kHeadDimV;
  static constexpr int kSecondDim = kRole == 0 ? T::kHeadDimV : T::kHeadDim;  // of the gradient
  static constexpr int kDqColumns = kRole == 0 ? T::kDqColumns0 : T::kDqColumns1;
  static constexpr int kLow = kDqColumns - 64;  // columns of dQ's low part, 64 or none
  static_assert(kLow == 0 || kLow == 64);

  const BwdKernelParams& params;
  typename T::SharedMemory& shared;
  BwdDqAdder<T> adder;

  uint32_t step_count = 0;  // query tiles, of all KV tiles so far, whose second product is issued
  uint32_t tile_count = 0;  // KV tiles with any

  static __device__ __forceinline__ int thread() { return threadIdx.x % 128; }

  // Every warp arrives once.
  __device__ __forceinline__ void say(uint64_t* barrier) { warp_arrive(barrier, thread() % 32); }

  __device__ __forceinline__ int kv_stage() const { return ring_slot<T::kKvStages>(tile_count); }

  __device__ __forceinline__ int q_stage() const { return ring_slot<T::kQStages>(step_count); }
  __device__ __forceinline__ int dout_stage() const {
    return ring_slot<T::kDoutStages>(step_count);
  }
  __device__ __forceinline__ void wait_q() {
    mbarrier_wait(&shared.q_full[q_stage()], ring_parity<T::kQStages>(step_count));
  }
  __device__ __forceinline__ void wait_dout() {
    mbarrier_wait(&shared.dout_full[dout_stage()], ring_parity<T::kDoutStages>(step_count));
  }

  // Role 0 reads Q first and dO second, role 1 the other way round.
  __device__ __forceinline__ void issue_first(float (&s)[kScores]) {
    if constexpr (kRole == 0) {
      wait_q();
    } else {
      wait_dout();
    }
    pin_registers(s);
    wgmma_fence();
    issue_qk_shared<Element, T::kBlockM, kFirstDim>(
        shared_address(kRole == 0 ? shared.k[kv_stage()] : shared.v[kv_stage()]), T::kBlockN,
        shared_address(kRole == 0 ? shared.q[q_stage()] : shared.dout[dout_stage()]), s);
    wgmma_commit();
  }

  __device__ __forceinline__ void issue_second(uint32_t (&a)[kScores / 2],
                                               float (&gradient)[kSecondDim / 2]) {
    // Role 1 has come by S's Q only through P: its own wait makes Q visible here.
    if constexpr (kRole == 1) wait_q();
    pin_registers(a);
    pin_registers(gradient);
    wgmma_fence();
    issue_pv<Element, kSecondDim, T::kBlockM>(
        a, shared_address(kRole == 0 ? shared.dout[dout_stage()] : shared.q[q_stage()]), gradient,
        true);
    wgmma_commit();
  }

  // Columns kColumn .. kColumn + 63 of this role's piece of dQ. dS must be there.
  template <int kColumn>
  __device__ __forceinline__ void issue_dq(uint32_t step, float (&dq)[32]) {
    using P = Panel<T::kHeadDim>;
    static_assert(P::kWidth == 64);
    constexpr int kPanel = (kRole * T::kDqColumns0 + kColumn) / 64;
    pin_registers(dq);
    wgmma_fence();
    issue_shared_row_major<Element, P, 64, T::kBlockN>(
        shared_address(shared.ds[ring_slot<T::kDsSlots>(step)]), T::kBlockM,
        shared_address(shared.k[kv_stage()]) + kPanel * (T::kBlockN * P::kBytes), dq);
    wgmma_commit();
  }

  __device__ __forceinline__ void wait_ds(uint32_t step) {
    mbarrier_wait(&shared.ds_full[ring_slot<T::kDsSlots>(step)], ring_parity<T::kDsSlots>(step));
  }

  __device__ __forceinline__ void release_ds(uint32_t step) {
    say(&shared.ds_empty[ring_slot<T::kDsSlots>(step)]);
  }

  // The second product is done, the last reader of role 0's dO and of role 1's Q: on to the next
  // query tile.
  __device__ __forceinline__ void release_second() {
    say(kRole == 0 ? &shared.dout_empty[dout_stage()] : &shared.q_empty[q_stage()]);
    ++step_count;
  }

  static __device__ __forceinline__ int first_key(const BwdTile& tile) {
    return tile.n * T::kBlockN + thread() / 32 * 16 + thread() % 32 / 4;
  }

  __device__ __forceinline__ uint4* p_fragments(int slot, int i) {
    return reinterpret_cast<uint4*>(shared.p[slot]) + i * 128 + thread();
  }

  // Role 0, S settled: P, for itself packed and for role 1 in shared memory.
  __device__ __forceinline__ void make_p(const BwdTile& tile, int m, float (&s)[kScores],
                                         uint32_t (&p)[kScores / 2]) {
    say(&shared.q_empty[q_stage()]);
    wait_dout();  // for the rows that come with it
    const RowValues<kScores / 8, false> minus_lse(shared.rows[dout_stage()]);
    make_probabilities<kSoftcap, 0, kScores>(s, minus_lse, params);
    const BlockRange plain = tile.plain[0];
    if (m < plain.begin || m >= plain.end) [[unlikely]] {
      mask_probabilities(s, params.mask, tile, first_key(tile),
                         m * T::kBlockM + 2 * (thread() % 4));
    }
    pack_fragments<Element>(s, p);
    const int slot = ring_slot<T::kPSlots>(step_count);
    mbarrier_wait(&shared.p_empty[slot], ring_parity<T::kPSlots>(step_count) ^ 1);
#pragma unroll
    for (int i = 0; i < kScores / 8; ++i) {
      *p_fragments(slot, i) = make_uint4(p[4 * i], p[4 * i + 1], p[4 * i + 2], p[4 * i + 3]);
    }
    say(&shared.p_full[slot]);
  }

  // Role 1, dP settled: dS, for itself packed and for both in shared memory.
  __device__ __forceinline__ void make_ds(float (&dp)[kScores], uint32_t (&ds)[kScores / 2]) {
    const int p_slot = ring_slot<T::kPSlots>(step_count);
    mbarrier_wait(&shared.p_full[p_slot], ring_parity<T::kPSlots>(step_count));
    const float* rows = shared.rows[dout_stage()];
#pragma unroll
    for (int i = 0; i < kScores / 8; ++i) {
      const uint4 p = *p_fragments(p_slot, i);
      make_score_gradients<Element>(dp + 8 * i, {p.x, p.y, p.z, p.w},
                                    row_values(rows + T::kBlockM + 16 * i));
    }
    if constexpr (kSoftcap) {
#pragma unroll
      for (int i = 0; i < kScores / 8; ++i) {
        const uint4 p = *p_fragments(p_slot, i);
        apply_softcap_factor<Element>(dp + 8 * i, {p.x, p.y, p.z, p.w}, rows + 16 * i,
                                      params.tanh_from_log2);
      }
    }
    pack_fragments<Element>(dp, ds);
    say(&shared.p_empty[p_slot]);
    say(&shared.dout_empty[dout_stage()]);  // dP is done, and the rows have been read
    const int slot = ring_slot<T::kDsSlots>(step_count);
    mbarrier_wait(&shared.ds_empty[slot], ring_parity<T::kDsSlots>(step_count) ^ 1);
    store_score_gradients(ds, shared_address(shared.ds[slot]));
    fence_shared_to_async_proxy();
    say(&shared.ds_full[slot]);
  }

  __device__ __forceinline__ void make_operand(const BwdTile& tile, int m, float (&s)[kScores],
                                               uint32_t (&a)[kScores / 2]) {
    if constexpr (kRole == 0) {
      make_p(tile, m, s, a);
    } else {
      make_ds(s, a);
    }
  }

  __device__ __forceinline__ void compute(const BwdTile& tile) {
    float s[kScores], dq[32], gradient[kSecondDim / 2];
    uint32_t a[kScores / 2];

    mbarrier_wait(&shared.k_full[kv_stage()], ring_parity<T::kKvStages>(tile_count));
    if constexpr (kRole == 1)
      mbarrier_wait(&shared.v_full[kv_stage()], ring_parity<T::kKvStages>(tile_count));
    int m = tile.m_begin;
    // The tile's row in the workspace, [query tile][head].
    int at = (tile.q_tile0 + m) * params.heads + tile.head_kv * params.group;
    int before = -1;  // of the step before
    // No first step of its own, from which ptxas would make serialised products: the sums begin at
    // 0, and the first step makes a dQ of nothing, which it does not add.
#pragma unroll
    for (int i = 0; i < kSecondDim / 2; ++i) gradient[i] = 0.0f;
#pragma unroll 1
    for (int left = (tile.m_end - m) * params.group;;) {
      const bool later = before >= 0;
      if (later) wait_ds(step_count);
      if constexpr (kLow > 0) issue_dq<0>(step_count, dq);
      wgmma_wait<0>();
      pin_registers(a);
      if (later) release_second();
      if (left-- == 0) break;
      issue_first(s);
      if constexpr (kLow > 0) {
        pin_registers(dq);
        if (later) adder.add(dq, before, step_count - 1, kRole, 0);
      }
      issue_dq<kLow>(step_count - 1, dq);
      wgmma_wait<1>();
      pin_registers(s);
      make_operand(tile, m, s, a);
      issue_second(a, gradient);
      wgmma_wait<1>();
      pin_registers(dq);
      if (later) {
        release_ds(step_count - 1);
        adder.add(dq, before, step_count - 1, kRole, kLow / 8);
      }
      before = at;
      at += params.heads;
      if (++m == tile.m_end) {  // the next head of the group
        m = tile.m_begin;
        at += 1 - (tile.m_end - m) * params.heads;
      }
    }
    if constexpr (kLow > 0) {
      pin_registers(dq);
      adder.add(dq, before, step_count - 1, kRole, 0);
    }
    issue_dq<kLow>(step_count - 1, dq);
    wgmma_wait<0>();
    pin_registers(dq);
    pin_registers(gradient);
    release_ds(step_count - 1);
    say(&shared.kv_empty[kv_stage()]);
    ++tile_count;
    adder.add(dq, before, step_count - 1, kRole, kLow / 8);
    store(tile, gradient);
  }

  __device__ __forceinline__ void store(const BwdTile& tile,
                                        const float (&gradient)[kSecondDim / 2]) const {
    if constexpr (kRole == 0) {
      store_key_gradients<T, kSecondDim>(gradient, 1.0f, params.dv, params.dv_strides, tile,
                                         first_key(tile), params.head_dim_v);
    } else {
      store_key_gradients<T, kSecondDim>(gradient, params.scale, params.dk, params.dk_strides, tile,
                                         first_key(tile), params.head_dim);
    }
  }

  // A tile that no query sees.
  __device__ __forceinline__ void store_zeros(const BwdTile& tile) const {
    const float gradient[kSecondDim / 2] = {};
    store(tile, gradient);
  }
};

// The tile loop of a consumer of either kind.
template <class T, class Consumer>
__device__ __forceinline__ void consume_tiles(typename T::SharedMemory& shared, Consumer consumer) {
  for (uint32_t count = 0;; ++count) {
    const int slot = ring_slot<T::kTileSlots>(count);
    mbarrier_wait(&shared.tile_full[slot], ring_parity<T::kTileSlots>(count));
    const BwdTile& tile = shared.tiles[slot];
    if (tile.head_kv < 0) return;
    if (tile.m_begin < tile.m_end) {
      consumer.compute(tile);
    } else {
      consumer.store_zeros(tile);
    }
    consumer.say(&shared.tile_empty[slot]);
  }
}

}  // namespace flash_attn3
