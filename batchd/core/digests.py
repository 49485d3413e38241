"""A digest of the rows that were delivered in each epoch of a stream. Pure code, for the daemon.

    row at place p, CRC-32 c --mix--> four numbers of 64 bits --sum of all rows--> 32 bytes

A sum has no order, so it is the same whatever workers, trainers and ranks delivered the rows, and
the digests of different rows of one epoch, such as those of two hosts, can be added. A place counts
once, with the rows of its first delivery: a trainer that resumes, or a second trainer, adds
nothing. It finds differences that happen, not those that an opponent makes: neither CRC-32 nor the
sum is cryptographic.

Invariant: each row of an epoch is in its sum at most once, and the memory is limited.
"""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from batchd.core.plan import Plan, mix_numbers
from batchd_wire.position import Position

EPOCHS_MAX = 1_000
"""Epochs whose digests are kept: the ones to which rows were added last."""
STEPS_BYTES_MAX = 64 << 20
"""For the steps of epochs that are not complete, a bit each."""
LANES = 4
_LANE_KEYS = np.arange(1, LANES + 1, dtype=np.uint64)[:, None] * np.uint64(0x9E3779B97F4A7C15)

Lanes = NDArray[np.uint64]
"""uint64 ``[4]``, added modulo 2^64 each."""


class RowsDigest(NamedTuple):
    """The digest of ``rows`` out of ``rows_max`` of an epoch: 64 hexadecimal digits."""

    epoch: int
    rows: int
    rows_max: int
    digest: str


@dataclass(slots=True)
class _EpochSum:
    steps: bytearray | None
    """A bit for each step that was delivered as a whole; None if all rows were."""
    rows: int = 0
    lanes: Lanes = field(default_factory=lambda: np.zeros(LANES, np.uint64))
    partial: dict[int, int] = field(default_factory=dict)
    """Of steps that were delivered in parts: a bit for each row."""


def rows_lanes(places: NDArray[np.int64], checksums: NDArray[np.uint32]) -> Lanes:
    """Sum up rows by their places in the epoch and their CRC-32."""
    mixed = mix_numbers(mix_numbers(places.astype(np.uint64)) ^ checksums)
    lanes: Lanes = mix_numbers(mixed ^ _LANE_KEYS).sum(axis=1, dtype=np.uint64)
    return lanes


def digest_text(lanes: Lanes) -> str:
    """A digest as 64 hexadecimal digits."""
    return lanes.astype("<u8").tobytes().hex()


def joined(one: RowsDigest, other: RowsDigest) -> RowsDigest:
    """Add the digests of different rows of one epoch."""
    lanes = sum(np.frombuffer(bytes.fromhex(each.digest), "<u8").astype(np.uint64) for each in (one, other))
    return one._replace(rows=one.rows + other.rows, digest=digest_text(np.asarray(lanes, np.uint64)))


class EpochDigests:
    """The digests of a stream."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._rows_max = plan.epoch_rows
        self._step_bytes = -(-plan.steps // 8)
        self._epochs: OrderedDict[int, _EpochSum] = OrderedDict()
        """In the order in which rows were added last."""

    def lacks(self, epoch: int, step: int, first: int, count: int) -> bool:
        """True if one of these rows was not delivered before."""
        known = self._epochs.get(epoch)
        if known is None:
            return True
        if known.steps is None or known.steps[step // 8] >> step % 8 & 1:
            return False
        return known.partial.get(step, 0) & _bits(first, count) != _bits(first, count)

    def add(self, epoch: int, step: int, first: int, checksums: NDArray[np.uint32]) -> None:
        """Add delivered rows of a step, from ``first`` on; those that are known are left out.

        ``checksums``: the CRC-32 of each, uint32 ``[rows]``.
        """
        if not self.lacks(epoch, step, first, len(checksums)):
            return
        known = self._epochs.get(epoch)
        if known is None:
            self._make_room()
            known = self._epochs[epoch] = _EpochSum(bytearray(self._step_bytes))
        self._epochs.move_to_end(epoch)
        before, rows = known.partial.pop(step, 0), self._plan.rows(Position(epoch, step))
        chosen = np.array([row for row in range(first, first + len(checksums)) if not before >> row & 1], np.int64)
        known.lanes += rows_lanes(step * self._plan.batch_size + chosen, checksums[chosen - first])
        known.rows += len(chosen)
        now = before | _bits(first, len(checksums))
        assert known.steps is not None, "it lacked a row"
        if now == _bits(0, rows):
            known.steps[step // 8] |= 1 << step % 8
        else:
            known.partial[step] = now
        if known.rows == self._rows_max:
            known.steps = None

    def _make_room(self) -> None:
        """Forget the digests to which no row was added for longest, where one more is too many."""
        incomplete = [epoch for epoch, one in self._epochs.items() if one.steps is not None]
        for epoch in incomplete[: max(0, len(incomplete) + 1 - max(1, STEPS_BYTES_MAX // self._step_bytes))]:
            del self._epochs[epoch]
        while len(self._epochs) >= EPOCHS_MAX:
            self._epochs.popitem(last=False)

    def __iter__(self) -> Iterator[RowsDigest]:
        for epoch, one in sorted(self._epochs.items()):
            yield RowsDigest(epoch, one.rows, self._rows_max, digest_text(one.lanes))


def _bits(first: int, count: int) -> int:
    return ((1 << count) - 1) << first
