"""The worker hosts of a daemon for people: rates, what is wanted, and what is wrong. Pure.

    PoolStatistics, PoolReading --pool_view--> PoolView: for `batchd top`, the page, `batchd status`

Invariant: a number that is not known yet is None, never zero.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from ipaddress import ip_address

from batchd.observe.diagnosis.readings import HostReading, PoolReading
from batchd_wire.status import LinkStatistics, PoolStatistics
from batchd_wire.wording import counted

OPENING_S = 10.0
"""A worker host that has opened no stream after this time is worth a line."""
HOSTS_MAX = 200
"""Worker hosts that are shown one by one; all are in the sums."""
NOTES_MAX = 8


@dataclass(frozen=True, slots=True)
class HostView:
    """One worker host. ``note``: its problem, or ""."""

    now: LinkStatistics
    samples_per_s: float | None
    bytes_per_s: float | None
    busy_share: float | None
    note: str


@dataclass(frozen=True, slots=True)
class PoolView:
    """All worker hosts. ``workers`` they have, ``wanted`` are needed; ``cap``: what limits that.

    ``bytes_per_s`` of rows from all of them; ``network_share``: that of the interface's speed.
    ``notes``: what is wrong, for people. ``hosts``: at most ``HOSTS_MAX``, of ``hosts_count``.
    """

    address: str
    workers: int
    wanted: int
    capped_by: str
    cap: str
    bytes_per_s: float | None
    network_share: float | None
    samples_per_s: float | None
    hosts_count: int
    hosts: tuple[HostView, ...]
    notes: tuple[str, ...]


def pool_view(pool: PoolStatistics, reading: PoolReading | None) -> PoolView:
    """The facts to show about the pool. ``reading``: None if there is only one status."""
    readings = {one.now.link: one for one in reading.hosts} if reading is not None else {}
    hosts = sorted(pool.links, key=lambda link: (link.name, link.link))
    return PoolView(
        address=pool.address,
        workers=sum(link.workers for link in pool.links),
        wanted=pool.wanted,
        capped_by=pool.capped_by,
        cap=pool.cap,
        bytes_per_s=reading.bytes_per_s if reading is not None else None,
        network_share=reading.network_share if reading is not None else None,
        samples_per_s=sum(one.samples_per_s for one in readings.values()) if reading is not None else None,
        hosts_count=len(hosts),
        hosts=tuple(_host(link, readings.get(link.link)) for link in hosts[:HOSTS_MAX]),
        notes=tuple(notes(pool)),
    )


def summary(view: PoolView) -> str:
    """The pool in one line: "2 worker hosts, 16 remote workers, 24 wanted, 3,000 samples/s"."""
    facts = [
        counted(view.hosts_count, "worker host"),
        f"{counted(view.workers, 'remote worker')}, {view.wanted:,} wanted",
        "" if view.samples_per_s is None else f"{view.samples_per_s:,.0f} samples/s",
        "" if view.bytes_per_s is None else gigabytes(view.bytes_per_s),
        "" if view.network_share is None else f"{view.network_share:.0%} of the network",
    ]
    return ", ".join(filter(None, facts))


def gigabytes(bytes_per_s: float) -> str:
    """A rate as text, in GB/s."""
    return f"{bytes_per_s / 1e9:.2f} GB/s"


def start_command(address: str) -> str:
    """The command that starts a worker host of the daemon that listens at ``address``.

    HOST stands for the daemon's host if that listens on all its addresses, since another machine
    would take such an address for its own. Beyond loopback, worker hosts need a key.
    """
    host, _colon, port = address.removeprefix("tcp://").rpartition(":")
    try:
        ip = ip_address(host.strip("[]"))
    except ValueError:
        ip = None  # "*", or an interface
    if ip is not None and ip.is_loopback:
        return f"batchd worker {address}"
    is_all = host == "*" or (ip is not None and ip.is_unspecified)
    return f"batchd worker {f'tcp://HOST:{port}' if is_all else address} --key FILE"


def notes(pool: PoolStatistics) -> Iterator[str]:
    """Warnings for people: the cap, hosts that are down or idle, and hosts that were refused."""
    if pool.cap:
        yield f"limited by {pool.cap}"
    if pool.gateways_down:
        names = ", ".join(f"number {gateway}" for gateway in pool.gateways_down)
        yield f"down, and started again by the daemon: {names} of {counted(pool.gateways, 'gateway')}"
    troubled = [(link, text) for link in pool.links if (text := trouble(link))]
    yield from (f"{link.name} ({link.host}) {text}" for link, text in troubled[:NOTES_MAX])
    if len(troubled) > NOTES_MAX:
        yield f"and {counted(len(troubled) - NOTES_MAX, 'worker host')} more with problems"
    yield from (f"sent away: {text}" for text in pool.sent_away)
    if not pool.links and pool.ended_links:
        yield f"all worker hosts are gone; the last one was {pool.last_end}"


def trouble(link: LinkStatistics) -> str:
    """Why a worker host fills less than it could, or ""."""
    if link.refused:
        return f"cannot fill {'; '.join(link.refused)}"
    if link.state == "opening" and link.since_s > OPENING_S:  # only proving needs a trainer
        return f"is opening for {link.since_s:.0f} s"
    if link.state == "serving" and not link.workers:
        return "has no workers"
    return ""


def _host(link: LinkStatistics, reading: HostReading | None) -> HostView:
    return HostView(
        now=link,
        samples_per_s=reading.samples_per_s if reading is not None else None,
        bytes_per_s=reading.bytes_per_s if reading is not None else None,
        busy_share=reading.busy_share if reading is not None else None,
        note=trouble(link),
    )
