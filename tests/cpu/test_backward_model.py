"""The barrier protocol of the backward kernel (csrc/kernels/bwd), as a model without a GPU.

Scheduler, producer, tail warp and consumers are generators that wait and arrive on model mbarriers
in the order of the kernel's code; a random interleaving runs them, in several CTAs that share the
tile counter and the turns of the deterministic mode. A protocol that can deadlock, that lets a
reader see other data than its own, or that lets somebody write what is still read, fails for some
seed. Numbers of slots are the kernel's own.
"""

import random
import re
from itertools import product
from pathlib import Path

import pytest
from support.actors import run_actors
from test_pipeline_model import Barrier

TRAITS = (Path(__file__).parents[2] / "csrc/kernels/bwd/bwd_traits.h").read_text()
TILE_SLOTS = int(re.search(r"kTileSlots = (\d+)", TRAITS)[1])
DS_SLOTS = int(re.search(r"kDsSlots = (\d+)", TRAITS)[1])
P_SLOTS = int(re.search(r"kPSlots = kRoles \? (\d+)", TRAITS)[1])
TURN_SLOTS = int(re.search(r"kTurnSlots = (\d+)", TRAITS)[1])


class Place:
    """Memory that must hold what its reader expects, and must not be written while it is read."""

    def __init__(self):
        self.holds, self.readers = None, 0

    def write(self, value):
        assert self.readers == 0, f"{value} written over {self.holds}, which is being read"
        self.holds = value

    def read(self, value):
        assert self.holds == value, f"{self.holds} instead of {value}"
        self.readers += 1

    def release(self):
        self.readers -= 1


class Work:
    """What all CTAs share. tiles: (first, end) of the query tiles of each KV tile, in claim order.

    heads: query heads of one KV head. All tiles are of one KV head, so they share its turns.
    whole: a claim is for all tiles of a pair, of which there are `pairs`, with heads of their own.
    """

    # Of the consumers that share keys: waits for the next step stand before dQ's additions; those
    # that leave out a tile's query tile m_begin, of which they see nothing.
    ahead = False
    skipping = ()

    def __init__(self, tiles, heads, stages, kv_stages, deterministic, key_tails, query_tail,
                 whole=False, pairs=1):  # fmt: skip
        self.tiles, self.heads = tiles * pairs, heads
        self.of_pair = len(tiles)
        self.stages, self.kv_stages = stages, kv_stages
        self.deterministic = deterministic
        self.whole = whole
        self.key_tails, self.query_tail = key_tails, query_tail
        self.counter = 0
        self.turns = {}  # (head, m, chain): how many KV tiles have been added
        self.added = {}  # (head, m, chain): KV tiles in the order of their additions
        self.gradients = []

    def steps(self, number):
        pair, n = divmod(number, self.of_pair)
        heads = range(pair * self.heads, (pair + 1) * self.heads)
        query_tiles = range(*self.tiles[number])
        if self.whole and n % 2:  # visits_down()
            query_tiles = query_tiles[::-1]
        return [(number, head, m) for head in heads for m in query_tiles]

    def skips(self, number, w):
        """The step, the first or the last, for which the consumer makes nothing but a dS of 0."""
        if (number, w) not in self.skipping or len(self.steps(number)) < 2:
            return None
        return -1 if self.whole and number % self.of_pair % 2 else 0

    def rank(self, number, m):
        return sum(first <= m < end for first, end in self.tiles[:number])


