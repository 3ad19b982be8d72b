"""The layouts of the e4m3 forward, replayed lane by lane: V transposed, P as it is packed.

csrc/kernels/fp8/value_layout.h is compiled for the host; what ldmatrix, prmt, stmatrix, the copy
engine's swizzle and the operands of wgmma do is written here from the PTX manual. P times V must
come out, and must not with another order of keys.
"""

import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

CSRC = Path(__file__).parents[2] / "csrc"
KEYS = 128

PROGRAM = r"""
#include <cstdio>
#include "kernels/fp8/value_layout.h"
using namespace flash_attn3;
int main() {
  for (int s = 0; s < 128; ++s) std::printf("%d ", ValueLayout::key_of_slot(s));
  std::puts("");
  for (int c = 0; c < 256; ++c)
    for (int s = 0; s < 128; ++s) std::printf("%d ", ValueLayout::offset(c, s));
  std::puts("");
  for (int r = 0; r < 16; ++r)
    for (int b = 0; b < 4; ++b) std::printf("%d ", ValueLayout::score_of_byte(r, b));
  std::puts("");
  using S = TransposeStep;
  for (int l = 0; l < 32; ++l)
    std::printf("%u %u %d %d %d ", S::selector(l, 0), S::selector(l, 1), S::load_key(l),
                S::store_column(l), S::store_half(l));
  std::puts("");
}
"""


@pytest.fixture(scope="module")
def layout(tmp_path_factory):
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    folder = tmp_path_factory.mktemp("layout")
    (folder / "print.cpp").write_text(PROGRAM)
    subprocess.run([compiler, "-std=c++17", "-I", str(CSRC), str(folder / "print.cpp"), "-o",
                    str(folder / "print")], check=True)
    text = subprocess.run([str(folder / "print")], check=True, capture_output=True, text=True)
    rows = [np.array([int(x) for x in line.split()]) for line in text.stdout.splitlines()]
    return {"key": rows[0], "offset": rows[1].reshape(256, KEYS), "score": rows[2].reshape(16, 4),
            "lane": rows[3].reshape(32, 5)}


