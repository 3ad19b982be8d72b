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
#pragma unroll
      for (int i = 0; i < kScores; ++i) {
        s[i] = params.transform == 1 ? tanh_by_exp2(params.cap_input * s[i]) : -s[i];
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

  __device__ __forceinline__ void finish_tile(int slot, SoftmaxRows& rows, float (&o)[kOutputs]) {
    rows.finish();
    epilogue.store(shared.tiles[slot], rows, o);
    release(&shared.tile_empty[slot]);
  }

  __device__ __forceinline__ static void scale_rows(float (&o)[kOutputs],
                                                    const float (&rescale)[2]) {
#pragma unroll
    for (int i = 0; i < kOutputs; ++i) o[i] *= rescale[i / 2 % 2];
  }

  __device__ __forceinline__ void run() {
    if (T::kTurns != Turns::kFree && warpgroup == T::kConsumers - 1) {
      named_barrier_arrive(kTurn, 256);  // the first turn is warpgroup 0's
    }
    if constexpr (T::kOverlap == Overlap::kOneScoreTile) {
      run_one_score_tile();
    } else {
      run_two_score_tiles();
    }
  }

  __device__ __forceinline__ void run_one_score_tile() {
    float s[kScores];
    uint32_t p[kScores / 2];
    float o[kOutputs];
    uint32_t q[kQueryRegisters];
    SoftmaxRows rows;
    float rescale[2];

    if (!advance()) return;
    StreamBlock current = newest;
    rows.reset();
    take_q(q);
    mbarrier_wait(&shared.k_full[k_ring.slot()], k_ring.parity());
    issue_qk(q, s);
    wgmma_wait<0>();
    pin_registers(s);
    release_k(newest.last());
    adjust_scores(current, s);
    rows.exponentiate(s, params.scale_log2, params.slack, rescale);
    pack_probabilities<Element>(s, p);

    // Here p holds block `current`, and o all blocks of its tile before it.
    while (advance()) {
      if (newest.first()) take_q(q);
      mbarrier_wait(&shared.k_full[k_ring.slot()], k_ring.parity());
      take_turn(Turns::kIssue);
      issue_qk(q, s);
      mbarrier_wait(&shared.v_full[v_ring.slot()], v_ring.parity());
      issue_pv_block(p, o, !current.first());
      pass_turn(Turns::kIssue);
      wgmma_wait<1>();
      pin_registers(s);
      release_k(newest.last());

      SoftmaxRows finished = rows;
      if (newest.first()) rows.reset();
      adjust_scores(newest, s);
      const bool moved = rows.exponentiate(s, params.scale_log2, params.slack, rescale);

      // Long complete: a second look at the barrier is a branch, which the assembler does not move the
      // wait for P V across, so that P V stays under the exponentials.
      mbarrier_wait(&shared.v_full[v_ring.slot()], v_ring.parity());
      wgmma_wait<0>();
      pin_registers(o);
      pin_registers(p);
      release_v();
      if (newest.first()) {
        finish_tile(current.slot(), finished, o);
      } else if (moved) {
        scale_rows(o, rescale);
      }
      pack_probabilities<Element>(s, p);
      current = newest;
    }

    mbarrier_wait(&shared.v_full[v_ring.slot()], v_ring.parity());
    issue_pv_block(p, o, !current.first());
    wgmma_wait<0>();
    pin_registers(o);
    release_v();
    finish_tile(current.slot(), rows, o);
  }

  // --- two score tiles ---

  struct Registers {
    uint32_t p[kScores / 2];
    float o[kOutputs];
    uint32_t q[kQueryRegisters];
  };

  // Before: p holds block e (in `done`), `ready` block e + 1's scores. Issues Q K^T of block e + 2
  // into `next` and P V of block e; the softmax of block e + 1 runs meanwhile. False when there is
  // no block e + 2; its product then is of stale data and nobody's.
  __device__ __forceinline__ bool step(float (&ready)[kScores], float (&next)[kScores],
                                       Registers& r, SoftmaxRows& rows, StreamBlock& done,
                                       StreamBlock& current) {
    const StreamBlock upcoming_of = current;
    const bool more = advance();
    if (more) {
      if (newest.first()) take_q(r.q);
      mbarrier_wait(&shared.k_full[k_ring.slot()], k_ring.parity());
    }
    take_turn(Turns::kIssue);
    issue_qk(r.q, next);
    mbarrier_wait(&shared.v_full[v_ring.slot()], v_ring.parity());
    issue_pv_block(r.p, r.o, !done.first());
    pass_turn(Turns::kIssue);

    SoftmaxRows finished = rows;
    float rescale[2];
    if (current.first()) rows.reset();
    adjust_scores(upcoming_of, ready);
    take_turn(Turns::kExponential);
    const bool moved = rows.exponentiate(ready, params.scale_log2, params.slack, rescale);
    pass_turn(Turns::kExponential);

    mbarrier_wait(&shared.v_full[v_ring.slot()], v_ring.parity());  // as above: keeps the wait below
    wgmma_wait<0>();
    pin_registers(next);
    pin_registers(r.o);
    pin_registers(r.p);
    if (more) release_k(newest.last());
    release_v();
    if (current.first()) {
      finish_tile(done.slot(), finished, r.o);
    } else if (moved) {
      scale_rows(r.o, rescale);
    }
    pack_probabilities<Element>(ready, r.p);
    done = current;
    current = newest;
    return more;
  }

  __device__ __forceinline__ void run_two_score_tiles() {
    float s0[kScores];
    float s1[kScores];
    Registers r;
    SoftmaxRows rows;

    if (!advance()) return;
    StreamBlock done = newest;
    StreamBlock current = newest;
    rows.reset();
    take_q(r.q);
    mbarrier_wait(&shared.k_full[k_ring.slot()], k_ring.parity());
    issue_qk(r.q, s0);
    wgmma_wait<0>();
    pin_registers(s0);
    release_k(newest.last());

    bool more = advance();
    if (more) {
      if (newest.first()) take_q(r.q);
      mbarrier_wait(&shared.k_full[k_ring.slot()], k_ring.parity());
    }
    current = newest;
    issue_qk(r.q, s1);
    float rescale[2];
    adjust_scores(done, s0);
    rows.exponentiate(s0, params.scale_log2, params.slack, rescale);
    pack_probabilities<Element>(s0, r.p);
    wgmma_wait<0>();
    pin_registers(s1);
    if (more) release_k(newest.last());

    while (more) {
      more = step(s1, s0, r, rows, done, current);
      if (!more) break;
      more = step(s0, s1, r, rows, done, current);
    }

    mbarrier_wait(&shared.v_full[v_ring.slot()], v_ring.parity());
    issue_pv_block(r.p, r.o, !done.first());
    wgmma_wait<0>();
    pin_registers(r.o);
    release_v();
    finish_tile(done.slot(), rows, r.o);
  }
};

}  // namespace flash_attn3
