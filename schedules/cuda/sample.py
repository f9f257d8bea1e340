"""A token of each row of logits by its own options: top-k, top-p, min-p, temperature, then a draw.

The vocabulary is looked at in groups of 32 neighbours. The `TOP_K` largest logits lie in the
`TOP_K` groups whose largest are largest, so one kernel notes the largest of every group, at the
speed of memory, and another, a block of threads a row, selects groups, then logits in them. Either
selection is exact whatever the logits are, in a bounded number of steps, and sorts nothing; of
equal logits the lower ids go first. The chain over what is left, and its draw, have the formulas of
`runtime/sampler.py`: weights are f32 (of few candidates f64 there), their sums f64.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tvm import tirx

from xpuc.artifact import BANNED, SAMPLING_BANNED, SAMPLING_FIELDS, SAMPLING_WORDS, TOP_K
from xpuc.schedules.cuda import tir
from xpuc.schedules.cuda.tir import WARP, Buffer, Expr, T, Threads

_GROUP = WARP
_FIND_WARPS = 8
_FIND_GROUPS = 4  # that a warp looks at
_WARPS = 32
_WIDTH = _WARPS * WARP  # threads that share a row
_NAN = 0xFFFFFFFF  # the key of one; 0 is that of no logit at all


def groups_of(v: int) -> int:
    """Groups of a vocabulary."""
    return -(-v // _GROUP)


def group_best(v: int) -> tirx.PrimFunc:
    """logits f32 (m, v), sampling int32 (m, SAMPLING_WORDS) -> best uint32 (m, groups_of(v)).

    The key of each group's largest that is not banned. Keys are in the order of the logits; a NaN
    has the largest of all.
    """
    rows, groups = tir.rows_var("m"), groups_of(v)

    def body() -> None:
        logits = tir.arg("logits", (rows, v), "float32")
        sampling = tir.arg("sampling", (rows, SAMPLING_WORDS), "int32")
        best = tir.arg("best", (rows, groups), "uint32")
        block_groups = _FIND_WARPS * _FIND_GROUPS
        threads = tir.launch((-(-groups // block_groups), rows), _FIND_WARPS)
        row = _Row.of(logits, sampling, threads.block[1], v)
        first = tir.let(threads.block[0] * block_groups + threads.warp * _FIND_GROUPS)
        at = tir.let(first * _GROUP + threads.lane)
        keys = [row.key(at + i * _GROUP) for i in range(_FIND_GROUPS)]
        for i, key in enumerate(keys):
            largest = tir.reduce_warp(key, "max")
            with tir.when(tirx.And(threads.lane == 0, first + i < groups)):
                tir.store(best, (row.number, first + i), largest)

    return tir.prim_func(f"group_best_{v}", body)


def sample(v: int) -> tirx.PrimFunc:
    """logits f32 (m, v), best of `group_best`, sampling int32 (m, SAMPLING_WORDS) -> ids
    int32 (m,).

    `artifact.Sampling` says what a row of `sampling` holds and which rows have no id, but -1.
    """
    rows, groups = tir.rows_var("m"), groups_of(v)

    def body() -> None:
        logits = tir.arg("logits", (rows, v), "float32")
        best = tir.arg("best", (rows, groups), "uint32")
        sampling = tir.arg("sampling", (rows, SAMPLING_WORDS), "int32")
        ids = tir.arg("ids", (rows,), "int32")
        threads = tir.launch((rows,), _WARPS)
        row = threads.block[0]
        found = _candidates(threads, _Row.of(logits, sampling, row, v), best)
        with tir.when(threads.warp == 0):
            options = _Options.read(sampling, rows, row)
            index = _draw(threads.lane, found, options)
            with tir.when(threads.lane == 0):
                tir.store(ids, row, _checked(found, options, index))

    return tir.prim_func(f"sample_{v}", body)


def _key(logit: Expr) -> Expr:
    """uint32 in the order of f32; both zeros are equal, a NaN is `_NAN`."""
    raw = tir.let(tir.bits(logit, "uint32"))
    magnitude = tir.let(raw & tir.const(0x7FFFFFFF, "uint32"))
    sign = tir.const(0x80000000, "uint32")
    key = T.Select(tirx.Or(raw < sign, magnitude == 0), magnitude | sign, ~raw)
    return tir.let(T.Select(magnitude > 0x7F800000, tir.const(_NAN, "uint32"), key))


def _logit(key: Expr) -> Expr:
    """The f32 of a key."""
    sign = tir.const(0x80000000, "uint32")
    return tir.let(tir.bits(T.Select(key >= sign, key ^ sign, ~key), "float32"))


@dataclass(frozen=True)
class _Row:
    """A row of logits, and the ids that it is not to give."""

    logits: Buffer
    number: Expr
    v: int
    banned: tuple[Expr, ...]

    @staticmethod
    def of(logits: Buffer, sampling: Buffer, number: Expr, v: int) -> _Row:
        places = range(SAMPLING_BANNED, SAMPLING_BANNED + BANNED)
        banned = tuple(tir.let(tir.load(sampling, (number, place))) for place in places)
        return _Row(logits, number, v, banned)

    def key(self, id_: Expr) -> Expr:
        """That of a logit; 0 past the last and of a banned id, unless it is a NaN."""
        key, nothing = tir.registers(1, "uint32"), tir.const(0, "uint32")
        tir.store(key, 0, nothing)
        is_banned = id_ == self.banned[0]
        for banned in self.banned[1:]:
            is_banned = tirx.Or(is_banned, id_ == banned)
        with tir.when(id_ < self.v):
            found = _key(tir.load(self.logits, (self.number, id_)))
            hides = tirx.And(is_banned, found != tir.const(_NAN, "uint32"))
            tir.store(key, 0, T.Select(hides, nothing, found))
        return key[0]


@dataclass(frozen=True)
class _Keyed:
    """Some logits of a row in shared memory: their keys uint32 and what they are the keys of."""

    keys: Buffer
    ids: Buffer  # int32

    @staticmethod
    def room() -> _Keyed:
        return _Keyed(tir.shared(TOP_K, "uint32"), tir.shared(TOP_K, "int32"))

    def put(self, place: Expr, key: Expr, id_: Expr) -> None:
        tir.store(self.keys, place, key)
        tir.store(self.ids, place, id_)


def _candidates(threads: Threads, row: _Row, best: Buffer) -> _Keyed:
    """The `TOP_K` largest logits of a row, falling, of equal ones the lowest id first."""
    groups = groups_of(row.v)
    selection = _Selection(threads, tir.shared((2, _WARPS), "uint32"))
    each = -(-max(groups, TOP_K) // _WIDTH)
    keys, first = tir.registers(each, "uint32"), tir.let(threads.thread * each)
    for i in range(each):
        tir.store(keys, i, tir.const(0, "uint32"))
        with tir.when(first + i < groups):
            tir.store(keys, i, tir.load(best, (row.number, first + i)))
    chosen, found = _Keyed.room(), _Keyed.room()
    for i, place in selection.largest(keys, each):
        chosen.put(place, keys[i], first + i)
    tir.sync_block()
    each = TOP_K * _GROUP // _WIDTH
    keys, ids = tir.registers(each, "uint32"), tir.registers(each, "int32")
    for i in range(each):
        at = tir.let(threads.thread * each + i)
        tir.store(ids, i, chosen.ids[at // _GROUP] * _GROUP + at % _GROUP)
        tir.store(keys, i, row.key(ids[i]))
    for i, place in selection.largest(keys, each):
        found.put(place, keys[i], ids[i])
    tir.sync_block()
    return _sorted(threads, found)


@dataclass(frozen=True)
class _Selection:
    """Selects among what all threads of a block hold. `counts` uint32 (2, warps) is shared."""

    threads: Threads
    counts: Buffer

    def largest(self, keys: Buffer, each: int) -> Iterator[tuple[int, Expr]]:
        """For each register i of `keys` (each,), opens a block for threads that hold one of the
        `TOP_K` largest there: (i, its place among them in the order of threads and registers).

        Of equal keys the first in that order are chosen.
        """
        assert each * WARP < 1 << 10, "a warp's counts take 10 bits"
        bound = self._bound(keys, each)
        zero = tir.const(0, "uint32")
        over, equal = tir.registers(1, "uint32"), tir.registers(1, "uint32")
        held: Expr = zero
        for i in range(each):
            held = tir.let(held + _flag(keys[i] > bound, 0) + _flag(keys[i] == bound, 16))
        before, total = self._before(held)
        tir.store(over, 0, before & tir.const(0xFFFF, "uint32"))
        tir.store(equal, 0, before >> tir.const(16, "uint32"))
        room = tir.let(tir.const(TOP_K, "uint32") - (total & tir.const(0xFFFF, "uint32")))
        for i in range(each):
            is_over, is_equal = tir.let(keys[i] > bound), tir.let(keys[i] == bound)
            place = tir.let(tir.cast(over[0] + tir.minimum(equal[0], room), "int32"))
            with tir.when(tirx.Or(is_over, tirx.And(is_equal, equal[0] < room))):
                yield i, place
            tir.store(over, 0, over[0] + _flag(is_over, 0))
            tir.store(equal, 0, equal[0] + _flag(is_equal, 0))

    def _bound(self, keys: Buffer, each: int) -> Expr:
        """A key that at least `TOP_K` reach: the largest such, or one that no more than these do.

        Two bits a step, from the top: each thread counts how many of its keys reach the three
        values that the next two bits can give.
        """
        bound, reached = tir.registers(1, "uint32"), tir.registers(1, "uint32")
        shift = tir.registers(1, "uint32")
        wanted = tir.const(TOP_K, "uint32")
        tir.store(bound, 0, tir.const(0, "uint32"))
        tir.store(reached, 0, tir.const(each * _WIDTH, "uint32"))
        tir.store(shift, 0, tir.const(32, "uint32"))
        with T.While(tirx.And(shift[0] > 0, reached[0] > wanted)):
            tir.store(shift, 0, shift[0] - tir.const(2, "uint32"))
            bits = tir.let(shift[0])
            steps = [tir.let(bound[0] | tir.const(s, "uint32") << bits) for s in (1, 2, 3)]
            held: Expr = tir.const(0, "uint32")
            for i in range(each):
                for step, at in zip(steps, (0, 10, 20), strict=True):
                    held = tir.let(held + _flag(keys[i] >= step, at))
            counts = self._total(held, bits)
            for step, count in zip(steps, counts, strict=True):
                with tir.when(count >= wanted):
                    tir.store(bound, 0, step)
                    tir.store(reached, 0, count)
        return tir.let(bound[0])

    def _total(self, held: Expr, bits: Expr) -> list[Expr]:
        """Sums over the block of the three 10-bit counts that each thread holds."""
        turn = tir.let(bits // 2 % 2)  # a slow warp still reads the counts of the turn before
        of_warp = tir.reduce_warp(held, "add")
        with tir.when(self.threads.lane == 0):
            tir.store(self.counts, (turn, self.threads.warp), of_warp)
        tir.sync_block()
        word = tir.let(self.counts[turn, self.threads.lane])
        ten, low = tir.const(10, "uint32"), tir.const(0x3FF, "uint32")
        two = tir.reduce_warp(
            (word & low) | ((word >> ten) & low) << tir.const(16, "uint32"), "add"
        )
        third = tir.reduce_warp(word >> tir.const(20, "uint32"), "add")
        return [two & tir.const(0xFFFF, "uint32"), two >> tir.const(16, "uint32"), third]

    def _before(self, held: Expr) -> tuple[Expr, Expr]:
        """(sum over the threads before this one, sum over all) of two 16-bit counts in a word."""
        lane, zero = self.threads.lane, tir.const(0, "uint32")
        inclusive = tir.scan_warp(held, lane)
        tir.sync_block()
        with tir.when(lane == WARP - 1):
            tir.store(self.counts, (0, self.threads.warp), inclusive)
        tir.sync_block()
        word = tir.let(self.counts[0, lane])
        total = tir.reduce_warp(word, "add")
        others = tir.reduce_warp(T.Select(lane < self.threads.warp, word, zero), "add")
        return tir.let(others + inclusive - held), total


def _flag(condition: Expr, at: int) -> Expr:
    """A bit of uint32."""
    return T.Select(condition, tir.const(1 << at, "uint32"), tir.const(0, "uint32"))


def _sorted(threads: Threads, found: _Keyed) -> _Keyed:
    """In falling order; equal ones stay in theirs. Each counts those that go before it."""
    lanes = _WIDTH // TOP_K
    mine, part = tir.let(threads.thread // lanes), tir.let(threads.thread % lanes)
    key = tir.let(found.keys[mine])
    rank: Expr = tir.const(0, "int32")
    for i in range(TOP_K // lanes):
        other = tir.let(part * (TOP_K // lanes) + i)
        its = tir.let(found.keys[other])
        before = tirx.Or(its > key, tirx.And(its == key, other < mine))
        rank = tir.let(rank + T.Select(before, tir.const(1, "int32"), tir.const(0, "int32")))
    rank = tir.warp_reduce(rank, "sum", lanes)
    ordered = _Keyed.room()
    with tir.when(part == 0):
        ordered.put(rank, key, found.ids[mine])
    tir.sync_block()
    return ordered


@dataclass(frozen=True)
class _Options:
    """A row of `sampling`, see artifact.Sampling."""

    u: Expr  # f64
    top_p: Expr  # f64
    temperature: Expr  # f32
    min_p: Expr  # f32
    top_k: Expr  # int32

    @staticmethod
    def read(sampling: Buffer, rows: Expr, row: Expr) -> _Options:
        words = {
            "float64": tir.view(sampling, (rows, SAMPLING_WORDS // 2), "float64"),
            "float32": tir.view(sampling, (rows, SAMPLING_WORDS), "float32"),
            "int32": sampling,
        }
        return _Options(
            *(tir.let(tir.load(words[dtype], (row, at))) for _, dtype, at in SAMPLING_FIELDS)
        )


def _draw(lane: Expr, found: _Keyed, options: _Options) -> Expr:
    """Which of the candidates is drawn by a warp; those with key 0 are none. A lane looks at
    neighbours of them."""
    each = TOP_K // WARP
    places = [tir.let(lane * each + i) for i in range(each)]
    keys = [tir.let(found.keys[place]) for place in places]
    logits = [_logit(key) for key in keys]
    largest = _logit(found.keys[0])
    inside = [
        tir.let(tirx.And(place < options.top_k, key > 0))
        for place, key in zip(places, keys, strict=True)
    ]
    before, total = _sums(lane, _weights(logits, largest, inside))
    limit = tir.let(options.top_p * total)
    least = tir.let(largest + options.min_p)
    kept = []
    for place, logit, sum_before, is_inside in zip(places, logits, before, inside, strict=True):
        likely = tirx.And(tirx.Or(options.top_p >= 1, sum_before < limit), logit >= least)
        kept.append(tir.let(tirx.Or(place == 0, tirx.And(is_inside, likely))))
    cooled = [tir.let(logit / options.temperature) for logit in logits]
    weights = _weights(cooled, tir.let(largest / options.temperature), kept)
    before, total = _sums(lane, weights)
    target = tir.let(options.u * total)
    passed = left = tir.const(0, "uint32")
    for is_kept, sum_before, weight in zip(kept, before, weights, strict=True):
        is_passed = tirx.And(is_kept, sum_before + weight <= target)
        passed, left = passed + _flag(is_passed, 0), left + _flag(is_kept, 0)
    last = tir.reduce_warp(left, "add") - tir.const(1, "uint32")
    return tir.let(tir.cast(tir.minimum(tir.reduce_warp(passed, "add"), last), "int32"))


def _weights(logits: Sequence[Expr], largest: Expr, counts: Sequence[Expr]) -> list[Expr]:
    """exp(logit - largest) in f64 of those that count, else 0."""
    nothing = tir.const(0.0, "float32")
    return [
        tir.let(tir.cast(T.Select(one, T.exp(logit - largest), nothing), "float64"))
        for logit, one in zip(logits, counts, strict=True)
    ]


def _sums(lane: Expr, weights: Sequence[Expr]) -> tuple[list[Expr], Expr]:
    """(sum before each weight, sum of all) over the weights of a warp, those of a lane together."""
    of_lane = weights[0]
    for weight in weights[1:]:
        of_lane = of_lane + weight
    inclusive = tir.scan_warp(tir.let(of_lane), lane)
    nothing = tir.const(0.0, "float64")
    left = tir.let(tir.shuffle(inclusive, tir.maximum(lane - 1, 0)))
    before = [tir.let(T.Select(lane == 0, nothing, left))]
    for weight in weights[:-1]:
        before.append(tir.let(before[-1] + weight))
    return before, tir.let(tir.shuffle(inclusive, tir.const(WARP - 1, "int32")))


def _checked(found: _Keyed, options: _Options, index: Expr) -> Expr:
    """The id of a candidate; -1 where the largest logit makes no sense, or there is none."""
    largest = found.keys[0]
    infinite = tir.bits(_logit(largest), "uint32") & tir.const(0x7FFFFFFF, "uint32")
    no_chance = tirx.And(options.temperature > 0, infinite == tir.const(0x7F800000, "uint32"))
    is_no_number = tirx.Or(largest == tir.const(_NAN, "uint32"), largest == 0)
    is_bad = tirx.Or(is_no_number, no_chance)
    return T.Select(is_bad, tir.const(-1, "int32"), found.ids[index])
