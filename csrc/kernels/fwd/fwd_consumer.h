// A consumer warpgroup: 64 query rows of every tile of its CTA. S = Q K^T, online softmax, O += P V.
//
// All KV blocks of all tiles form one stream. The products of the next block are issued before the
// softmax of the current one also where the next block belongs to the next tile, so that a tile has
// neither a prologue nor an epilogue of its own in which the matrix unit waits.
#pragma once

#include "kernels/attn/online_softmax.h"
#include "kernels/common/named_barriers.h"
#include "kernels/fwd/fwd_epilogue.h"
#include "kernels/fwd/fwd_params.h"
#include "kernels/fwd/fwd_traits.h"

namespace flash_attn3 {

// One KV block of the stream, as this warpgroup sees it. Three of them are alive at a time, so the
// flags share a register.
struct StreamBlock {
  static constexpr uint32_t kFirst = 16;   // of its tile: softmax and O start anew
  static constexpr uint32_t kLast = 32;    // of its tile
  static constexpr uint32_t kMasked = 64;  // some row does not see some key

  int n;
  uint32_t flags;

  __device__ __forceinline__ int slot() const { return flags & 15; }  // of its tile
  __device__ __forceinline__ bool first() const { return flags & kFirst; }
  __device__ __forceinline__ bool last() const { return flags & kLast; }
  __device__ __forceinline__ bool masked() const { return flags & kMasked; }
};

template <class T>
struct FwdConsumer {
  using Element = typename T::Element;
  static constexpr int kScores = T::kBlockN / 2;
  static constexpr int kOutputs = T::kHeadDimV / 2;
  static constexpr int kQueryRegisters = T::kQueryInRegisters ? T::kHeadDim / 4 : 1;

  const FwdKernelParams& params;
  typename T::SharedMemory& shared;
  int warpgroup;
  int thread;  // within the warpgroup
  FwdEpilogue<T> epilogue;

  RingPosition<T::kTileSlots> tile_ring;  // of the tile that the newest block belongs to
  RingPosition<T::kStages> k_ring;
  RingPosition<T::kStages> v_ring;
  uint32_t q_parity = 0;
  StreamBlock newest{0, StreamBlock::kLast};
  int newest_begin = 0;        // the newest tile ends with this block
  BlockRange newest_plain{0, 0};  // its blocks that need no mask
  bool started = false;

  __device__ __forceinline__ FwdConsumer(const FwdKernelParams& params_,
                                         typename T::SharedMemory& shared_, int warpgroup_)
      : params(params_),
        shared(shared_),
        warpgroup(warpgroup_),
        thread(threadIdx.x % 128),
        epilogue{params_, warpgroup_ * 64 + thread / 32 * 16 + thread % 32 / 4, thread % 4} {}

  __device__ __forceinline__ void release(uint64_t* barrier) {
    __syncwarp();
    if (thread % 32 == 0) mbarrier_arrive(barrier);
  }

  __device__ __forceinline__ void set_newest(int n, uint32_t first) {
    const bool masked = n < newest_plain.begin || n >= newest_plain.end;
    newest.n = n;
    newest.flags = uint32_t(tile_ring.slot()) | first | (n == newest_begin ? StreamBlock::kLast : 0) |
                   (masked ? StreamBlock::kMasked : 0);
  }

  // Moves `newest` to the next block of the stream; false at its end. Tiles without blocks are stored
  // on the way. The slot of a tile stays taken until its epilogue has read it.
  __device__ __forceinline__ bool advance() {
    if (!newest.last()) {
      set_newest(newest.n - 1, 0);
      return true;
    }
    for (;;) {
      if (started) tile_ring.advance();
      started = true;
      const TileInfo& tile = shared.tiles[tile_ring.slot()];
      mbarrier_wait(&shared.tile_full[tile_ring.slot()], tile_ring.parity());
      if (tile.batch < 0) return false;
      if (tile.n_begin < tile.n_end) {
        const int first_row = tile.row0 + warpgroup * T::kRowsPerConsumer;
        const int last_row = smaller(first_row + T::kRowsPerConsumer, tile.q_len) - 1;
        newest_plain = unmasked_blocks(params.mask, first_row, last_row, tile.q_len, tile.k_len,
                                       T::kBlockN);
        newest_begin = tile.n_begin;
        set_newest(tile.n_end - 1, StreamBlock::kFirst);
        return true;
      }
      epilogue.store_nothing(tile);
      release(&shared.tile_empty[tile_ring.slot()]);
    }
  }

