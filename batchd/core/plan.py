"""The sample in each row of each batch: pure code, for the daemon and workers.

    place in the epoch   0 ............ B-1 | B ........... 2B-1 | ...            | samples-1
    batch (step)              step 0        |      step 1        | ...            | last, or partial
    sample index         shuffle(place; seed, epoch), or the place itself without shuffling,
                         or what an ``EpochOrder`` says: ``core.blocks``, ``core.buckets``

With ``repeats`` = r, each of these batches is r consecutive steps, its **copies**: step s has the
samples of batch s // r in the same rows, and other random numbers, those of copy s % r. Ranks read
consecutive steps, so with r ranks or more the copies of a sample are on different ranks, but in a
last round, which ranks share by rows.

Where images have several ``sizes``, each batch draws one for all of its rows, by (seed, epoch,
step): the copies of a batch and, with ``alike`` = k, those of k batches in a row draw together.

The shuffle is a keyed bijection on [0, length), computed for any few indices without memory for the
rest: a generalised Feistel network on Z_a x Z_b with a * b >= length, and cycle walking for the few
values that land outside (J. Black, P. Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA
2002). With a near the root of the length, at most about one value in a walks. The round function is
a 64-bit mixer: this is a shuffle, not a cipher.

Invariants: a position names the same samples in the same rows for ever, whatever workers, trainers,
clocks and crashes do; for each key, ``Permutation`` maps [0, length) onto itself, every index once,
and ``inverse`` maps it back.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from math import isqrt, lcm
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from batchd.core.rows import Rows
from batchd_wire.position import COPY_BIT, SIZE_BIT, EpochRows, Position
from batchd_wire.views import Array

ROUNDS = 8
"""Even, so that both halves come back to their places."""
ROUNDS_SMALL = 24
SMALL_LENGTH = 256
"""Below it the halves mix little: with 8 rounds the orders of 5 samples are visibly uneven."""
WIDTHS_TRIED = 64
LENGTH_MAX = 1 << 62
PLACES_FOR_A_SAMPLE = 1_000
"""A look at so many places takes about as long as finding those of one sample that is drawn."""
PLACES_AT_ONCE = 1 << 20
SIZE_SALT = 0x73697A65
"""Separates the draw of a batch's size from the shuffle and the substitutes of the same seed."""

_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_MASK = (1 << 64) - 1

Indices = NDArray[np.uint64]
_RoundKey = np.uint64 | Indices
Table = Array
"""Numbers of any type, as the index of a stream has them for all processes."""
Tables = Mapping[str, Table]
Facts = Mapping[str, Any]
"""What JSON can say of a stream."""


