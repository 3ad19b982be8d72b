// A consumer warpgroup: 64 query rows of every tile of its CTA. S = Q K^T, online softmax, O += P
// V.
//
// The KV blocks of one tile after the other form a stream. The products of the next block are
// issued before the softmax of the current one also where the next block belongs to the next tile,
// so that a tile has neither a prologue nor an epilogue of its own in which the matrix unit waits.
#pragma once

#include "kernels/attn/online_softmax.h"
#include "kernels/common/named_barriers.h"
#include "kernels/fwd/fwd_epilogue.h"
#include "kernels/fwd/fwd_params.h"
#include "kernels/fwd/fwd_traits.h"
#include "kernels/fwd/stream_block.h"

namespace flash_attn3 {

template <class T>
struct FwdConsumer {
  using Element = typename T::Input;
  static constexpr int kScores = T::kBlockN / 2;
  // Exponentiated while P V still reads P.
  static constexpr int kHeld = T::Held::kScores;
  static constexpr int kEarly = kHeld > 0 ? kScores - kHeld : kScores / 16 * 8;
  static constexpr int kOutputs = T::kHeadDimV / 2;
  static constexpr int kQuerySteps = T::QueryPanel::kRowBytes / 32;  // products of one Q K^T
  static constexpr int kQueryRegisters = T::kQueryInRegisters ? 4 * kQuerySteps : 1;

  // Where one place holds Q of this tile and of the next, the last block is left to the general
  // step, which frees it before the softmax; or plain steps free it themselves (T::kCarried).
  static constexpr bool kLeaveLast = T::kQueryStages == 1 && !T::kQueryInRegisters && !T::kCarried;

  // Where the end of a stream is told: in the flags of `newest`, or in a register of its own. The
  // e4m3 kernels spill one way, the bf16 ones the other.
  static constexpr bool kEndInFlags = T::kScaled;
  // Likewise whether scores are transformed: in the flags it is read beside the tile's fields.
  static constexpr bool kTransformInFlags = !T::kScaled;

  const FwdKernelParams& params;
  typename T::SharedMemory& shared;
  FwdEpilogue<T> epilogue;
  int warpgroup;  // of the consumers

  RingPosition<T::kTileSlots> tile_ring;  // of the tile that the newest block belongs to
  RingPosition<T::kKeyStages> k_ring;
  RingPosition<T::kValueStages> v_ring;
  RingPosition<T::kQueryStages> q_ring;
  StreamBlock newest{0, 0};

  // A stage of K or V: both CTAs of a pair write it.
  __device__ __forceinline__ void release_stage(uint64_t* barrier) {
    if constexpr (T::kPair == 1) {
      release(barrier);
    } else {
      warp_arrive_at_both(barrier, thread() % 32);
    }
  }

  // Registers are scarce here: these are computed where they are needed.
  static __device__ __forceinline__ int thread() { return threadIdx.x % 128; }

  __device__ __forceinline__ void release(uint64_t* barrier) {
    warp_arrive(barrier, thread() % 32);
  }

  // Where tile_ring is while `newest` belongs to its tile. A register less: it is found again at
  // the tile's end.
  __device__ __forceinline__ int tile_slot() const {
    return T::kCarried ? newest.slot() : tile_ring.slot();
  }

  __device__ __forceinline__ void find_tile_ring() {
    tile_ring = RingPosition<T::kTileSlots>::at(shared.tiles_before[newest.slot()]);
  }

  __device__ __forceinline__ void set_newest(int n, uint32_t first) {
    const TileInfo& tile = shared.tiles[tile_slot()];
    const BlockRange plain = tile.plain[warpgroup];
    const bool masked = (n < plain.begin) | (n >= plain.end);
    newest.n = n;
    newest.flags =
        uint32_t(tile_slot()) | first | (n == tile.n_begin ? StreamBlock::kLast : 0) |
        (masked ? StreamBlock::kMasked : 0) |
        (kTransformInFlags && params.transform != ScoreTransform::kNone ? StreamBlock::kTransformed
                                                                        : 0);
  }