  // Waits for the newest tile's Q; with Q in registers, its place is free again at once.
  __device__ __forceinline__ void take_q(uint32_t (&q)[kQueryRegisters]) {
    mbarrier_wait(&shared.q_full[warpgroup], q_parity);
    q_parity ^= 1;
    if constexpr (T::kQueryInRegisters) {
      using P = Panel<T::kHeadDim>;
      const uint32_t base = shared_address(shared.q[warpgroup]);
      const int row = thread / 32 * 16 + thread % 16;
#pragma unroll
      for (int k = 0; k < T::kHeadDim / 16; ++k) {
        const int panel = k / (P::kWidth / 16);
        const int chunk = k % (P::kWidth / 16) * 2 + thread % 32 / 16;
        uint32_t fragment[4];
        load_matrix_x4(fragment, base + panel * T::kRowsPerConsumer * P::kBytes + row * P::kBytes +
                                     P::swizzle(row, chunk) * 16);
#pragma unroll
        for (int i = 0; i < 4; ++i) q[4 * k + i] = fragment[i];
      }
      release(&shared.q_empty[warpgroup]);
    }
  }

  __device__ __forceinline__ void issue_qk(uint32_t (&q)[kQueryRegisters], float (&s)[kScores]) {
    const uint32_t k = shared_address(shared.k[k_ring.slot()]);
    pin_registers(s);
    wgmma_fence();
    if constexpr (T::kQueryInRegisters) {
      issue_qk_register<Element, T::kBlockN, T::kHeadDim>(q, k, s);
    } else {
      issue_qk_shared<Element, T::kBlockN, T::kHeadDim>(shared_address(shared.q[warpgroup]),
                                                        T::kRowsPerConsumer, k, s);
    }
    wgmma_commit();
  }

  __device__ __forceinline__ void issue_pv_block(uint32_t (&p)[kScores / 2], float (&o)[kOutputs],
                                                 bool accumulate) {
    pin_registers(o);
    wgmma_fence();
    issue_pv<Element, T::kHeadDimV, T::kBlockN>(p, shared_address(shared.v[v_ring.slot()]), o,
                                                accumulate);
    wgmma_commit();
  }

  // K has been read. The last block of a tile is also the last reader of Q in shared memory.
  __device__ __forceinline__ void release_k(bool last_of_tile) {
    release(&shared.k_empty[k_ring.slot()]);
    k_ring.advance();
    if constexpr (!T::kQueryInRegisters) {
      if (last_of_tile) release(&shared.q_empty[warpgroup]);
    }
  }

  __device__ __forceinline__ void release_v() {
    release(&shared.v_empty[v_ring.slot()]);
    v_ring.advance();
  }

  // Soft cap, sign and mask: what a plain block of a plain call has none of.
  __device__ __forceinline__ void adjust_scores(const StreamBlock& block, float (&s)[kScores]) {
    if (params.transform != 0) {
      if (params.transform == 1) {
#pragma unroll
        for (int i = 0; i < kScores; ++i) s[i] = tanh_by_exp2(params.cap_input * s[i]);
      } else {
#pragma unroll
        for (int i = 0; i < kScores; ++i) s[i] = -s[i];
      }
    }
    if (block.masked()) {
      const TileInfo& tile = shared.tiles[block.slot()];
      KeyRange keys[2];
      const int first_column = block.n * T::kBlockN + 2 * (thread % 4);
      bool upper_end_only = true;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        keys[h] = visible_keys(params.mask, tile.row0 + epilogue.row_in_tile + 8 * h, tile.q_len,
                               tile.k_len);
        upper_end_only &= keys[h].lo <= block.n * T::kBlockN;
        keys[h].lo -= first_column;
        keys[h].hi -= first_column;
      }
      mask_scores(s, keys, __all_sync(0xffffffffu, upper_end_only));
    }
  }

  __device__ __forceinline__ void take_turn(Turns kind) {
    if (T::kTurns == kind) named_barrier_sync(kTurn + warpgroup, 256);
  }

  __device__ __forceinline__ void pass_turn(Turns kind) {
    if (T::kTurns == kind) {
      named_barrier_arrive(kTurn + (warpgroup + 1) % T::kConsumers, 256);
    }
  }

  // The last block of a tile has been exponentiated: its LSE is known before its O is.
  __device__ __forceinline__ void finish_rows(const StreamBlock& block, SoftmaxRows& rows,
                                              float (&inverse)[2]) {
    rows.finish();
    epilogue.store_lse(shared.tiles[block.slot()], rows, inverse);
  }

