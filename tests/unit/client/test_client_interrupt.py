"""Interrupts, signal handlers and threads.

After any interruption, no batch is lost and no batch is repeated.
"""

import gc
import inspect
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path

import pytest

import batchd_client
from batchd_client import reader as client_reader
from batchd_client.errors import BatchdClientError, ReentrantCall
from batchd_wire.fields import CHECKSUM
from batchd_wire.messages import Mismatched, Pull
from support.fake_daemon import FakeDaemon, spoilt
from support.fake_live import FakeLive
from support.fake_remote import FakeRemoteDaemon
from support.fake_stream import FakeStream
from support.kernel import descriptors_of
from support.waiting import wait_until


@pytest.fixture(autouse=True)
def _descriptors_lost_by_interrupts():
    """Close descriptors that Python lost in an interrupt right after their receipt."""
    yield
    for link in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            if "batchd-fake" in os.readlink(link):  # noqa: PTH115  the link's text, which is no path
                os.close(int(link.name))


@pytest.fixture
def fake(tmp_path):
    with FakeDaemon(tmp_path / "run", FakeStream(steps=100_000, window=2)) as fake:
        yield fake


class Interrupter:
    """Raises ``KeyboardInterrupt`` at the n-th place where Python would run a signal handler.

    These places are function entries and returns from calls.
    """

    def __init__(self, place: int) -> None:
        self.place = place
        self.happened = False

    def __call__(self, frame, event: str, _argument: object) -> None:
        if event not in ("call", "c_return") or self.happened:
            return
        # This event can be the mere end of a generator, as in __del__.
        if event == "call" and frame.f_code.co_flags & inspect.CO_GENERATOR:
            return
        while frame is not None:
            if frame.f_code.co_name == "__del__":  # Python only prints an exception there
                return
            # its handlers would stay locked, for all threads
            if frame.f_code.co_filename == logging.__file__:
                return
            frame = frame.f_back
        self.place -= 1
        if self.place == 0:
            self.happened = True
            sys.setprofile(None)
            raise KeyboardInterrupt


def interrupted(function: Callable[[], object], place: int) -> bool:
    """Call ``function``, interrupted at ``place``; return False if it has no such place."""
    interrupter = Interrupter(place)
    gc.disable()  # the interrupt must not hit other objects' finalisers
    sys.setprofile(interrupter)
    try:
        function()
    except KeyboardInterrupt:
        pass
    finally:
        sys.setprofile(None)
        gc.enable()
    return interrupter.happened


@pytest.mark.parametrize("ready", [True, False], ids=["batch ready", "batch to be waited for"])
def test_interrupt_at_any_place_of_next_loses_and_repeats_nothing(fake, daemon, ready: bool) -> None:
    """The test sweeps over every place; the following batches are exactly the next ones."""
    stream = daemon.stream("photos")
    taken: list[int] = []

    def take() -> None:
        if ready:
            daemon.status()  # the requested batches have arrived by then
        for batch in stream:
            taken.append(batch.step)
            return

    take()
    place = 1
    while interrupted(lambda: stream.take(0), place):
        assert stream.step == taken[-1] + 1, f"a lost batch at place {place}"
        take()
        assert taken[-2] + 1 == taken[-1], f"interrupted at place {place}"
        place += 1

    assert place > 20
    assert fake.stream.steps > stream.step == taken[-1] + 2  # the last call was not interrupted


@pytest.mark.thorough
def test_interrupt_at_any_place_of_next_with_a_wrong_batch_loses_and_repeats_nothing(fake, daemon, monkeypatch) -> None:
    """The sweep covers the detection, the report, the pause and the new subscription."""
    monkeypatch.setattr(client_reader, "MISMATCH_PAUSE_S", 1e-6)
    to_spoil: set[int] = set()

    def spoil_once(_epoch: int, step: int, page: bytearray) -> bytearray:
        if step not in to_spoil:
            return page
        to_spoil.remove(step)
        return spoilt(page)

    fake.stream.fields += (CHECKSUM,)
    fake.alter_page = spoil_once
    stream = daemon.stream("photos")
    place, happened = 1, True
    while happened:
        first = 10 * place  # beyond the batches that the daemon has filled
        to_spoil.add(first)
        stream.seek(0, first)
        daemon.status()  # the batch has arrived by then
        happened = interrupted(partial(stream.take, 0), place)
        step = first + (not happened)
        assert stream.step == step, f"a lost batch at place {place}"
        batch = next(iter(stream))
        assert (batch.step, batch["label"][0]) == (step, fake.stream.label(0, step)[0]), f"interrupted at place {place}"
        place += 1

    assert place > 300
    # After an earlier interrupt the repeated batch is right.
    assert stream.statistics().mismatches > place / 2
    assert {mismatched.sequence for mismatched in fake.heard_of(Mismatched)} == {0}


