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
      const RowKeys keys = row_keys(m, first, tile, sq, sk);
      for (int i = first; c == 0 && i <= last; ++i)
        for (int j = 0; j < sk; ++j, ++cases)
          if ((j >= keys.first + i - first && j < keys.end + i - first) != sees(m, i, j, sq, sk)) {
            std::printf("rows: sq %d sk %d window %d %d row %d key %d\n", sq, sk, l, r, i, j);
            return 1;
          }
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


# What the backward makes of query_tiles(): BwdScheduler's fresh_from and final_to (whole pairs; no
# more queries than keys), and m_first, by which a consumer leaves out a step.
PAIRS = r"""
#include <cstdio>
#include <vector>
#include "kernels/attn/query_range.h"
using namespace flash_attn3;

int main() {
  const int lengths[] = {1, 2, 5, 8, 9, 16, 23, 31, 40, 53};
  const int windows[] = {-1, 0, 1, 4, 7, 30};
  const int chunks[] = {0, 1, 3, 8, 13};
  const int tiles_of[] = {4, 8};
  const int block = 8;
  long cases = 0;
  for (int sq : lengths) for (int sk : lengths) for (int tile : tiles_of)
  for (int l : windows) for (int r : windows) for (int c : chunks) {
    const Mask m{l, r, c};
    std::vector<int> visits(blocks_for(sq, tile)), final(visits.size());
    int fresh_from = 0;
    const auto fail = [&](const char* what, int n, int at) {
      std::printf("%s: sq %d sk %d tile %d window %d %d chunk %d block %d query tile %d\n", what,
                  sq, sk, tile, l, r, c, n, at);
      return 1;
    };
    const auto tiles_from = [&](int first_key, int keys) {
      return query_tiles(m, first_key, smaller(first_key + keys, sk) - 1, sq, sk, tile);
    };
    for (int n = 0; n * block < sk; ++n) {
      const BlockRange here = tiles_from(n * block, block);
      for (int half = 0; half < 2; ++half, ++cases) {
        const int first_key = n * block + half * block / 2;
        if (here.begin >= tiles_from(first_key, block / 2).begin) continue;
        if (here.end - here.begin < 2) return fail("one tile, left out", n, here.begin);
        for (int key = first_key; key < smaller(first_key + block / 2, sk); ++key) {
          const QueryRange seen = visible_queries(m, key, sq, sk);
          if (seen.lo <= seen.hi && seen.lo < (here.begin + 1) * tile && seen.hi >= 0)
            return fail("seen, left out", n, here.begin);
        }
      }
      if (sq > sk) continue;
      const BlockRange next = tiles_from((n + 1) * block, block);
      const int final_to = next.begin < next.end ? next.begin : here.end;
      for (int at = here.begin; at < here.end; ++at, ++cases) {
        if ((at >= fresh_from) != (visits[at]++ == 0)) return fail("fresh", n, at);
        if (final[at] != 0) return fail("after the last", n, at);
        final[at] = at < final_to;
      }
      fresh_from = here.end;
    }
    for (int at = 0; sq <= sk && at < int(final.size()); ++at)
      if (final[at] != 1) return fail("never written", -1, at);
  }
  std::printf("%ld\n", cases);
  return 0;
}
"""


@pytest.mark.parametrize("program_text", [PROGRAM, PAIRS], ids=["ranges", "whole pairs"])
def test_visible_keys_and_blocks_against_brute_force(tmp_path, program_text):
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler on this machine")
    source, program = tmp_path / "ranges.cpp", tmp_path / "ranges"
    source.write_text(program_text)
    subprocess.run([compiler, "-std=c++17", "-O1", "-I", CSRC, source, "-o", program], check=True)
    result = subprocess.run([program], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout
    assert int(result.stdout) > 100_000
