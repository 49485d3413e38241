"""The worker hosts of one daemon, as actors of a Ray cluster. Runs in `batchd ray`, a Ray driver.

    every second: the actors' reports, and the daemon's wanted workers --> start or stop actors

    absent --ask--> pending --report--> running --leave--> leaving --kill for good--> absent
                       ^                   |
                       +-- Ray restarts ---+    its process or its node has died

A pending actor is the demand that Ray's autoscaler sees. Actors are detached, and their names are
ADDRESS/NUMBER with the daemon's address: they stay when this process ends, and the next one finds
them.

Invariant: a running worker host is killed only after a request to leave, and they leave one at a
time.
Invariant: no call blocks on an actor: each has one request in flight, which is polled.
"""

import logging
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from threading import Event
from time import monotonic
from typing import Any

import ray
import structlog
from ray._private.services import canonicalize_bootstrap_address_or_die
from ray.exceptions import ActorDiedError, RayActorError, RayError

from batchd.errors import BatchdError
from batchd.pool.ray.actor import LEAVE_S, ActorOptions, ActorReport, HostActor
from batchd.pool.ray.scaling import HostCount, Limits

NAMESPACE = "batchd"
LOOK_S = 1.0
CONNECT_TIMEOUT_S = 5.0
ANSWER_TIMEOUT_S = 5.0
"""Timeout of first reports from a former driver's worker hosts; without one, a host is pending."""
LEAVE_TIMEOUT_S = 2 * LEAVE_S
"""Timeout of the answer of a leaving worker host: its node may have died meanwhile."""
START_RAY = (
    "start one with `ray start --head`, and join it with `ray start --address=HEAD:6379` on each further machine, "
    "and on this one with --num-cpus=0"
)

_log = structlog.get_logger()


@dataclass(slots=True)
class Host:
    """One worker host. ``report``: None while it is pending. ``leaves``: the request to leave."""

    actor: Any
    answer: Any
    report: ActorReport | None = None
    leaves: Any = None
    leaves_since_s: float = 0.0


@contextmanager
def cluster(address: str) -> Iterator[None]:
    """Be a driver of the Ray cluster at ``address``, or "auto". Raises ``BatchdError``."""
    try:
        found = canonicalize_bootstrap_address_or_die(address)
        host, _, port = found.rpartition(":")
        # Ray itself would wait ten minutes or more for a cluster that is gone.
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_TIMEOUT_S).close()
    except (OSError, ValueError):
        raise BatchdError(f"no Ray cluster answers at {address!r}: {START_RAY}") from None
    try:
        # keep "auto": only then does Ray use a token that it finds by itself
        ray.init(
            address=address if address == "auto" else found,
            namespace=NAMESPACE,
            log_to_driver=False,
            logging_level=logging.CRITICAL,
        )
    except (RayError, RuntimeError, ValueError, OSError) as error:
        raise BatchdError(
            f"the Ray cluster at {found} refuses this driver: {_last_line(error)}; if the cluster has a token, "
            "set RAY_AUTH_MODE=token here, too"
        ) from None
    try:
        yield
    finally:
        ray.shutdown()


def keep(pool: "Pool", limits: Limits, options: ActorOptions, ask: Callable[[], int | None], end: Event) -> None:
    """Keep as many worker hosts as are wanted until ``end`` is set or the pool is taken down.

    ``ask`` returns the number of wanted workers, or None while the daemon is away. Raises
    ``BatchdError`` as ``look``.
    """
    count = HostCount(limits, len(pool.hosts))
    while not end.wait(LOOK_S):
        pool.look()
        if pool.is_taken_down:
            break
        before, wanted = count.hosts, ask()
        hosts = count.follow(wanted, pool.pending, pool.leaving, monotonic())
        if hosts != before:
            _log.info("number of worker hosts changed", hosts=hosts, before=before, wanted_workers=wanted)
        pool.settle(hosts, options)


def this_node() -> str:
    """The IP address of this machine in the cluster."""
    address: str = ray.util.get_node_ip_address()
    return address


def pools() -> list[str]:
    """The addresses of all pools on the cluster."""
    return sorted({name.rpartition("/")[0] for name in ray.util.list_named_actors()})


