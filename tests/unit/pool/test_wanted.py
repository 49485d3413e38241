"""The number of remote workers wanted, from the core's state; and the interface of an address."""

from collections.abc import Callable
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path

import pytest

from batchd.core import events as ev
from batchd.core.state import TICK_S
from batchd.pool import wanted
from batchd.pool.wanted import WantedCount, interface_of
from support.core_world import World, make_spec

ROW_BYTES = 1_000_000
NO_INTERFACE = "", None


class Counted:
    """A world in which time passes by ticks; each worker is busy all the time with one order."""

    def __init__(self, count: WantedCount, workers: int = 1, **changes: object) -> None:
        self.count = count
        self.world = World([make_spec(**({"samples": 2_000, "batch_size": 4} | changes))], workers)
        self.world.start_workers()

    def ticks(self, seconds: float, each: Callable[[], object] = lambda: None) -> None:
        """Let time pass; ``each`` is called every half second."""
        for _ in range(round(seconds / TICK_S)):
            each()
            self.world.now += TICK_S
            self.world.do(ev.Ticked())
            self.count.tick(self.world.state, {1: ROW_BYTES})

    def work(self) -> None:
        """Let each worker carry out an order of half a second, and let the trainers read on."""
        for number in [number for number, worker in self.world.workers.items() if worker.orders]:
            self.world.fill(number, busy_us=int(TICK_S * 1e6))
        for number in self.world.trainers:
            self.world.pull(number)


def test_a_trainer_that_always_waits_wants_more_workers() -> None:
    """The number is ten times the one worker, with 15 % to spare, less that worker."""
    counted = Counted(WantedCount(0, NO_INTERFACE))
    counted.world.subscribe()
    counted.ticks(12, counted.work)

    assert counted.count.now.workers == 11


def test_the_first_seconds_of_a_daemon_want_little() -> None:
    """A ring that is filled for the first time is no sign of missing workers."""
    counted = Counted(WantedCount(0, NO_INTERFACE), workers=2)
    counted.world.subscribe()
    counted.ticks(1, counted.work)

    assert counted.count.now.workers == 0


def test_a_trainer_that_has_gone_wants_nothing() -> None:
    """The stream's waits of the last seconds do not count."""
    counted = Counted(WantedCount(0, NO_INTERFACE))
    counted.world.subscribe()
    counted.ticks(12, counted.work)
    counted.world.end(1)
    counted.ticks(TICK_S)

    assert counted.count.now.workers == 0


def test_a_trainer_that_only_looks_wants_nothing() -> None:
    """Workers make the batches of a spectator when they have nothing else to do."""
    counted = Counted(WantedCount(0, NO_INTERFACE))
    counted.world.subscribe(is_spectator=True)
    counted.ticks(12, counted.work)

    assert counted.count.now.workers == 0


def test_what_was_longer_ago_does_not_count() -> None:
    """The trainer waited before, and has been stalled for the last seconds."""
    counted = Counted(WantedCount(0, NO_INTERFACE))
    counted.world.subscribe()
    counted.ticks(12, counted.work)
    counted.world.fill_all()
    counted.world.pull(1, waiting=False)
    counted.world.fill_all()
    counted.ticks(11)

    assert counted.count.now.workers == 0


def test_a_stream_that_is_decoded_here_wants_no_remote_workers() -> None:
    """The length of the trainer's waits does not matter."""
    counted = Counted(WantedCount(0, NO_INTERFACE), decodes_here=True)
    counted.world.subscribe()
    counted.ticks(12, counted.work)

    assert counted.count.now.workers == 0


def test_the_speed_of_the_network_caps_the_number() -> None:
    """One worker makes several rows of a megabyte in half a second."""
    counted = Counted(WantedCount(0, ("eth0", 20e6)))
    counted.world.subscribe()
    counted.ticks(12, counted.work)

    assert 0 < counted.count.now.workers < 11
    assert counted.count.now.capped_by == "network"


