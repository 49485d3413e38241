"""Loaders in programs' lives: forks, pickles, DataLoaders, threads, interrupts, exits. No hang."""

import pickle
from typing import ClassVar

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed; `make test-torch` installs it")

from torch.utils.data import DataLoader  # noqa: E402

from batchd_client.errors import StateMismatch  # noqa: E402
from batchd_client.torch import BatchdDataset, BatchdLoader  # noqa: E402
from support.loader_suite import LifeSuite  # noqa: E402
from support.programs import end, epochs_in_threads, gone, start  # noqa: E402

EPOCH = 40


@pytest.fixture(scope="module")
def daemon(start_shared_daemon):
    """Serve one stream of photographs."""
    return start_shared_daemon()


@pytest.fixture
def load(daemon):
    """Make a loader of the daemon's stream; it is closed with the test."""
    loaders = []

    def load(**options):
        loaders.append(BatchdLoader("photos", address=daemon.address, **{"as_dict": True, **options}))
        return loaders[-1]

    yield load
    for loader in loaders:
        loader.close()


class TestLife(LifeSuite):
    """Of loaders of dicts."""

    loader_type = BatchdLoader
    options: ClassVar = {"as_dict": True}
    program = "torch_program"


def numbers_of(batches):
    """Return the samples of batches, in their order."""
    return [number for batch in batches for number in batch["index"].tolist()]


def test_threads_have_a_loader_each(daemon):
    """All threads get the same whole epoch."""
    epochs = epochs_in_threads(4, lambda: BatchdLoader("photos", address=daemon.address, as_dict=True))
    assert all(epoch == epochs[0] for epoch in epochs)
    assert sorted(epochs[0]) == list(range(EPOCH))


def test_two_loaders_in_one_program_are_two_trainers(load):
    """Each has a position of its own."""
    first, second = load(), load()
    started = [next(iter(first)), next(iter(second)), next(iter(first))]
    assert numbers_of(started[:1]) == numbers_of(started[1:2])
    assert sorted(numbers_of([*started[1:2], *second])) == list(range(EPOCH))
    assert sorted(numbers_of([started[0], started[2], *first])) == list(range(EPOCH))


def test_a_pickled_loader_connects_where_it_is_used_and_goes_on_there(load):
    """The pickle has nothing of the connection."""
    loader = load()
    taken = [next(iter(loader)) for _ in range(2)]
    copy = pickle.loads(pickle.dumps(loader))
    assert repr(copy) == "<BatchdLoader photos rank=0/1 device=cpu>"
    rest = numbers_of(loader)
    assert numbers_of(copy) == rest
    assert sorted(numbers_of(taken) + rest) == list(range(EPOCH))
    unused = pickle.loads(pickle.dumps(copy))
    copy.close()
    unused.close()
    assert repr(pickle.loads(pickle.dumps(copy))).endswith("[closed]>")


def test_an_exception_in_the_loop_loses_nothing_but_the_batch_in_hand(load):
    """The same loader continues with the next batch."""
    loader = load()
    seen = []

    def train():
        for batch in loader:
            seen.append(batch)
            if len(seen) == 2:
                raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train()
    assert sorted(numbers_of([*seen, *loader])) == list(range(EPOCH))


def test_a_data_loader_passes_whole_batches_on(load):
    """With ``batch_size=None`` and no workers, length, epochs and state are the loader's."""
    dataset = BatchdDataset(load())
    through = DataLoader(dataset, batch_size=None, num_workers=0)
    assert len(through) == len(dataset) == 5
    first = numbers_of(through)
    state = dataset.state_dict()
    dataset.set_epoch(3)
    numbers_of(through)
    assert dataset.loader.epoch == 4
    dataset.load_state_dict(state)
    second = numbers_of(through)
    assert sorted(first) == sorted(second) == list(range(EPOCH))
    assert first != second
    with pytest.raises(StateMismatch):
        dataset.load_state_dict({"epoch": 1})


@pytest.mark.thorough
@pytest.mark.parametrize("context", ["fork", pytest.param("spawn", marks=pytest.mark.jobs)])
def test_in_a_worker_of_a_data_loader_it_says_what_to_do(daemon, context):
    """Each worker would read the whole stream once more."""
    ((said,), status, errors) = end(start("torch_program", "read_in_a_worker", daemon, context))
    assert status == 0, errors
    assert said["error"] == "LoaderInWorker"
    assert "num_workers=0" in said["text"]
    gone(daemon)


def test_a_data_loader_with_forked_workers_beside_it_changes_nothing(load):
    """Programs use them to read other data."""
    loader = load()
    iterator = iter(loader)
    seen = [next(iterator)]
    others = DataLoader(range(100), batch_size=10, num_workers=2, multiprocessing_context="fork")
    assert sum(int(part.sum()) for part in others) == sum(range(100))
    assert sorted(numbers_of([*seen, *iterator])) == list(range(EPOCH))