class Cta:
    def __init__(self, work, roles):
        self.work, self.roles, stages = work, roles, work.stages
        self.tile_full = [Barrier(1) for _ in range(TILE_SLOTS)]
        # Producer, tail warp, two consumers, and the lanes of the turn warp where it runs.
        self.chains = self.chains_of(0) + self.chains_of(1)
        turn_lanes = len(self.chains) if work.deterministic else 0
        self.tile_empty = [Barrier(4 + turn_lanes) for _ in range(TILE_SLOTS)]
        self.turn_come = {c: [Barrier(1) for _ in range(TURN_SLOTS)] for c in self.chains}
        self.turn_done = {c: [Barrier(1) for _ in range(TURN_SLOTS)] for c in self.chains}
        self.tile = [None] * TILE_SLOTS
        self.loaded = Barrier(1)
        kv_stages = range(work.kv_stages)
        self.kv = {x: [Place() for _ in kv_stages] for x in "kv"}
        self.kv_full = {x: [Barrier(1) for _ in kv_stages] for x in "kv"}
        self.kv_tail = {x: [Barrier(1) for _ in kv_stages] for x in "kv"}
        self.kv_empty = [Barrier(2) for _ in kv_stages]
        self.data = {x: [Place() for _ in range(stages[x])] for x in "qo"}
        self.full = {x: [Barrier(1) for _ in range(stages[x])] for x in "qo"}
        self.tail = {x: [Barrier(1) for _ in range(stages[x])] for x in "qo"}
        self.empty = {x: [Barrier(2) for _ in range(stages[x])] for x in "qo"}
        self.ds = [[Place(), Place()] for _ in range(DS_SLOTS)]  # each writer's half
        self.ds_full = [Barrier(1 if roles else 2) for _ in range(DS_SLOTS)]
        self.ds_empty = [Barrier(2) for _ in range(DS_SLOTS)]
        self.p = [Place() for _ in range(P_SLOTS)]
        self.p_full = [Barrier(1) for _ in range(P_SLOTS)]
        self.p_empty = [Barrier(1) for _ in range(P_SLOTS)]
        self.in_flight = []  # copies that have been issued and not yet arrived

    def actors(self):
        consumer = self.role_consumer if self.roles else self.key_consumer
        turns = map(self.turn_lane, self.chains if self.work.deterministic else [])
        actors = [self.scheduler(), self.producer(), self.tail_warp(), consumer(0), consumer(1)]
        return [*actors, *turns]

    def chains_of(self, w):
        """Parts of dQ that consumer w adds by themselves; role 1 has one, as at head dim 192."""
        return [(w, part) for part in range(2 if self.roles and w == 0 else 1)]

    def copy(self, place, value, barrier):
        def arrive():
            place.write(value)
            barrier.arrive()

        self.in_flight.append(arrive)

    # Actors yield a condition that must hold before they go on.

    def scheduler(self):
        count = 0
        of_claim = self.work.of_pair if self.work.whole else 1
        while True:
            if count:
                yield lambda: self.loaded.passed((count - 1) % 2)
            first, self.work.counter = self.work.counter, self.work.counter + of_claim
            for number in range(first, first + of_claim):
                slot, parity = count % TILE_SLOTS, count // TILE_SLOTS % 2
                yield lambda: self.tile_empty[slot].passed(parity ^ 1)
                self.tile[slot] = number if number < len(self.work.tiles) else -1
                self.tile_full[slot].arrive()
                if self.tile[slot] < 0:
                    return
                count += 1

    def tiles(self):
        """Waits for one tile after the other; the caller ends each by arriving at tile_empty."""
        count = 0
        while True:
            slot, parity = count % TILE_SLOTS, count // TILE_SLOTS % 2
            yield slot, lambda: self.tile_full[slot].passed(parity)
            count += 1

    def kv_position(self, with_work):
        return with_work % self.work.kv_stages, with_work // self.work.kv_stages % 2

    def has_query_tail(self, m):
        return self.work.query_tail == m

    def producer(self):
        with_work = count = 0
        stages = self.work.stages
        for slot, ready in self.tiles():
            yield ready
            number = self.tile[slot]
            if number < 0:
                return
            steps = self.work.steps(number)
            key_tail = self.work.key_tails[number]

            kv, kv_parity = self.kv_position(with_work)

            def load_kv(x):
                value = ("uncleared", number) if key_tail else number
                barrier = (self.kv_tail if key_tail else self.kv_full)[x][kv]
                self.copy(self.kv[x][kv], value, barrier)

            for index, step in enumerate(steps):
                for x in "qo":
                    stage, parity = count % stages[x], count // stages[x] % 2
                    yield lambda: self.empty[x][stage].passed(parity ^ 1)
                    tail = self.has_query_tail(step[2])
                    value = ("uncleared", step) if tail else step
                    barrier = (self.tail if tail else self.full)[x][stage]
                    self.copy(self.data[x][stage], value, barrier)
                    if x == "q" and index == 0:
                        yield lambda: self.kv_empty[kv].passed(kv_parity ^ 1)
                        with_work += 1
                        load_kv("k")
                        load_kv("v")
                count += 1
            self.loaded.arrive()
            self.tile_empty[slot].arrive()

    def tail_warp(self):
        with_work = count = 0
        stages = self.work.stages
        key_parities = [0] * self.work.kv_stages
        parities = {x: [0] * stages[x] for x in "qo"}
        for slot, ready in self.tiles():
            yield ready
            number = self.tile[slot]
            if number < 0:
                return
            steps = self.work.steps(number)
            kv, _ = self.kv_position(with_work)
            with_work += bool(steps)
            if steps and self.work.key_tails[number]:
                for x in "kv":
                    yield lambda: self.kv_tail[x][kv].passed(key_parities[kv])
                    assert self.kv[x][kv].holds == ("uncleared", number)
                    self.kv[x][kv].write(number)
                    self.kv_full[x][kv].arrive()
                key_parities[kv] ^= 1
            per_head = len(steps) // self.work.heads
            for head in range(self.work.heads if steps else 0):
                count += per_head
                last = steps[(head + 1) * per_head - 1]
                if not self.has_query_tail(last[2]):
                    continue
                for x in "qo":
                    stage = (count - 1) % stages[x]
                    yield lambda: self.tail[x][stage].passed(parities[x][stage])
                    parities[x][stage] ^= 1
                    assert self.data[x][stage].holds == ("uncleared", last)
                    self.data[x][stage].write(last)
                    self.full[x][stage].arrive()
            self.tile_empty[slot].arrive()

    # Additions to dQ.

    def turn_lane(self, chain):
        """Announces turns up to TURN_SLOTS steps before they are passed on; it never blocks."""
        turns = self.work.turns
        announced, passed_on = [], 0  # (head, m) of the steps announced
        count, number, steps = 0, None, []
        while True:
            slot, parity = passed_on % TURN_SLOTS, passed_on // TURN_SLOTS % 2
            if passed_on < len(announced) and self.turn_done[chain][slot].passed(parity):
                turns[(*announced[passed_on], chain)] += 1
                passed_on += 1
            elif number == -1:
                if passed_on == len(announced):
                    return
            elif len(announced) - passed_on == TURN_SLOTS:
                pass
            elif number is None:
                if self.tile_full[count % TILE_SLOTS].passed(count // TILE_SLOTS % 2):
                    number = self.tile[count % TILE_SLOTS]
                    steps = self.work.steps(number) if number >= 0 else []
            elif not steps:
                self.tile_empty[count % TILE_SLOTS].arrive()
                count, number = count + 1, None
            else:
                _, head, m = steps[0]
                if turns.setdefault((head, m, chain), 0) == self.work.rank(number, m):
                    self.turn_come[chain][len(announced) % TURN_SLOTS].arrive()
                    announced.append((head, m))
                    steps = steps[1:]
            yield self.turn_may_move(chain, announced, passed_on, count, number, steps)

    def turn_may_move(self, chain, announced, passed_on, count, number, steps):
        """Whether a round of turn_lane() would do anything: without it no deadlock would show."""
        slot, parity = passed_on % TURN_SLOTS, passed_on // TURN_SLOTS % 2
        has_room = len(announced) - passed_on < TURN_SLOTS

        def may_move():
            if passed_on < len(announced) and self.turn_done[chain][slot].passed(parity):
                return True
            if number == -1:
                return passed_on == len(announced)
            if not has_room:
                return False
            if number is None:
                return self.tile_full[count % TILE_SLOTS].passed(count // TILE_SLOTS % 2)
            if not steps:
                return True
            _, head, m = steps[0]
            return self.work.turns.get((head, m, chain), 0) == self.work.rank(number, m)

        return may_move

    def add(self, step, count, chain):
        """A part of a step's dQ, in its turn."""
        slot, parity = count % TURN_SLOTS, count // TURN_SLOTS % 2
        if self.work.deterministic:
            yield lambda: self.turn_come[chain][slot].passed(parity)
        self.work.added.setdefault((step[1], step[2], chain), []).append(step[0])
        yield lambda: True
        if self.work.deterministic:
            self.turn_done[chain][slot].arrive()

    def key_consumer(self, w):
        stages = self.work.stages
        count, with_work = 0, 0

        def dq(step, at):
            slot = at % DS_SLOTS
            yield lambda: self.ds_full[slot].passed(at // DS_SLOTS % 2)
            for half in self.ds[slot]:
                half.read(step)

        def add(step, at):
            for half in self.ds[at % DS_SLOTS]:
                half.release()
            self.ds_empty[at % DS_SLOTS].arrive()
            yield from self.add(step, at, (w, 0))

        def arrived(x, at):
            return lambda: self.full[x][at % stages[x]].passed(at // stages[x] % 2)

        def release(x, at):
            self.data[x][at % stages[x]].release()
            self.empty[x][at % stages[x]].arrive()

        def write_ds(step):
            yield lambda: self.ds_empty[count % DS_SLOTS].passed(count // DS_SLOTS % 2 ^ 1)
            self.ds[count % DS_SLOTS][w].write(step)
            self.ds_full[count % DS_SLOTS].arrive()

        for slot, ready in self.tiles():
            yield ready
            number = self.tile[slot]
            if number < 0:
                return
            steps = self.work.steps(number)
            if steps:
                kv, kv_parity = self.kv_position(with_work)
                for x in "kv":
                    yield lambda: self.kv_full[x][kv].passed(kv_parity)
                    self.kv[x][kv].read(number)
            skipped = self.work.skips(number, w)
            for index, step in enumerate(steps):
                if index == skipped or index - len(steps) == skipped:
                    yield from write_ds(step)
                    for x in "qo":
                        yield arrived(x, count)
                        self.data[x][count % stages[x]].read(step)
                    release("o", count)
                    count += 1
                    continue
                if self.work.ahead and index == (skipped == 0):
                    for x in "qo":
                        yield arrived(x, count)
                if not self.work.ahead:
                    yield arrived("q", count)
                self.data["q"][count % stages["q"]].read(step)  # S
                if index:  # dK of the step before is done
                    release("q", count - 1)
                if not self.work.ahead:
                    yield arrived("o", count)
                self.data["o"][count % stages["o"]].read(step)  # dP, then dV
                yield lambda: True
                yield from write_ds(step)
                yield lambda: True
                release("o", count)
                if index:
                    yield from dq(steps[index - 1], count - 1)
                if self.work.ahead and index + 1 < len(steps) + (skipped or 0):
                    for x in "qo":
                        yield arrived(x, count + 1)
                if index:
                    yield lambda: True
                    yield from add(steps[index - 1], count - 1)
                count += 1
            for rest in range(2 if skipped == -1 else 1, 0, -1) if steps else []:
                yield from dq(steps[-rest], count - rest)
                yield lambda: True
                release("q", count - rest)
                if rest == 1:
                    for x in "kv":
                        self.kv[x][kv].release()
                    self.kv_empty[kv].arrive()
                    with_work += 1
                yield from add(steps[-rest], count - rest)
            self.work.gradients.append((number, w))
            self.tile_empty[slot].arrive()

    def role_consumer(self, w):
        stages = self.work.stages
        count, with_work = 0, 0  # count: seconds released
        first, second = ("q", "o") if w == 0 else ("o", "q")
        chains = self.chains_of(w)

        def make_operand(step):
            stage, parity = count % stages["o"], count // stages["o"] % 2
            q, q_parity = count % stages["q"], count // stages["q"] % 2
            p, p_parity = count % P_SLOTS, count // P_SLOTS % 2
            if w == 0:
                self.data["q"][q].release()
                self.empty["q"][q].arrive()
                yield lambda: self.full["o"][stage].passed(parity)
                self.data["o"][stage].read(step)
                yield lambda: self.p_empty[p].passed(p_parity ^ 1)
                self.p[p].write(step)
                self.p_full[p].arrive()
                return
            yield lambda: self.p_full[p].passed(p_parity)
            self.p[p].read(step)
            yield lambda: True
            self.p[p].release()
            self.p_empty[p].arrive()
            self.data["o"][stage].release()
            self.empty["o"][stage].arrive()
            at = count % DS_SLOTS
            yield lambda: self.ds_empty[at].passed(count // DS_SLOTS % 2 ^ 1)
            self.ds[at][0].write(step)
            self.ds_full[at].arrive()
            yield lambda: self.full["q"][q].passed(q_parity)
            self.data["q"][q].read(step)

        for slot, ready in self.tiles():
            yield ready
            number = self.tile[slot]
            if number < 0:
                return
            steps = self.work.steps(number)
            kv, kv_parity = self.kv_position(with_work)
            used = "k" if w == 0 else "kv"
            if steps:
                for x in used:
                    yield lambda: self.kv_full[x][kv].passed(kv_parity)
                    self.kv[x][kv].read(number)
            for index in range(len(steps) + 1 if steps else 0):
                later = index > 0
                if later:
                    before, ds = steps[index - 1], count % DS_SLOTS
                    yield lambda: self.ds_full[ds].passed(count // DS_SLOTS % 2)
                    self.ds[ds][0].read(before)
                yield lambda: True
                if later:
                    self.data[second][count % stages[second]].release()
                    self.empty[second][count % stages[second]].arrive()
                    count += 1
                if index == len(steps):
                    break
                step, stage = steps[index], count % stages[first]
                parity = count // stages[first] % 2
                yield lambda: self.full[first][stage].passed(parity)
                self.data[first][stage].read(step)
                for chain in chains[:-1] if later else []:
                    yield from self.add(before, count - 1, chain)
                yield lambda: True
                yield from make_operand(step)
                yield lambda: True
                if later:
                    self.ds[ds][0].release()
                    self.ds_empty[ds].arrive()
                    yield from self.add(before, count - 1, chains[-1])
            if steps:
                for chain in chains[:-1]:
                    yield from self.add(steps[-1], count - 1, chain)
                yield lambda: True
                self.ds[ds][0].release()
                self.ds_empty[ds].arrive()
                for x in used:
                    self.kv[x][kv].release()
                self.kv_empty[kv].arrive()
                with_work += 1
                yield from self.add(steps[-1], count - 1, chains[-1])
            self.work.gradients.append((number, w))
            self.tile_empty[slot].arrive()


def run(work, roles, ctas):
    """True when every actor of every CTA came to its end."""
    ctas = [Cta(work, roles) for _ in range(ctas)]
    return run_actors([actor for cta in ctas for actor in cta.actors()], ctas)


def tile_lists():
    """KV tiles in the order of their claims, each with its query tiles."""
    yield [(0, 0)] * 5
    yield [(0, 1)] * 5
    yield [(0, 4)] * 3
    yield [(n, 5) for n in range(5)]  # causal, longest first
    yield [(n, 5) for n in reversed(range(5))]  # causal, deterministic
    yield [(max(0, n - 2), min(6, n + 2)) for n in range(6)]  # a window
    yield [(2, 4), (0, 0), (0, 0), (0, 0), (1, 3)]
    for seed in range(12):
        chooser = random.Random(seed)
        starts = [chooser.randint(0, 3) for _ in range(chooser.randint(1, 6))]
        yield [(start, start + chooser.randint(0, 3)) for start in starts]


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("stages, kv_stages", [("22", 1), ("22", 2), ("42", 1), ("44", 2)])
@pytest.mark.parametrize("roles", [False, True])
def test_every_part_is_added_once_whatever_the_order(roles, stages, kv_stages, deterministic):
    for number, tiles in enumerate(tile_lists()):
        for seed in range(4):
            random.seed(1000 * number + seed)
            key_tails = [random.random() < 0.3 for _ in tiles]
            # The last query tile of the sequence, which ends every range that reaches it.
            query_tail = max(end for _, end in tiles) - 1 if random.random() < 0.5 else None
            heads = random.choice((1, 1, 2, 3))
            places = dict(zip("qo", map(int, stages)))
            work = Work(tiles, heads, places, kv_stages, deterministic, key_tails, query_tail)
            work.ahead = random.random() < 0.5
            work.skipping = [(n, random.randint(0, 1)) for n in range(len(tiles)) if n % 2]
            ctas = random.choice((1, 2, 3, len(tiles) + 1))
            assert run(work, roles, ctas), f"deadlock with tiles {tiles}, seed {seed}, CTAs {ctas}"
            assert sorted(work.gradients) == [(n, w) for n in range(len(tiles)) for w in range(2)]
            chains = Cta(work, roles).chains
            wanted = {}
            for n, (first, end) in enumerate(tiles):
                for key in product(range(heads), range(first, end), chains):
                    wanted.setdefault(key, []).append(n)
            got = work.added if deterministic else {k: sorted(v) for k, v in work.added.items()}
            assert got == wanted


@pytest.mark.parametrize("stages, kv_stages", [("22", 1), ("42", 1), ("42", 2), ("44", 2)])
def test_whole_pairs_are_added_in_order_by_one_cta(stages, kv_stages):
    for number, tiles in enumerate(tile_lists()):
        for seed in range(4):
            random.seed(1000 * number + seed)
            pairs, heads = random.randint(1, 4), random.choice((1, 1, 2, 3))
            places = dict(zip("qo", map(int, stages)))
            all_tiles = range(len(tiles) * pairs)
            tails = [False for _ in all_tiles]
            work = Work(tiles, heads, places, kv_stages, False, tails, None,
                        whole=True, pairs=pairs)  # fmt: skip
            work.ahead = random.random() < 0.5
            work.skipping = [(n, random.randint(0, 1)) for n in all_tiles if random.random() < 0.5]
            ctas = random.choice((1, 2, 3, pairs + 1))
            assert run(work, False, ctas), f"deadlock with tiles {tiles}, seed {seed}, CTAs {ctas}"
            assert sorted(work.gradients) == [(n, w) for n in all_tiles for w in range(2)]
            assert all(order == sorted(order) for order in work.added.values())
            parts = sum(map(len, work.added.values()))
            assert parts == 2 * sum(len(work.steps(n)) for n in all_tiles)


def test_the_model_notices_a_turn_that_never_comes():
    """A tile that waits for one claimed later: with one CTA the other never starts."""
    random.seed(0)
    work = Work([(0, 2), (0, 2)], 1, dict(q=2, o=2), 1, True, [False, False], None)
    work.rank = lambda number, m: 1 - number
    assert not run(work, False, 1)
