// A consumer warpgroup of the e4m3 forward whose O is the accumulator of the products, as in the
// bf16 forward: for head dims at which registers hold no other sums beside O.
//
// The tensor unit keeps about 13 bits of a sum, so O holds no more than kCarriedBlocks blocks. Then
// it goes into the tile's mean, which lies in shared memory in fp16, and starts from zero again. A
// mean of V's values, weighted by P and by their blocks' scales, is never larger than they are.
//
// Tiles of few blocks need no mean (Promotion::kShort), which leaves room to transpose V.
#pragma once

#include "kernels/fp8/fp8_consumer.h"

namespace flash_attn3 {

template <class T>
struct Fp8CarriedConsumer : Fp8Consumer<T> {
  using Base = Fp8Consumer<T>;
  using Base::adjust_scores;
  using Base::exponent_scale;
  using Base::far_from_zero;
  using Base::fp8;
  using Base::k_ring;
  using Base::kOutputs;
  using Base::kScores;
  using Base::move_references;
  using Base::newest;
  using Base::pass_turn;
  using Base::rare;
  using Base::release;
  using Base::release_k;
  using Base::scale_first;
  using Base::shared;
  using Base::take_turn;
  using Base::warpgroup;

  static_assert(T::kTensorSums && T::kQueryStages == 1);
  static_assert(!T::kHasMean || (T::kStagedOut && !T::kTransposes));
  static_assert(!T::kHasMean || T::kOutBytes == 128 * kOutputs * 2,
                "the mean lies where O is staged");

  struct Stream : Base::Stream {
    // Of P, by the tensor unit: of row h the sum, which belongs to O's reference, and the same in
    // O's units of V, by which O is bounded; or, of kSplitSums, the sum's halves.
    float sums[4];
    // The same of the mean's blocks: a quad's threads hold one each, for want of registers.
    float of_mean;
  };

  // `current` is the block before `newest`, of its tile or the last of the tile before, whose slot
  // is the one before: there are no registers to keep it in.
  struct Place {
    const TileInfo& tile;
    int slot;
    int n;
  };
  __device__ __forceinline__ Place current_place(bool of_tile_before) const {
    const int slot = (newest.slot() - of_tile_before) & (T::kTileSlots - 1);
    const TileInfo& tile = shared.tiles[slot];
    return {tile, slot, of_tile_before ? tile.n_begin : newest.n + 1};
  }

  // --- which blocks are summed together ---------------------------------------------------------
  //
  // It follows from their numbers, so that nothing need be counted. A tile's blocks come from the
  // last to the first.

  __device__ __forceinline__ static bool first_of_sum(const TileInfo& tile, int n) {
    return last_of_sum(n + 1) | (n == tile.n_end - 1);
  }

  __device__ __forceinline__ static bool last_of_sum(int n) {
    return T::kHasMean && uint32_t(n) % kCarriedBlocks == 0;
  }

  // Whether there is a mean when the sum that block n belongs to ends.
  __device__ __forceinline__ static bool has_mean(const TileInfo& tile, int n) {
    return T::kHasMean && uint32_t(tile.n_end - 1) / kCarriedBlocks != uint32_t(n) / kCarriedBlocks;
  }

  // --- products ---------------------------------------------------------------------------------

  // Low words of descriptors, as numbers that the assembler knows to be the warp's: otherwise it
  // moves each of them from an ordinary register to a uniform one.
  __device__ __forceinline__ static uint32_t uniform_descriptor(const void* place) {
    return warp_uniform(k_major_low(shared_address(place)));
  }

  // V comes one block later than K, so K's ring tells where it is: kAhead is 2 where K of `newest`
  // has been released, or 1.
  static_assert(T::kKeyStages == T::kValueStages);
  template <int kAhead>
  __device__ __forceinline__ RingPosition<T::kValueStages> values() const {
    return k_ring.before(kAhead);
  }

  __device__ __forceinline__ void release_values() { release(&shared.v_empty[values<2>().slot()]); }

  __device__ __forceinline__ void issue_scores(float (&s)[kScores], uint32_t q, uint32_t k) {
    pin_registers(s);
    wgmma_fence();
    issue_qk_shared_at<typename T::Input, T::kBlockN, T::kHeadDim>(q, T::kRowsPerConsumer, k, s);
    wgmma_commit();
  }

