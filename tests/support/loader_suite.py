"""What every ``BatchdLoader`` promises: an adapter's tests inherit these, and add its own arrays.

class TestLoader(LoaderSuite):      with the fixture ``load`` (``support.loaders.loading``) of a
place = "device=cpu"            daemon with a stream "photos": 40 samples in batches of 8

class TestLife(LifeSuite):          with the fixture ``daemon``
loader_type = BatchdLoader
program = "torch_program"       a module of ``support`` with the programs that are named here
"""

import json
import os
import signal
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar

import pytest

import batchd_client
from batchd_client.errors import (
    DefinitionRefused,
    PrefetchInvalid,
    SettingsInvalid,
    StateMismatch,
    StreamClosed,
    StreamUnknown,
    TensorsInvalid,
)
from support.daemon_process import DaemonProcess
from support.garbage import CYCLES, collected
from support.loaders import in_use
from support.programs import end, gone, start
from support.settings import folder_stream

EPOCH = 40
Load = Callable[..., Any]


def indices(loader: Any, batches: int | None = None) -> list[list[int]]:
    """Return the samples' numbers of the rest of the epoch, or of so many batches of it."""
    iterator = iter(loader)
    taken: list[list[int]] = []
    while (batches is None or len(taken) < batches) and (batch := next(iterator, None)) is not None:
        taken.append(batch["index"].tolist())
    return taken


