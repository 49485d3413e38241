"""How many remote workers are wanted: the core's counters of the last seconds. DAEMON process.

    every tick: counters --kept for WINDOW_S--> difference --diagnosis.demand--> WantedNumber

A tick reads a few numbers of each trainer and makes no statistics, so that the loop does not notice
a hundred trainers.
"""

import fcntl
import socket
import struct
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path

from batchd.core.state import DaemonState
from batchd.core.stream import Stream
from batchd.observe.diagnosis import demand
from batchd.runtime.addresses import EVERYWHERE

INTERFACES = Path("/sys/class/net")
IPV6_ADDRESSES = Path("/proc/net/if_inet6")
_GET_ADDRESS = 0x8915
"""SIOCGIFADDR: the IPv4 address of an interface."""
_IFREQ_BYTES = 256
_MBIT_BYTES = 125_000


@dataclass(frozen=True, slots=True)
class _Counts:
    """Counters of one stream. ``trainers``: by subscription, batches and seconds of waiting."""

    samples: int
    work_s: float
    trainers: dict[int, tuple[int, float]]


_NO_COUNTS = _Counts(0, 0.0, {})
"""Of a stream that had not begun."""


class WantedCount:
    """Follows the core's counters. ``workers_max``: as configured, 0 for none.

    ``interface``: through which rows come, with its speed; see ``interface_of``.
    """

    def __init__(self, workers_max: int, interface: tuple[str, float | None]) -> None:
        self._workers_max = workers_max
        self.interface, self.interface_bytes_per_s = interface
        self._rule = demand.WantedWorkers()
        self._kept: deque[tuple[float, dict[int, _Counts]]] = deque()

    @property
    def now(self) -> demand.WantedNumber:
        """The number at the last tick."""
        return self._rule.now

    def tick(self, state: DaemonState, row_bytes: Mapping[int, int]) -> None:
        """Read the counters, as of the core's last event. ``row_bytes``: by stream."""
        counts = {number: _counts(state.streams[number]) for number in state.numbers.values()}
        self._kept.append((state.now_s, counts))
        while len(self._kept) > 2 and state.now_s - self._kept[1][0] >= demand.WINDOW_S:  # noqa: PLR2004  a difference needs two
            self._kept.popleft()
        local = state.fleet.ready
        remote = sum(len(link.workers) for link in state.links.by_number.values() if not link.is_leaving)
        limits = demand.PoolLimits(local, remote, self._workers_max, self.interface, self.interface_bytes_per_s)
        self._rule.follow(self._loads(state, local + remote, row_bytes), limits)

    def _loads(self, state: DaemonState, workers: int, row_bytes: Mapping[int, int]) -> Iterator[demand.StreamLoad]:
        (begun_s, former), (ended_s, latter) = self._kept[0], self._kept[-1]
        seconds = max(demand.WINDOW_S, ended_s - begun_s)  # in the first ones little was done
        for number, after in latter.items():
            before = former.get(number, _NO_COUNTS)
            work_s, samples = after.work_s - before.work_s, after.samples - before.samples
            trainers = []
            for one, (batches, waited_s) in after.trainers.items():
                batches_before, waited_before_s = before.trainers.get(one, (0, 0.0))
                trainers.append((batches - batches_before, min(1.0, (waited_s - waited_before_s) / seconds)))
            stream = state.streams[number]
            yield demand.StreamLoad(
                name=stream.spec.name,
                busy_workers=work_s / seconds,
                trainers=trainers,
                row_bytes_per_busy_s=samples * row_bytes[number] / work_s if work_s > 0 else 0.0,
                ring_workers=_ring_workers(stream, len(trainers), workers),
                stays_here=stream.spec.decodes_here,
            )


def _counts(stream: Stream) -> _Counts:
    trainers = {
        number: (one.consumed, one.waits.workers_s)
        for number, one in stream.delivery.subscriptions.items()
        if not one.is_spectator and not one.ended
    }
    return _Counts(stream.decoded_samples, stream.work.total_s, trainers)


def _ring_workers(stream: Stream, trainers: int, workers: int) -> float:
    """For how many workers the slots that no trainer has are enough; one slot for each at least."""
    batch_rows = stream.spec.plan.batch_size
    orders = -(-batch_rows // stream.chunk_rows(batch_rows, workers, 0, 1.0))
    filling = max(trainers, stream.delivery.ring.slots_max - demand.SLOTS_OF_A_TRAINER * trainers)
    return filling * orders / demand.ORDERS_AT_ONCE


def interface_of(address: str) -> tuple[str, float | None]:
    """Find the network interface that has ``address``, and its speed in bytes per second.

    ("", None) for an address that is on no single one; for all addresses the only one with a speed.
    The speed is None for interfaces without hardware: what these report is invented.
    """
    names = [name for _index, name in socket.if_nameindex() if name != "lo"]
    if address in names:
        return address, _speed(address)
    try:
        wanted = ip_address(address)
    except ValueError:
        wanted = None  # "*", or the name of a host
    if wanted is not None and not wanted.is_unspecified:
        names = [name for name in names if wanted in addresses_on(name)]
    elif wanted is not None or address == EVERYWHERE:
        names = [name for name in names if _speed(name) is not None]
    else:
        names = []
    return (names[0], _speed(names[0])) if len(names) == 1 else ("", None)


def _speed(name: str) -> float | None:
    """Bytes per second of an interface with hardware, which is no part of another one."""
    folder = INTERFACES / name
    if not any((folder / kind).exists() for kind in ("device", "bonding")) or (folder / "master").exists():
        return None
    try:
        mbit_per_s = int((folder / "speed").read_text())
    except (OSError, ValueError):
        return None
    return mbit_per_s * _MBIT_BYTES if mbit_per_s > 0 else None


def addresses_on(name: str) -> Iterator[IPv4Address | IPv6Address]:
    """The first IPv4 address of an interface, and all IPv6 ones."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked, suppress(OSError):
        request = struct.pack(f"{_IFREQ_BYTES}s", name.encode()[:15])
        yield IPv4Address(fcntl.ioctl(asked, _GET_ADDRESS, request)[20:24])
    with suppress(OSError):
        for line in IPV6_ADDRESSES.read_text().splitlines():
            words = line.split()
            if words[-1] == name:
                yield IPv6Address(bytes.fromhex(words[0]))