  // Moves `newest` to the next block of the stream. False where the stream must end: at the last
  // tile, and before one without blocks, whose slot would not come free while an unstored tile
  // holds its own.
  __device__ __forceinline__ bool advance() {
    if (!newest.last()) {
      set_newest(newest.n - 1, 0);
      return true;
    }
    if constexpr (T::kCarried) find_tile_ring();
    tile_ring.advance();
    const bool more = start_tile();
    if (kEndInFlags && !more) {
      newest.flags = StreamBlock::kNone | (T::kCarried ? uint32_t(tile_ring.slot()) : 0);
    }
    return more;
  }

  // Whether the tile at tile_ring has blocks; then `newest` is its first. The slot of a tile stays
  // taken until its epilogue has read it.
  __device__ __forceinline__ bool start_tile() {
    const TileInfo& tile = shared.tiles[tile_ring.slot()];
    mbarrier_wait(&shared.tile_full[tile_ring.slot()], tile_ring.parity());
    // Everything is read before anything is asked: one after the other each would be waited for.
    const bool has_blocks = (tile.head >= 0) & (tile.n_begin < tile.n_end);
    int start = tile.n_end;
    if constexpr (T::kMostUnseen > 0) start = tile.start[warpgroup];
    if constexpr (T::kCarried) newest.flags = tile_ring.slot();
    set_newest(start - 1, StreamBlock::kFirst);
    if constexpr (T::kMostUnseen > 0) {
      if (has_blocks) {
        for (int n = tile.n_end; n > start; --n) leave_out_k();
      }
    }
    return has_blocks;
  }

  // A block that these rows see no key of: it costs a turn, as it does the others, and no more.
  __device__ __forceinline__ void leave_out_k() {
    mbarrier_wait(&shared.k_full[k_ring.slot()], k_ring.parity());
    take_turn();
    pass_turn();
    release_stage(&shared.k_empty[k_ring.slot()]);
    k_ring.advance();
  }

  // V of the blocks left out at the start of the newest tile, which come after V of the tile
  // before.
  __device__ __forceinline__ void leave_out_v() {
    if constexpr (T::kMostUnseen > 0) {
      const TileInfo& tile = shared.tiles[tile_ring.slot()];
      for (int n = tile.n_end; n > tile.start[warpgroup]; --n) {
        mbarrier_wait(&shared.v_full[v_ring.slot()], v_ring.parity());
        release_v();
      }
    }
  }

  // Stores tiles without blocks until one with blocks starts a new stream; false after the last.
  __device__ __forceinline__ bool start_stream() {
    while (!start_tile()) {
      const TileInfo& tile = shared.tiles[tile_ring.slot()];
      if (tile.head < 0) return false;
      epilogue.store_nothing(tile);
      release(&shared.tile_empty[tile_ring.slot()]);
      tile_ring.advance();
    }
    return true;
  }

  // Waits for the newest tile's Q; with Q in registers, its place is free again once give_q_back()
  // has said so. Rows that are not in use become 0: what they hold would reach no result, but could
  // make a warp move the references of its other rows, and so change their bits.
  __device__ __forceinline__ void take_q(uint32_t (&q)[kQueryRegisters]) {
    if constexpr (T::kCarried) {
      q_ring = RingPosition<T::kQueryStages>::at(shared.loads_before[newest.slot()]);
    }
    mbarrier_wait(&shared.q_full[q_ring.slot()][warpgroup], q_ring.parity());
    const TileInfo& tile = shared.tiles[tile_slot()];
    const int used = tile.q_len - tile.row0 - warpgroup * T::kRowsPerConsumer;
    if constexpr (T::kQueryInRegisters) {
      const uint32_t first_q = first_q_fragment();
#pragma unroll
      for (int k = 0; k < kQuerySteps; ++k) {
        uint32_t fragment[4];
        load_matrix_x4(fragment, fragment_address<T::kRowsPerConsumer>(first_q, k));
#pragma unroll
        for (int i = 0; i < 4; ++i) q[4 * k + i] = fragment[i];
      }
      if (used < T::kRowsPerConsumer) {
        const int row = thread() / 32 * 16 + thread() % 32 / 4;
#pragma unroll
        for (int i = 0; i < 4 * kQuerySteps; ++i) {
          if (row + 8 * (i % 2) >= used) q[i] = 0;
        }
      }
    } else if (used < T::kRowsPerConsumer) {
      clear_q_rows(used);
    }
  }

