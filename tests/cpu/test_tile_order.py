"""csrc/kernels/attn/tile_order.h on the host: tiles of dense calls by number."""

import os
import subprocess

import build_modules
import pytest

ROOT = build_modules.ROOT

PROGRAM = r"""
#include <cstdio>
#include <vector>
#include "kernels/attn/tile_order.h"
using namespace flash_attn3;

int main() {
  long cases = 0;
  for (int batch : {1, 2, 3, 7}) for (int heads : {1, 2, 5, 12}) for (int tiles : {1, 2, 3, 17})
  for (int section = 1; section <= batch * heads; ++section) {
    const DenseOrder order = dense_order(tiles, section, batch, heads);
    int number = 0;
    // One section after the other; in each the first tile of every pair, then the second of each.
    for (int first = 0; first < batch * heads; first += section)
      for (int nth = 0; nth < tiles; ++nth)
        for (int pair = first; pair < smaller(first + section, batch * heads); ++pair, ++cases) {
          const DenseTile tile = dense_tile(order, number++);
          if (tile.batch * heads + tile.head != pair || tile.head >= heads || tile.nth != nth) {
            std::printf("batch %d heads %d tiles %d section %d number %d: %d %d %d\n", batch, heads,
                        tiles, section, number - 1, tile.batch, tile.head, tile.nth);
            return 1;
          }
        }
  }
  std::printf("%ld\n", cases);
  return 0;
}
"""


def test_tiles_of_dense_calls_come_section_by_section(tmp_path):
    toolchain = build_modules.load("toolchain")
    toolkit, cutlass = toolchain.find_toolkit(), toolchain.find_cutlass(ROOT, os.environ)
    if toolkit is None or cutlass is None:
        pytest.skip("no nvcc or no CUTLASS on this machine")
    source, program = tmp_path / "order.cu", tmp_path / "order"
    source.write_text(PROGRAM)
    flags = ["-std=c++17", "-O1", "--expt-relaxed-constexpr"]
    folders = ["-I", ROOT / "csrc", "-isystem", cutlass.include]
    subprocess.run([toolkit.nvcc, *flags, *folders, source, "-o", program], check=True)
    result = subprocess.run([program], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout
    assert int(result.stdout) > 10_000