  __device__ __forceinline__ void issue_values(Stream& t, uint32_t v, bool accumulate) {
    mbarrier_wait(&shared.v_full[values<1>().slot()], values<1>().parity());
    pin_registers(t.o);
    pin_registers(t.sums);
    wgmma_fence();
    issue_pv_transposed_at<T::kHeadDimV, T::kBlockN>(t.p, v, t.o, accumulate);
    issue_pv_transposed<8, T::kBlockN>(t.p, shared_address(shared.ones()), t.sums, accumulate);
    wgmma_commit();
  }

  __device__ __forceinline__ static void pin_sums(Stream& t) {
    pin_registers(t.o);
    pin_registers(t.sums);
    pin_registers(t.p);
  }

  // --- what becomes of O after a block ----------------------------------------------------------

  // O complete up to `current`, whose tile goes on, to what the next block's P V will be relative
  // to. `carry`: the unit of V by the next one. Returns what of_mean is to be multiplied by, after
  // take_into_mean().
  __device__ __forceinline__ float rescale(Stream& t, const float (&factor)[2], float carry) {
    if (!last_of_sum(newest.n + 1)) {
      // Most steps move a row of some warp, but seldom in both halves of its rows.
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float by = factor[h] * carry;
        if (__any_sync(0xffffffffu, by != 1.0f)) {
#pragma unroll
          for (int i = 0; i < kOutputs; ++i) {
            if (i / 2 % 2 == h) t.o[i] *= by;
          }
          t.sums[2 * h] *= factor[h];
          t.sums[2 * h + 1] *= T::kSplitSums ? factor[h] : by;
        }
      }
    }
    const int quad = thread_index() % 4;
    return (quad < 2 ? factor[0] : factor[1]) * (quad % 2 == 0 ? 1.0f : carry);
  }

  static constexpr int kWordsOfMean = kOutputs / 2;  // of two values each

  // Four words of a thread, two of each row. A warp's lie where its part of the staged O does, so
  // that it waits for no other.
  __device__ __forceinline__ uint4* place_of_mean() {
    const int thread = thread_index() % 128;
    return reinterpret_cast<uint4*>(shared.o[warpgroup] + thread / 32 * 2048 + thread % 32 * 16);
  }
  __device__ __forceinline__ static int step_of_mean(int chunk) {  // in 16 bytes
    return (chunk / 4 * 8192 + chunk % 4 * 512) / 16;
  }

  __device__ __forceinline__ static float of_quad(float x, int thread) {
    return __shfl_sync(0xffffffffu, x, thread, 4);
  }

  static constexpr float kSmallestSum = 1.0e-30f;

  // Where a sum ends: mean = old * mean + (1 - old) * O / weight of O, with `old` as fp16 has it,
  // so that the shares' sum is 1. After `newest` has been exponentiated: O and the sums need not
  // follow its references any more, and while scores are there no register is left for this.
  __device__ __forceinline__ void take_into_mean(Stream& t) {
    const Place current = current_place(false);
    if (!last_of_sum(current.n)) return;
    uint4* place = place_of_mean();
    float by[2];
    uint32_t old[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float weight = t.sums[2 * h + 1];
      const float before = of_quad(t.of_mean, 2 * h + 1);
      const float share = before * reciprocal_approx(fmaxf(before + weight, kSmallestSum));
      const __half2 rounded = __float2half2_rn(share);
      old[h] = reinterpret_cast<const uint32_t&>(rounded);
      by[h] = (1.0f - __low2float(rounded)) * reciprocal_approx(fmaxf(weight, kSmallestSum));
    }
    const int quad = thread_index() % 4;
    t.of_mean +=
        quad < 2 ? (quad == 0 ? t.sums[0] : t.sums[1]) : (quad == 2 ? t.sums[2] : t.sums[3]);
    if (!has_mean(current.tile, current.n)) {
      // The copy that lane 0 started for the tile before has read this place.
      if (thread_index() % 32 == 0) bulk_store_wait_read();
      __syncwarp();
#pragma unroll
      for (int c = 0; c < kWordsOfMean / 4; ++c) {
        uint32_t words[4];
        shares_of_out(t, c, by, words);
        place[step_of_mean(c)] = make_uint4(words[0], words[1], words[2], words[3]);
      }
    } else {
#pragma unroll
      for (int c = 0; c < kWordsOfMean / 4; ++c) {
        const uint4 before = place[step_of_mean(c)];
        uint32_t words[4];
        shares_of_out(t, c, by, words);
        place[step_of_mean(c)] = make_uint4(
            add_share(before.x, old[0], words[0]), add_share(before.y, old[1], words[1]),
            add_share(before.z, old[0], words[2]), add_share(before.w, old[1], words[3]));
      }
    }
  }

