"""csrc/kernels/attn: key_range.h and query_range.h, compiled for the host, against brute force."""

import shutil
import subprocess
from pathlib import Path

import pytest

CSRC = Path(__file__).parents[2] / "csrc"

PROGRAM = r"""
#include <cstdio>
#include "kernels/attn/query_range.h"
using namespace flash_attn3;

// The masks as flash_attn_func's docstring has them, for one query and one key.
bool sees(const Mask& m, int i, int j, int sq, int sk) {
  const int p = i + sk - sq;
  if (m.window_left >= 0 && j < p - m.window_left) return false;
  if (m.window_right >= 0 && j > p + m.window_right) return false;
  if (m.chunk > 0) {
    const int a = p >= 0 ? p / m.chunk : -((-p + m.chunk - 1) / m.chunk);
    if (a != j / m.chunk) return false;
  }
  return true;
}

int main() {
  const int lengths[] = {1, 2, 5, 16, 23};
  const int windows[] = {-1, 0, 1, 4, 30};
  const int chunks[] = {0, 1, 3, 8};
  const int tile = 8, block = 4;
  long cases = 0;
  for (int sq : lengths) for (int sk : lengths)
  for (int l : windows) for (int r : windows) for (int c : chunks) {
    const Mask m{l, r, c};
    for (int i = 0; i < sq; ++i) {
      const KeyRange k = visible_keys(m, i, sq, sk);
      for (int j = 0; j < sk; ++j, ++cases)
        if ((j >= k.lo && j <= k.hi) != sees(m, i, j, sq, sk)) {
          std::printf("keys: sq %d sk %d window %d %d chunk %d row %d key %d\n", sq, sk, l, r, c,
                      i, j);
          return 1;
        }
    }
    for (int j = 0; j < sk; ++j) {
      const QueryRange q = visible_queries(m, j, sq, sk);
      for (int i = 0; i < sq; ++i, ++cases)
        if ((i >= q.lo && i <= q.hi) != sees(m, i, j, sq, sk)) {
          std::printf("queries: sq %d sk %d window %d %d chunk %d row %d key %d\n", sq, sk, l, r, c,
                      i, j);
          return 1;
        }
    }
    for (int first = 0; first < sq; first += tile) {
      const int last = smaller(first + tile, sq) - 1;
      const BlockRange visible = visible_blocks(m, first, last, sq, sk, block);
      const BlockRange plain = unmasked_blocks(m, first, last, sq, sk, block);
      const int q_tile = first / tile;
      for (int n = 0; n * block < sk; ++n, ++cases) {
        bool any = false, all = (n + 1) * block <= sk;
        for (int i = first; i <= last; ++i)
          for (int j = n * block; j < smaller((n + 1) * block, sk); ++j) {
            any |= sees(m, i, j, sq, sk);
            all &= sees(m, i, j, sq, sk);
          }
        const bool in_visible = n >= visible.begin && n < visible.end;
        const bool in_plain = n >= plain.begin && n < plain.end;
        // The backward goes the other way: from a KV block to its query tiles.
        const int first_key = n * block, last_key = smaller(first_key + block, sk) - 1;
        const BlockRange tiles = query_tiles(m, first_key, last_key, sq, sk, tile);
        const BlockRange plain_tiles =
            unmasked_query_tiles(m, first_key, first_key + block - 1, sq, sk, tile);
        const bool from_keys = q_tile >= tiles.begin && q_tile < tiles.end;
        const bool plain_from_keys = q_tile >= plain_tiles.begin && q_tile < plain_tiles.end;
        if (from_keys != in_visible || plain_from_keys != all) {
          std::printf("tiles: sq %d sk %d window %d %d chunk %d block %d rows %d-%d\n", sq, sk, l,
                      r, c, n, first, last);
          return 1;
        }
        // A needed block must be visited, and one without mask code must need none.
        if ((any && !in_visible) || (in_plain && !all) || (all && !in_plain)) {
          std::printf("blocks: sq %d sk %d window %d %d chunk %d rows %d-%d block %d\n", sq, sk, l,
                      r, c, first, last, n);
          return 1;
        }
      }
    }
  }
  std::printf("%ld\n", cases);
  return 0;
}
"""


def test_visible_keys_and_blocks_against_brute_force(tmp_path):
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler on this machine")
    source, program = tmp_path / "ranges.cpp", tmp_path / "ranges"
    source.write_text(PROGRAM)
    subprocess.run([compiler, "-std=c++17", "-O1", "-I", CSRC, source, "-o", program], check=True)
    result = subprocess.run([program], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout
    assert int(result.stdout) > 100_000
