// A consumer warpgroup of the e4m3 forward. The stream of blocks, the turns and the handling of
// masks are the forward's (FwdConsumer); what differs is what happens to P and to the sums of P V.
//
// P is e4m3. With kExactTop, every block's maximum moves the references, and the largest P of a row
// is the power of two that e4m3 holds without an error. Otherwise plain blocks take the references
// as they are, as in the forward; a packed probability of 2^8 or more moves them, and P is scaled
// and packed again.
//
// Sums: the tensor unit's are those of one block; they are added to O in fp32, which is kept in
// units of the newest block's scale of V. Scales of Q and K go with the scores' scale.
#pragma once

#include "kernels/fp8/fp8_params.h"
#include "kernels/fp8/fp8_probabilities.h"
#include "kernels/fp8/fp8_traits.h"
#include "kernels/fp8/row_tops.h"
#include "kernels/fwd/fwd_consumer.h"

namespace flash_attn3 {

template <class T>
struct Fp8Consumer : FwdConsumer<T> {
  using Base = FwdConsumer<T>;
  using Base::adjust_scores;
  using Base::epilogue;
  using Base::finish_tile;
  using Base::issue_qk;
  using Base::k_ring;
  using Base::kOutputs;
  using Base::kQueryRegisters;
  using Base::kScores;
  using Base::newest;
  using Base::pass_turn;
  using Base::q_ring;
  using Base::release_k;
  using Base::release_v;
  using Base::shared;
  using Base::take_turn;
  using Base::v_ring;
  using Base::warpgroup;
  using typename Base::Element;

  static constexpr int kTop = T::kExactTop ? kExactTopExponent : kTopExponent;
  // Three consumers lack the registers for what follows quick_tops() when a row is negative.
  static constexpr bool kQuickTops = T::kConsumers == 2;
  // Of row sums, behind the last columns of O: two columns of both rows, all of them the same.
  static constexpr int kSums = T::kTensorSums ? 4 : 0;
  // Sums that the tensor unit adds to. With chunks they are the registers of scores.
  static constexpr int kPartial = T::kInChunks ? 1 : kOutputs + kSums;
  static constexpr int kScratch = T::kInChunks ? kScores + kSums : kScores;

  const Fp8KernelParams& fp8;

  // Of the next block, worked out while the exponential unit is busy (aim()): what stands between
  // one softmax and the next product is time in which nothing else runs.
  struct Aim {
    uint32_t k_full;  // address
    uint32_t parity;
    uint32_t k;  // low words of descriptors
    uint32_t q;
  };

  // What one block leaves to the next.
  struct Stream {
    uint32_t q[kQueryRegisters];
    uint32_t p[kScores / 4];  // probabilities of `current`
    float o[kOutputs];        // all blocks of its tile before it
    float partial[kPartial];  // P V of one block
    float factor[2];          // of O, when P V of `current` is added
    SoftmaxRows rows;
    StreamBlock current;
    Aim aim;
  };

  // A product of scales is not 0, by which a masked score, -inf, would become NaN.
  static constexpr float kSmallestProduct = 1.17549435e-38f;

  // What the scores of `newest` are to be multiplied by, beside what the call asks for. Scales are
  // read where they are needed: no register is left to keep one in.
  __device__ __forceinline__ float block_scale() {
    return fmaxf(shared.scales[newest.slot()].q[warpgroup] * shared.k_scale[k_ring.slot()],
                 kSmallestProduct);
  }

  template <bool kPlain>
  __device__ __forceinline__ float take_block(Stream& t) {
    if (!kPlain && newest.first()) Base::take_q(t.q);
    if constexpr (kPlain) {
      mbarrier_wait_at(t.aim.k_full, t.aim.parity);
    } else {
      mbarrier_wait(&shared.k_full[k_ring.slot()], k_ring.parity());
    }
    return block_scale();
  }