class Permutation:
    """One shuffle of [0, length), chosen by ``key``: integers such as a seed and an epoch.

    With arrays of integers in the key, int64 ``[indices]``, each index has the shuffle of its own
    key. Such a permutation has only an ``inverse``.

    Raises ``ValueError`` for a length outside 1 to ``LENGTH_MAX``.
    """

    def __init__(self, length: int, key: tuple[int | NDArray[np.int64], ...]) -> None:
        if not 0 < length <= LENGTH_MAX:
            raise ValueError(f"a permutation needs 1 to {LENGTH_MAX} indices, not {length}")
        self.length = length
        columns = _columns_for(length)
        self._columns = np.uint64(columns)
        self._rows = np.uint64(-(-length // columns))
        self._round_keys = _round_keys(key, ROUNDS if length >= SMALL_LENGTH else ROUNDS_SMALL)

    def __call__(self, indices: Indices, tweaks: Indices | None = None) -> Indices:
        """Return where ``indices`` go: uint64, each below ``length``, of the same shape.

        ``tweaks``: a number for each index, which chooses one of many bijections; of their shape.
        """
        values = self._permute(indices, tweaks)
        outside = np.flatnonzero(values >= self.length)
        while outside.size:
            values[outside] = self._permute(values[outside], None if tweaks is None else tweaks[outside])
            outside = outside[values[outside] >= self.length]
        return values

    def inverse(self, values: Indices, tweaks: Indices | None = None) -> Indices:
        """Return which indices go to ``values``: uint64 below ``length``, of the same shape.

        ``tweaks``: as of the call.
        """
        indices = self._permute_back(values, tweaks)
        while (outside := indices >= self.length).any():
            indices = np.where(outside, self._permute_back(indices, tweaks), indices)
        return indices

    def _permute(self, indices: Indices, tweaks: Indices | None) -> Indices:
        """Walk through the network once, on [0, columns * rows)."""
        right, left = np.divmod(indices, self._columns)
        for first, second in self._round_keys:
            left, right = right, (left + mixed_all(_tweaked(right, tweaks), first)) % self._columns
            left, right = right, (left + mixed_all(_tweaked(right, tweaks), second)) % self._rows
        values: Indices = right * self._columns + left
        return values

    def _permute_back(self, values: Indices, tweaks: Indices | None) -> Indices:
        """Walk through the network once from its end; a difference below 0 wraps around."""
        right, left = np.divmod(values, self._columns)
        for first, second in reversed(self._round_keys):
            left, right = (
                (right + self._rows - mixed_all(_tweaked(left, tweaks), second) % self._rows) % self._rows,
                left,
            )
            moved = mixed_all(_tweaked(left, tweaks), first) % self._columns
            left, right = (right + self._columns - moved) % self._columns, left
        indices: Indices = right * self._columns + left
        return indices


def _tweaked(values: Indices, tweaks: Indices | None) -> Indices:
    return values if tweaks is None else values ^ (tweaks << np.uint64(32))


def mixed_all(values: Indices, key: np.uint64 | Indices) -> Indices:
    """Mix 64 bits well (SplitMix64's finaliser); keep 32, so that a sum cannot overflow.

    Takes and returns uint64 of the same shape.
    """
    mixed = values + key
    mixed ^= mixed >> np.uint64(30)
    mixed *= _MIX_1
    mixed ^= mixed >> np.uint64(27)
    mixed *= _MIX_2
    mixed >>= np.uint64(32)
    return mixed


def _columns_for(length: int) -> int:
    """Return the width near the root of the length that leaves the fewest values outside."""
    root = isqrt(length - 1) + 1
    return min(range(root, max(0, root - WIDTHS_TRIED, root // 2), -1), key=lambda width: -length % width)


def _round_keys(key: tuple[int | NDArray[np.int64], ...], rounds: int) -> list[tuple[_RoundKey, _RoundKey]]:
    """Return the keys of each round: uint64, and arrays of them if the key has arrays."""
    keys: list[_RoundKey] = []
    if any(isinstance(word, np.ndarray) for word in key):
        states = mixed_each(key)
        for _ in range(rounds):
            states = states + np.uint64(_GOLDEN)
            keys.append(mix_numbers(states))
    else:
        state = mixed(key)  # type: ignore[arg-type]
        for _ in range(rounds):
            state = (state + _GOLDEN) & _MASK
            keys.append(np.uint64(_mix_number(state)))
    return list(zip(keys[::2], keys[1::2], strict=True))


def mixed(key: tuple[int, ...]) -> int:
    """Return a well mixed 64-bit number for any whole numbers."""
    state = _GOLDEN
    for word in key:
        state = _mix_number(state ^ (word & _MASK))
    return state


def mixed_each(key: tuple[int | NDArray[np.int64], ...]) -> Indices:
    """Return what ``mixed`` does, for each element of the arrays in ``key``."""
    states = np.full(1, _GOLDEN, np.uint64)
    for word in key:
        words = word.astype(np.uint64) if isinstance(word, np.ndarray) else np.full(1, word & _MASK, np.uint64)
        states = mix_numbers(states ^ words)
    return states


def mix_numbers(values: Indices) -> Indices:
    """Apply ``_mix_number`` to each element; arrays wrap around as it does."""
    mixed = values + np.uint64(_GOLDEN)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * _MIX_1
    mixed = (mixed ^ (mixed >> np.uint64(27))) * _MIX_2
    return mixed ^ (mixed >> np.uint64(31))


def _mix_number(value: int) -> int:
    """Apply SplitMix64's finaliser to one Python number (Steele, Lea, Flood 2014)."""
    value = (value + _GOLDEN) & _MASK
    value = ((value ^ (value >> 30)) * int(_MIX_1)) & _MASK
    value = ((value ^ (value >> 27)) * int(_MIX_2)) & _MASK
    return value ^ (value >> 31)


class EpochOrder(Protocol):
    """Another order of an epoch's samples than that of the source or of the whole shuffle."""

    @property
    def samples(self) -> int:
        """The number of samples of the source."""

    @property
    def has_each_once(self) -> bool:
        """Whether each epoch has each sample at one place."""

    @property
    def digest(self) -> str:
        """Digest of what decides the order beside seed and epoch."""

    def samples_at(self, epoch: int, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the samples at ``places``: int64 of the same shape."""

    def places_of(self, epoch: int, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the first places of ``samples``: int64 of the same shape; -1 without one."""

    def occurrences(self, epoch: int, sample: int) -> NDArray[np.int64]:
        """Return all places of a sample, ascending: int64 ``[places]``."""


class RowCounts(Protocol):
    """The rows of each batch, where a budget decides them, or buckets have images of one size.

    ``limits_rows``: a budget decides; otherwise all batches but the last are of ``batch_size``.
    """

    limits_rows: bool

    def steps(self, *, drop_last: bool) -> int:
        """Return the batches of an epoch; ``drop_last`` leaves a partial last one out."""

    def rows(self, epoch: int, step: int) -> int:
        """Return the rows of a batch."""

    def rows_of(self, epoch: int, steps: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the rows of some batches of an epoch: int64 ``[steps]``."""

    def bucket(self, epoch: int, step: int) -> int:
        """Return the bucket of a batch."""

    def substitutes(self, samples: NDArray[np.int64], numbers: Indices) -> NDArray[np.int64]:
        """Return another sample for each that fits into its row, as random ``numbers`` choose.

        Int64 ``[samples]``; ``numbers``: uint64 ``[samples]``.
        """


class Draws(Protocol):
    """Which sample each draw of an epoch takes, where samples are drawn by weight."""

    @property
    def samples(self) -> int:
        """The number of samples of the source."""

    @property
    def digest(self) -> str:
        """Digest of what decides the draws beside seed and epoch."""

    @property
    def expected(self) -> NDArray[np.float64]:
        """How often each sample is drawn in an epoch on average: float64 ``[samples]``."""

    def samples_of(self, epoch: int, draws: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the samples of some draws: int64 of the same shape."""

    def draws_of(self, epoch: int, sample: int) -> NDArray[np.int64]:
        """Return the draws that take a sample, ascending: int64 ``[draws]``."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The arithmetic of a stream. Samples, batch size and batches per epoch are at least 1.

    ``documents``: of a packed stream the samples of its source; then ``samples`` are its packs.
    ``order``: in place of ``shuffle``. ``draws``: then ``samples`` are draws, and the order is
    theirs. ``row_counts``: then ``batch_size`` is the most rows of a batch, and places that a
    smaller batch leaves over are in no batch. All three derive from the stream's index, so they are
    no part of the plan as data. ``repeats``: copies of each batch; ``order``, ``draws`` and
    ``row_counts`` know of one. ``sizes``, ``alike``: see the module.
    """

    samples: int
    batch_size: int
    seed: int
    shuffle: bool
    drop_last: bool
    documents: int | None = None
    order: EpochOrder | None = field(default=None, compare=False, repr=False)
    draws: Draws | None = field(default=None, compare=False, repr=False)
    row_counts: RowCounts | None = field(default=None, compare=False, repr=False)
    repeats: int = 1
    sizes: int = 1
    alike: int = 1

    @property
    def source_samples(self) -> int:
        """The samples of the source."""
        if self.documents is not None:
            return self.documents
        planned = self.draws or self.order
        return self.samples if planned is None else planned.samples

    @property
    def steps(self) -> int:
        """Batches in an epoch of the whole stream."""
        if self.row_counts is not None:
            return self.row_counts.steps(drop_last=self.drop_last) * self.repeats
        if self.drop_last:
            return self.samples // self.batch_size * self.repeats
        return -(-self.samples // self.batch_size) * self.repeats

    @property
    def epoch_rows(self) -> int:
        """The rows of all batches of an epoch: all samples, but for a partial batch left out."""
        if not self.drop_last:
            return self.samples * self.repeats
        if self.row_counts is None:
            return self.steps * self.batch_size
        last = self.row_counts.steps(drop_last=True)
        has_partial = self.row_counts.steps(drop_last=False) > last
        return (self.samples - (self.row_counts.rows(0, last) if has_partial else 0)) * self.repeats

    @property
    def _cut(self) -> EpochRows:
        """How an epoch is cut where no ``row_counts`` say so."""
        return EpochRows(self.samples, self.batch_size, self.repeats)

    def draw_epoch(self, position: Position) -> int:
        """Return the epoch whose random numbers a batch draws: its own, and its copy above it.

        Above that is the number of its size.
        """
        return self.size_of(position) << SIZE_BIT | position.step % self.repeats << COPY_BIT | position.epoch

    def size_of(self, position: Position) -> int:
        """Return the number of the size that a batch draws; 0 if there is one size."""
        if self.sizes == 1:
            return 0
        block = position.step // (self.repeats * self.alike)
        return mixed((self.seed, position.epoch, block, SIZE_SALT)) % self.sizes

    def first_place(self, position: Position) -> int:
        """Return the place of row 0 of a batch, which is that of its copies."""
        return position.step // self.repeats * self.batch_size

    def copies(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return where the copies of rows are: int64 ``[places, repeats]``, ascending in each.

        ``places``: those of an epoch without copies. As below, row r of step s is number
        ``s * batch_size + r`` among those that are returned.
        """
        groups, rows = np.divmod(places, self.batch_size)
        steps = groups[:, None] * self.repeats + np.arange(self.repeats)
        copies: NDArray[np.int64] = steps * self.batch_size + rows[:, None]
        return copies

    def rows(self, position: Position) -> int:
        """Return the rows of a batch: ``batch_size``, or fewer in a partial last one.

        With ``row_counts`` it is as many as they say.
        """
        if self.row_counts is not None:
            return self.row_counts.rows(position.epoch, position.step // self.repeats)
        return min(self.batch_size, self.samples - self.first_place(position))

    def bucket_of(self, position: Position) -> int:
        """Return the bucket of a batch whose rows ``row_counts`` says, else its size."""
        if self.row_counts is None:
            return self.size_of(position)
        return self.row_counts.bucket(position.epoch, position.step // self.repeats)

    def rows_of(self, epochs: NDArray[np.int64], steps: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the rows of batches: int64 ``[steps]``; not above 0 for a step beyond an epoch."""
        if self.row_counts is None:
            return np.minimum(self.batch_size, self.samples - steps // self.repeats * self.batch_size)
        rows = np.zeros(len(steps), np.int64)
        for epoch in np.unique(epochs).tolist():
            chosen = (epochs == epoch) & (steps < self.steps)
            rows[chosen] = self.row_counts.rows_of(epoch, steps[chosen] // self.repeats)
        return rows

    def place_of(self, position: Position) -> int:
        """Return the number of the stream's batches before ``position``."""
        return position.epoch * self.steps + position.step

    def begins_with(self, epoch: int, sample: int) -> tuple[int, int]:
        """Return the step that has sample number ``sample`` of an epoch, and its row there.

        ``sample`` counts the rows of all batches of the epoch from 0. The end of the epoch is row 0
        of step ``steps``, and what is beyond it of the next one.
        """
        if sample >= self.epoch_rows:
            return self.steps + (sample > self.epoch_rows), 0
        if self.row_counts is None:
            return self._cut.find(sample)
        ends = np.cumsum(self.rows_of(np.full(self.steps, epoch), np.arange(self.steps)))
        step = int(np.searchsorted(ends, sample, side="right"))
        return step, sample - (int(ends[step - 1]) if step else 0)

    def samples_before(self, position: Position, row: int) -> int:
        """Return the rows of an epoch before a row of a batch: the way back."""
        if self.row_counts is None:
            return min(self._cut.before(position.step) + row, self.epoch_rows)
        steps = np.arange(position.step)
        return int(self.rows_of(np.full(len(steps), position.epoch), steps).sum()) + row

    def rows_before(self, position: Position, batch_size: int) -> int:
        """Return the rows of an epoch before a position in batches of another size.

        With ``row_counts``, the size is this one.
        """
        if batch_size == self.batch_size:
            return self.samples_before(position, 0)
        return EpochRows(self.samples, batch_size, self.repeats).before(position.step)

    def convertible_every(self, batch_size: int) -> int:
        """Return after how many rows of an epoch batches of another size have had the same."""
        is_same_order = self.repeats == 1 or batch_size == self.batch_size
        return 1 if is_same_order else lcm(self.batch_size, batch_size) * self.repeats

    def indices(self, position: Position, first: int, count: int) -> NDArray[np.int64]:
        """Return the samples of rows ``first`` to ``first + count``: int64 ``[count]``."""
        start = self.first_place(position) + first
        return self._samples_at(position.epoch, np.arange(start, start + count))

    def places(self, epoch: int, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the first places of samples in an epoch: int64 ``[samples]``, -1 without one.

        Place p is row ``p % batch_size`` of step ``p // batch_size``. With ``drop_last`` the last
        places may be in no batch.
        """
        if self.draws is None:
            found = self._places_of(epoch, samples)
            return np.where(found < 0, -1, self.copies(found)[:, 0])
        first = (self.occurrences(epoch, sample)[:1] for sample in samples.tolist())
        return np.asarray([int(one[0]) if len(one) else -1 for one in first], np.int64)

    @property
    def has_each_once(self) -> bool:
        """Whether each epoch has each sample at one place, or in one row of each copy."""
        return self.draws is None and (self.order is None or self.order.has_each_once)

    def all_places(
        self, epochs: NDArray[np.int64], samples: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return all places of samples, each in its epoch; both int64 ``[samples]``.

        Returns the number of each pair, ascending, and a place of it, int64 ``[places]`` each.
        """
        pairs, places = self._all_first_places(epochs, samples)
        return np.repeat(pairs, self.repeats), self.copies(places).ravel()

    def _all_first_places(
        self, epochs: NDArray[np.int64], samples: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the same of an epoch without copies."""
        if self.has_each_once and self.order is None:
            if not self.shuffle:
                return np.arange(len(samples)), samples.astype(np.int64)
            keyed = Permutation(self.samples, (self.seed, epochs))
            return np.arange(len(samples)), keyed.inverse(samples.astype(np.uint64)).astype(np.int64)
        pairs, places = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
        for epoch in np.unique(epochs).tolist():
            chosen = np.flatnonzero(epochs == epoch)
            which, found = self._all_places_in(epoch, samples[chosen])
            pairs.append(chosen[which])
            places.append(found)
        order = np.argsort(np.concatenate(pairs), kind="stable")
        return np.concatenate(pairs)[order], np.concatenate(places)[order]

    def _all_places_in(self, epoch: int, samples: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the same for one epoch. For many samples, it looks at all places."""
        if self.has_each_once:
            return np.arange(len(samples)), self._places_of(epoch, samples)
        if len(samples) * PLACES_FOR_A_SAMPLE < self.samples:
            found = [self._occurrences(epoch, sample) for sample in samples.tolist()]
            return np.repeat(np.arange(len(samples)), list(map(len, found))), np.concatenate(found)
        order = np.argsort(samples, kind="stable")
        pairs, places = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
        for first in range(0, self.samples, PLACES_AT_ONCE):
            some = np.arange(first, min(self.samples, first + PLACES_AT_ONCE))
            numbers = self._samples_at(epoch, some)
            which = np.minimum(np.searchsorted(samples, numbers, sorter=order), len(samples) - 1)
            is_wanted = samples[order[which]] == numbers
            pairs.append(order[which[is_wanted]])
            places.append(some[is_wanted])
        return np.concatenate(pairs), np.concatenate(places)

    def occurrences(self, epoch: int, sample: int) -> NDArray[np.int64]:
        """Return all places of a sample in an epoch, ascending: int64 ``[places]``."""
        return np.sort(self.copies(self._occurrences(epoch, sample)), axis=None)

    def _occurrences(self, epoch: int, sample: int) -> NDArray[np.int64]:
        """Return the same of an epoch without copies."""
        if self.draws is not None:
            return np.sort(self._places_of(epoch, self.draws.draws_of(epoch, sample)))
        if self.order is not None:
            return self.order.occurrences(epoch, sample)
        return self._places_of(epoch, np.asarray([sample], np.int64))

    def _samples_at(self, epoch: int, places: NDArray[np.int64]) -> NDArray[np.int64]:
        if self.order is not None:
            numbers = self.order.samples_at(epoch, places)
        elif self.shuffle:
            numbers = permutation(self.samples, (self.seed, epoch))(places.astype(np.uint64)).astype(np.int64)
        else:
            numbers = places
        return numbers if self.draws is None else self.draws.samples_of(epoch, numbers)

    def _places_of(self, epoch: int, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the places of samples, or of draws."""
        if self.order is not None:
            return self.order.places_of(epoch, numbers)
        if not self.shuffle:
            return numbers.astype(np.int64)
        return permutation(self.samples, (self.seed, epoch)).inverse(numbers.astype(np.uint64)).astype(np.int64)

    def rows_by_sample(self, position: Position) -> Rows:
        """Return all rows of a batch in the order of their samples: neighbours are together."""
        samples = self.indices(position, 0, self.rows(position))
        return tuple(np.argsort(samples, kind="stable").tolist())

    def indices_of(self, position: Position, rows: Rows) -> NDArray[np.int64]:
        """Return the samples of some ascending rows, at least one: int64 ``[rows]``."""
        span = self.indices(position, rows[0], rows[-1] + 1 - rows[0])
        return span if len(span) == len(rows) else span[np.asarray(rows) - rows[0]]

    def other(self, epoch: int, pick: int) -> int:
        """Return the sample that a random ``pick``, from 0, chooses to join another one.

        Any of the source is as likely; of samples that are drawn, or that a part of a mixture has,
        any place of the epoch.
        """
        if self.draws is None and self.source_samples in {self.samples, self.documents}:
            return pick % self.source_samples
        return int(self._samples_at(epoch, np.asarray([pick % self.samples]))[0])

    def neighbours(self, epoch: int, sample: int, batches: int) -> list[int]:
        """Return the other samples in the row that a sample has, of its batch and those before it.

        Of ``batches`` in all, and of the first ones of the epoch where there are no more before.
        They are in the order of their batches. None for a sample that the epoch does not have.
        """
        places = self._occurrences(epoch, sample)
        if not len(places):
            return []
        step, row = divmod(int(places[0]), self.batch_size)
        steps = min(batches, -(-(self.samples - row) // self.batch_size))
        window = np.arange(steps) + max(0, step + 1 - steps)
        found: list[int] = self._samples_at(epoch, window[window != step] * self.batch_size + row).tolist()
        return found

    def substitute(self, epoch: int, sample: int, attempt: int) -> int:
        """Return the substitute of a bad sample at try ``attempt``, from 1: always the same.

        Of samples that are drawn, or that a part of a mixture has, it is one of the same epoch, and
        maybe the bad one. With ``row_counts``, it is one of the same bucket, if that has others.
        """
        if self.row_counts is not None:
            return int(self.substitutes(np.array([epoch]), np.array([sample]), attempt)[0])
        number = mixed((self.seed, epoch, sample, attempt))
        if self.source_samples != self.samples or self.draws is not None:
            return int(self._samples_at(epoch, np.asarray([number % self.samples]))[0])
        return sample if self.samples == 1 else (sample + 1 + number % (self.samples - 1)) % self.samples

    def substitutes(self, epochs: NDArray[np.int64], samples: NDArray[np.int64], attempt: int) -> NDArray[np.int64]:
        """Return what ``substitute`` does for each sample in its epoch: int64 ``[samples]``."""
        numbers = mixed_each((self.seed, epochs, samples, attempt))
        if self.row_counts is not None:
            return self.row_counts.substitutes(samples, numbers)
        if self.source_samples != self.samples or self.draws is not None:
            places = (numbers % np.uint64(self.samples)).astype(np.int64)
            others = np.empty(len(samples), np.int64)
            for epoch in np.unique(epochs).tolist():
                others[epochs == epoch] = self._samples_at(epoch, places[epochs == epoch])
            return others
        if self.samples == 1:
            return samples
        return (samples + 1 + (numbers % np.uint64(self.samples - 1)).astype(np.int64)) % self.samples


@lru_cache(maxsize=1024)
def permutation(length: int, key: tuple[int, ...]) -> Permutation:
    """Make a permutation, or return it if it is one of the last: its keys take longer than it."""
    return Permutation(length, key)
