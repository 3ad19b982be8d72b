"""The barrier protocol of the e4m3 forward (csrc/kernels/fp8) as a model, without a GPU.

As in test_pipeline_model.py, whose barriers, rings, scheduler and tile lists serve here. Between
the producer and the consumers stand two warps that transpose V; consumers issue products either
together (Q K^T of the newest block with P V of the one before) or in turn (P V, then Q K^T);
"early" and "late" are in turn too, but the next one's turn comes in between, or V is freed behind
Q K^T; "carried" issues both together in all blocks, and frees V of a tile's last block before K of
the next one's first.
"""

import random
import re
from pathlib import Path

import pytest
from test_pipeline_model import Barrier, Kernel, Ring, tile_lists

CONFIG = Path(__file__).parents[2] / "csrc" / "kernels" / "fp8" / "fp8_config.h"
SCHEDULE = re.compile(
    r"Fp8(Transposed|Short)?ScheduleOf<(\d+), (\d+)>.*?Fp8Schedule<(\d), (\d), (\d), (\d), (\d),\s*"
    r"QuerySource::(\w+),\s*OutPath::\w+,\s*Promotion::(\w+)(?:,\s*RowSums::\w+(?:,\s*(\w+))?)?>",
    re.DOTALL)


def schedules():
    """(name, consumers, K, raw, V and Q stages, Q in registers, how products are issued, turns)."""
    for match in SCHEDULE.finditer(CONFIG.read_text()):
        kind, d, dv, *numbers, source, promotion, turns = match.groups()
        orders = {"kWhole": "both", "kCarried": "carried", "kShort": "carried"}
        order = orders.get(promotion, "early" if dv == "256" else "late")
        name = f"{d},{dv}{' ' + kind.lower() if kind else ''}"
        yield name, *map(int, numbers), source == "kRegisters", order, turns != "false"