@pytest.mark.thorough
def test_interrupt_at_any_place_of_next_with_a_slot_in_transit_loses_and_repeats_nothing(fake) -> None:
    """The handle has arrived, and its memory is still unread on the lifeline."""
    place, happened = 1, True
    while happened:
        fake.grants_at_most = 0
        with batchd_client.connect(fake.address, reconnect_timeout_s=20, batch_timeout_s=20) as daemon:
            stream = daemon.stream("photos")
            fake.grant_up_to(10)
            session = daemon._connection.session
            while not stream._reader.subscription.handles:
                if not session.receive():
                    session.wait(1)
            assert not session.slots
            happened = interrupted(partial(stream.take, 0), place)
            first = int(not happened)
            assert [next(iter(stream)).step for _ in range(3)] == [first, first + 1, first + 2], f"at place {place}"
        place += 1

    assert place > 40


@pytest.mark.thorough(after_first=True)
@pytest.mark.parametrize("action", ["status", "stream", "seek"])
def test_interrupt_at_any_place_of_a_query_leaves_a_connection_that_works(daemon, action: str) -> None:
    """A late answer is not taken for the answer to the next query."""
    stream = daemon.stream("photos")
    actions = {
        "status": daemon.status,
        "stream": lambda: daemon.stream("photos").close(),
        "seek": lambda: stream.seek(3, 7),
    }
    place = 1
    while interrupted(actions[action], place):
        assert daemon.status() == {"version": "fake"}
        epoch, step = stream.epoch, stream.step
        batch = next(iter(stream))
        assert (batch.epoch, batch.step) == (epoch, step)
        place += 1

    assert place > 20


def test_interrupted_wait_continues_with_the_same_batch(fake, daemon) -> None:
    """Ctrl-C interrupts the wait while the daemon decodes.

    The signal is real, at the place where trainers wait longest.
    """
    fake.grants_at_most = 0
    stream = daemon.stream("photos")

    def interrupt() -> None:
        fake.wait_until(lambda: any(pull.waiting for pull in fake.heard_of(Pull)))
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        next(iter(stream))
    thread.join()
    fake.grant_up_to(9)

    assert next(iter(stream)).step == 0
    assert stream.statistics().resubscribed == 0


def test_signal_handler_that_uses_the_connection_gets_an_error(daemon) -> None:
    """It would wait for the thread that it interrupts; reading the state is allowed."""
    stream = daemon.stream("photos")
    seen: list[object] = []

    def use_from_inside(session) -> None:
        seen.append(stream.state_dict()["step"])
        with pytest.raises(ReentrantCall):
            daemon.status()
        seen.append("refused")
        assert session.is_usable

    daemon._connection.run(use_from_inside)

    assert seen == [0, "refused"]
    assert daemon.status() == {"version": "fake"}


def test_threads_take_turns_with_one_connection(daemon) -> None:
    """Each thread has its own stream and gets all of its batches."""
    found: dict[int, list[int]] = {0: [], 1: []}

    def read(rank: int) -> None:
        stream = daemon.stream("photos", rank, 2)
        for batch in stream:
            found[rank].append(batch.step)
            if len(found[rank]) == 40:
                break
        stream.close()

    threads = [threading.Thread(target=read, args=(rank,)) for rank in found]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert found == {rank: list(range(rank, 80, 2)) for rank in found}


def test_one_thread_waits_without_keeping_another_from_working(fake, daemon) -> None:
    """The connection is locked only while a message is sent."""
    fake.grants_at_most = 0
    stream = daemon.stream("photos")
    steps: list[int] = []
    thread = threading.Thread(target=lambda: steps.append(next(iter(stream)).step))
    thread.start()
    fake.wait_until(lambda: any(pull.waiting for pull in fake.heard_of(Pull)))

    assert daemon.status() == {"version": "fake"}

    fake.grant_up_to(9)
    thread.join()
    assert steps == [0]


