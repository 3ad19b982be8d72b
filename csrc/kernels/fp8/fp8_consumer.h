// A consumer warpgroup of the e4m3 forward. The stream of blocks, the turns and the handling of
// masks are the forward's (FwdConsumer); what differs is what happens to P and to the sums of P V.
//
// P is e4m3. With kExactTop, every block's maximum moves the references, and the largest P of a row
// is the power of two that e4m3 holds without an error. Otherwise plain blocks take the references
// as they are, as in the forward; a packed probability of 2^8 or more moves them, and P is scaled
// and packed again.
//
// Sums: the tensor unit's are those of one block; they are added to O in fp32, multiplied by the
// block's scale of V. Scales of Q and K go with the scores' scale.
#pragma once

#include "kernels/fp8/fp8_params.h"
#include "kernels/fp8/fp8_probabilities.h"
#include "kernels/fp8/fp8_traits.h"
#include "kernels/fwd/fwd_consumer.h"

namespace flash_attn3 {

template <class T>
struct Fp8Consumer : FwdConsumer<T> {
  using Base = FwdConsumer<T>;
  using Base::adjust_scores;
  using Base::epilogue;
  using Base::finish_rows;
  using Base::finish_tile;
  using Base::issue_qk;
  using Base::k_ring;
  using Base::kOutputs;
  using Base::kQueryRegisters;
  using Base::kScores;
  using Base::newest;
  using Base::pass_turn;
  using Base::release_k;
  using Base::release_v;
  using Base::scale_rows;
  using Base::shared;
  using Base::take_turn;
  using Base::v_ring;
  using Base::warpgroup;

  static constexpr int kEarly = kScores / 2;
  static constexpr int kTop = T::kExactTop ? kExactTopExponent : kTopExponent;
  // Sums that the tensor unit adds to. With chunks they are the registers of scores.
  static constexpr int kPartial = T::kInChunks ? 1 : kOutputs;

  const Fp8KernelParams& fp8;

  // What one block leaves to the next.
  struct Stream {
    uint32_t q[kQueryRegisters];
    uint32_t p[kScores / 4];  // probabilities of `current`
    float o[kOutputs];        // all blocks of its tile before it
    float partial[kPartial];  // P V of one block
    SoftmaxRows rows;
    StreamBlock current;
  };

  // What the scores of `newest` are to be multiplied by, beside what the call asks for. Scales are
  // read where they are needed: no register is left to keep one in.
  __device__ __forceinline__ float block_scale() {
    return shared.scales[newest.slot()].q[warpgroup] * shared.k_scale[k_ring.slot()];
  }

  template <bool kPlain>
  __device__ __forceinline__ float take_block(Stream& t) {
    if (!kPlain && newest.first()) Base::take_q(t.q);
    mbarrier_wait(&shared.k_full[k_ring.slot()], k_ring.parity());
    return block_scale();
  }

  // O of a new tile.
  __device__ __forceinline__ static void clear_out(Stream& t) {
#pragma unroll
    for (int i = 0; i < kOutputs; ++i) t.o[i] = 0.0f;
  }

  // --- O += P V of `current` --------------------------------------------------------------------

  __device__ __forceinline__ void issue_whole(Stream& t) {
    mbarrier_wait(&shared.v_full[v_ring.slot()], v_ring.parity());
    pin_registers(t.partial);
    wgmma_fence();
    issue_pv_transposed<T::kHeadDimV, T::kBlockN>(t.p, shared_address(shared.v[v_ring.slot()]),
                                                  t.partial, false);
    wgmma_commit();
  }

  // The sums are complete.
  __device__ __forceinline__ void settle_whole(Stream& t) {
    pin_registers(t.partial);
    pin_registers(t.p);
    const float value_scale = shared.v_scale[v_ring.slot()];
    release_v();
#pragma unroll
    for (int i = 0; i < kPartial; ++i) t.o[i] = fmaf(t.partial[i], value_scale, t.o[i]);
  }