  __device__ __forceinline__ void aim(Stream& t) {
    t.aim.k_full = shared_address(&shared.k_full[k_ring.slot()]);
    t.aim.parity = k_ring.parity();
    t.aim.k = k_major_low(shared_address(shared.k[k_ring.slot()]));
    asm volatile("" : "+r"(t.aim.k_full), "+r"(t.aim.parity), "+r"(t.aim.k));
    if constexpr (!T::kQueryInRegisters) {
      t.aim.q = k_major_low(shared_address(shared.q[q_ring.slot()][warpgroup]));
      asm volatile("" : "+r"(t.aim.q));
    }
  }

  // Of a plain block, which aim() was for.
  __device__ __forceinline__ void issue_aimed(Stream& t, float (&s)[kScores]) {
    pin_registers(s);
    wgmma_fence();
    if constexpr (T::kQueryInRegisters) {
      issue_qk_register_at<Element, T::kBlockN, T::kHeadDim>(t.q, t.aim.k, s);
    } else {
      issue_qk_shared_at<Element, T::kBlockN, T::kHeadDim>(t.aim.q, T::kRowsPerConsumer, t.aim.k,
                                                           s);
    }
    wgmma_commit();
  }

  // O of a new tile.
  __device__ __forceinline__ static void clear_out(Stream& t) {
    t.factor[0] = t.factor[1] = 1.0f;
#pragma unroll
    for (int i = 0; i < kOutputs; ++i) t.o[i] = 0.0f;
  }

  // --- O += P V of `current` --------------------------------------------------------------------
  //
  // O is kept relative to the reference and to the scale of V of the block that was added last: the
  // one multiplication of an addition serves both when they move.

  __device__ __forceinline__ static float (&scores_of(float (&scratch)[kScratch]))
      [kScores] { return reinterpret_cast<float (&)[kScores]>(scratch); }

  __device__ __forceinline__ void issue_whole(Stream& t) {
    mbarrier_wait(&shared.v_full[v_ring.slot()], v_ring.parity());
    pin_registers(t.partial);
    wgmma_fence();
    issue_pv_transposed<T::kHeadDimV + 2 * kSums, T::kBlockN>(
        t.p, shared_address(shared.v[v_ring.slot()]), t.partial, false);
    wgmma_commit();
  }

  // Of a block whose scale of V is no unit of O: rare, and then it waits for the sums by itself.
  __device__ __forceinline__ void weigh_partial(Stream& t) {
    if (value_weight() != 1.0f) {
      wgmma_wait<0>();
      pin_registers(t.partial);
#pragma unroll
      for (int i = 0; i < kOutputs; ++i) t.partial[i] *= value_weight();  // not the row sums
    }
  }

  // Waits for the sums, and adds them. They must have been weighed.
  __device__ __forceinline__ void settle_whole(Stream& t) {
    wgmma_wait<0>();
    pin_registers(t.partial);
    pin_registers(t.p);
    add_sums(t, t.partial + kOutputs);
    take_carry(t);
    add_outputs<0, kOutputs>(t, t.partial);
  }

  // To what O is now relative to, from what it was relative to.
  __device__ __forceinline__ void take_carry(Stream& t) {
    const float carry = shared.v_scale[v_ring.slot()].carry;
    t.factor[0] *= carry;
    t.factor[1] *= carry;
  }

  // What P V is to be multiplied by: 1 unless the scale is far from all that O may be relative to.
  __device__ __forceinline__ float value_weight() { return shared.v_scale[v_ring.slot()].weight; }

  // Of the last block that was added, until its V is released.
  __device__ __forceinline__ float value_unit() { return shared.v_scale[v_ring.slot()].unit; }

  template <int kSize>
  __device__ __forceinline__ static void scale_by(float (&x)[kSize], float factor) {
#pragma unroll
    for (int i = 0; i < kSize; ++i) x[i] *= factor;
  }

  __device__ __forceinline__ static void add_sums(Stream& t, const float* sums) {
    if constexpr (T::kTensorSums) {
#pragma unroll
      for (int h = 0; h < 2; ++h) t.rows.sum[h] = fmaf(t.rows.sum[h], t.factor[h], sums[2 * h]);
    }
  }

