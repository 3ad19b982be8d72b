"""The barrier protocol of a pair of CTAs (Paired, fwd_traits.h) as a model, without a GPU.

Both CTAs are kernels as in test_pipeline_model.py. Each brings one half of every KV block to both
and waits for the consumers of both before it fills a stage again; the first claims tiles for both.
A CTA that has ended must be sent nothing more: its shared memory may be another's by then.
"""

import random

import pytest
from support.actors import run_actors
from test_pipeline_model import Barrier, Kernel, tile_lists


class CountingBarrier(Barrier):
    """A phase also waits for as many copies as were announced. They may come before that."""

    def __init__(self):
        super().__init__(1)
        self.copies = 0

    def announce(self, copies):
        self.copies += copies
        self.arrive()

    def arrive(self):
        assert self.pending > 0, "more arrivals than the phase expects"
        self.pending -= 1
        self.complete()

    def copied(self):
        self.copies -= 1
        self.complete()

    def complete(self):
        if self.pending == 0 and self.copies == 0:
            self.pending, self.phase = self.arrivals, self.phase + 1


class PairedKernel(Kernel):
    """One CTA of the pair; `rank` 0 claims tiles."""

    def __init__(self, rank, *args, drains=True, **options):
        super().__init__(*args, **options)
        self.rank, self.drains, self.other = rank, drains, None
        self.full = {x: [CountingBarrier() for _ in range(self.stages[x])] for x in "kv"}
        self.v_tail = [CountingBarrier() for _ in range(self.stages["v"])]
        both = 2 * self.consumers
        self.empty = {x: [Barrier(both) for _ in range(self.stages[x])] for x in "kv"}
        self.halves = {x: [[None, None] for _ in range(self.stages[x])] for x in "kv"}
        self.claims = [None, None]
        self.claim_full = [CountingBarrier(), CountingBarrier()]
        self.claim_empty = [Barrier(1), Barrier(1)]
        self.running = 0

    def send(self, receiver, arrival):
        def arrive():
            assert receiver.running > 0, "sent to a CTA that has ended"
            arrival()

        self.in_flight.append(arrive)

    def bring(self, place, slot, value, barriers):
        tail = barriers is self.v_tail
        barriers[slot].announce(2)

        def half_at(kernel):
            def arrival():
                halves = kernel.halves[place][slot]
                halves[self.rank] = value
                kernel.data[place][slot] = value if halves[0] == halves[1] else "mixed"
                (kernel.v_tail if tail else kernel.full[place])[slot].copied()

            return arrival

        for kernel in (self, self.other):
            self.send(kernel, half_at(kernel))

    def stage_is_read(self, x, slot):
        self.empty[x][slot].arrive()
        self.send(self.other, self.other.empty[x][slot].arrive)

    def claim(self, number):
        if number == 0:  # nobody claims the first tile
            return
        at, parity = (number - 1) % 2, (number - 1) // 2 % 2
        if self.rank == 0:
            yield lambda: self.claim_empty[at].passed(parity ^ 1)

            def told():
                self.other.claims[at] = number
                self.other.claim_full[at].copied()

            self.send(self.other, told)
        else:
            self.claim_full[at].announce(1)
            yield lambda: self.claim_full[at].passed(parity)
            assert self.claims[at] == number
            self.send(self.other, self.other.claim_empty[at].arrive)

    def scheduler(self):
        yield from super().scheduler()
        if self.rank == 0 and self.drains:
            claims = len(self.tiles)
            for number in (claims, claims + 1):
                yield lambda: self.claim_empty[number % 2].passed(number // 2 % 2 ^ 1)

    def await_others(self, rings):
        for x, ring in rings.items() if self.drains else ():
            for _ in range(self.stages[x]):
                yield lambda: self.empty[x][ring.slot].passed(ring.parity ^ 1)
                ring.advance()

    def actors(self):
        def counted(actor):
            yield from actor
            self.running -= 1

        actors = [self.scheduler(), self.producer(), self.tail()]
        actors += [self.consumer(w) for w in range(self.consumers)]
        self.running = len(actors)
        return [counted(actor) for actor in actors]


def run_pair(tiles, consumers, stages, ahead, seed, **options):
    random.seed(seed)
    pair = [PairedKernel(rank, tiles, consumers, 1, False, stages, ahead, **options)
            for rank in (0, 1)]
    pair[0].other, pair[1].other = pair[1], pair[0]
    pair[1].has_tail = pair[0].has_tail
    assert run_actors(pair[0].actors() + pair[1].actors(), pair), "deadlock"
    return pair


@pytest.mark.parametrize("consumers, stages", [(2, (2, 2)), (2, (3, 2)), (3, (4, 4))])
@pytest.mark.parametrize("ahead", [1, 2])
def test_both_compute_every_tile_once_whatever_the_order(consumers, stages, ahead):
    for number, tiles in enumerate(tile_lists()):
        for seed in range(2):
            for kernel in run_pair(tiles, consumers, stages, ahead, 1000 * number + seed):
                assert kernel.done == [list(range(len(tiles)))] * consumers
                assert len(set(kernel.issued)) == 1


def test_the_model_notices_a_cta_that_does_not_wait_for_the_other():
    """It would end while the other still has arrivals for its barriers."""
    failures = 0
    for seed in range(60):
        try:
            run_pair([2, 1, 3], 2, (2, 2), 1, seed, drains=False)
        except AssertionError as error:
            failures += "has ended" in str(error)
    assert failures > 0


def test_the_model_notices_a_stage_filled_before_both_have_read_it(monkeypatch):
    """With arrivals of its own consumers alone a producer overtakes the other CTA."""
    def alone(self, x, slot):
        self.empty[x][slot].arrive()

    def halved(self, *args, **options):
        build(self, *args, **options)
        self.empty = {x: [Barrier(self.consumers) for _ in range(self.stages[x])] for x in "kv"}

    build = PairedKernel.__init__
    monkeypatch.setattr(PairedKernel, "__init__", halved)
    monkeypatch.setattr(PairedKernel, "stage_is_read", alone)
    failures = 0
    for seed in range(60):
        try:
            run_pair([3, 4, 3, 5], 2, (2, 2), 1, seed)
        except AssertionError:
            failures += 1
    assert failures > 0
