"""Divide samples among worker hosts, so that their caches act as one. Pure code.

    sample --hash--> bucket --table--> share --> the worker hosts of that share

A host's share of all samples is proportional to its number of workers. The table is a weighted
rendezvous hash (D. Thaler, C. Ravishankar, "Using name-based mappings to increase hit rates",
IEEE/ACM Transactions on Networking, 1998): each share draws a number for each bucket, and the least
number wins. So when a host arrives or leaves, only its own samples move.

The draws of a host depend on its name and on its number among hosts with the same name. So after a
reconnection or a restart of the daemon a host has the same samples as before.

A row is ordered together with other rows of its batch and share. With very many shares the orders
would be short and cost the daemon much time. So their number has a limit, above which several
hosts, chosen by their names, have one share together.

Invariant: the division depends on names, numbers of workers and the batch size only.
"""

from collections.abc import Iterable
from functools import lru_cache
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from batchd.core.plan import Indices, mixed_all
from batchd.core.rows import Rows

BUCKETS = 1 << 14
SHARES_MIN = 8
"""Number of shares that are always permitted, however small a batch is."""
SHARE_ROWS = 32
"""Mean number of rows of a batch for each share that more than ``SHARES_MIN`` shares need."""
_SAMPLES_KEY = np.uint64(0x5EED)


def host_key(name: str, number: int) -> int:
    """The key for a host's samples; not 0. ``number``: among hosts with this name, from 0."""
    digest = blake2b(f"{number} {name}".encode("utf-8", "backslashreplace"), digest_size=7).digest()
    return 1 + int.from_bytes(digest)


class Shares:
    """The shares of one stream's samples. ``hosts``: (link, key, number of workers) of each."""

    def __init__(self, hosts: Iterable[tuple[int, int, int]], batch_rows: int) -> None:
        hosts = list(hosts)
        shares_max = max(SHARES_MIN, batch_rows // SHARE_ROWS)
        are_few = len({key for _link, key, _workers in hosts}) <= shares_max
        self.of_link = {link: key if are_few else 1 + key % shares_max for link, key, _workers in hosts}
        """The share of each link; never 0."""
        workers: dict[int, int] = {}
        for link, _key, number in hosts:
            workers[self.of_link[link]] = workers.get(self.of_link[link], 0) + number
        self._shares = sorted(workers)
        draws = np.stack([_draws(share) / np.float32(workers[share]) for share in self._shares])
        self._table = draws.argmin(axis=0)

    def divide(self, samples: NDArray[np.int64], rows: Rows) -> list[tuple[Rows, int]]:
        """Divide ``rows`` into (rows, share), ascending in each.

        ``samples``: the sample index of each row, int64 ``[rows]``.
        """
        owners = self._table[_buckets(samples)]
        order = np.argsort(owners, kind="stable")
        ends = np.flatnonzero(np.diff(owners[order])) + 1
        numbers = np.asarray(rows)[order]
        return [
            (tuple(numbers[first:end].tolist()), self._shares[owners[order[first]]])
            for first, end in zip([0, *ends.tolist()], [*ends.tolist(), len(rows)], strict=True)
        ]


def _buckets(samples: NDArray[np.int64]) -> Indices:
    """The bucket of each sample: uint64 ``[samples]``."""
    return mixed_all(samples.astype(np.uint64), _SAMPLES_KEY) % np.uint64(BUCKETS)


@lru_cache(maxsize=128)
def _draws(share: int) -> NDArray[np.float32]:
    """Exponential draws, float32 ``[BUCKETS]``.

    Divided by their weights, the least of several belongs to each in proportion to its weight.
    """
    mixed = mixed_all(np.arange(BUCKETS, dtype=np.uint64), np.uint64(share))
    return -np.log((mixed.astype(np.float64) + 0.5) / 2**32).astype(np.float32)