class LoaderSuite:
    """Order, positions, states and mistakes; batches are dicts."""

    place: ClassVar[str]
    """Where its arrays are, as its ``repr`` shows it."""

    def test_two_epochs_are_two_loops(self, daemon: DaemonProcess, load: Load) -> None:
        """A DataLoader does the same; the second epoch has another order."""
        loader = load()
        epochs = [list(chain.from_iterable(indices(loader))) for _ in range(2)]
        with batchd_client.connect(daemon.address) as connection:
            claim = connection.stream("photos", epochs=2)
            expected = [number for _ in range(2) for batch in claim for number in batch["index"].tolist()]

        assert epochs == [expected[:EPOCH], expected[EPOCH:]]
        assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(EPOCH))
        assert epochs[0] != epochs[1]
        assert loader.epoch == 2

    def test_it_says_how_long_it_is_and_where(self, load: Load) -> None:
        """``len`` is one rank's batches in an epoch; the position works until the end."""
        loader = load()
        iterator = iter(loader)
        assert (len(loader), loader.batch_size, loader.stream.classes) == (5, 8, ("cat", "dog", "owl", "yak"))
        assert repr(loader) == f"<BatchdLoader photos rank=0/1 {self.place} epoch=0 step=0>"
        next(iterator)
        assert repr(loader) == f"<BatchdLoader photos rank=0/1 {self.place} epoch=0 step=1>"
        statistics = loader.statistics()
        assert statistics.batches == 1
        assert 0 < statistics.wait_s < statistics.next_s
        loader.close()
        assert repr(loader).endswith("[closed]>")
        assert loader.state_dict()["step"] == 1
        for use in (lambda: next(iterator), lambda: iter(loader)):
            with pytest.raises(StreamClosed, match="loader of stream 'photos' has been closed"):
                use()
        loader.close()

    @pytest.mark.parametrize("taken", [0, 1, 4, 5, 7])
    def test_a_saved_state_goes_on_with_the_next_batch(self, load: Load, taken: int) -> None:
        """Another loader gets it when it is made or later; the seam of two epochs works as well."""
        whole = load()
        expected = indices(whole) + indices(whole) + indices(whole)
        first = load()
        seen = indices(first, taken) if taken <= 5 else indices(first) + indices(first, taken - 5)
        state = first.state_dict()
        born, told = load(state=state), load()
        told.load_state_dict(state)
        for second in (born, told):
            assert second.state_dict() == state
            with_card = second.state_dict(card=True)
            assert (with_card.pop("card")["fingerprint"], with_card) == (state["fingerprint"], state)
            assert seen + indices(second) + indices(second) == expected[: taken + 10 - taken % 5]

    @pytest.mark.parametrize("taken", [0, 1])
    def test_a_loader_goes_on_with_any_sample(self, load: Load, taken: int) -> None:
        """The first batch is the rest of one; a state says so until the loop has that batch."""
        order = [sample for batch in indices(load()) for sample in batch]
        loader, told = load(), load()
        loader.seek(0, sample=11)
        seen = indices(loader, taken)
        told.load_state_dict(loader.state_dict())
        for one in (loader, told):
            rest = indices(one)
            assert [sample for batch in seen + rest for sample in batch] == order[11:]
            assert [len(batch) for batch in seen + rest] == [5, 8, 8, 8]

    @pytest.mark.parametrize("size", [3, 12])
    def test_a_loader_has_batches_of_its_own_size(self, load: Load, size: int) -> None:
        """Of the same samples in the same order; states go on in batches of the stream's size."""
        order = [sample for batch in indices(load()) for sample in batch]
        own = load(batch_size=size)
        assert (len(own), own.batch_size) == (-(-EPOCH // size), size)
        seen = indices(own, 2)
        assert [len(batch) for batch in seen] == [size, size]
        for one in (load(state=own.state_dict()), own):
            assert [sample for batch in seen + indices(one) for sample in batch] == order

    def test_another_streams_state_is_refused(self, load: Load) -> None:
        """The loader keeps its position."""
        loader = load()
        indices(loader, 2)
        before = loader.state_dict()
        with pytest.raises(StateMismatch, match="other files or other settings"):
            loader.load_state_dict(before | {"fingerprint": "0" * 32})
        assert loader.state_dict() == before

    def test_setting_the_epoch_moves_to_its_beginning_and_never_back_within_it(self, load: Load) -> None:
        """The usual loop may call it each time, also right after a resume."""
        expected = load()
        epochs = [indices(expected) for _ in range(4)]
        loader = load()
        loader.set_epoch(2)
        assert indices(loader, 3) == epochs[2][:3]
        loader.set_epoch(2)
        assert indices(loader) == epochs[2][3:]
        loader.set_epoch(3)
        assert indices(loader, 1) == epochs[3][:1]
        loader.set_epoch(0)
        assert indices(loader) == epochs[0]

    def test_a_loop_that_was_left_continues_unless_it_shall_restart(self, load: Load) -> None:
        """Training needs the first, validation the second."""
        going_on, restarted = load(), load(restart=True)
        whole = indices(load())
        assert [indices(going_on, 2), indices(going_on)] == [whole[:2], whole[2:]]
        assert [indices(restarted, 2), indices(restarted)] == [whole[:2], whole]

    def test_after_the_last_epoch_there_is_nothing(self, load: Load) -> None:
        """The training has that many epochs."""
        loader = load(epochs=1)
        assert len(indices(loader)) == len(loader) == 5
        assert indices(loader) == []

    @pytest.mark.parametrize("world_size", [2, 3])
    def test_ranks_share_an_epoch(self, load: Load, world_size: int) -> None:
        """Each sample goes to one of them, and all have the same number of batches."""
        shares = [indices(load(rank=rank, world_size=world_size)) for rank in range(world_size)]
        assert len({len(share) for share in shares}) == 1
        assert sorted(number for share in shares for batch in share for number in batch) == list(range(EPOCH))

    def test_a_loader_defines_the_stream_that_it_reads(self, load: Load, start_daemon: Any, photos: Path) -> None:
        """A state has the table, so that another loader goes on with the next batch."""
        table = folder_stream(photos, seed=3)
        rules = {"who": [f"group:{os.getegid()}"], "roots": [str(photos)]}
        address = start_daemon({"same": table}, define=rules).address
        with load("same", address=address) as one:
            expected = indices(one) + indices(one)
        with load("trial", address=address, define=table) as one:
            seen, state = indices(one, 2), one.state_dict()
        assert state["define"] == table
        with load("trial", address=address, state=state) as one:
            assert seen + indices(one) + indices(one) == expected

    def test_mistakes_are_said_at_once(self, load: Load) -> None:
        """Those of fields, and of the client."""
        with pytest.raises(TensorsInvalid, match="no field 'picture'; it has image, label, index"):
            load(fields=["picture"])
        with pytest.raises(StreamUnknown):
            load("fotos")
        with pytest.raises(PrefetchInvalid, match="prefetch=-1"):
            load(prefetch=-1)
        with pytest.raises(SettingsInvalid, match="derive = true"):
            load(set={"seed": 1})
        with pytest.raises(DefinitionRefused, match=r"\[daemon.define\]"):
            load("trial", define={"batch_size": 8})


class LifeSuite:
    """Forks, interrupts, exits and garbage: the daemon has its slots back."""

    loader_type: ClassVar[type[Any]]
    options: ClassVar[dict[str, object]] = {}
    """Which give dicts."""
    program: ClassVar[str]

    @pytest.mark.thorough(after_first=True)
    @pytest.mark.parametrize("how", ["exit_with_batches_held", "exit_by_an_exception"])
    def test_a_script_ends_at_once_with_everything_still_open(self, daemon: DaemonProcess, how: str) -> None:
        """The script exits without waiting, whatever it holds."""
        said, status, errors = end(start(self.program, how, daemon))
        assert said, errors
        assert status == (1 if how == "exit_by_an_exception" else 0)
        assert ("the loss is nan" in errors) == bool(status)
        assert "Exception ignored" not in errors
        gone(daemon)

    def test_ctrl_c_leaves_a_state_from_which_nothing_is_repeated_or_skipped(self, daemon: DaemonProcess) -> None:
        """The signal may hit any place in the loop."""
        program = start(self.program, "wait_for_interrupt", daemon)
        assert program.stdout is not None
        assert json.loads(program.stdout.readline()) == {"ready": True}
        program.send_signal(signal.SIGINT)
        (said,), status, errors = end(program)
        assert status == 130, errors
        before = []
        with self.loader_type("photos", address=daemon.address, **self.options) as loader:
            while (loader.epoch, loader.state_dict()["step"]) != (said["state"]["epoch"], said["state"]["step"]):
                before.append(next(iter(loader))["index"].tolist())
        assert said["trained"] in (before, before[:-1])  # the last one may be untrained
        gone(daemon)

    @pytest.mark.thorough
    def test_a_forked_child_does_not_disturb_its_parent(self, daemon: DaemonProcess) -> None:
        """The child gets an error with the remedy, and the parent continues."""
        said, status, errors = end(start(self.program, "fork_and_go_on", daemon))
        assert status == 0, errors
        assert said[0] == {"child": "ForkedConnection"}
        assert said[1]["child_status"] == 7
        assert sorted(said[1]["numbers"]) == list(range(EPOCH))
        gone(daemon)

    def test_a_loader_that_is_forgotten_is_closed(self, daemon: DaemonProcess) -> None:
        """The program need not close it."""
        in_use(self.loader_type, daemon)
        gone(daemon)

    @pytest.mark.parametrize("tie", CYCLES.values(), ids=CYCLES)
    def test_a_loader_in_a_cycle_ends_with_it(self, daemon: DaemonProcess, tie: Any) -> None:
        """The loader's iterator and a batch are part of the cycle, and end with it."""
        collected(lambda: in_use(self.loader_type, daemon), tie)
        gone(daemon)
