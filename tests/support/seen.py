"""The batches that trainers get: every byte of a batch in a digest.

For tests of processes; it imports only modules that a trainer imports.
"""

from collections.abc import Iterable
from hashlib import blake2b
from itertools import islice
from typing import NamedTuple

import numpy as np

import batchd_client


class Seen(NamedTuple):
    """One batch of a trainer: its position, its samples, and a digest of all its bytes."""

    epoch: int
    step: int
    samples: tuple[int, ...]
    digest: str

    @property
    def position(self) -> tuple[int, int]:
        """Return (epoch, step)."""
        return self.epoch, self.step


def digest_of(arrays: Iterable[tuple[str, np.ndarray | list[np.ndarray]]]) -> str:
    """Return a digest of named arrays, or lists of arrays: names, types, shapes and bytes."""
    digest = blake2b(digest_size=12)
    for name, value in sorted(arrays, key=lambda item: item[0]):
        for array in value if isinstance(value, list) else [value]:
            digest.update(f"{name} {array.dtype.str} {array.shape} ".encode())
            digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


def rows_of(arrays: Iterable[tuple[str, np.ndarray | list[np.ndarray]]]) -> list[tuple[int, str]]:
    """Return for each row of a batch its sample, and a digest of its bytes in every field."""
    fields = dict(arrays)
    return [
        (sample, digest_of((name, value[row]) for name, value in fields.items()))
        for row, sample in enumerate(np.asarray(fields["index"]).tolist())
    ]


def look_at(batch: batchd_client.Batch) -> Seen:
    """Read every byte of a batch."""
    return Seen(batch.epoch, batch.step, tuple(batch["index"].tolist()), digest_of(batch.items()))


def see(stream: batchd_client.Stream, batches: int | None = None) -> list[Seen]:
    """Take the rest of the epoch, or the next ``batches`` of it, and release each at once."""
    seen = []
    iterator = iter(stream)
    while (batches is None or len(seen) < batches) and (batch := next(iterator, None)) is not None:
        with batch:
            seen.append(look_at(batch))
    return seen


def positions(seen: Iterable[Seen]) -> list[tuple[int, int]]:
    """Return the positions of batches, in their order."""
    return [one.position for one in seen]


def samples(seen: Iterable[Seen]) -> list[int]:
    """Return all their samples, in order of their numbers."""
    return sorted(sample for one in seen for sample in one.samples)


def rows_read(stream, count=None):
    """The rows of each batch of the rest of the epoch, or of so many; each is released at once."""
    found = []
    for batch in islice(stream, count):
        with batch:
            found.append(rows_of(batch.items()))
    return found


def joined(batches):
    """The rows of all batches, one after the other."""
    return [row for batch in batches for row in batch]
