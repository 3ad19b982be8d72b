"""The barrier protocol of the forward kernel (csrc/kernels/fwd), as a model without a GPU.

Scheduler, producer, tail warp and consumers are generators that wait and arrive on model
mbarriers in the order of the kernel's code; a random interleaving runs them. A protocol that can
deadlock, or that lets a consumer read another block than its own, fails for some seed. The number
of tile slots is the kernel's own.
"""

import random
import re
from pathlib import Path

import pytest
from support.actors import run_actors

FWD = Path(__file__).parents[2] / "csrc" / "kernels" / "fwd"
TILE_SLOTS = int(re.search(r"kTileSlots = (\d+)", (FWD / "fwd_traits.h").read_text())[1])


class Barrier:
    """An mbarrier: `arrivals` complete a phase; waiting for a parity passes once that phase has."""

    def __init__(self, arrivals):
        self.arrivals, self.pending, self.phase = arrivals, arrivals, 0

    def arrive(self):
        assert self.pending > 0, "more arrivals than the phase expects"
        self.pending -= 1
        if self.pending == 0:
            self.pending, self.phase = self.arrivals, self.phase + 1

    def passed(self, parity):
        return self.phase % 2 != parity


class Ring:
    def __init__(self, slots):
        self.slots, self.at = slots, 0

    slot = property(lambda self: self.at % self.slots)
    parity = property(lambda self: self.at // self.slots % 2)

    def next(self):
        ring = Ring(self.slots)
        ring.at = self.at + 1
        return ring

    def advance(self):
        self.at += 1


class Kernel:
    """`tiles` are numbers of KV blocks, the end of work is -1."""

    def __init__(self, tiles, consumers, q_stages, q_in_registers, stages=(2, 2), ahead=1,
                 slots=TILE_SLOTS, most_unseen=None):
        self.tiles, self.consumers, self.slots = tiles, consumers, slots
        self.q_stages, self.q_in_registers = q_stages, q_in_registers
        self.stages = dict(zip("kv", stages))
        self.places = {"k": "k", "v": "v"}  # where the producer brings them
        self.claim_ahead = ahead
        self.query_ahead = q_in_registers or q_stages > 1
        self.wanted = [Barrier(1), Barrier(1)]
        self.tile_full = [Barrier(1) for _ in range(slots)]
        self.tile_empty = [Barrier(2 + consumers) for _ in range(slots)]
        self.tile = [None] * slots
        self.q_full = [[Barrier(1) for _ in range(consumers)] for _ in range(q_stages)]
        self.q_empty = [[Barrier(1) for _ in range(consumers)] for _ in range(q_stages)]
        self.q = [[None] * consumers for _ in range(q_stages)]
        self.full = {x: [Barrier(1) for _ in range(self.stages[x])] for x in "kv"}
        self.empty = {x: [Barrier(consumers) for _ in range(self.stages[x])] for x in "kv"}
        self.v_tail = [Barrier(1) for _ in range(self.stages["v"])]
        self.data = {x: [None] * self.stages[x] for x in "kv"}
        self.has_tail = [random.random() < 0.5 for _ in tiles]
        # Blocks that a consumer leaves out at the start of a tile.
        self.unseen = [[random.randint(0, max(0, min(most_unseen or stages[1] // 2, blocks - 1)))
                        for blocks in tiles] for _ in range(consumers)]
        self.in_flight = []  # copies that have been issued and not yet arrived
        self.turn, self.issued = 0, [0] * consumers
        self.done = [[] for _ in range(consumers)]

    # What a pair of CTAs does otherwise (test_pair_model.py).

    def claim(self, number):
        yield from ()

    def bring(self, place, slot, value, barriers):
        self.copy(self.data[place], slot, value, barriers[slot])

    def stage_is_read(self, x, slot):
        self.empty[x][slot].arrive()

    def await_others(self, rings):
        yield from ()

    # Actors yield a condition that must hold before they go on.

    def scheduler(self):
        ring = Ring(self.slots)
        for number, blocks in enumerate(self.tiles + [-1]):
            by = number - self.claim_ahead
            if by >= 0:
                yield lambda: self.wanted[by % 2].passed(by // 2 % 2)
            yield from self.claim(number)
            yield lambda: self.tile_empty[ring.slot].passed(ring.parity ^ 1)
            self.tile[ring.slot] = (number, blocks)
            self.tile_full[ring.slot].arrive()
            ring.advance()

    def producer(self):
        tile_ring, q_ring = Ring(self.slots), Ring(self.q_stages)
        rings = {x: Ring(self.stages[self.places[x]]) for x in "kv"}

        def load_q(number):
            for w in range(self.consumers):
                yield lambda: self.q_empty[q_ring.slot][w].passed(q_ring.parity ^ 1)
                self.copy(self.q[q_ring.slot], w, number, self.q_full[q_ring.slot][w])
            q_ring.advance()

        def load(x, block):
            ring = rings[x]
            yield lambda: self.empty[self.places[x]][ring.slot].passed(ring.parity ^ 1)
            tile, n = block
            tail = x == "v" and self.has_tail[tile] and n == self.tiles[tile] - 1
            place = self.places[x]
            barriers = self.v_tail if tail else self.full[place]
            self.bring(place, ring.slot, "uncleared" if tail else block, barriers)
            ring.advance()

        first = True
        while True:
            yield lambda: self.tile_full[tile_ring.slot].passed(tile_ring.parity)
            number, blocks = self.tile[tile_ring.slot]
            if blocks < 0:
                yield from self.await_others(rings)
                return
            wanted_at = min(2, blocks - 1)
            if blocks:
                if first and self.query_ahead:
                    yield from load_q(number)
                if wanted_at == blocks - 1:
                    self.wanted[number % 2].arrive()
                yield from load("k", (number, blocks - 1))
                if not self.query_ahead:
                    yield from load_q(number)
            else:
                self.wanted[number % 2].arrive()
            for n in range(blocks - 2, -1, -1):
                if n == wanted_at:
                    self.wanted[number % 2].arrive()
                yield from load("k", (number, n))
                yield from load("v", (number, n + 1))
            first = False
            ahead = tile_ring.next()
            yield lambda: self.tile_full[ahead.slot].passed(ahead.parity)
            next_number, next_blocks = self.tile[ahead.slot]
            if next_blocks > 0 and self.query_ahead:
                yield from load_q(next_number)
            if blocks:
                yield from load("v", (number, 0))
            self.tile_empty[tile_ring.slot].arrive()
            tile_ring.advance()

    def tail(self):
        tile_ring, v_ring = Ring(self.slots), Ring(self.stages["v"])
        parities = [0] * self.stages["v"]
        while True:
            yield lambda: self.tile_full[tile_ring.slot].passed(tile_ring.parity)
            number, blocks = self.tile[tile_ring.slot]
            if blocks < 0:
                return
            if blocks and self.has_tail[number]:
                stage = v_ring.slot
                yield lambda: self.v_tail[stage].passed(parities[stage])
                parities[stage] ^= 1
                assert self.data["v"][stage] == "uncleared"
                self.data["v"][stage] = (number, blocks - 1)
                self.full["v"][stage].arrive()
            for _ in range(blocks):
                v_ring.advance()
            self.tile_empty[tile_ring.slot].arrive()
            tile_ring.advance()

    def consumer(self, w):
        tile_ring, q_ring = Ring(self.slots), Ring(self.q_stages)
        rings = {x: Ring(self.stages[x]) for x in "kv"}

        def tile_here():
            yield lambda: self.tile_full[tile_ring.slot].passed(tile_ring.parity)
            return tile_ring.slot, *self.tile[tile_ring.slot]

        def read(x, block):
            ring = rings[x]
            yield lambda: self.full[x][ring.slot].passed(ring.parity)
            assert self.data[x][ring.slot] == block

        def release(x):
            self.stage_is_read(x, rings[x].slot)
            rings[x].advance()

        def release_q():
            self.q_empty[q_ring.slot][w].arrive()
            q_ring.advance()

        def leave_out_k(number, blocks):
            for i in range(self.unseen[w][number]):
                yield from read("k", (number, blocks - 1 - i))
                yield lambda: self.turn % self.consumers == w
                self.turn += 1
                self.issued[w] += 1
                release("k")

        def leave_out_v(number, blocks):
            for i in range(self.unseen[w][number]):
                yield from read("v", (number, blocks - 1 - i))
                release("v")

        def take_q(number):
            yield lambda: self.q_full[q_ring.slot][w].passed(q_ring.parity)
            assert self.q[q_ring.slot][w] == number

        def release_k(n):
            release("k")
            if n == 0 and not self.q_in_registers:
                release_q()

        while True:  # streams
            slot, number, blocks = yield from tile_here()
            while blocks == 0:
                self.done[w].append(number)
                self.tile_empty[slot].arrive()
                tile_ring.advance()
                slot, number, blocks = yield from tile_here()
            if blocks < 0:
                return
            yield from leave_out_k(number, blocks)
            yield from leave_out_v(number, blocks)
            n = blocks - 1 - self.unseen[w][number]
            yield from take_q(number)
            yield from read("k", (number, n))
            if self.q_in_registers:
                release_q()
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
                    yield from leave_out_k(number, blocks)
                    n = blocks - 1 - self.unseen[w][number]
                    yield from take_q(number)
                yield from read("k", (number, n))
                yield lambda: self.turn % self.consumers == w
                yield from read("v", current[1:])
                self.turn += 1
                self.issued[w] += 1
                yield lambda: True
                if self.q_in_registers and number != current[1]:
                    release_q()  # behind the products
                keep = random.random() < 0.5 and number == current[1]  # the loop of plain blocks
                if not keep:
                    release_k(n)
                release("v")
                if number != current[1]:
                    yield from leave_out_v(number, blocks)
                    self.done[w].append(current[1])
                    self.tile_empty[current[0]].arrive()
                yield lambda: True
                if keep:
                    release_k(n)
            yield from read("v", current[1:])
            release("v")
            self.done[w].append(current[1])
            self.tile_empty[current[0]].arrive()

    def copy(self, place, index, value, barrier):
        def arrive():
            place[index] = value
            barrier.arrive()

        self.in_flight.append(arrive)

    def more_actors(self):
        return []

    def run(self):
        """True when every actor came to its end."""
        actors = [self.scheduler(), self.producer(), self.tail()]
        actors += [self.consumer(w) for w in range(self.consumers)] + self.more_actors()
        return run_actors(actors, [self])


def tile_lists():
    yield [3, 0, 0, 0, 0, 0, 2]
    yield [0] * 9
    yield [1] * 9
    yield []
    for seed in range(30):
        chooser = random.Random(seed)
        most = chooser.choice((1, 2, 5))
        yield [chooser.choice((0, chooser.randint(0, most))) for _ in range(chooser.randint(1, 14))]


@pytest.mark.parametrize("q_stages, q_in_registers", [(2, True), (2, False), (1, False), (1, True)])
@pytest.mark.parametrize("consumers, stages", [
    (2, (2, 2)), (2, (3, 2)), (2, (3, 3)), (2, (4, 4)), (3, (4, 4))])
@pytest.mark.parametrize("ahead", [1, 2])
def test_every_tile_is_computed_once_whatever_the_order(consumers, stages, ahead, q_stages,
                                                        q_in_registers):
    for number, tiles in enumerate(tile_lists()):
        for seed in range(2):
            random.seed(1000 * number + seed)
            kernel = Kernel(tiles, consumers, q_stages, q_in_registers, stages, ahead)
            assert kernel.run(), f"deadlock with tiles {tiles}, seed {seed}"
            assert kernel.done == [list(range(len(tiles)))] * consumers
            assert len(set(kernel.issued)) == 1  # turns would not come round otherwise


def test_the_model_notices_a_deadlock():
    """A tile is stored only once the next one has started: with one slot the next never comes."""
    random.seed(0)
    assert not Kernel([2, 1], 2, 2, True, slots=1).run()


def test_the_model_notices_too_many_blocks_left_out():
    """Three blocks left out, but V of two of them only comes once V of the tile before is free."""
    results = []
    for seed in range(60):
        random.seed(seed)
        results.append(Kernel([5, 5, 5, 5], 2, 2, True, most_unseen=3).run())
    assert not all(results)
