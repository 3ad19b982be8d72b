// Sums of dQ in fp32: from a consumer's registers straight into the workspace, the order of the
// additions in deterministic calls, and dQ from the sums.
//
// The sums lie in the order of the threads' fragments, so that each thread adds 16 bytes and a warp
// 512 contiguous ones; nothing passes through shared memory, whose bandwidth the products need.
// bwd_postprocess.h undoes the order.
#pragma once

#include "kernels/bwd/bwd_params.h"
#include "kernels/bwd/bwd_traits.h"
#include "kernels/common/memory.h"
#include "kernels/fwd/fwd_epilogue.h"

namespace flash_attn3 {

// Where fragment i (of 8 columns) of a piece lies, in floats from the piece's start.
__device__ __forceinline__ int dq_fragment_offset(int i, int thread) {
  return (i * 128 + thread) * 4;
}

// Floats of the tile before warpgroup w's piece.
template <class T>
__device__ __forceinline__ int dq_piece_offset(int w) {
  return w * 64 * T::kDqColumns0;
}

// A thread's part of 32 columns of one row of dQ: four fragments of a piece from fragment `first`
// on, of which it has two neighbouring columns each. `row` is its upper row in the sequence; the
// lower one, 8 further, is half 1. All four threads of a row take part.
template <class T>
struct BwdDqRows {
  using Element = typename T::Element;
  const BwdKernelParams& params;
  SequenceSpan q;
  int head;
  int row;
  int first_column;  // of the piece

  __device__ __forceinline__ void store(int first, int half, const float (&low)[4],
                                        const float (&high)[4]) const {
    const int quad = threadIdx.x % 4;
    const int at = row + 8 * half;
    // What lies in a row that is not in use is no number that matters: it gets 0.
    const bool used = at < q.used;
    uint32_t r[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      r[j] = used ? pack_two<Element>(low[j] * params.scale, high[j] * params.scale) : 0u;
    }
    transpose_quad(r, quad);
    const int column = first_column + (first + quad) * 8;
    if (at < q.rows && column < params.head_dim) {
      Element* out = static_cast<Element*>(params.dq) + q.batch * params.dq_strides.batch +
                     (int64_t(q.base) + at) * params.dq_strides.row + head * params.dq_strides.head;
      store_16_bytes<T::kWholePairs>(out + column, r);
    }
  }
};

// The upper row of this thread in warpgroup w's piece of a query tile, and the piece's first
// column.
template <class T>
__device__ __forceinline__ int dq_row_in_tile(int w) {
  const int thread = threadIdx.x % 128;
  return (T::kDqByRows ? w * 64 : 0) + thread / 32 * 16 + thread % 32 / 4;
}
template <class T>
__device__ __forceinline__ int dq_first_column(int w) {
  return T::kDqByRows ? 0 : w * T::kDqColumns0;
}

template <class T>
struct BwdDqAdder {
  const BwdKernelParams& params;
  typename T::SharedMemory& shared;

  // Adds a part of warpgroup w's piece of a query tile, from its first_fragment on; dq must be
  // settled. `at`: query tile of the workspace times heads plus head; `step` counts query tiles.
  template <int kSize>
  __device__ __forceinline__ void add(const float (&dq)[kSize], int at, uint32_t step, int w,
                                      int first_fragment) const {
    float* sum = params.dq_sum + int64_t(at) * (T::kBlockM * T::kHeadDim) + dq_piece_offset<T>(w) +
                 dq_fragment_offset(first_fragment, threadIdx.x % 128);
    const int slot = ring_slot<T::kTurnSlots>(step);
    const int chain = T::turn_chain(w, first_fragment);
    if (params.turns != nullptr) [[unlikely]]
      mbarrier_wait(&shared.turn_come[chain][slot], ring_parity<T::kTurnSlots>(step));
#pragma unroll
    for (int i = 0; i < kSize / 4; ++i) {
      reduce_add_4(sum + dq_fragment_offset(i, 0), dq[4 * i], dq[4 * i + 1], dq[4 * i + 2],
                   dq[4 * i + 3]);
    }
    if (params.turns == nullptr) [[likely]]
      return;
    warp_arrive(&shared.turn_done[chain][slot], threadIdx.x % 32);
  }
};

// Whole pairs: a CTA makes all parts of a query tile's dQ, and every thread all parts of the same
// elements. So program order alone orders them, the sums need neither zeros nor atomics, and with
// the last part they go straight to dQ. Sums are by CTA, [query tile][head of the group]: what all
// CTAs have open stays in L2.
template <class T, int kColumns>
struct BwdDqSettler {
  static constexpr int kFloats = kColumns / 2;

  const BwdKernelParams& params;
  const BwdTile& tile;
  int at;  // the sums' row
  int w;

  __device__ __forceinline__ bool is_fresh() const { return at >= tile.fresh_from; }
  __device__ __forceinline__ bool is_final() const { return at < tile.final_to; }

  __device__ __forceinline__ float* sums() const {
    const int64_t row = int64_t(blockIdx.x) * (params.q_tiles * params.group) + at;
    return params.dq_sum + row * (T::kBlockM * T::kHeadDim) + dq_piece_offset<T>(w) +
           dq_fragment_offset(0, threadIdx.x % 128);
  }