  template <int kBegin, int kCount>
  __device__ __forceinline__ static void add_outputs(Stream& t, const float* partial) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      t.o[kBegin + i] = fmaf(t.o[kBegin + i], t.factor[i / 2 % 2], partial[i]);
    }
  }

  // By the registers of scores, which hold so many columns at a time: the last columns first,
  // beside which the row sums are.
  static constexpr int kChunkColumns = 2 * kScores < T::kHeadDimV ? 2 * kScores : T::kHeadDimV;

  template <int kColumn>
  __device__ __forceinline__ void add_columns(Stream& t, float (&s)[kScratch]) {
    constexpr bool kFirst = kColumn + kChunkColumns == T::kHeadDimV;
    pin_registers(s);
    wgmma_fence();
    issue_pv_transposed<kChunkColumns + (kFirst ? 2 * kSums : 0), T::kBlockN>(
        t.p, shared_address(shared.v[v_ring.slot()]) + kColumn * T::kBlockN, s, false);
    wgmma_commit();
    wgmma_wait<0>();
    pin_registers(s);
    if constexpr (kFirst) {
      add_sums(t, s + kChunkColumns / 2);
      take_carry(t);
    }
    if (value_weight() != 1.0f) [[unlikely]]
      scale_by(s, value_weight());
    add_outputs<kColumn / 2, kChunkColumns / 2>(t, s);
    if constexpr (kColumn > 0) add_columns<kColumn - kChunkColumns>(t, s);
  }

  // All of it, before anything else is issued.
  __device__ __forceinline__ void add_current(Stream& t, float (&s)[kScratch]) {
    if constexpr (T::kInChunks) {
      mbarrier_wait(&shared.v_full[v_ring.slot()], v_ring.parity());
      add_columns<T::kHeadDimV - kChunkColumns>(t, s);
      pin_registers(t.p);
    } else {
      issue_whole(t);
      weigh_partial(t);
      settle_whole(t);
    }
  }

  // --- softmax ----------------------------------------------------------------------------------

  // The scale of exponents for the block's scores; those of a transformed call are scaled before.
  __device__ __forceinline__ float exponent_scale(float block_scale, float (&s)[kScores]) {
    if (fp8.transform == ScoreTransform::kNone) [[likely]]
      return fmaxf(fp8.scale_log2 * block_scale, kSmallestProduct);
#pragma unroll
    for (int i = 0; i < kScores; ++i) s[i] *= block_scale;
    return fp8.scale_log2;
  }

  // Whether a row's largest exponent of two is so far from 0 that it is rounded to a multiple of
  // 1/2: then an exact one minus a rounded one is no exponent that P could have. -inf, of rows that
  // see no key of the block, is not far.
  __device__ __forceinline__ static bool far_from_zero(const float (&top)[2], float scale) {
    bool far = false;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      far |= fabsf(top[h] * scale) >= 4194304.0f && top[h] != kMinusInfinity;
    }
    return far;
  }

  // Scaled first, the scores are rounded as their reference is.
  __device__ __forceinline__ static void scale_first(float (&s)[kScores], float (&top)[2],
                                                     float& scale) {
    scale_by(s, scale);
    top[0] *= scale;
    top[1] *= scale;
    scale = 1.0f;
  }

  // The rows' maxima become the references; `factor` is what O and the sums are to be multiplied by
  // for it. No vote: most blocks of a short sequence move some row of a warp, and two rows'
  // shuffles side by side take no longer than a branch.
  __device__ __forceinline__ static void move_references(SoftmaxRows& rows, const float (&top)[2],
                                                         float scale, float (&factor)[2]) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      // Rounded up: no probability is above 2^kTop.
      const float next = fmaxf(rows.reference[h], __fmaf_ru(top[h], scale, -float(kTop)));
      factor[h] = exp2_approx(rows.reference[h] - next);
      rows.reference[h] = next;
      if constexpr (!T::kTensorSums) rows.sum[h] *= factor[h];
    }
  }

  // All scores to probabilities; their sums, unless the tensor unit makes them.
  __device__ __forceinline__ static void exponentiate(SoftmaxRows& rows, float (&s)[kScores],
                                                      float scale) {
    if constexpr (T::kTensorSums) {
#pragma unroll
      for (int i = 0; i < kScores; ++i) {
        s[i] = exp2_approx(fmaf(s[i], scale, -rows.reference[i / 2 % 2]));
      }
    } else {
      rows.template exponentiate<0, kScores>(s, scale, rows.sum);
    }
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
          if constexpr (!T::kTensorSums) t.rows.sum[h] *= factor[h];
        }
        scale_scores(s, factor);
      }
      pack_probabilities_e4m3(s, t.p);
      t.factor[0] = factor[0];
      t.factor[1] = factor[1];
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
    float largest[2];
    tops_of_rows(s, largest);
    move_references(t.rows, largest, scale, factor);
    SoftmaxRows fresh{{t.rows.reference[0], t.rows.reference[1]}, {0.0f, 0.0f}};
    exponentiate(fresh, s, scale);
    if constexpr (!T::kTensorSums) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        if (top[h] == -kMinusInfinity) t.rows.sum[h] = fresh.sum[h];
      }
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

  // As in the forward, Q K^T of `newest` and P V of `current` are issued together. P V is so short
  // that it is done when the maximum is: from there on one stretch of code without a wait or a
  // branch exponentiates, adds P V to O and packs P, so that the exponential unit, which takes one
  // in eight cycles, never waits and all else happens meanwhile.
  template <bool kPlain>
  __device__ __forceinline__ void step_overlapped(Stream& t) {
    float s[kScores];
    float scale = take_block<kPlain>(t);
    take_turn();
    if constexpr (kPlain) {
      issue_aimed(t, s);
    } else {
      issue_qk(t.q, s);
    }
    issue_whole(t);
    pass_turn();
    EndOfTile end;
    const bool new_tile = !kPlain && newest.first();
    if constexpr (!kPlain) {
      if (new_tile) begin_end(t, end);
    }
    wgmma_wait<1>();
    pin_registers(s);
    constexpr bool kMoves = !kPlain || T::kExactTop;
    float factor[2] = {1.0f, 1.0f};
    if constexpr (kMoves) release_k(!kPlain && newest.last());
    if constexpr (kPlain) {
      scale *= fp8.scale_log2;
    } else {
      scale = exponent_scale(scale, s);
      adjust_scores(newest, s);
    }
    float top[2];
    bool rare = value_weight() != 1.0f;
    if constexpr (kPlain && kMoves && kQuickTops) {
      quick_tops(s, top);
      rare |= any_negative(top);
    } else if constexpr (kMoves) {
      tops_of_rows(s, top);
    }
    if constexpr (kMoves) rare |= far_from_zero(top, scale);
    // The assembler moves the wait for P V above all that stands before it, but not over a branch.
    if (__any_sync(0xffffffffu, rare)) [[unlikely]] {
      if constexpr (kPlain && kMoves && kQuickTops) tops_of_rows(s, top);
      weigh_partial(t);
      if constexpr (kMoves) {
        if (far_from_zero(top, scale)) scale_first(s, top, scale);
      }
    }
    if constexpr (kMoves) move_references(t.rows, top, scale, factor);
    settle_whole(t);
    if constexpr (!kPlain) {
      if (new_tile) {
        finish_end(t, end);
        clear_out(t);
      }
    }
    release_v();
    t.factor[0] = factor[0];
    t.factor[1] = factor[1];
    exponentiate(t.rows, s, scale);
    pack_probabilities_e4m3(s, t.p);
    if constexpr (!kMoves) check_plain(t, s, scale);
    aim(t);
    t.current = newest;
  }

  // P V of `current`, then Q K^T of `newest`, then its softmax, under which the other warpgroup's
  // products run: where registers do not hold sums, scores and the state of masks at a time.
  template <bool kPlain>
  __device__ __forceinline__ void step_in_turn(Stream& t) {
    constexpr bool kMoves = !kPlain || T::kExactTop;
    float scratch[kScratch];
    float (&s)[kScores] = scores_of(scratch);
    take_turn();
    add_current(t, scratch);
    const float unit = kPlain ? 1.0f : value_unit();
    release_v();
    float scale = take_block<kPlain>(t);
    if constexpr (kPlain) {
      issue_aimed(t, s);
    } else {
      issue_qk(t.q, s);
    }
    pass_turn();
    if constexpr (!kPlain) {
      if (newest.first()) {
        finish(t, t.rows.reference, unit);
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
    t.factor[0] = t.factor[1] = 1.0f;
    if constexpr (kMoves) {
      float top[2];
      if constexpr (kPlain && kQuickTops) {
        quick_tops(s, top);
        if (__any_sync(0xffffffffu, any_negative(top))) [[unlikely]]
          tops_of_rows(s, top);
      } else {
        tops_of_rows(s, top);
      }
      if (far_from_zero(top, scale)) [[unlikely]]
        scale_first(s, top, scale);
      move_references(t.rows, top, scale, t.factor);
    }
    exponentiate(t.rows, s, scale);
    pack_probabilities_e4m3(s, t.p);
    if constexpr (!kMoves) check_plain(t, s, scale);
    aim(t);
    t.current = newest;
  }

  // --- the end of a tile ------------------------------------------------------------------------

  // What a step that is at the next tile already keeps of the rows of the one before.
  struct EndOfTile {
    float inverse[2];
  };

  // Exact sums are complete before P V is: the LSE is stored under Q K^T.
  __device__ __forceinline__ void begin_end(Stream& t, EndOfTile& end) {
    if constexpr (T::kTensorSums) {
      end.inverse[0] = t.rows.reference[0];
      end.inverse[1] = t.rows.reference[1];
      t.rows.reference[0] = t.rows.reference[1] = kNoReference;
    } else {
      Base::finish_rows(t.current, t.rows, end.inverse);
      t.rows.reset();
    }
  }

  __device__ __forceinline__ void finish_end(Stream& t, EndOfTile& end) {
    const float unit = value_unit();
    if constexpr (T::kTensorSums) {
      finish(t, end.inverse, unit);
      t.rows.sum[0] = t.rows.sum[1] = 0.0f;
    } else {
      end.inverse[0] *= unit;
      end.inverse[1] *= unit;
      finish_tile(t.current, end.inverse, t.o);
    }
  }

  // LSE and O of the tile of `current`, all of whose blocks are in O.
  __device__ __forceinline__ void finish(Stream& t, const float (&reference)[2], float unit) {
    SoftmaxRows rows{{reference[0], reference[1]}, {t.rows.sum[0], t.rows.sum[1]}};
    if constexpr (!T::kTensorSums) rows.finish();
    float inverse[2];
    epilogue.store_lse(shared.tiles[t.current.slot()], rows, inverse);
    inverse[0] *= unit;
    inverse[1] *= unit;
    finish_tile(t.current, inverse, t.o);
  }

  __device__ __forceinline__ void first_block(Stream& t) {
    float s[kScores];
    const float scale_of_block = take_block<false>(t);
    issue_qk(t.q, s);
    wgmma_wait<0>();
    pin_registers(s);
    release_k(newest.last());
    t.rows.reset();
    clear_out(t);
    float scale = exponent_scale(scale_of_block, s);
    adjust_scores(newest, s);
    float top[2];
    tops_of_rows(s, top);
    if (far_from_zero(top, scale)) scale_first(s, top, scale);
    move_references(t.rows, top, scale, t.factor);
    exponentiate(t.rows, s, scale);
    pack_probabilities_e4m3(s, t.p);
    aim(t);
    t.current = newest;
  }

  // P V of the last block of all.
  __device__ __forceinline__ void last_block(Stream& t) {
    float scratch[kScratch];
    add_current(t, scratch);
    const float unit = value_unit();
    release_v();
    finish(t, t.rows.reference, unit);
  }

  __device__ __forceinline__ void run() { Base::run(*this); }
};

}  // namespace flash_attn3