def swizzle(row, chunk, width):
    """The 16-byte chunk where TMA puts chunk `chunk` of row `row`; panels start at 1,024 bytes."""
    return chunk ^ (row % 8) if width == 128 else chunk ^ (row // 2 % 4)


def raw_tile(v):
    """V [key][column] as the copy engine writes it: panels of 128 or 64 bytes a row, swizzled."""
    columns = v.shape[1]
    width = 128 if columns % 128 == 0 else 64
    tile = np.zeros(KEYS * columns, np.uint8)
    for key in range(KEYS):
        for at in range(0, columns, 16):
            panel, chunk = at // width, at % width // 16
            to = panel * KEYS * width + key * width + swizzle(key, chunk, width) * 16
            tile[to:to + 16] = v[key, at:at + 16]
    return tile, width


def load_matrix_transposed(memory, addresses):
    """ldmatrix.x4.trans.b16: registers [4][32 lanes][4 bytes]."""
    out = np.zeros((4, 32, 4), np.uint8)
    for j in range(4):
        rows = [memory[a:a + 16].reshape(8, 2) for a in addresses[8 * j:8 * j + 8]]
        for lane in range(32):
            g, t = lane // 4, lane % 4
            out[j, lane] = np.concatenate([rows[2 * t][g], rows[2 * t + 1][g]])
    return out


def permute(a, b, selector):
    both = np.concatenate([a, b])
    return np.array([both[selector >> 4 * i & 7] for i in range(4)], np.uint8)


def store_matrix(memory, addresses, registers):
    """stmatrix.x4.b16; also the largest number of rows of a matrix that share a bank."""
    worst = 0
    for j in range(4):
        for row in range(8):
            a = addresses[8 * j + row]
            memory[a:a + 16] = registers[j, 4 * row:4 * row + 4].reshape(16)
        banks = [addresses[8 * j + row] // 16 % 8 for row in range(8)]
        worst = max(worst, max(banks.count(bank) for bank in banks))
    return worst


def transposed_tile(v, layout):
    """Fp8Transposer::transpose(), both warps."""
    raw, width = raw_tile(v)
    tile = np.zeros(v.shape[1] * KEYS, np.uint8)
    worst = 0
    for keys in range(0, KEYS, 32):
        for at in range(0, v.shape[1], 16):
            source, target = [], []
            for lane in range(32):
                load_key, store_column, store_half = (int(x) for x in layout["lane"][lane][2:])
                key = keys + load_key
                panel, chunk = at // width, at % width // 16
                source.append(panel * KEYS * width + key * width
                              + swizzle(key, chunk, width) * 16)
                target.append(int(layout["offset"][store_column, keys + store_half * 16])
                              + at * KEYS)
            loaded = load_matrix_transposed(raw, source)
            stored = np.zeros_like(loaded)
            for lane in range(32):
                for j in range(4):
                    pair = loaded[j // 2 * 2, lane], loaded[j // 2 * 2 + 1, lane]
                    stored[j, lane] = permute(*pair, int(layout["lane"][lane][j % 2]))
            worst = max(worst, store_matrix(tile, target, stored))
    return tile, worst


@pytest.mark.parametrize("columns", [64, 128, 192, 256])
def test_v_is_transposed_without_bank_conflicts(layout, columns):
    v = np.random.default_rng(columns).integers(0, 256, (KEYS, columns), dtype=np.uint8)
    tile, worst = transposed_tile(v, layout)
    assert np.array_equal(tile[layout["offset"][:columns]], v[layout["key"]].T)
    assert worst == 1


def test_every_key_has_a_slot(layout):
    assert sorted(layout["key"]) == list(range(KEYS))
    assert sorted(layout["offset"].ravel()) == list(range(256 * KEYS))


def product(p, tile, layout, columns, key_of_score):
    """O of 16 rows: P packed by lanes as the A operand, V read as the B operand (K-major)."""
    o = np.zeros((16, columns))
    for k in range(KEYS // 32):
        a = np.zeros((16, 32))
        for lane in range(32):
            g, t = lane // 4, lane % 4
            for r in range(4):
                row = g + 8 * (r % 2)
                for byte in range(4):
                    score = int(layout["score"][4 * k + r, byte])
                    # s[4 i + 2 h + e] is row g + 8 h, column 8 i + 2 t + e.
                    assert score // 2 % 2 == r % 2
                    key = key_of_score(8 * (score // 4) + 2 * t + score % 2)
                    a[row, 16 * (r // 2) + 4 * t + byte] = p[row, key]
        b = tile[layout["offset"][:columns, 32 * k:32 * k + 32]].astype(float)
        o += a @ b.T
    return o


def test_packed_p_times_transposed_v(layout):
    random = np.random.default_rng(1)
    columns = 64
    v = random.integers(0, 256, (KEYS, columns), dtype=np.uint8)
    p = random.integers(0, 100, (16, KEYS)).astype(float)
    tile, _ = transposed_tile(v, layout)
    right = p @ v.astype(float)
    assert np.array_equal(product(p, tile, layout, columns, lambda key: key), right)
    wrong = product(p, tile, layout, columns, lambda key: key ^ 1)
    assert not np.array_equal(wrong, right)


def test_plain_order_of_keys_would_be_wrong(layout):
    random = np.random.default_rng(2)
    v = random.integers(0, 256, (KEYS, 64), dtype=np.uint8)
    p = random.integers(0, 100, (16, KEYS)).astype(float)
    plain = np.zeros(64 * KEYS, np.uint8)
    plain[layout["offset"][:64]] = v.T
    assert not np.array_equal(product(p, plain, layout, 64, lambda key: key), p @ v.astype(float))