  // Behind the products: the fence waits as long as they need.
  __device__ __forceinline__ void give_q_back() {
    if constexpr (T::kQueryInRegisters) {
      fence_shared_to_async_proxy();  // read before the copy engine writes here again
      release_q();
    }
  }

  // Each warp clears its own rows from `used` on; all of them before the warpgroup's next product.
  __device__ __forceinline__ void clear_q_rows(int used) {
    using P = typename T::QueryPanel;
    const int warp_row = thread() / 32 * 16;
#pragma unroll 1
    for (int panel = 0; panel < P::kCount; ++panel) {
      uint8_t* rows =
          shared.q[q_ring.slot()][warpgroup] + (panel * T::kRowsPerConsumer + warp_row) * P::kBytes;
      for (int at = larger(used - warp_row, 0) * P::kBytes + thread() % 32 * 16;
           at < 16 * P::kBytes; at += 32 * 16) {
        *reinterpret_cast<uint4*>(rows + at) = make_uint4(0, 0, 0, 0);
      }
    }
    fence_shared_to_async_proxy();
    named_barrier_sync(kQueryCleared + warpgroup, 128);
  }

  // Where this thread's row of Q, or the second half of one, begins: what it loads of the A operand
  // of the first product.
  __device__ __forceinline__ uint32_t first_q_fragment() const {
    const uint32_t thread = uint32_t(thread_index()) % 128;
    return chunk_address(shared_address(shared.q[q_ring.slot()][warpgroup]),
                         thread / 32 * 16 + thread % 16, thread % 32 / 16);
  }

  // Of 16-byte chunk 0 or 1 of a row of Q or K.
  static __device__ __forceinline__ uint32_t chunk_address(uint32_t base, uint32_t row,
                                                           uint32_t chunk) {
    using P = typename T::QueryPanel;
    return base + row * P::kBytes + P::swizzle(row, chunk) * 16;
  }

  // 32 k bytes further in that row, in panels of kRows rows: the swizzle is an exclusive or.
  template <int kRows>
  static __device__ __forceinline__ uint32_t fragment_address(uint32_t first, int k) {
    using P = typename T::QueryPanel;
    constexpr int kSteps = P::kBytes / 32;
    return (first ^ uint32_t(k % kSteps * 32)) + k / kSteps * kRows * P::kBytes;
  }

  // S of this warp's rows once more, by the warp alone: other warps need not take part. K of the
  // block must not have been released.
  __device__ __forceinline__ void recompute_scores(uint32_t (&q)[kQueryRegisters],
                                                   float (&s)[kScores]) {
    const uint32_t first_q = T::kQueryInRegisters ? 0 : first_q_fragment();
    const uint32_t lane = threadIdx.x % 32;
    const uint32_t first_k = chunk_address(shared_address(shared.k[k_ring.slot()]),
                                           lane / 16 * 8 + lane % 8, lane / 8 % 2);
#pragma unroll
    for (int i = 0; i < kScores; ++i) s[i] = 0.0f;
#pragma unroll
    for (int k = 0; k < kQuerySteps; ++k) {
      uint32_t a[4];
      if constexpr (T::kQueryInRegisters) {
#pragma unroll
        for (int i = 0; i < 4; ++i) a[i] = q[4 * k + i];
      } else {
        load_matrix_x4(a, fragment_address<T::kRowsPerConsumer>(first_q, k));
      }
#pragma unroll
      for (int n = 0; n < T::kBlockN / 16; ++n) {
        uint32_t b[4];
        load_matrix_x4(b,
                       fragment_address<T::kBlockN>(first_k, k) + n * 16 * T::QueryPanel::kBytes);
        mma_16x8<Element>(s + 8 * n, a, b[0], b[1]);
        mma_16x8<Element>(s + 8 * n + 4, a, b[2], b[3]);
      }
    }
  }

  __device__ __forceinline__ void release_q() {
    release(&shared.q_empty[q_ring.slot()][warpgroup]);
    q_ring.advance();
  }

  static __device__ __forceinline__ uint32_t uniform(uint32_t x) {
    return T::kUniform ? warp_uniform(x) : x;
  }