class Fp8Kernel(Kernel):
    TRANSPOSERS = 2

    def __init__(self, tiles, consumers, stages, q_stages, q_in_registers, order, ahead=1,
                 transposes=True, turns=True):
        k_stages, raw_stages, v_stages = stages
        super().__init__(tiles, consumers, q_stages, q_in_registers, (k_stages, v_stages), ahead)
        self.transposes, self.order, self.turns = transposes, order, turns
        warps = self.TRANSPOSERS if transposes else 0
        self.tile_empty = [Barrier(1 + warps + consumers) for _ in range(self.slots)]
        self.has_tail = [False] * len(tiles)  # cleared by the transposing warps, on their way
        if not transposes:
            return
        self.stages["raw"] = raw_stages
        self.full["raw"] = [Barrier(1) for _ in range(raw_stages)]
        self.empty["raw"] = [Barrier(warps) for _ in range(raw_stages)]
        self.data["raw"] = [None] * raw_stages
        self.full["v"] = [Barrier(warps) for _ in range(v_stages)]
        self.written = [[None] * warps for _ in range(v_stages)]
        self.places["v"] = "raw"

    def tail(self):
        return self.transposer(0) if self.transposes else iter([lambda: True])

    def more_actors(self):
        return [self.transposer(1)] if self.transposes else []

    def transposer(self, part):
        tile_ring = Ring(self.slots)
        raw, ring = Ring(self.stages["raw"]), Ring(self.stages["v"])
        while True:
            yield lambda: self.tile_full[tile_ring.slot].passed(tile_ring.parity)
            number, blocks = self.tile[tile_ring.slot]
            if blocks < 0:
                return
            for n in range(blocks - 1, -1, -1):
                yield lambda: self.full["raw"][raw.slot].passed(raw.parity)
                yield lambda: self.empty["v"][ring.slot].passed(ring.parity ^ 1)
                assert self.data["raw"][raw.slot] == (number, n)
                self.written[ring.slot][part] = (number, n)
                yield lambda: True  # while it writes
                if len(set(self.written[ring.slot])) == 1:
                    self.data["v"][ring.slot] = (number, n)
                self.full["v"][ring.slot].arrive()
                self.empty["raw"][raw.slot].arrive()
                raw.advance()
                ring.advance()
            self.tile_empty[tile_ring.slot].arrive()
            tile_ring.advance()

    def consumer(self, w):
        tile_ring, q_ring = Ring(self.slots), Ring(self.q_stages)
        rings = {x: Ring(self.stages[x]) for x in "kv"}

        def tile_here():
            yield lambda: self.tile_full[tile_ring.slot].passed(tile_ring.parity)
            return tile_ring.slot, *self.tile[tile_ring.slot]

        def read(x, block):
            yield lambda: self.full[x][rings[x].slot].passed(rings[x].parity)
            assert self.data[x][rings[x].slot] == block

        def release(x):
            self.empty[x][rings[x].slot].arrive()
            rings[x].advance()

        def release_q():
            self.q_empty[q_ring.slot][w].arrive()
            q_ring.advance()

        def take_q(number):
            yield lambda: self.q_full[q_ring.slot][w].passed(q_ring.parity)
            assert self.q[q_ring.slot][w] == number
            if self.q_in_registers:
                release_q()

        def release_k(n):
            release("k")
            if n == 0 and not self.q_in_registers:
                release_q()

        def store(slot, number):
            self.done[w].append(number)
            self.tile_empty[slot].arrive()

        def my_turn():
            return not self.turns or self.turn % self.consumers == w

        def pass_turn():
            self.turn += 1
            self.issued[w] += 1

        while True:
            slot, number, blocks = yield from tile_here()
            while blocks == 0:
                store(slot, number)
                tile_ring.advance()
                slot, number, blocks = yield from tile_here()
            if blocks < 0:
                return
            n = blocks - 1
            yield from take_q(number)
            yield from read("k", (number, n))
            release_k(n)
            while True:
                current = slot, number, n
                if n > 0:
                    n -= 1
                else:
                    tile_ring.advance()
                    slot, number, blocks = yield from tile_here()
                    if blocks <= 0:
                        break
                    n = blocks - 1
                new_tile = number != current[1]
                plain = not new_tile and random.random() < 0.5
                if self.order in ("early", "late") or self.order == "both" and not plain:
                    early, late = self.order == "early", self.order == "late"
                    if early and plain or late:  # V first
                        yield lambda: self.full["v"][rings["v"].slot].passed(rings["v"].parity)
                    yield my_turn
                    yield from read("v", current[1:])
                    if early:
                        pass_turn()
                        yield lambda: True
                    if not late:
                        release("v")
                    if new_tile:
                        yield from take_q(number)
                    yield from read("k", (number, n))
                    if not early:
                        pass_turn()
                    if late:
                        yield lambda: True
                        release("v")
                    if new_tile:
                        store(*current[:2])
                    yield lambda: True
                    release_k(n)
                else:
                    if new_tile:
                        yield from take_q(number)
                    yield from read("k", (number, n))
                    yield my_turn
                    yield from read("v", current[1:])
                    pass_turn()
                    yield lambda: True
                    if plain:
                        release_k(n)
                        yield lambda: True
                    release("v")
                    if new_tile:
                        store(*current[:2])
                    yield lambda: True
                    if not plain:  # carried: V first
                        release_k(n)
            yield from read("v", current[1:])
            release("v")
            store(*current[:2])


def test_the_schedules_were_found():
    assert {name for name, *_ in schedules()} >= {"64,64", "128,128", "256,256",
                                                    "256,256 transposed", "256,256 short"}


# Where V comes transposed nothing is left to transpose; short calls transpose always.
@pytest.mark.parametrize("schedule, transposes", [
    (schedule, transposes) for schedule in schedules() for transposes in (True, False)
    if not ("transposed" if transposes else "short") in schedule[0]],
    ids=lambda value: value if isinstance(value, bool) else value[0])
@pytest.mark.parametrize("ahead", [1, 2])
def test_every_tile_is_computed_once_whatever_the_order(schedule, transposes, ahead):
    _, consumers, k, raw, v, q, in_registers, order, turns = schedule
    for number, tiles in enumerate(tile_lists()):
        for seed in range(2):
            random.seed(1000 * number + seed)
            kernel = Fp8Kernel(tiles, consumers, (k, raw, v), q, in_registers, order, ahead,
                               transposes, turns)
            assert kernel.run(), f"deadlock with tiles {tiles}, seed {seed}"
            assert kernel.done == [list(range(len(tiles)))] * consumers
            assert len(set(kernel.issued)) == 1


def test_the_model_notices_a_missing_arrival():
    """One transposing warp is not enough for a block to be there."""
    random.seed(0)
    kernel = Fp8Kernel([3, 2], 2, (2, 1, 2), 1, False, "in turn")
    kernel.more_actors = lambda: []
    assert not kernel.run()
