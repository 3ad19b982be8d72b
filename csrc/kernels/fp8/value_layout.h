// How a block of V lies in shared memory for the e4m3 product P V, and how a warp gets it there.
//
// The product wants V transposed: a row of 128 bytes for each column of V, one byte a key ("slot").
// Which key a slot holds is free, as long as P has the same order: the order below is that in which
// a thread holds its scores, so that P is packed without any exchange between threads.
//
// Plain integer arithmetic that the host can run too: tests/cpu/test_fp8_layout.py replays the
// transposition with it.
#pragma once

#include <cstdint>

#include "kernels/attn/key_range.h"

namespace flash_attn3 {

struct ValueLayout {
  static constexpr int kKeys = 128;  // of a block
  static constexpr int kRowBytes = kKeys;

  // A thread t of four holds columns 8 i + 2 t + e of a row of scores (e = 0, 1), and bytes 4 t to
  // 4 t + 3 of every 16 of the A operand. So of 16 keys, slot 4 t + 2 i + e is key 8 i + 2 t + e.
  static FLASH_ATTN3_HOST_DEVICE int key_of_slot(int slot) {
    return slot / 16 * 16 + slot / 2 % 2 * 8 + slot / 4 % 4 * 2 + slot % 2;
  }

  // Which of a thread's scores (attn/online_softmax.h has their order) is byte `byte` of register
  // `r` of the A operand: registers 4 c to 4 c + 3 hold slots 32 c to 32 c + 31, the first 16 of
  // rows g and g + 8, then the others.
  static FLASH_ATTN3_HOST_DEVICE int score_of_byte(int r, int byte) {
    return r / 4 * 16 + r / 2 % 2 * 8 + r % 2 * 2 + byte / 2 * 4 + byte % 2;
  }

  // The byte of a block's transposed tile at which a slot of a column lies, swizzled as the copy
  // engine and the products swizzle rows of 128 bytes.
  static FLASH_ATTN3_HOST_DEVICE int offset(int column, int slot) {
    return column * kRowBytes + ((slot / 16) ^ (column % 8)) * 16 + slot % 16;
  }
};

// One step of a warp: 32 keys x 16 columns by one transposing load of four 8 x 8 matrices of byte
// pairs, eight byte permutations and one store of four matrices.
//
// Loaded, matrix j (keys 8 j to 8 j + 7) gives lane (g, t) the bytes
//   (key 2 t, column 2 g), (key 2 t, 2 g + 1), (key 2 t + 1, 2 g), (key 2 t + 1, 2 g + 1)
// of it, the lowest first. Matrices 0 and 1, and 2 and 3, make 16 keys each.
struct TransposeStep {
  static constexpr int kKeys = 32;
  static constexpr int kColumns = 16;

  // Bytes 0 and 2 of both registers: column 2 g; bytes 1 and 3: column 2 g + 1. They are slots 4 t
  // to 4 t + 3 of that column, in order.
  static constexpr uint32_t kEvenColumn = 0x6420;
  static constexpr uint32_t kOddColumn = 0x7531;

  // Stored, matrices are (first 16 keys, one column of each pair), (first, the other), (second,
  // one), (second, the other). Even columns of 16 alone would fall on the same banks, g and g + 4;
  // so the upper four pairs give their odd columns first.
  static FLASH_ATTN3_HOST_DEVICE uint32_t selector(int lane, int which) {
    return (which ^ (lane / 4 >= 4 ? 1 : 0)) == 0 ? kEvenColumn : kOddColumn;
  }

  // Which key's row a lane gives the load, of 32.
  static FLASH_ATTN3_HOST_DEVICE int load_key(int lane) { return lane; }

  // Which column and which 16 slots (0 or 1) a lane gives the store: matrix lane / 8, its row
  // lane % 8.
  static FLASH_ATTN3_HOST_DEVICE int store_column(int lane) {
    return lane % 8 * 2 + (lane / 8 % 2 ^ (lane % 8 >= 4 ? 1 : 0));
  }
  static FLASH_ATTN3_HOST_DEVICE int store_half(int lane) { return lane / 16; }
};

}  // namespace flash_attn3