  __device__ __forceinline__ void issue_qk(uint32_t (&q)[kQueryRegisters], float (&s)[kScores]) {
    const uint32_t k = uniform(shared_address(shared.k[k_ring.slot()]));
    pin_registers(s);
    wgmma_fence();
    if constexpr (T::kQueryInRegisters) {
      issue_qk_register<Element, T::kBlockN, T::kHeadDim>(q, k, s);
    } else {
      issue_qk_shared<Element, T::kBlockN, T::kHeadDim>(
          uniform(shared_address(shared.q[q_ring.slot()][warpgroup])), T::kRowsPerConsumer, k, s);
    }
    wgmma_commit();
  }

  __device__ __forceinline__ void issue_pv_block(uint32_t (&p)[kScores / 2], float (&o)[kOutputs],
                                                 bool accumulate) {
    pin_registers(o);
    wgmma_fence();
    issue_pv<Element, T::kHeadDimV, T::kBlockN>(p, uniform(shared_address(shared.v[v_ring.slot()])),
                                                o, accumulate);
    wgmma_commit();
  }

  // K has been read. The last block of a tile is also the last reader of Q in shared memory.
  __device__ __forceinline__ void release_k(bool last_of_tile) {
    release_stage(&shared.k_empty[k_ring.slot()]);
    k_ring.advance();
    k_ring.forget_derived();  // head dim 128 has no register to keep it in
    if constexpr (!T::kQueryInRegisters) {
      if (last_of_tile) release_q();
    }
  }

  __device__ __forceinline__ void release_v() {
    release_stage(&shared.v_empty[v_ring.slot()]);
    v_ring.advance();
  }

  __device__ __forceinline__ bool transformed(const StreamBlock& block) const {
    return kTransformInFlags ? (block.flags & StreamBlock::kTransformed) != 0
                             : params.transform != ScoreTransform::kNone;
  }

  // Soft cap, sign and mask: what a plain block of a plain call has none of.
  __device__ __forceinline__ void adjust_scores(const StreamBlock& block, float (&s)[kScores]) {
    if (transformed(block)) [[unlikely]] {
      if (params.transform == ScoreTransform::kSoftcap) {
#pragma unroll
        for (int i = 0; i < kScores; ++i) s[i] = tanh_by_exp2(params.transform_factor * s[i]);
      } else {
#pragma unroll
        for (int i = 0; i < kScores; ++i) s[i] *= params.transform_factor;
      }
    }
    if (block.masked()) [[unlikely]] {
      const TileInfo& tile = shared.tiles[block.slot()];
      const int row = epilogue.row_in_tile();
      const int first_column = block.n * T::kBlockN + 2 * (thread() % 4);
      uint32_t seen[2];
      if (T::kOpenLeft || params.mask.chunk == 0) [[likely]] {
        // The second of both rows sees two columns more, and starts two later.
        const int existing = columns_before(tile.k_len - first_column);
        const int end = columns_before(tile.keys.end + row - first_column);
        seen[0] = first_columns(smaller(end, existing));
        seen[1] = first_columns(smaller(end + 2, existing));
        if constexpr (!T::kOpenLeft) {
          const int start = columns_before(tile.keys.first + row - first_column);
          seen[0] &= ~first_columns(start);
          seen[1] &= ~first_columns(start + 2);
        }
      } else {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const KeyRange keys =
              visible_keys(params.mask, tile.row0 + row + 8 * h, tile.q_len, tile.k_len);
          seen[h] = first_columns(columns_before(keys.hi + 1 - first_column)) &
                    ~first_columns(columns_before(keys.lo - first_column));
        }
      }
      mask_scores(s, seen);
    }
  }

  // Ping-pong: warpgroups issue their products in turn, so that the softmax of one meets the
  // products of another. Each takes one turn a step, and all take the same number.
  __device__ __forceinline__ void take_turn() {
    if constexpr (T::kTurns) named_barrier_sync(kTurn + warpgroup, 256);
  }

  __device__ __forceinline__ void pass_turn() {
    if constexpr (T::kTurns) {
      named_barrier_arrive(kTurn + (warpgroup + 1) % T::kConsumers, 256);
    }
  }

  __device__ __forceinline__ void finish_tile(const StreamBlock& block, const float (&inverse)[2],
                                              float (&o)[kOutputs]) {
    epilogue.store_out(shared.tiles[block.slot()], inverse, o, shared.o[warpgroup]);
    release(&shared.tile_empty[block.slot()]);
  }