def test_a_small_ring_caps_the_number() -> None:
    """Of three slots, the trainer has two, so one is left to fill, with an order or a few."""
    counted = Counted(WantedCount(0, NO_INTERFACE), slots_max=3)
    counted.world.subscribe()
    counted.ticks(12, counted.work)

    assert counted.count.now.capped_by == "ring"
    assert "stream 'stream1' have rows for 2 workers" in counted.count.now.cap


def test_a_configured_maximum_caps_the_number() -> None:
    """The maximum is ``pool_max`` of the configuration."""
    counted = Counted(WantedCount(3, NO_INTERFACE))
    counted.world.subscribe()
    counted.ticks(12, counted.work)

    assert (counted.count.now.workers, counted.count.now.capped_by) == (3, "max")


# --- interfaces -----------------------------------------------------------------------------------

ADDRESSES = {
    "eth0": [IPv4Address("10.0.0.5"), IPv6Address("fd00::5")],
    "docker0": [IPv4Address("172.17.0.1")],
    "wlan0": [IPv4Address("10.0.1.5")],
}


@pytest.fixture
def machine(tmp_path: Path, monkeypatch) -> Path:
    """A machine with a network card of 10 Gbit/s, one of unknown speed, and a bridge."""
    for name, facts in {"eth0": {"speed": "10000\n"}, "docker0": {"speed": "10000\n"}, "wlan0": {}}.items():
        (tmp_path / name).mkdir()
        for fact, text in facts.items():
            (tmp_path / name / fact).write_text(text)
    for name in ("eth0", "wlan0"):
        (tmp_path / name / "device").mkdir()
    names = ["lo", *ADDRESSES]
    monkeypatch.setattr(wanted, "INTERFACES", tmp_path)
    monkeypatch.setattr(wanted.socket, "if_nameindex", lambda: list(enumerate(names, 1)))
    monkeypatch.setattr(wanted, "addresses_on", lambda name: iter(ADDRESSES[name]))
    return tmp_path


@pytest.mark.parametrize("address", ["10.0.0.5", "fd00::5", "eth0", "*", "0.0.0.0", "::"])
@pytest.mark.usefixtures("machine")
def test_the_speed_of_an_address_is_that_of_its_interface(address) -> None:
    """An address of all interfaces has the speed of the only interface with a known one."""
    assert interface_of(address) == ("eth0", 1.25e9)


@pytest.mark.parametrize(
    ("address", "found"),
    [
        ("172.17.0.1", ("docker0", None)),
        ("10.0.1.5", ("wlan0", None)),
        ("127.0.0.1", ("", None)),
        ("10.9.9.9", ("", None)),
        ("gpu1.example.org", ("", None)),
    ],
)
@pytest.mark.usefixtures("machine")
def test_a_speed_that_is_not_known_is_none(address, found) -> None:
    """A bridge has no hardware, so its speed is invented."""
    assert interface_of(address) == found


def test_of_two_cards_that_take_all_addresses_none_is_chosen(machine) -> None:
    """Rows may come through either card."""
    (machine / "wlan0" / "speed").write_text("1000\n")

    assert interface_of("*") == ("", None)


def test_a_card_that_is_a_part_of_a_bond_has_no_speed_of_its_own(machine) -> None:
    """The speed is that of the bond."""
    (machine / "eth0" / "master").mkdir()

    assert interface_of("10.0.0.5") == ("eth0", None)


@pytest.mark.parametrize("speed", ["-1\n", "", "unknown\n"])
def test_a_card_without_a_link_has_no_speed(machine, speed) -> None:
    """The kernel writes -1, or text that is no number."""
    (machine / "eth0" / "speed").write_text(speed)

    assert interface_of("eth0") == ("eth0", None)


def test_the_addresses_of_an_interface_are_those_of_the_kernel() -> None:
    """Every machine has the loopback interface."""
    assert IPv4Address("127.0.0.1") in set(wanted.addresses_on("lo"))