class Pool:
    """The worker hosts of the daemon at ``address``, by their numbers.

    ``is_taken_down``: another process, usually `batchd ray down`, has ended one of them for good.
    """

    def __init__(self, address: str) -> None:
        self.address = address
        self.is_taken_down = False
        self.hosts: dict[int, Host] = {}
        for name in ray.util.list_named_actors():
            pool, _, number = name.rpartition("/")
            if pool == address:
                with suppress(ValueError):  # it has left meanwhile
                    actor = ray.get_actor(name)
                    self.hosts[int(number)] = Host(actor, actor.report.remote())

    @property
    def pending(self) -> int:
        """Number of worker hosts that Ray has not started yet, or is restarting."""
        return sum(host.report is None for host in self.hosts.values())

    @property
    def leaving(self) -> int:
        """Number of worker hosts that are finishing their work before they leave."""
        return sum(host.leaves is not None for host in self.hosts.values())

    @property
    def key(self) -> str | None:
        """The key that a running worker host has from a former driver."""
        keys = (host.report["options"]["key"] for host in self.hosts.values() if host.report)
        return next((key for key in keys if key), None)

    def look(self, within_s: float = 0.0) -> None:
        """Process the answers that have arrived; wait up to ``within_s`` for all of them.

        Raises ``BatchdError`` if the cluster cannot run worker hosts.
        """
        waiting = [host.leaves or host.answer for host in self.hosts.values()]
        answered = set(ray.wait(waiting, num_returns=len(waiting), timeout=within_s)[0]) if waiting else set()
        for number, host in list(self.hosts.items()):
            if host.leaves is not None:
                if host.leaves in answered or monotonic() - host.leaves_since_s > LEAVE_TIMEOUT_S:
                    self._end(number, host)
            elif host.answer in answered:
                self._take(number, host)

    def settle(self, count: int, options: ActorOptions) -> None:
        """Ask for ``count`` worker hosts; let one leave that is surplus or has old options."""
        for number in set(range(count)) - set(self.hosts):
            self._ask(number, options)
        if not self.leaving:
            asked = asdict(options)
            beyond = [number for number in sorted(self.hosts, reverse=True) if number >= count]
            old = (number for number, host in self.hosts.items() if host.report and host.report["options"] != asked)
            for number in (*beyond, *old)[:1]:
                self.leave(number)

    def take_down(self) -> None:
        """Let all worker hosts leave at the same time. For `batchd ray down`."""
        self.look(ANSWER_TIMEOUT_S)
        for number in list(self.hosts):
            self.leave(number)
        self.look(LEAVE_TIMEOUT_S)
        for number, host in list(self.hosts.items()):
            self._end(number, host)

    def leave(self, number: int) -> None:
        """Let a worker host finish its work and leave; end a pending one at once."""
        host = self.hosts[number]
        if host.report is None:
            self._end(number, host)
            return
        _log.info("worker host told to leave", host=number, node=host.report["node"])
        host.leaves, host.leaves_since_s = host.actor.leave.remote(), monotonic()

    def _ask(self, number: int, options: ActorOptions) -> None:
        kind = ray.remote(num_cpus=options.workers, max_restarts=-1, max_task_retries=0)(HostActor)
        name = f"{self.address}/{number}"
        actor: Any = kind.options(name=name, lifetime="detached", get_if_exists=True).remote(options)
        self.hosts[number] = Host(actor, actor.report.remote())
        _log.info("worker host asked for", host=number, cpus=options.workers)

    def _take(self, number: int, host: Host) -> None:
        """Process the report of a worker host, and request the next one."""
        before = host.report
        try:
            report = host.report = ray.get(host.answer)
            if before is None or before["actor"] != report["actor"]:
                _log.info("worker host started", host=number, node=report["node"])
            elif before["starts"] != report["starts"]:
                _log.warning(
                    "worker host ended", host=number, node=report["node"], how=report["ended"], said=report["last_line"]
                )
        except RayActorError as error:
            if isinstance(error, ActorDiedError) and not self._is_known(number):
                if "ray.kill" not in str(error):
                    said = _last_line(error)
                    raise BatchdError(f"the nodes of the cluster cannot run worker hosts: {said}") from None
                self.is_taken_down = True
                del self.hosts[number]
                return
            host.report = None
            if before is not None:
                _log.warning("worker host lost", host=number, node=before["node"])
        host.answer = host.actor.report.remote()

    def _is_known(self, number: int) -> bool:
        """True if Ray restarts it."""
        try:
            ray.get_actor(f"{self.address}/{number}")
        except ValueError:
            return False
        return True

    def _end(self, number: int, host: Host) -> None:
        ray.kill(host.actor, no_restart=True)
        del self.hosts[number]
        _log.info("worker host removed", host=number)


def _last_line(error: Exception) -> str:
    return str(error).strip().rpartition("\n")[2].strip()