  __device__ __forceinline__ void finish_tile(const StreamBlock& block, const float (&inverse)[2],
                                              float (&o)[kOutputs]) {
    epilogue.store_out(shared.tiles[block.slot()], inverse, o);
    release(&shared.tile_empty[block.slot()]);
  }

  __device__ __forceinline__ static void scale_rows(float (&o)[kOutputs],
                                                    const float (&factor)[2]) {
#pragma unroll
    for (int i = 0; i < kOutputs; ++i) o[i] *= factor[i / 2 % 2];
  }

  // What one block leaves to the next step: O lags behind the softmax by a block.
  struct Stream {
    uint32_t q[kQueryRegisters];
    float s[kScores];
    float o[kOutputs];
    SoftmaxRows rows;
    // Due once P V of the block before `current` is done: multiply O by `factor` when the softmax of
    // `current` moved a reference, or, when `current` is the first of its tile, store O times it.
    float factor[2];
    bool due;
    StreamBlock current;
    StreamBlock previous;
    bool has_previous;
  };

  __device__ __forceinline__ void softmax(Stream& t, uint32_t (&p)[kScores / 2]) {
    float rescale[2];
    adjust_scores(newest, t.s);
    const bool moved = t.rows.template exponentiate<Element>(t.s, p, params.scale_log2,
                                                             params.slack, rescale);
    if (!newest.first()) {
      t.due = moved;
      t.factor[0] = rescale[0];
      t.factor[1] = rescale[1];
    }
  }

  // O of all blocks before `current` is complete.
  __device__ __forceinline__ void settle(Stream& t) {
    if (t.has_previous) release_v();
    if (t.current.first()) {
      if (t.has_previous) finish_tile(t.previous, t.factor, t.o);
    } else if (t.due) {
      scale_rows(t.o, t.factor);
    }
  }

  // Before: p holds the probabilities of block e = `current`, P V of e - 1 may be in flight (reading
  // p_next), S is free. After: the same, one block further. `newest` is e + 1.
  //
  // O is touched before Q K^T is issued: the assembler gives up the overlap of all products when
  // ordinary instructions read an accumulator between the issue of one and the wait for another.
  __device__ __forceinline__ void step(Stream& t, uint32_t (&p)[kScores / 2],
                                       uint32_t (&p_next)[kScores / 2]) {
    if (newest.first()) take_q(t.q);
    mbarrier_wait(&shared.k_full[k_ring.slot()], k_ring.parity());
    wgmma_wait<0>();
    pin_registers(t.o);
    pin_registers(p_next);
    settle(t);
    take_turn(Turns::kIssue);
    issue_qk(t.q, t.s);
    mbarrier_wait(&shared.v_full[v_ring.slot()], v_ring.parity());
    issue_pv_block(p, t.o, !t.current.first());
    pass_turn(Turns::kIssue);
    wgmma_wait<1>();
    pin_registers(t.s);
    release_k(newest.last());

    t.previous = t.current;
    t.has_previous = true;
    if (newest.first()) {
      finish_rows(t.current, t.rows, t.factor);
      t.rows.reset();
    }
    t.current = newest;
    softmax(t, p_next);
  }

  __device__ __forceinline__ void run() {
    if (T::kTurns != Turns::kFree && warpgroup == T::kConsumers - 1) {
      named_barrier_arrive(kTurn, 256);  // the first turn is warpgroup 0's
    }
    Stream t;
    uint32_t p0[kScores / 2];
    uint32_t p1[kScores / 2];

    if (!advance()) return;
    t.rows.reset();
    t.current = newest;
    t.has_previous = false;
    take_q(t.q);
    mbarrier_wait(&shared.k_full[k_ring.slot()], k_ring.parity());
    issue_qk(t.q, t.s);
    wgmma_wait<0>();
    pin_registers(t.s);
    release_k(newest.last());
    softmax(t, p0);

    // Two steps a round, so that P alternates between registers without moves.
    bool more = advance();
    while (more) {
      step(t, p0, p1);
      more = advance();
      if (!more) {
#pragma unroll
        for (int i = 0; i < kScores / 2; ++i) p0[i] = p1[i];
        break;
      }
      step(t, p1, p0);
      more = advance();
    }

    wgmma_wait<0>();
    pin_registers(t.o);
    settle(t);
    mbarrier_wait(&shared.v_full[v_ring.slot()], v_ring.parity());
    issue_pv_block(p0, t.o, !t.current.first());
    finish_rows(t.current, t.rows, t.factor);
    wgmma_wait<0>();
    pin_registers(t.o);
    release_v();
    finish_tile(t.current, t.factor, t.o);
  }
};

}  // namespace flash_attn3
