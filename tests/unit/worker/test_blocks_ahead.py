"""A worker requests each of its blocks once, before it needs them, and forgets what is used up."""

import numpy as np
import pytest

from batchd.core.blocks import BlockOrder
from batchd.data.storage.ahead import RequestBudget, Requested
from batchd.worker.blocks import UNUSED_TURNS, BlocksAhead

SIZE, BLOCKS, OPEN = 4, 24, 4
BLOCK_BYTES = 4 << 20
ALONE = 0, 1
"""The share of an only worker."""


class Requests:
    """Counts the requests for blocks, each of ``BLOCK_BYTES``; ``room`` is that of the worker."""

    def __init__(self, blocks_max: int = BLOCKS) -> None:
        self.room = RequestBudget(blocks_max * BLOCK_BYTES)
        self.begun: list[int] = []
        """The first sample of each block, in turn."""
        self.last = Requested(self.room)

    def __call__(self, _epoch, samples) -> Requested:
        self.last = Requested(self.room)
        if self.last.take(BLOCK_BYTES):
            self.begun.append(samples[0])
        return self.last

    @property
    def kept(self) -> int:
        """Blocks that count in the room."""
        return self.room._used_bytes // BLOCK_BYTES


@pytest.fixture
def order() -> BlockOrder:
    return BlockOrder(np.arange(0, BLOCKS * SIZE + 1, SIZE), OPEN, seed=1)


def first_samples(order: BlockOrder, ranks: range) -> list[int]:
    """The first sample of the block of each rank, in epoch 0."""
    return [order.block_at(0, rank)[0] for rank in ranks]


def window(order: BlockOrder, number: int) -> np.ndarray:
    """The samples of a window of epoch 0, in the order in which they are read."""
    return order.samples_at(0, np.arange(number * OPEN * SIZE, (number + 1) * OPEN * SIZE))


def test_ranks_name_blocks(order):
    """Each sample is in the block of its rank, and ranks follow the windows."""
    places = np.arange(BLOCKS * SIZE)
    samples = order.samples_at(3, places)
    ranks = order.ranks_of(3, samples)
    assert all(sample in order.block_at(3, rank) for sample, rank in zip(samples.tolist(), ranks.tolist(), strict=True))
    assert np.array_equal(ranks // OPEN, places // (OPEN * SIZE))


def test_the_open_window_and_the_next_one_are_requested_with_the_first_order(order):
    """Each block is requested once, whatever rows later orders have."""
    requests = Requests()
    blocks = BlocksAhead(order, requests)
    for samples in np.split(window(order, 0), 4):
        found, left = blocks.begin(0, samples, ALONE)
        assert len(left) == 0
        assert len(found) == len(set((samples // SIZE).tolist()))

    assert sorted(requests.begun) == sorted(first_samples(order, range(2 * OPEN)))


def test_each_of_two_workers_requests_its_own_blocks(order):
    """Rows of the other's blocks are left to requests by rows."""
    both = []
    for place in range(2):
        requests = Requests()
        found, left = BlocksAhead(order, requests).begin(0, window(order, 0), (place, 2))
        assert len(found) == OPEN // 2
        assert (order.ranks_of(0, left) % 2 != place).all()
        assert len(left) == OPEN * SIZE // 2
        both += requests.begun
    assert sorted(both) == sorted(first_samples(order, range(2 * OPEN)))


@pytest.mark.parametrize("rows_each", [1, 3])
def test_a_block_is_forgotten_when_all_of_its_rows_are_made(order, rows_each):
    """After an epoch, nothing is left, and each block was requested once, also for three copies."""
    requests = Requests()
    blocks = BlocksAhead(order, requests, rows_each)
    for number in range(BLOCKS // OPEN):
        samples = window(order, number)
        for _copy in range(rows_each):
            blocks.begin(0, samples, ALONE)
            blocks.made(0, samples[:5])
            blocks.made(0, samples[5:])
        assert requests.kept == (OPEN if number < BLOCKS // OPEN - 1 else 0)
    assert sorted(requests.begun) == first_samples_sorted(order)


def first_samples_sorted(order: BlockOrder) -> list[int]:
    """The first samples of all blocks."""
    return sorted(first_samples(order, range(BLOCKS)))


def test_blocks_without_room_are_requested_by_rows(order):
    """Blocks of this window and the next are not given up for each other."""
    requests = Requests(blocks_max=3)
    blocks = BlocksAhead(order, requests)
    found, left = blocks.begin(0, window(order, 0), ALONE)
    assert (len(found), len(left)) == (3, SIZE)

    blocks.begin(0, window(order, 0), ALONE)
    assert len(requests.begun) == 3


def test_blocks_of_another_window_make_room(order):
    """A trainer that reads elsewhere gets the blocks, which are used now."""
    requests = Requests(blocks_max=OPEN)
    blocks = BlocksAhead(order, requests)
    blocks.begin(0, window(order, 0), ALONE)
    found, left = blocks.begin(0, window(order, 4), ALONE)
    assert (len(found), len(left)) == (OPEN, 0)
    assert requests.kept == OPEN


def test_a_block_that_failed_is_requested_by_rows_the_next_time(order):
    """A server may fail for a moment: the samples of a block are not bad because of it."""
    requests = Requests()
    blocks = BlocksAhead(order, requests)
    blocks.begin(0, window(order, 0), ALONE)
    requests.last.has_failed = True
    samples = window(order, 1)
    _found, left = blocks.begin(0, samples, ALONE)
    assert len(left) == SIZE


def test_samples_that_cannot_be_requested_by_blocks_are_tried_once(order):
    """Files of unknown size gain nothing by being requested together."""
    tries = []

    def refuse(_epoch, samples) -> Requested:
        tries.append(samples)
        requested = Requested(RequestBudget(1 << 30, is_sized=True))
        assert not requested.take(None)
        return requested

    blocks = BlocksAhead(order, refuse)
    for number in range(2):
        found, left = blocks.begin(0, window(order, number), ALONE)
        assert (found, left.tolist()) == ([], window(order, number).tolist())
    assert len(tries) == 1


def test_blocks_that_others_have_finished_are_forgotten(order):
    """The rest of a block may have been made by another worker, for a trainer that waited."""
    requests = Requests()
    blocks = BlocksAhead(order, requests)
    blocks.begin(0, window(order, 0), ALONE)
    blocks.made(0, window(order, 0)[:-1])
    others = window(order, 1)
    for _turn in range(UNUSED_TURNS * OPEN + 1):
        blocks.begin(0, others, ALONE)
    blocks.made(0, others)
    assert requests.kept == OPEN


def test_closing_forgets_all_blocks(order):
    """The room is as large as before."""
    requests = Requests()
    blocks = BlocksAhead(order, requests)
    blocks.begin(0, window(order, 0), ALONE)
    blocks.close()
    assert requests.kept == 0