# --- connect and close ----------------------------------------------------------------------------


def _fail(address: str) -> None:
    with pytest.raises(BatchdClientError):
        batchd_client.connect(address, connect_timeout_s=0.001)


@pytest.fixture(params=["on this host", "over TCP", "a producer", "no daemon", "no port"])
def life(request, fake):
    """A function that opens and closes a connection, or fails to open one."""
    with ExitStack() as stack:
        remote = stack.enter_context(FakeRemoteDaemon())
        if request.param == "a producer":
            stack.callback(FakeLive(fake).close)
        yield {
            "on this host": lambda: batchd_client.connect(fake.address).close(),
            "over TCP": lambda: batchd_client.connect(remote.address).close(),
            "a producer": lambda: batchd_client.push("live", fake.address).close(),
            "no daemon": lambda: _fail(f"{fake.address}/nowhere"),
            "no port": lambda: _fail("tcp://127.0.0.1:1"),
        }[request.param]


def possessions() -> list[int]:
    """The number of descriptors and threads of this process, including those of libraries.

    Descriptors of memory are not counted: see the fixture above.
    """
    descriptors = [name for name in descriptors_of("self").values() if "batchd-fake" not in name]
    return [len(descriptors), sum(1 for _ in Path("/proc/self/task").iterdir())]


def nothing_more_than(before: list[int], place: str) -> None:
    """Wait until this process has no more descriptors and threads than ``before``.

    The fake daemon may notice an end late, also that of an earlier connection: so ``before`` falls
    with the present numbers. A garbage collection frees exceptions in reference cycles.
    """

    def is_no_more() -> bool:
        now = possessions()
        before[:] = map(min, before, now)
        return now == before

    if not is_no_more():
        gc.collect()
    wait_until(is_no_more, f"there is no more than before, interrupted at {place}", seconds=10)


LIFE_S = 0.008
"""Approximate duration of the life of a connection."""
SWALLOWED = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning")
"""Python swallows exceptions inside a finaliser.

An object that an interrupt takes from its owner closes itself, with a warning.
"""


@SWALLOWED
@pytest.mark.slow
def test_interrupt_at_any_place_of_connect_and_close_leaves_nothing_open(life) -> None:
    """No contexts of ZeroMQ, descriptors or threads remain.

    The test sweeps over every place and calls nothing twice.
    """
    life()
    before = possessions()
    place = 1
    while interrupted(life, place):
        nothing_more_than(before, f"place {place}")
        place += 1

    assert place > 100


@pytest.mark.thorough(after_first=True)
@SWALLOWED
@pytest.mark.parametrize("moments", [25, pytest.param(500, marks=pytest.mark.slow)])
def test_signal_at_any_moment_of_connect_and_close_leaves_nothing_open(life, moments: int) -> None:
    """The signals are real, also within system calls.

    A signal may interrupt the call that ends ZeroMQ's threads.
    """
    is_armed = False

    def interrupt(_number: int, _frame: object) -> None:
        if is_armed:
            raise KeyboardInterrupt

    former = signal.signal(signal.SIGALRM, interrupt)
    try:
        life()
        before = possessions()
        for moment in range(1, moments + 1):
            is_armed = True
            try:
                signal.setitimer(signal.ITIMER_REAL, moment / moments * LIFE_S)
                life()
                is_armed = False
            except KeyboardInterrupt:
                is_armed = False
            signal.setitimer(signal.ITIMER_REAL, 0)
            nothing_more_than(before, f"moment {moment}")
    finally:
        signal.signal(signal.SIGALRM, former)


def test_interrupted_close_is_completed_by_the_next_close(fake) -> None:
    """The daemon sees the end of the connection then, and not only at the program's end."""
    place, happened = 1, True
    while happened:
        daemon = batchd_client.connect(fake.address)
        batch = next(iter(daemon.stream("photos")))
        happened = interrupted(daemon.close, place)
        daemon.close()
        batch.release()
        del batch
        fake.wait_until(lambda ended=place: fake.ended_sessions == ended)
        place += 1

    assert place > 20
