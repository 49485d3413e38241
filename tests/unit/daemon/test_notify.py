"""The messages to the service manager, read from the socket of a fake one."""

import dataclasses
import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from batchd.core import events as ev
from batchd.daemon.manager import FEEDINGS, STATUS_EVERY_S, Notifier, Service, status_line
from support.core_invariants import CheckedWorld
from support.core_world import make_spec
from support.notify_socket import NotifySocket


class Clock:
    """A clock that tests set."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    """Close everything at the end of the test."""
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def manager(stack: ExitStack, tmp_path: Path) -> NotifySocket:
    """Make a service manager with a socket in a folder."""
    manager = NotifySocket(tmp_path / "notify")
    stack.callback(manager.close)
    return manager


def notifier_for(stack: ExitStack, manager: NotifySocket, **variables: str) -> Notifier:
    """Make a notifier from the environment."""
    notifier = Notifier.from_environment({"NOTIFY_SOCKET": manager.address, **variables})
    stack.callback(notifier.close)
    return notifier


def test_each_word_is_one_message(stack: ExitStack, manager: NotifySocket) -> None:
    """State and status are in one message, so that both change together."""
    notifier = notifier_for(stack, manager)
    notifier.ready("2 streams")
    notifier.status("3 streams")
    notifier.reloading("reading")
    notifier.stopping("bye")
    notifier.scanning("scanning photos")
    ready, status, reloading, stopping, scanning = manager.heard()
    assert ready == ["READY=1", "STATUS=2 streams"]
    assert status == ["STATUS=3 streams"]
    assert reloading[0] == "RELOADING=1"
    assert int(reloading[1].removeprefix("MONOTONIC_USEC=")) > 0
    assert stopping == ["STOPPING=1", "STATUS=bye"]
    assert scanning == ["EXTEND_TIMEOUT_USEC=60000000", "STATUS=scanning photos"]


def test_an_abstract_socket_is_a_socket_too(stack: ExitStack) -> None:
    """An address that begins with @ is an abstract socket and has no file."""
    manager = NotifySocket(f"@batchd-test-{os.getpid()}")
    stack.callback(manager.close)
    notifier_for(stack, manager).status("here")
    assert manager.heard() == [["STATUS=here"]]


def test_a_status_is_one_line(stack: ExitStack, manager: NotifySocket) -> None:
    """Text behind a line break would be a message of its own, such as READY=1."""
    notifier_for(stack, manager).status("stopped: a\nREADY=1")
    assert manager.heard() == [["STATUS=stopped: a READY=1"]]


def test_the_variables_are_for_the_daemon_alone() -> None:
    """Workers get an environment without these variables."""
    environment = {"NOTIFY_SOCKET": "@nobody", "WATCHDOG_USEC": "1", "WATCHDOG_PID": "1", "PATH": "/bin"}
    Notifier.from_environment(environment).close()
    assert environment == {"PATH": "/bin"}


@pytest.mark.parametrize("address", [None, "", "relative", "vsock:2:1"])
def test_without_a_service_manager_nothing_is_told(address: str | None) -> None:
    """No message is sent either if the address is of an unknown kind."""
    notifier = Notifier.from_environment({} if address is None else {"NOTIFY_SOCKET": address, "WATCHDOG_USEC": "5"})
    assert not notifier.is_heard
    assert notifier.watchdog_s is None
    notifier.ready("nobody hears this")


@pytest.mark.parametrize(
    ("variables", "watchdog_s"),
    [
        ({"WATCHDOG_USEC": "30000000"}, 30.0),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": str(os.getpid())}, 30.0),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "1"}, None),
        ({"WATCHDOG_USEC": "0"}, None),
        ({"WATCHDOG_USEC": "soon"}, None),
        ({}, None),
    ],
)
def test_the_watchdog_is_fed_where_it_is_ours(
    stack: ExitStack, manager: NotifySocket, variables: dict[str, str], watchdog_s: float | None
) -> None:
    """The variables may be inherited from the service that started this one."""
    notifier = notifier_for(stack, manager, **variables)
    notifier.progressed()
    assert notifier.watchdog_s == watchdog_s
    assert manager.heard() == ([] if watchdog_s is None else [["WATCHDOG=1"]])


def test_a_socket_that_is_full_or_gone_does_not_block_the_daemon(
    stack: ExitStack, manager: NotifySocket, tmp_path: Path
) -> None:
    """Messages that do not fit are lost, and later messages arrive again."""
    notifier = notifier_for(stack, manager)
    for number in range(10_000):
        notifier.status(f"number {number}")
    taken = manager.heard()
    assert 0 < len(taken) < 10_000
    notifier.status("again")
    assert manager.heard() == [["STATUS=again"]]
    (tmp_path / "notify").unlink()
    notifier.status("gone")
    manager.close()
    notifier.status("gone for good")


# --- the daemon as a service ----------------------------------------------------------------------


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def world() -> CheckedWorld:
    """Make two workers, neither of which has started."""
    return CheckedWorld([make_spec()], workers=2)


@pytest.fixture
def service(stack: ExitStack, manager: NotifySocket, clock: Clock) -> Service:
    """Make a service with these two workers and a watchdog of 30 s."""
    return Service(notifier_for(stack, manager, WATCHDOG_USEC="30000000"), 2, clock)


def without_watchdog(messages: list[list[str]]) -> list[list[str]]:
    return [message for message in messages if message != ["WATCHDOG=1"]]


def test_ready_is_said_when_every_worker_is(world: CheckedWorld, service: Service, manager: NotifySocket) -> None:
    """The message is sent once, after the last worker and not after the first."""
    world.do(ev.Ticked())
    service.round_ended(world.state)
    world.ready(1)
    service.round_ended(world.state)
    assert without_watchdog(manager.heard()) == []
    world.ready(2)
    service.round_ended(world.state)
    service.round_ended(world.state)
    assert without_watchdog(manager.heard()) == [["READY=1", "STATUS=1 stream, 2 workers, 0 trainers, 0 samples/s"]]


def test_the_status_has_the_rate_since_the_last_one(
    world: CheckedWorld, service: Service, manager: NotifySocket, clock: Clock
) -> None:
    """The rate is the delivered samples divided by the time, sent at most every few seconds."""
    world.start_workers()
    service.round_ended(world.state)
    trainer = world.subscribe()
    assert trainer
    world.fill_all()
    delivered = sum(stream.delivered_samples for stream in world.state.statistics().streams)
    assert delivered > 0
    clock.now_s += STATUS_EVERY_S / 2
    service.round_ended(world.state)
    manager.heard()
    clock.now_s += STATUS_EVERY_S / 2
    service.round_ended(world.state)
    rate = f"{delivered / STATUS_EVERY_S:,.0f} samples/s"
    assert without_watchdog(manager.heard()) == [[f"STATUS=1 stream, 2 workers, 1 trainer, {rate}"]]


def test_only_a_round_feeds_the_watchdog(
    world: CheckedWorld, service: Service, manager: NotifySocket, clock: Clock
) -> None:
    """Time alone sends no message, and fast rounds send a few within the timeout."""
    service.round_ended(world.state)
    assert manager.heard() == [["WATCHDOG=1"]]
    clock.now_s += 1000.0
    assert manager.heard() == []
    for _ in range(60):
        service.round_ended(world.state)
        clock.now_s += 0.5
    assert manager.heard() == [["WATCHDOG=1"]] * FEEDINGS


def test_draining_is_said_once(world: CheckedWorld, service: Service, manager: NotifySocket) -> None:
    """The message is sent once, also if the loop ended before it could send it."""
    world.start_workers()
    world.do(ev.DrainAsked())
    service.round_ended(world.state)
    service.round_ended(world.state)
    service.stopping()
    assert without_watchdog(manager.heard()) == [["STOPPING=1", "STATUS=finishing the work in progress"]]


def test_a_scan_asks_for_time_as_long_as_it_gets_on(service: Service, manager: NotifySocket, clock: Clock) -> None:
    """The scan extends the timeout once a second, with the number of samples found."""
    service.scanned("photos", 1_000)
    service.scanned("photos", 2_000)
    clock.now_s += 1.0
    service.scanned("photos", 3_000)
    told = without_watchdog(manager.heard())
    assert [lines[1] for lines in told] == [
        "STATUS=scanning photos: 1,000 samples so far",
        "STATUS=scanning photos: 3,000 samples so far",
    ]
    assert {lines[0] for lines in told} == {"EXTEND_TIMEOUT_USEC=60000000"}


def test_a_reload_ends_with_ready(world: CheckedWorld, service: Service, manager: NotifySocket) -> None:
    """The daemon continues to serve, whatever the result of the reload."""
    world.start_workers()
    service.round_ended(world.state)
    manager.heard()
    service.reloading()
    service.reloaded(3, "refused: batchd.toml line 3")
    (first, second) = manager.heard()
    assert first[0] == "RELOADING=1"
    assert second == ["READY=1", "STATUS=refused: batchd.toml line 3"]


def test_a_reload_does_not_make_the_daemon_ready(world: CheckedWorld, service: Service, manager: NotifySocket) -> None:
    """A reload during memory reservation only sets the status; READY=1 follows as usual."""
    world.start_workers()
    service.round_ended(world.state, has_memory=False)
    service.reloading()
    service.reloaded(2, "added more")
    service.round_ended(world.state, has_memory=False)
    assert without_watchdog(manager.heard()) == [["STATUS=reading the configuration again"], ["STATUS=added more"]]
    service.round_ended(world.state)
    assert without_watchdog(manager.heard()) == [["READY=1", "STATUS=1 stream, 2 workers, 0 trainers, 0 samples/s"]]


def test_a_reload_asks_for_time_as_long_as_it_scans_and_feeds_no_watchdog(
    world: CheckedWorld, service: Service, manager: NotifySocket, clock: Clock
) -> None:
    """The watchdog covers only the loop, and the status of the scan is not overwritten."""
    world.start_workers()
    service.round_ended(world.state)
    service.reloading()
    manager.heard()
    service.scanned("photos", 0)
    service.scanned("photos", 1_000)
    clock.now_s += STATUS_EVERY_S
    service.scanned("photos", 3_000)
    told = ["EXTEND_TIMEOUT_USEC=60000000", "STATUS=scanning photos: 0 samples so far"]
    assert manager.heard() == [told, [told[0], "STATUS=scanning photos: 3,000 samples so far"]]
    service.round_ended(world.state)
    assert without_watchdog(manager.heard()) == []


def test_the_rate_after_a_reload_is_that_of_the_time_since_it_was_last_told(
    world: CheckedWorld, service: Service, manager: NotifySocket, clock: Clock
) -> None:
    """The outcome stays for a while, and the rate afterwards covers the whole time since."""
    world.start_workers()
    service.round_ended(world.state)
    assert world.subscribe()
    world.fill_all()
    delivered = sum(stream.delivered_samples for stream in world.state.statistics().streams)
    clock.now_s += 3 * STATUS_EVERY_S
    service.reloading()
    service.reloaded(2, "nothing has changed")
    clock.now_s += STATUS_EVERY_S
    service.round_ended(world.state)
    assert manager.heard()[-1] == [
        f"STATUS=1 stream, 2 workers, 1 trainer, {delivered / (4 * STATUS_EVERY_S):,.0f} samples/s"
    ]


def test_a_stream_that_comes_in_the_place_of_one_that_goes_is_counted_from_its_beginning(
    world: CheckedWorld, service: Service, manager: NotifySocket, clock: Clock
) -> None:
    """The samples of the old stream are not subtracted from those of the new stream."""
    world.start_workers()
    assert world.subscribe(1, 1)
    world.fill_all()
    service.round_ended(world.state)
    world.reconfigure((dataclasses.replace(make_spec(3), name="stream1"),), replaced=(1,))
    assert world.subscribe(3, 2)
    world.fill_all()
    delivered = sum(stream.delivered_samples for stream in world.state.statistics().streams)
    assert delivered
    clock.now_s += STATUS_EVERY_S
    service.round_ended(world.state)
    assert f" {delivered / STATUS_EVERY_S:,.0f} samples/s" in manager.heard()[-1][-1]


def test_workers_that_leave_are_not_to_come(world: CheckedWorld) -> None:
    """After a reload with fewer workers, the status counts only the remaining ones."""
    world.start_workers()
    world.reconfigure(workers=1)
    assert "1 worker, 0 trainers" in status_line(world.state.statistics(), 0.0)


def test_a_stream_that_has_stopped_is_named(world: CheckedWorld) -> None:
    """The operator needs the name of the stopped stream."""
    world.start_workers()
    world.subscribe()
    for stream in world.state.streams.values():
        stream.delivery.stop("it is broken", [])
    assert status_line(world.state.statistics(), 0.0).endswith("0 samples/s, stopped: stream1")


def test_the_service_manager_of_a_script_is_not_told_of_its_embedded_daemon(
    stack: ExitStack, manager: NotifySocket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise it would regard the script as ready; the variables are not passed on either."""
    monkeypatch.setenv("NOTIFY_SOCKET", manager.address)
    assert not Notifier.from_environment(os.environ, is_embedded=True).is_heard
    assert "NOTIFY_SOCKET" not in os.environ
    monkeypatch.setenv("NOTIFY_SOCKET", manager.address)
    notifier = Notifier.from_environment(os.environ)
    stack.callback(notifier.close)
    assert notifier.is_heard