  // By the registers of scores, which hold so many columns at a time.
  static constexpr int kChunkColumns = 2 * kScores < T::kHeadDimV ? 2 * kScores : T::kHeadDimV;

  template <int kColumn>
  __device__ __forceinline__ void add_columns(Stream& t, float (&s)[kScores]) {
    pin_registers(s);
    wgmma_fence();
    issue_pv_transposed<kChunkColumns, T::kBlockN>(
        t.p, shared_address(shared.v[v_ring.slot()]) + kColumn * T::kBlockN, s, false);
    wgmma_commit();
    wgmma_wait<0>();
    pin_registers(s);
    const float value_scale = shared.v_scale[v_ring.slot()];
#pragma unroll
    for (int i = 0; i < kChunkColumns / 2; ++i) {
      t.o[kColumn / 2 + i] = fmaf(s[i], value_scale, t.o[kColumn / 2 + i]);
    }
    if constexpr (kColumn + kChunkColumns < T::kHeadDimV) {
      add_columns<kColumn + kChunkColumns>(t, s);
    }
  }

  // All of it, before anything else is issued.
  __device__ __forceinline__ void add_current(Stream& t, float (&s)[kScores]) {
    if constexpr (T::kInChunks) {
      mbarrier_wait(&shared.v_full[v_ring.slot()], v_ring.parity());
      add_columns<0>(t, s);
      pin_registers(t.p);
      release_v();
    } else {
      issue_whole(t);
      wgmma_wait<0>();
      settle_whole(t);
    }
  }

  // --- softmax ----------------------------------------------------------------------------------

  // The scale of exponents for the block's scores; those of a transformed call are scaled before.
  __device__ __forceinline__ float exponent_scale(float block_scale, float (&s)[kScores]) {
    if (fp8.transform == ScoreTransform::kNone) [[likely]]
      return fp8.scale_log2 * block_scale;
#pragma unroll
    for (int i = 0; i < kScores; ++i) s[i] *= block_scale;
    return fp8.scale_log2;
  }

  __device__ __forceinline__ static bool move_references(SoftmaxRows& rows,
                                                         const float (&s)[kScores], float scale,
                                                         float (&factor)[2]) {
    return rows.template move_references<kTop, 0>(s, scale, factor);
  }

  // Probabilities of a plain block are packed. Where one came out too large, the reference of its
  // row moves so far that the largest becomes 2^kTopExponent. K is released.
  __device__ __forceinline__ void check_plain(Stream& t, float (&s)[kScores], float scale) {
    if (__any_sync(0xffffffffu, any_too_large(t.p))) [[unlikely]] {
      float top[2];
      largest_of_rows(s, top);
      float factor[2];
      if (__any_sync(0xffffffffu, top[0] == -kMinusInfinity || top[1] == -kMinusInfinity)) {
        compute_again(t, s, scale, top, factor);
      } else {
        constexpr float kTop = 1 << kTopExponent;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const bool moves = top[h] > kTop;  // not where it is NaN
          factor[h] = moves ? kTop * reciprocal_approx(top[h]) : 1.0f;
          t.rows.reference[h] += moves ? __log2f(top[h]) - float(kTopExponent) : 0.0f;
          t.rows.sum[h] *= factor[h];
        }
        scale_scores(s, factor);
      }
      pack_probabilities_e4m3(s, t.p);
      scale_rows(t.o, factor);
    }
    release_k(false);
  }

  __device__ __forceinline__ static void scale_scores(float (&s)[kScores],
                                                      const float (&factor)[2]) {
#pragma unroll
    for (int i = 0; i < kScores; ++i) s[i] *= factor[i / 2 % 2];
  }