  // The sums so far, before the wait for this part, so that L2's answer travels under the product.
  __device__ __forceinline__ void fetch(float (&sum)[kFloats]) const {
    const float* from = sums();
    const bool later = !is_fresh();
#pragma unroll
    for (int i = 0; i < kFloats / 4; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) sum[4 * i + j] = 0.0f;
      load_relaxed_4_if(later, from + dq_fragment_offset(i, 0), sum + 4 * i);
    }
  }

  __device__ __forceinline__ void settle(float (&dq)[kFloats], const float (&sum)[kFloats]) const {
#pragma unroll
    for (int i = 0; i < kFloats; ++i) dq[i] += sum[i];
    if (is_final()) {
      write(dq);
    } else {
      float* to = sums();
#pragma unroll
      for (int i = 0; i < kFloats / 4; ++i) {
        store_relaxed_4(to + dq_fragment_offset(i, 0), dq[4 * i], dq[4 * i + 1], dq[4 * i + 2],
                        dq[4 * i + 3]);
      }
    }
  }

  __device__ __forceinline__ void write(const float (&dq)[kFloats]) const {
    const int m = at / params.group;
    const int head = tile.head_kv * params.group + (at - m * params.group);
    const SequenceSpan q{tile.q_batch, tile.q_base, tile.q_len, tile.q_len};
    const BwdDqRows<T> rows{params, q, head, m * T::kBlockM + dq_row_in_tile<T>(w),
                            dq_first_column<T>(w)};
#pragma unroll
    for (int i = 0; i < kColumns / 8; i += 4) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float low[4], high[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          low[j] = dq[4 * (i + j) + 2 * h];
          high[j] = dq[4 * (i + j) + 2 * h + 1];
        }
        rows.store(i, h, low, high);
      }
    }
  }
};

// The turn warp of deterministic calls. Each part of dQ that consumers add by itself is a chain of
// its own: a counter in the workspace for every query tile of every head, of the KV tiles that have
// added that part. A KV tile's turn has come when the counter is its rank among the KV tiles that
// the query tile needs.
//
// A lane serves a chain. It lets consumers know of turns up to kTurnSlots steps before they add,
// and raises the counters behind them: neither the way to L2 nor the wait for the additions' end
// stands in a consumer's way. No lane blocks, since the consumers that one lane waits for may wait
// for those of another.
template <class T>
struct BwdTurns {
  const BwdKernelParams& params;
  typename T::SharedMemory& shared;
  int chain;

  uint32_t announced = 0;  // steps whose turn has come
  uint32_t passed_on = 0;  // steps whose counter has been raised
  uint32_t count = 0;      // tiles

  // The next step to be announced.
  const BwdTile* tile = nullptr;  // none: the tile is not there yet
  int head = 0;
  int m = 0;
  int rank = 0;

  __device__ __forceinline__ int row() const { return (tile->q_tile0 + m) * params.heads + head; }

  __device__ __forceinline__ int* counter(int at) const {
    return params.turns + int64_t(at) * kMostTurnChains + chain;
  }

  __device__ __forceinline__ void find_rank() {
    const int row0 = m * T::kBlockM;
    const int last_row = smaller(row0 + T::kBlockM, tile->q_len) - 1;
    const BlockRange blocks =
        visible_blocks(params.mask, row0, last_row, tile->q_len, tile->k_len, T::kBlockN);
    rank = params.last_first ? blocks.end - 1 - tile->n : tile->n - blocks.begin;
  }

  __device__ __forceinline__ void leave_tile() {
    tile = nullptr;
    mbarrier_arrive(&shared.tile_empty[ring_slot<T::kTileSlots>(count)]);
    ++count;
  }

  // False after the last tile.
  __device__ __forceinline__ bool enter_tile() {
    const int slot = ring_slot<T::kTileSlots>(count);
    if (!mbarrier_test(&shared.tile_full[slot], ring_parity<T::kTileSlots>(count))) return true;
    tile = &shared.tiles[slot];
    if (tile->head_kv < 0) return false;
    head = tile->head_kv * params.group;
    m = tile->m_begin;
    if (m == tile->m_end) {
      leave_tile();
    } else {
      find_rank();
    }
    return true;
  }

  __device__ __forceinline__ void announce() {
    const int slot = ring_slot<T::kTurnSlots>(announced);
    shared.turn_rows[chain][slot] = row();
    mbarrier_arrive(&shared.turn_come[chain][slot]);
    ++announced;
    if (++m == tile->m_end) {
      m = tile->m_begin;
      if (++head == (tile->head_kv + 1) * params.group) {
        leave_tile();
        return;
      }
    }
    find_rank();
  }

  // The consumers' additions, known here through turn_done, come before the counter.
  __device__ __forceinline__ void pass_on() {
    const int slot = ring_slot<T::kTurnSlots>(passed_on);
    if (!mbarrier_test(&shared.turn_done[chain][slot], ring_parity<T::kTurnSlots>(passed_on)))
      return;
    add_release(counter(shared.turn_rows[chain][slot]), 1);
    ++passed_on;
  }

  __device__ __forceinline__ void run() {
    if (chain >= T::kTurnChains) return;
    bool more = true;
    while (more || passed_on != announced) {
      if (passed_on != announced) pass_on();
      if (!more || announced - passed_on == T::kTurnSlots) {
        __nanosleep(32);
      } else if (tile == nullptr) {
        more = enter_tile();
      } else if (load_acquire(counter(row())) >= rank) {  // above it where sequences overlap
        announce();
      }
    }
  }
};

}  // namespace flash_attn3