  __device__ __forceinline__ static void shares_of_out(const Stream& t, int chunk,
                                                       const float (&by)[2], uint32_t (&words)[4]) {
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      const int i = chunk * 8 + 2 * w;
      words[w] = pack_two<__half>(t.o[i] * by[w % 2], t.o[i + 1] * by[w % 2]);
    }
  }

  __device__ __forceinline__ static uint32_t add_share(uint32_t mean, uint32_t old,
                                                       uint32_t share) {
    uint32_t sum;
    asm("fma.rn.f16x2 %0, %1, %2, %3;\n" : "=r"(sum) : "r"(mean), "r"(old), "r"(share));
    return sum;
  }

  // O and the sums of all blocks of a tile.
  __device__ __forceinline__ void add_mean(Stream& t, const Place& last) {
    t.rows.sum[0] = T::kSplitSums ? t.sums[0] + t.sums[1] : t.sums[0];
    t.rows.sum[1] = T::kSplitSums ? t.sums[2] + t.sums[3] : t.sums[2];
    if (!has_mean(last.tile, last.n)) return;
    t.rows.sum[0] += of_quad(t.of_mean, 0);
    t.rows.sum[1] += of_quad(t.of_mean, 2);
    const float weight[2] = {of_quad(t.of_mean, 1), of_quad(t.of_mean, 3)};
    const uint4* place = place_of_mean();
#pragma unroll
    for (int c = 0; c < kWordsOfMean / 4; ++c) {
      const uint4 mean = place[step_of_mean(c)];
      const uint32_t words[4] = {mean.x, mean.y, mean.z, mean.w};
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        const float2 two = __half22float2(reinterpret_cast<const __half2&>(words[w]));
        const int i = c * 8 + 2 * w;
        t.o[i] = fmaf(two.x, weight[w % 2], t.o[i]);
        t.o[i + 1] = fmaf(two.y, weight[w % 2], t.o[i + 1]);
      }
    }
  }

  // --- steps ------------------------------------------------------------------------------------

  template <bool kPlain>
  __device__ __forceinline__ void step(Stream& t) {
    if constexpr (kPlain) {
      step_overlapped(t);
    } else {
      step_values_first(t);
    }
  }

  // What was derived of these is computed anew: products under way leave few registers.
  __device__ __forceinline__ void forget() {
    k_ring.forget_derived();
    uint32_t packed = uint32_t(newest.n) << 8 | newest.flags;  // one register instead of two
    asm volatile("" : "+r"(packed));
    newest.flags = packed & 255;
    newest.n = packed >> 8;
  }

  // Q K^T of `newest` and P V of `current` are issued together; the maximum of `newest` is found
  // under P V, and its exponentials under the other warpgroup's products.
  __device__ __forceinline__ void step_overlapped(Stream& t) {
    float s[kScores];
    mbarrier_wait(&shared.k_full[k_ring.slot()], k_ring.parity());
    const uint32_t q = k_major_low(shared_address(shared.q[0][warpgroup]));
    const uint32_t k = uniform_descriptor(shared.k[k_ring.slot()]);
    const uint32_t v = uniform_descriptor(shared.v[values<1>().slot()]);
    const bool accumulate = !first_of_sum(shared.tiles[newest.slot()], newest.n + 1);
    take_turn();
    issue_scores(s, q, k);
    issue_values(t, v, accumulate);
    pass_turn();
    forget();
    float scale = Base::block_scale() * fp8.scale_log2;
    const float carry = shared.v_scale[values<1>().slot()].carry;
    wgmma_wait<1>();
    pin_registers(s);
    release_k(newest.n == shared.tiles[newest.slot()].n_begin);
    float top[2];
    quick_tops(s, top);
    // The assembler moves the wait for P V above all that stands before it, but not over a branch.
    if (__any_sync(0xffffffffu, rare(top, scale))) [[unlikely]] {
      tops_of_rows(s, top);
      if (__any_sync(0xffffffffu, far_from_zero(top, scale))) scale_first(s, top, scale);
    }
    float factor[2];
    move_references(t.rows, top, scale, factor);
    wgmma_wait<0>();
    pin_sums(t);
    release_values();
    forget();
    const float of_mean_by = rescale(t, factor, carry);
    forget();
    // Codes would lose their last places beside a reference far from 0, and the scale is 1 then. It
    // may be 1 for another reason too: no register is left to tell.
    if (scale == 1.0f) [[unlikely]] {
      Base::template finish_scores<false>(t, s, scale, factor);
    } else {
      Base::template finish_scores<true>(t, s, scale, factor);
    }
    take_into_mean(t);
    t.of_mean *= of_mean_by;
  }

  // P V first: where a tile ends, O is stored under Q K^T of the next. The state of a mask has no
  // registers beside what products are at.
  __device__ __forceinline__ void step_values_first(Stream& t) {
    float s[kScores];
    if (newest.first()) Base::take_q(t.q);
    mbarrier_wait(&shared.k_full[k_ring.slot()], k_ring.parity());
    const uint32_t q = k_major_low(shared_address(shared.q[0][warpgroup]));
    const uint32_t k = uniform_descriptor(shared.k[k_ring.slot()]);
    const uint32_t v = uniform_descriptor(shared.v[values<1>().slot()]);
    const Place ending = current_place(newest.first());
    const bool accumulate = !first_of_sum(ending.tile, ending.n);
    take_turn();
    issue_values(t, v, accumulate);
    issue_scores(s, q, k);
    pass_turn();
    forget();
    wgmma_wait<1>();
    pin_sums(t);
    if (newest.first()) {
      const float unit = shared.v_scale[values<1>().slot()].unit;
      release(&shared.v_empty[values<1>().slot()]);
      finish(t, current_place(true), unit);
      Base::reset_rows(t);
      t.of_mean = 0.0f;
    }
    forget();
    const float scale_of_block = Base::block_scale();
    wgmma_wait<0>();
    pin_registers(s);
    release_k(newest.n == shared.tiles[newest.slot()].n_begin);
    float scale = exponent_scale(scale_of_block, s);
    adjust_scores(newest, s);
    float top[2], factor[2];
    tops_of_rows(s, top);
    if (far_from_zero(top, scale)) [[unlikely]]
      scale_first(s, top, scale);
    move_references(t.rows, top, scale, factor);
    forget();
    float of_mean_by = 1.0f;
    if (!newest.first()) {
      const float carry = shared.v_scale[values<2>().slot()].carry;
      release_values();
      of_mean_by = rescale(t, factor, carry);
    }
    Base::template finish_scores<false>(t, s, scale, factor);
    forget();
    if (!newest.first()) take_into_mean(t);
    t.of_mean *= of_mean_by;
  }

  // --- the ends of a stream and of a tile -------------------------------------------------------

  __device__ __forceinline__ void finish(Stream& t, const Place& last, float unit) {
    add_mean(t, last);
    t.current = {last.n, uint32_t(last.slot)};
    Base::finish(t, unit);
  }

  __device__ __forceinline__ void first_block(Stream& t) {
    Base::first_block(t);
    t.of_mean = 0.0f;
  }

  // P V of the last block of all.
  __device__ __forceinline__ void last_block(Stream& t) {
    const uint32_t v = uniform_descriptor(shared.v[values<1>().slot()]);
    const Place last = current_place(true);
    issue_values(t, v, !first_of_sum(last.tile, last.n));
    wgmma_wait<0>();
    pin_sums(t);
    const float unit = shared.v_scale[values<1>().slot()].unit;
    release(&shared.v_empty[values<1>().slot()]);
    finish(t, last, unit);
  }

  __device__ __forceinline__ void run() { FwdConsumer<T>::run(*this); }
};

}  // namespace flash_attn3