  // Some row has a probability of 2^128 or more: the scores themselves are needed again. Such a
  // row's sum is lost, and was 0 beside the new ones; the others' holds this block already.
  __device__ __forceinline__ void compute_again(Stream& t, float (&s)[kScores], float scale,
                                                const float (&top)[2], float (&factor)[2]) {
    recompute_scores(t.q, s);
    fence_shared_to_async_proxy();  // K and Q read before the copy engine writes there again
    if (!move_references(t.rows, s, scale, factor)) factor[0] = factor[1] = 1.0f;
    float part[2] = {0.0f, 0.0f};
    t.rows.template exponentiate<0, kScores>(s, scale, part);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (top[h] == -kMinusInfinity) t.rows.sum[h] = part[h];
    }
  }

  __device__ __forceinline__ static void largest_of_rows(const float (&s)[kScores],
                                                         float (&top)[2]) {
    top[0] = top[1] = 0.0f;
#pragma unroll
    for (int i = 0; i < kScores; ++i) top[i / 2 % 2] = fmaxf(top[i / 2 % 2], s[i]);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      top[h] = fmaxf(top[h], __shfl_xor_sync(0xffffffffu, top[h], 1));
      top[h] = fmaxf(top[h], __shfl_xor_sync(0xffffffffu, top[h], 2));
    }
  }

  // As the forward's, but in a loop that needs few registers: mma.sync has no e4m3 here, the
  // assembler converts to fp16, and fetched ahead the fragments would spill.
  __device__ __forceinline__ void recompute_scores(uint32_t (&q)[kQueryRegisters],
                                                   float (&s)[kScores]) {
    const uint32_t k_base = shared_address(shared.k[k_ring.slot()]);
    const int lane = Base::thread() % 32;
#pragma unroll
    for (int n = 0; n < kScores / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 8; ++i) s[8 * n + i] = 0.0f;
      if constexpr (T::kQueryInRegisters) {
#pragma unroll
        for (int k = 0; k < Base::kQuerySteps; ++k) {
          multiply(n, k, lane, k_base, {{q[4 * k], q[4 * k + 1], q[4 * k + 2], q[4 * k + 3]}}, s);
        }
      } else {
#pragma unroll 1
        for (int k = 0; k < Base::kQuerySteps; ++k) {
          uint32_t a[4];
          Base::load_q_fragment(k, a);
          multiply(n, k, lane, k_base, {{a[0], a[1], a[2], a[3]}}, s);
        }
      }
    }
  }

  struct Fragment {
    uint32_t a[4];
  };

  __device__ __forceinline__ static void multiply(int n, int k, int lane, uint32_t k_base,
                                                  const Fragment& q, float (&s)[kScores]) {
    uint32_t b[4];
    load_matrix_x4(b, Base::template fragment_address<T::kBlockN>(
                          k_base, n * 16 + lane / 16 * 8 + lane % 8, 2 * k + lane / 8 % 2));
    mma_16x8<typename T::Input>(s + 8 * n, q.a, b[0], b[1]);
    mma_16x8<typename T::Input>(s + 8 * n + 4, q.a, b[2], b[3]);
  }

  // --- steps ------------------------------------------------------------------------------------

  template <bool kPlain>
  __device__ __forceinline__ void step(Stream& t) {
    if constexpr (T::kInChunks || !(kPlain || T::kOverlapsEdges)) {
      step_in_turn<kPlain>(t);
    } else {
      step_overlapped<kPlain>(t);
    }
  }

  // As in the forward: Q K^T of `newest` and P V of `current` are issued together, and the softmax
  // of `newest` runs under P V.
  template <bool kPlain>
  __device__ __forceinline__ void step_overlapped(Stream& t) {
    constexpr bool kMoves = !kPlain || T::kExactTop;
    float s[kScores];
    float scale = take_block<kPlain>(t);
    take_turn();
    issue_qk(t.q, s);
    issue_whole(t);
    pass_turn();
    float factor[2];  // what O is to be multiplied by
    const bool new_tile = !kPlain && newest.first();
    bool moved = false;
    if constexpr (!kPlain) {
      if (new_tile) {
        finish_rows(t.current, t.rows, factor);
        t.rows.reset();
      }
    }
    wgmma_wait<1>();
    pin_registers(s);
    if constexpr (kMoves) release_k(!kPlain && newest.last());
    if constexpr (kPlain) {
      scale *= fp8.scale_log2;
    } else {
      scale = exponent_scale(scale, s);
      adjust_scores(newest, s);
    }
    if constexpr (kMoves) {
      float rescale[2];
      moved = move_references(t.rows, s, scale, rescale);
      if (!new_tile) {
        factor[0] = rescale[0];
        factor[1] = rescale[1];
      }
    }
    t.rows.template exponentiate<0, kEarly>(s, scale, t.rows.sum);
    // P V stays under these exponentials only if nothing moves its wait above them, nor them below
    // it: the assembler is kept by a branch, a second look at a barrier that is long complete, and
    // that looks as if it depended on their sums.
    pin_registers(s);
    pin_registers(t.rows.sum);
    const bool never = fminf(t.rows.sum[0], t.rows.sum[1]) < 0.0f;
    mbarrier_wait(&shared.v_full[v_ring.slot()], v_ring.parity() ^ uint32_t(never));
    wgmma_wait<0>();
    settle_whole(t);
    if constexpr (!kPlain) {
      if (new_tile) {
        finish_tile(t.current, factor, t.o);
        clear_out(t);
      }
    }
    if constexpr (kMoves) {
      if (!new_tile && moved) scale_rows(t.o, factor);
    }
    t.rows.template exponentiate<kEarly, kScores>(s, scale, t.rows.sum);
    pack_probabilities_e4m3(s, t.p);
    if constexpr (!kMoves) check_plain(t, s, scale);
    t.current = newest;
  }

  // P V of `current`, then Q K^T of `newest`, then its softmax, under which the other warpgroup's
  // products run: where registers do not hold sums, scores and the state of masks at a time.
  template <bool kPlain>
  __device__ __forceinline__ void step_in_turn(Stream& t) {
    constexpr bool kMoves = !kPlain || T::kExactTop;
    float s[kScores];
    take_turn();
    add_current(t, s);
    float scale = take_block<kPlain>(t);
    issue_qk(t.q, s);
    pass_turn();
    float factor[2];
    if constexpr (!kPlain) {
      if (newest.first()) {
        finish_rows(t.current, t.rows, factor);
        finish_tile(t.current, factor, t.o);
        t.rows.reset();
        clear_out(t);
      }
    }
    wgmma_wait<0>();
    pin_registers(s);
    if constexpr (kMoves) release_k(!kPlain && newest.last());
    if constexpr (kPlain) {
      scale *= fp8.scale_log2;
    } else {
      scale = exponent_scale(scale, s);
      adjust_scores(newest, s);
    }
    if constexpr (kMoves) {
      if (move_references(t.rows, s, scale, factor)) scale_rows(t.o, factor);
    }
    t.rows.template exponentiate<0, kEarly>(s, scale, t.rows.sum);
    t.rows.template exponentiate<kEarly, kScores>(s, scale, t.rows.sum);
    pack_probabilities_e4m3(s, t.p);
    if constexpr (!kMoves) check_plain(t, s, scale);
    t.current = newest;
  }

  __device__ __forceinline__ void first_block(Stream& t) {
    float s[kScores];
    float rescale[2];
    const float scale_of_block = take_block<false>(t);
    issue_qk(t.q, s);
    wgmma_wait<0>();
    pin_registers(s);
    release_k(newest.last());
    t.rows.reset();
    clear_out(t);
    const float scale = exponent_scale(scale_of_block, s);
    adjust_scores(newest, s);
    move_references(t.rows, s, scale, rescale);
    // In step()'s order of additions: results do not depend on which tile a CTA starts with.
    t.rows.template exponentiate<0, kEarly>(s, scale, t.rows.sum);
    t.rows.template exponentiate<kEarly, kScores>(s, scale, t.rows.sum);
    pack_probabilities_e4m3(s, t.p);
    t.current = newest;
  }

  // P V of the last block of all.
  __device__ __forceinline__ void last_block(Stream& t) {
    float s[kScores];
    float factor[2];
    add_current(t, s);
    finish_rows(t.current, t.rows, factor);
    finish_tile(t.current, factor, t.o);
  }

  __device__ __forceinline__ void run() { Base::run(*this); }
};

}  // namespace flash_attn3