  __device__ __forceinline__ static void scale_rows(float (&o)[kOutputs],
                                                    const float (&factor)[2]) {
#pragma unroll
    for (int i = 0; i < kOutputs; ++i) o[i] *= factor[i / 2 % 2];
  }

  // What one block leaves to the next.
  struct Stream {
    uint32_t q[kQueryRegisters];
    uint32_t p[kScores / 2];  // probabilities of `current`
    float o[kOutputs];        // all blocks of its tile before it
    SoftmaxRows rows;
    StreamBlock current;
  };

  __device__ __forceinline__ void wait_for_newest(Stream& t) {
    if (newest.first()) take_q(t.q);
    mbarrier_wait(&shared.k_full[k_ring.slot()], k_ring.parity());
  }

  // What depends on this stays behind the branch that it is read behind (struct Held).
  __device__ __forceinline__ uint32_t read_nonzero() {
    return kHeld > 0 ? *static_cast<const volatile uint32_t*>(&shared.nonzero) : 1;
  }

  __device__ __forceinline__ void exponentiate_late(const SoftmaxRows& rows, float (&s)[kScores],
                                                    float (&part)[2], uint32_t nonzero) {
    if constexpr (kHeld == 0) {
      rows.exponentiate<kEarly, kScores>(s, params.scale_log2, part);
    } else if constexpr (T::Held::kWithScale) {
      const float scale_log2 = nonzero != 0 ? params.scale_log2 : 0.0f;
      rows.exponentiate<kEarly, kScores>(s, scale_log2, part);
    } else {
      rows.exponentiate_if<kEarly, kScores>(s, params.scale_log2, part, nonzero);
    }
  }

  // Q K^T of `newest` and P V of `current` are issued together; the softmax of `newest` runs under
  // P V and under the other warpgroups' products.
  //
  // A plain block is not the first of its tile and needs no adjustment of its scores. Its
  // probabilities are taken relative to the references as they are, without looking for a maximum:
  // the matrix unit slows ordinary arithmetic down, and the maximum would be a fifth of the
  // softmax. Only when a sum shows that a reference is too old does the warp compute its scores
  // again and move it. (Masked blocks done so were tried: the registers of the redo spill at head
  // dim 256.)
  template <bool kPlain>
  __device__ __forceinline__ void step(Stream& t) {
    float s[kScores];
    if constexpr (kPlain) {
      mbarrier_wait(&shared.k_full[k_ring.slot()], k_ring.parity());
    } else {
      // The sums of the tile before are joined here: behind the products shuffles wait for them.
      if (newest.first()) t.rows.finish();
      wait_for_newest(t);
    }
    take_turn();
    issue_qk(t.q, s);
    mbarrier_wait(&shared.v_full[v_ring.slot()], v_ring.parity());
    issue_pv_block(t.p, t.o, !t.current.first());
    pass_turn();

    float factor[2];  // what O is to be multiplied by
    const bool new_tile = !kPlain && newest.first();
    bool moved = false;
    if constexpr (!kPlain) {
      if (new_tile) {
        give_q_back();
        epilogue.store_lse(shared.tiles[t.current.slot()], t.rows, factor);
        t.rows.reset();
      }
    }
    wgmma_wait<1>();
    pin_registers(s);
    if constexpr (!kPlain) {
      release_k(newest.last());
      adjust_scores(newest, s);
      float rescale[2];
      moved = t.rows.move_references(s, params.scale_log2, rescale);
      if (!new_tile) {
        factor[0] = rescale[0];
        factor[1] = rescale[1];
      }
    }
    float part[2] = {0.0f, 0.0f};
    t.rows.template exponentiate<0, kEarly>(s, params.scale_log2, part);
    // P V stays under these exponentials only if nothing moves its wait above them: the compiler is
    // kept by the pins, the assembler by a branch, a second look at a barrier that is long
    // complete.
    pin_registers(s);
    pin_registers(part);
    mbarrier_wait(&shared.v_full[v_ring.slot()], v_ring.parity());
    const uint32_t nonzero = read_nonzero();
    wgmma_wait<0>();
    pin_registers(t.o);
    pin_registers(t.p);
    release_v();
    if constexpr (!kPlain) {
      if (new_tile) {
        leave_out_v();
        finish_tile(t.current, factor, t.o);
      } else if (moved) {
        scale_rows(t.o, factor);
      }
    }
    exponentiate_late(t.rows, s, part, nonzero);
    pack_probabilities<Element, 0, kScores>(s, t.p);
    if constexpr (kPlain) {
      const bool too_old = !(part[0] < kLargestBlockSum) || !(part[1] < kLargestBlockSum);
      if (__any_sync(0xffffffffu, too_old)) [[unlikely]] {
        recompute_scores(t.q, s);
        fence_shared_to_async_proxy();  // K and Q read before the copy engine writes there again
        if (t.rows.move_references(s, params.scale_log2, factor)) scale_rows(t.o, factor);
        part[0] = part[1] = 0.0f;
        t.rows.template exponentiate<0, kScores>(s, params.scale_log2, part);
        pack_probabilities<Element, 0, kScores>(s, t.p);
      }
      release_k(false);
    }
    t.rows.add(part);
    t.current = newest;
  }

