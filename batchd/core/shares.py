"""Which worker hosts fill the rows of a sample, so that their caches act as one. Pure code.

    sample --hash--> bucket --table--> share --> the worker hosts of that share

A host has a share of all samples as large as its part of all workers. The table is a rendezvous
hash (D. Thaler, C. Ravishankar, "Using name-based mappings to increase hit rates", IEEE/ACM
Transactions on Networking, 1998), with weights: each share draws a number for each bucket, and the
least one has it. So when a host comes or goes, only its own samples change hands.

A host's draws follow from its name, and from its number among hosts with the same name. So one that
connects again, or meets a daemon that was started again, has the same samples as before.

A row is ordered with others of its batch and its share. With very many shares orders would be
short, and the daemon would be busy with them. So there is a limit; beyond it several hosts have one
share together, chosen by their names.

Invariant: what belongs to whom depends on names, workers and the batch size only.
"""

from collections.abc import Iterable
from functools import lru_cache
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from batchd.core.plan import Indices, mixed_all
from batchd.orders.rows import Rows

BUCKETS = 1 << 14
SHARES_MIN = 8
"""So many shares there may be, however small a batch is."""
SHARE_ROWS = 32
"""With more than ``SHARES_MIN`` shares, a batch has at least so many rows for each, in the mean."""
_SAMPLES_KEY = np.uint64(0x5EED)


def host_key(name: str, number: int) -> int:
    """What decides a host's samples; not 0. ``number``: of the hosts with this name, from 0."""
    digest = blake2b(f"{number} {name}".encode("utf-8", "backslashreplace"), digest_size=7).digest()
    return 1 + int.from_bytes(digest)


class Shares:
    """The shares of one stream's samples. ``hosts``: (link, its key, its workers) of each."""

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
        """Divide ``rows``, which have these ``samples``: (rows, their share), ascending in each."""
        owners = self._table[_buckets(samples)]
        order = np.argsort(owners, kind="stable")
        ends = np.flatnonzero(np.diff(owners[order])) + 1
        numbers = np.asarray(rows)[order]
        return [
            (tuple(numbers[first:end].tolist()), self._shares[owners[order[first]]])
            for first, end in zip([0, *ends.tolist()], [*ends.tolist(), len(rows)], strict=True)
        ]


def _buckets(samples: NDArray[np.int64]) -> Indices:
    return mixed_all(samples.astype(np.uint64), _SAMPLES_KEY) % np.uint64(BUCKETS)


@lru_cache(maxsize=128)
def _draws(share: int) -> NDArray[np.float32]:
    """One exponential draw for each bucket: the least of several is of each as often as it weighs."""
    mixed = mixed_all(np.arange(BUCKETS, dtype=np.uint64), np.uint64(share))
    return -np.log((mixed.astype(np.float64) + 0.5) / 2**32).astype(np.float32)
