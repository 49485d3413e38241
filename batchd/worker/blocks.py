"""The blocks of a shuffle that one worker reads from servers, each once, before it needs them.

    rank of a block in its epoch     0   1   2   3   4   5 | 6   7   8   9  10  11 |12  ...
    of two workers, the first has    x       x       x     | >       >       >     | >
                                     open, samples left      requested with the first order

The blocks of a window are open together, so the next window is requested as soon as one begins, and
short blocks further ahead. A block is forgotten when all of its samples are made. Samples of other
workers' blocks, and of blocks for which there is no room, are requested by the rows of orders.
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from batchd.core.blocks import BlockOrder
from batchd.data.storage.ahead import Requested

AHEAD_BYTES = 8 << 20
"""Blocks are requested so far ahead, even where the next window ends before."""
UNUSED_TURNS = 16
"""Times the open blocks: the orders after which a block that was begun counts as passed, because
other workers have made the rest of it."""

Request = Callable[[int, Sequence[int]], Requested]
"""Begins to read samples of an epoch into the room of blocks."""


class _OwnBlock:
    """A block that is requested. ``left``: its rows that were not made; ``turn``: last use."""

    def __init__(self, requested: Requested, left: int) -> None:
        self.requested = requested
        self.left = left
        self.turn: int | None = None


class BlocksAhead:
    """See the module. Belongs to one stream of one worker. ``rows_each``: rows of each sample."""

    def __init__(self, order: BlockOrder, request: Request, rows_each: int = 1) -> None:
        self._order = order
        self._rows_each = rows_each
        self._request = request
        self._kept: dict[tuple[int, int], _OwnBlock] = {}
        """By epoch and rank; those that were used last are at the end."""
        self._turn = 0
        self._frontier = (0, 0)
        """The epoch, and the rank up to which its blocks were requested ahead."""
        self._is_fit = True
        """False once samples cannot be requested by blocks, such as files of unknown size."""

    def begin(
        self, epoch: int, samples: NDArray[np.int64], share: tuple[int, int]
    ) -> tuple[list[Requested], NDArray[np.int64]]:
        """Request the blocks of some samples, and the next ones.

        Returns what the samples have to wait for, and the samples that are in no block here: int64.
        ``share``: see ``worker.messages.Chunk``.
        """
        place, workers = share
        if not self._is_fit or not workers:
            return [], samples
        self._turn += 1
        ranks = self._order.ranks_of(epoch, samples)
        used = [rank for rank in np.unique(ranks[ranks % workers == place]).tolist() if self._keep(epoch, rank)]
        for rank in used:
            block = self._kept[epoch, rank] = self._kept.pop((epoch, rank))
            block.turn = self._turn
        if used:
            self._keep_next(epoch, used[-1], workers)
        self._forget_passed()
        return [self._kept[epoch, rank].requested for rank in used], samples[~np.isin(ranks, used)]

    def made(self, epoch: int, samples: NDArray[np.int64]) -> None:
        """Note that samples were made; a block without others is forgotten."""
        if not self._kept:
            return
        ranks, counts = np.unique(self._order.ranks_of(epoch, samples), return_counts=True)
        for rank, count in zip(ranks.tolist(), counts.tolist(), strict=True):
            block = self._kept.get((epoch, rank))
            if block is not None:
                block.left -= count
                if block.left <= 0:
                    self._forget((epoch, rank))

    def close(self) -> None:
        """Forget all blocks."""
        for key in list(self._kept):
            self._forget(key)

    def _keep(self, epoch: int, rank: int, *, is_ahead: bool = False) -> bool:
        """Request a block unless it is here; return whether all of it is, or will be.

        Only for a block that is used now, others are forgotten if there is no room.
        """
        block = self._kept.get((epoch, rank))
        if block is not None and block.requested.has_failed:
            self._forget((epoch, rank))  # by now, the server may answer
            return False
        while block is None and self._is_fit:
            samples = self._order.block_at(epoch, rank)
            block = _OwnBlock(self._request(epoch, samples), len(samples) * self._rows_each)
            if not block.requested.is_whole:
                block.requested.forget()
                self._is_fit = block.requested.is_fit
                block = None
                if not self._is_fit or is_ahead or not self._make_room(epoch, rank):
                    return False
            else:
                self._kept[epoch, rank] = block
        return block is not None

    def _keep_next(self, epoch: int, rank: int, workers: int) -> None:
        """Request the next blocks of this worker: up to the end of the next window, or further."""
        window, block_bytes = self._order.open_blocks, self._kept[epoch, rank].requested.bytes
        short_blocks = AHEAD_BYTES // block_bytes if block_bytes else 0
        end = min(max((rank // window + 2) * window, rank + workers * short_blocks), self._order.blocks)
        first = self._frontier[1] if self._frontier[0] == epoch else 0
        for following in range(max(first, rank + workers), end, workers):
            if not self._keep(epoch, following, is_ahead=True):
                return
            self._frontier = epoch, following + workers

    def _make_room(self, epoch: int, rank: int) -> bool:
        """Forget what was used longest ago, of another window than this one and the next."""
        window = self._order.open_blocks
        for key in self._kept:
            if key[0] != epoch or not 0 <= key[1] // window - rank // window <= 1:
                self._forget(key)
                return True
        return False

    def _forget_passed(self) -> None:
        """Forget blocks that were begun and whose other samples were made elsewhere."""
        passed = self._turn - UNUSED_TURNS * self._order.open_blocks
        for key in [key for key, block in self._kept.items() if block.turn is not None and block.turn < passed]:
            self._forget(key)

    def _forget(self, key: tuple[int, int]) -> None:
        self._kept.pop(key).requested.forget()