  __device__ __forceinline__ void first_block(Stream& t) {
    float s[kScores];
    float rescale[2];
    float part[2] = {0.0f, 0.0f};
    wait_for_newest(t);
    issue_qk(t.q, s);
    give_q_back();
    wgmma_wait<0>();
    pin_registers(s);
    release_k(newest.last());
    t.rows.reset();
    adjust_scores(newest, s);
    t.rows.move_references(s, params.scale_log2, rescale);
    // In step()'s order of additions: results do not depend on which tile a CTA starts with.
    t.rows.template exponentiate<0, kEarly>(s, params.scale_log2, part);
    t.rows.template exponentiate<kEarly, kScores>(s, params.scale_log2, part);
    t.rows.add(part);
    pack_probabilities<Element, 0, kScores>(s, t.p);
    t.current = newest;
  }

  // P V of the last block of all.
  __device__ __forceinline__ void last_block(Stream& t) {
    float factor[2];
    mbarrier_wait(&shared.v_full[v_ring.slot()], v_ring.parity());
    issue_pv_block(t.p, t.o, !t.current.first());
    t.rows.finish();
    epilogue.store_lse(shared.tiles[t.current.slot()], t.rows, factor);
    wgmma_wait<0>();
    pin_registers(t.o);
    release_v();
    finish_tile(t.current, factor, t.o);
  }

  __device__ __forceinline__ void run() { run(*this); }

  // Of the newest tile's plain blocks, the last that a plain step may take.
  __device__ __forceinline__ int plain_end() const {
    const TileInfo& tile = shared.tiles[tile_slot()];
    return larger(tile.n_begin + kLeaveLast, tile.plain[warpgroup].begin);
  }

  // Self has the steps: this struct, or one that derives from it.
  template <class Self>
  __device__ __forceinline__ void run(Self& self) {
    if (T::kTurns && warpgroup == T::kConsumers - 1) {
      named_barrier_arrive(kTurn, 256);  // the first turn is warpgroup 0's
    }
    typename Self::Stream t;
    while (start_stream()) {
      leave_out_v();
      self.first_block(t);
      run_stream(self, t);
      self.last_block(t);
      if constexpr (T::kCarried) find_tile_ring();
    }
    epilogue.finish();
  }

  template <class Self>
  __device__ __forceinline__ void run_stream(Self& self, typename Self::Stream& t) {
    bool more = advance();
    while (kEndInFlags ? (newest.flags & StreamBlock::kNone) == 0 : more) {
      if (newest.plain() && (kTransformInFlags || !transformed(newest)) &&
          !(kLeaveLast && newest.last())) {
        // A short loop of its own for the blocks that are most of the work.
        const TileInfo& tile = shared.tiles[tile_slot()];
        if constexpr (T::kCarried) {  // no register to keep the end in
          for (; newest.n >= plain_end(); --newest.n) self.template step<true>(t);
        } else {
          const int end = plain_end();
          for (; newest.n >= end; --newest.n) self.template step<true>(t);
        }
        if (newest.n >= (T::kCarried ? shared.tiles[newest.slot()].n_begin : tile.n_begin)) {
          set_newest(newest.n, 0);
        } else {
          if constexpr (!T::kQueryInRegisters && !T::kCarried) release_q();
          newest.flags |= StreamBlock::kLast;
          more = advance();
        }
      } else {
        self.template step<false>(t);
        more = advance();
      }
    }
  }
};

}  // namespace flash_attn3
