// A consumer warpgroup of the e4m3 forward. The stream of blocks, the turns and the handling of
// masks are the forward's (FwdConsumer); what differs is what happens to P and to the sums of P V.
//
// P is e4m3. Every block's maximum moves the references, so that the largest P of a row is the
// power of two that e4m3 holds without an error.
//
// Sums: the tensor unit's are those of one block; they are added to O in fp32, which is kept in
// units of the newest block's scale of V. Scales of Q and K go with the scores' scale.
#pragma once

#include "kernels/fp8/fp8_codes.h"
#include "kernels/fp8/fp8_params.h"
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
  using Base::uniform;
  using Base::v_ring;
  using Base::warpgroup;
  using typename Base::Element;

  // Three consumers lack the registers to work out the next block's addresses early.
  static constexpr bool kAims = T::kConsumers == 2 && !T::kCarried;
  // Of row sums, behind the last columns of O: two columns of both rows, all of them the same.
  static constexpr int kSums = T::kTensorSums ? 4 : 0;
  // Sums that the tensor unit adds to.
  static constexpr int kPartial = T::kInChunks || T::kCarried ? 1 : kOutputs + kSums;

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
    float exact[2];           // sums of a row before rounding, if the LSE shall be exact
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
    if constexpr (kPlain && kAims) {
      mbarrier_wait_at(t.aim.k_full, t.aim.parity);
    } else {
      mbarrier_wait(&shared.k_full[k_ring.slot()], k_ring.parity());
    }
    return block_scale();
  }

  __device__ __forceinline__ void aim(Stream& t) {
    if constexpr (!kAims) return;
    t.aim.k_full = shared_address(&shared.k_full[k_ring.slot()]);
    t.aim.parity = k_ring.parity();
    t.aim.k = k_major_low(shared_address(shared.k[k_ring.slot()]));
    asm volatile("" : "+r"(t.aim.k_full), "+r"(t.aim.parity), "+r"(t.aim.k));
    t.aim.q = k_major_low(shared_address(shared.q[q_ring.slot()][warpgroup]));
    asm volatile("" : "+r"(t.aim.q));
  }

  // Of a plain block, which aim() was for.
  __device__ __forceinline__ void issue_aimed(Stream& t, float (&s)[kScores]) {
    pin_registers(s);
    wgmma_fence();
    issue_qk_shared_at<Element, T::kBlockN, T::kHeadDim>(t.aim.q, T::kRowsPerConsumer, t.aim.k, s);
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

  // The low word, of V of `current`.
  __device__ __forceinline__ uint32_t value_descriptor() {
    return uniform(k_major_low(shared_address(shared.v[v_ring.slot()])));
  }

  __device__ __forceinline__ void issue_whole(Stream& t, uint32_t v) {
    mbarrier_wait(&shared.v_full[v_ring.slot()], v_ring.parity());
    pin_registers(t.partial);
    wgmma_fence();
    issue_pv_transposed_at<T::kHeadDimV + 2 * kSums, T::kBlockN>(t.p, v, t.partial, false);
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

  // So many columns at a time, the last first, beside which the row sums are. Several chunks are in
  // the scores' registers, or the assembler spills; one alone is not, or it serialises the
  // products.
  static constexpr int kChunkColumns = 2 * kScores < T::kHeadDimV ? 2 * kScores : T::kHeadDimV;
  static constexpr int kLastChunk = T::kHeadDimV - kChunkColumns;
  template <int kColumn>
  static constexpr int kChunk = kChunkColumns / 2 + (kColumn == kLastChunk ? kSums : 0);

  template <int kColumn>
  __device__ __forceinline__ void multiply_columns(Stream& t, float (&part)[kChunk<kColumn>]) {
    pin_registers(part);
    wgmma_fence();
    issue_pv_transposed<2 * kChunk<kColumn>, T::kBlockN>(
        t.p, shared_address(shared.v[v_ring.slot()]) + kColumn * T::kBlockN, part, false);
    wgmma_commit();
    wgmma_wait<0>();
    pin_registers(part);
  }

  template <int kColumn>
  __device__ __forceinline__ void add_chunk(Stream& t, float (&part)[kChunk<kColumn>]) {
    if constexpr (kColumn == kLastChunk) {
      add_sums(t, part + kChunkColumns / 2);
      take_carry(t);
    }
    if (value_weight() != 1.0f) [[unlikely]]
      scale_by(part, value_weight());
    add_outputs<kColumn / 2, kChunkColumns / 2>(t, part);
  }

  template <int kColumn>
  __device__ __forceinline__ void add_columns(Stream& t, float (&part)[kChunk<kColumn>]) {
    multiply_columns<kColumn>(t, part);
    add_chunk<kColumn>(t, part);
    if constexpr (kColumn > 0) add_columns<kColumn - kChunkColumns>(t, part);
  }

  // All of it, before anything else is issued.
  template <bool kPlain, bool kTurn>
  __device__ __forceinline__ void add_current(Stream& t, float (&s)[kScores]) {
    if constexpr (kTurn && !(kPlain && kInPieces)) take_turn();
    if constexpr (kPlain && kInPieces) {
      add_in_pieces(t);
    } else if constexpr (T::kInChunks) {
      mbarrier_wait(&shared.v_full[v_ring.slot()], v_ring.parity());
      float part[kAddsLate ? kChunk<kLastChunk> : 1];
      if constexpr (kAddsLate) add_columns<kLastChunk>(t, part);
      if constexpr (!kAddsLate) add_columns<kLastChunk>(t, s);
      pin_registers(t.p);
      if constexpr (kTurn && kPassesEarly) pass_turn();
    } else {
      issue_whole(t, value_descriptor());
      weigh_partial(t);
      settle_whole(t);
    }
  }

  // Two products of 64 columns are under way at a time: while one is added to O, the other runs.
  // The turn is passed when the last has been issued.
  static constexpr bool kInPieces = T::kInChunks && T::kHeadDimV == 256;
  static_assert(!(kInPieces && T::kTensorSums), "no piece has the columns of ones");
  static constexpr bool kPassesEarly = kInPieces;
  // One chunk is all: it is added to O under Q K^T, so that the turn is over the sooner.
  static constexpr bool kAddsLate = T::kInChunks && kLastChunk == 0;
  static constexpr int kPieces = T::kHeadDimV / 64;
  static constexpr int kPiece = 32;  // registers

  __device__ __forceinline__ void add_in_pieces(Stream& t) {
    mbarrier_wait(&shared.v_full[v_ring.slot()], v_ring.parity());
    const uint32_t v = value_descriptor();
    const float weight = value_weight();
    take_carry(t);
    take_turn();
    float first[kPiece], second[kPiece];
    issue_piece<0>(t, v, first);
    issue_piece<1>(t, v, second);
    add_pieces<0>(t, v, weight, first, second);
    pin_registers(t.p);
  }

  template <int kIndex>
  __device__ __forceinline__ void issue_piece(Stream& t, uint32_t v, float (&to)[kPiece]) {
    wgmma_fence();
    issue_pv_transposed_at<64, T::kBlockN>(t.p, v + (kIndex * 64 * T::kBlockN >> 4), to, false);
    wgmma_commit();
  }

  template <int kIndex>
  __device__ __forceinline__ void add_pieces(Stream& t, uint32_t v, float weight,
                                             float (&from)[kPiece], float (&other)[kPiece]) {
    wgmma_wait<kIndex + 1 < kPieces ? 1 : 0>();
    pin_registers(from);
    // A branch each time: without one the assembler adds several pieces after the last product.
    if (weight != 1.0f) [[unlikely]] {
      scale_by(from, weight);
      add_outputs<kIndex * kPiece, kPiece>(t, from);
    } else {
      add_outputs<kIndex * kPiece, kPiece>(t, from);
    }
    if constexpr (kIndex + 2 < kPieces) {
      float next[kPiece];
      issue_piece<kIndex + 2>(t, v, next);
      if constexpr (kIndex + 3 == kPieces) pass_turn();
      add_pieces<kIndex + 1>(t, v, weight, other, next);
    } else if constexpr (kIndex + 1 < kPieces) {
      add_pieces<kIndex + 1>(t, v, weight, other, from);
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

  // Whether a row's largest exponent of two is so far from 0 that a rounded one minus an exact one
  // may be no exponent that P could have, or that codes of P (PowerCode) lose their last places.
  // -inf, of rows that see no key of the block, is not far.
  static constexpr float kFarFromZero = 131072.0f;
  __device__ __forceinline__ static bool far_from_zero(const float (&top)[2], float scale) {
    bool far = false;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      far |= fabsf(top[h] * scale) >= kFarFromZero && top[h] != kMinusInfinity;
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
      // Rounded up: no probability is above 2^kTopExponent.
      const float next = fmaxf(rows.reference[h], __fmaf_ru(top[h], scale, -float(kTopExponent)));
      factor[h] = exp2_approx(rows.reference[h] - next);
      rows.reference[h] = next;
    }
  }

  // Whether quick_tops() did not do: a row is negative, far from zero, or NaN.
  __device__ __forceinline__ static bool rare(const float (&top)[2], float scale) {
    const uint32_t larger_of =
        max(__float_as_uint(top[0] * scale), __float_as_uint(top[1] * scale));
    return larger_of >= __float_as_uint(kFarFromZero);
  }

  // Scores to packed probabilities, and their sums where the tensor unit's do not do.
  template <bool kPlain>
  __device__ __forceinline__ void finish_scores(Stream& t, float (&s)[kScores], float scale,
                                                const float (&factor)[2]) {
    exponentiate<T::kLseSums == LseSums::kExact, kPlain>(t, s, scale, factor);
  }

  // In plain blocks half of P's registers, as many of either row, are made without exponentials. It
  // takes sums of what P has become: exact ones would not know of its error.
  template <bool kPlain>
  static constexpr bool by_code(int r) {
    return kPlain && T::kTensorSums && r / 2 % 2 == 1;
  }

  template <bool kSumsUp, bool kPlain>
  __device__ __forceinline__ static void exponentiate(Stream& t, float (&s)[kScores], float scale,
                                                      const float (&factor)[2]) {
    // Two chains a row: an addition waits four cycles for the last.
    float part[2][2] = {};
    // By the registers of P: three consumers have none to spare.
#pragma unroll
    for (int r = 0; r < kScores / 4; ++r) {
      const int h = r % 2;
      float x[4], p[4];
#pragma unroll
      for (int byte = 0; byte < 4; ++byte) {
        x[byte] = fmaf(s[ValueLayout::score_of_byte(r, byte)], scale, -t.rows.reference[h]);
        if (kSumsUp || !by_code<kPlain>(r)) p[byte] = exp2_approx(x[byte]);
        if constexpr (kSumsUp) part[h][byte % 2] += p[byte];
      }
      if (!by_code<kPlain>(r)) {
        t.p[r] = pack_four_e4m3(p[0], p[1], p[2], p[3]);
      } else {
        const float one = fmaf(-PowerCode::kOctave, t.rows.reference[h], PowerCode::kOne);
#pragma unroll
        for (int byte = 0; byte < 4; ++byte) {
          x[byte] = fmaf(s[ValueLayout::score_of_byte(r, byte)], PowerCode::kOctave * scale, one);
        }
        t.p[r] = PowerCode::pack_scaled(x);
      }
    }
    if constexpr (kSumsUp) {
      float (&sum)[2] = T::kTensorSums ? t.exact : t.rows.sum;
#pragma unroll
      for (int h = 0; h < 2; ++h) sum[h] = fmaf(sum[h], factor[h], part[h][0] + part[h][1]);
    }
  }

  // --- steps ------------------------------------------------------------------------------------

  template <bool kPlain>
  __device__ __forceinline__ void step(Stream& t) {
    if constexpr (T::kInChunks || !kPlain) {
      step_in_turn<kPlain>(t);
    } else {
      step_overlapped(t);
    }
  }

  // A plain block, as in the forward: Q K^T of `newest` and P V of `current` are issued together.
  // P V is so short that it is done when the maximum is: from there on one stretch of code without
  // a wait or a branch exponentiates, adds P V to O and packs P.
  __device__ __forceinline__ void step_overlapped(Stream& t) {
    float s[kScores];
    float scale = take_block<true>(t);
    const uint32_t v = value_descriptor();
    t.aim.k = uniform(t.aim.k);
    t.aim.q = uniform(t.aim.q);
    take_turn();
    issue_aimed(t, s);
    issue_whole(t, v);
    pass_turn();
    const float weight = value_weight();
    wgmma_wait<1>();
    pin_registers(s);
    release_k(false);
    scale *= fp8.scale_log2;
    float top[2];
    quick_tops(s, top);
    // The assembler moves the wait for P V above all that stands before it, but not over a branch.
    if (__any_sync(0xffffffffu, rare(top, scale) || weight != 1.0f)) [[unlikely]] {
      tops_of_rows(s, top);
      weigh_partial(t);
      // Codes lose their last places beside so large a reference.
      if (__any_sync(0xffffffffu, far_from_zero(top, scale))) {
        scale_first(s, top, scale);
        finish_overlapped<false>(t, s, top, scale);
        return;
      }
    }
    finish_overlapped<true>(t, s, top, scale);
  }

  template <bool kPlain>
  __device__ __forceinline__ void finish_overlapped(Stream& t, float (&s)[kScores],
                                                    const float (&top)[2], float scale) {
    float factor[2];
    move_references(t.rows, top, scale, factor);
    settle_whole(t);
    release_v();
    finish_scores<kPlain>(t, s, scale, factor);
    t.factor[0] = factor[0];
    t.factor[1] = factor[1];
    aim(t);
    t.current = newest;
  }

  // P V of `current`, then Q K^T of `newest`, then its softmax, under which the other warpgroup's
  // products run: where registers do not hold sums, scores and the state of masks at a time.
  template <bool kPlain>
  __device__ __forceinline__ void step_in_turn(Stream& t) {
    float s[kScores];
    float part[kAddsLate ? kChunk<kLastChunk> : 1];
    float unit = 1.0f;
    const auto finish_values = [&] {
      if constexpr (!kPlain) unit = value_unit();
      release_v();
    };
    if constexpr (kAddsLate) {
      mbarrier_wait(&shared.v_full[v_ring.slot()], v_ring.parity());
      take_turn();
      multiply_columns<kLastChunk>(t, part);
      pin_registers(t.p);
    } else {
      add_current<kPlain, true>(t, s);
      finish_values();
    }
    float scale = take_block<kPlain>(t);
    if constexpr (kPlain && kAims) {
      issue_aimed(t, s);
    } else {
      issue_qk(t.q, s);
    }
    if constexpr (!kPassesEarly) pass_turn();
    if constexpr (kAddsLate) {
      add_chunk<kLastChunk>(t, part);
      finish_values();
    }
    if constexpr (!kPlain) {
      if (newest.first()) {
        finish(t, unit);
        reset_rows(t);
        clear_out(t);
      }
    }
    wgmma_wait<0>();
    pin_registers(s);
    release_k(!kPlain && newest.last());
    if constexpr (kPlain) {
      scale *= fp8.scale_log2;
    } else {
      scale = exponent_scale(scale, s);
      adjust_scores(newest, s);
    }
    float top[2];
    if constexpr (kPlain) {
      quick_tops(s, top);
      if (__any_sync(0xffffffffu, rare(top, scale))) [[unlikely]] {
        tops_of_rows(s, top);
        if (__any_sync(0xffffffffu, far_from_zero(top, scale))) {
          scale_first(s, top, scale);
          if constexpr (T::kTensorSums) {  // as in step_overlapped()
            finish_in_turn<false>(t, s, top, scale);
            return;
          }
        }
      }
    } else {
      tops_of_rows(s, top);
      if (far_from_zero(top, scale)) [[unlikely]]
        scale_first(s, top, scale);
    }
    finish_in_turn<kPlain>(t, s, top, scale);
  }

  template <bool kPlain>
  __device__ __forceinline__ void finish_in_turn(Stream& t, float (&s)[kScores],
                                                 const float (&top)[2], float scale) {
    move_references(t.rows, top, scale, t.factor);
    finish_scores<kPlain>(t, s, scale, t.factor);
    aim(t);
    t.current = newest;
  }

  // --- the ends of a stream and of a tile -------------------------------------------------------

  __device__ __forceinline__ static void reset_rows(Stream& t) {
    t.rows.reset();
    if constexpr (T::kTensorSums) t.exact[0] = t.exact[1] = 0.0f;
  }

  // LSE and O of the tile of `current`, all of whose blocks are in O.
  __device__ __forceinline__ void finish(Stream& t, float unit) {
    if constexpr (!T::kTensorSums) t.rows.finish();
    float inverse[2];
    if (T::kTensorSums && T::kLseSums == LseSums::kExact) {
      SoftmaxRows exact{{0.0f, 0.0f}, {t.exact[0], t.exact[1]}};
      exact.finish();
      epilogue.store_lse(shared.tiles[t.current.slot()], t.rows, exact.sum, inverse);
    } else {
      epilogue.store_lse(shared.tiles[t.current.slot()], t.rows, inverse);
    }
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
    reset_rows(t);
    clear_out(t);
    float scale = exponent_scale(scale_of_block, s);
    adjust_scores(newest, s);
    float top[2];
    tops_of_rows(s, top);
    if (far_from_zero(top, scale)) scale_first(s, top, scale);
    move_references(t.rows, top, scale, t.factor);
    finish_scores<false>(t, s, scale, t.factor);
    aim(t);
    t.current = newest;
  }

  // P V of the last block of all.
  __device__ __forceinline__ void last_block(Stream& t) {
    float s[kScores];
    add_current<false, false>(t, s);
    const float unit = value_unit();
    release_v();
    finish(t, unit);
  }

  __device__ __forceinline__ void run() { Base::run(*this); }
};

}  // namespace flash_attn3
