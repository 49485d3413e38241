"""Worker hosts of real daemons. For tests of processes."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import cycle
from pathlib import Path
from typing import Any

import batchd_client
from batchd.core.admission import SUBSCRIPTIONS_MAX
from support.daemon_process import DaemonProcess
from support.fake_gateway import WorkerHostProcess
from support.kernel import gateways_of
from support.network import free_port
from support.seen import see
from support.waiting import wait_until

StartHost = Callable[..., WorkerHostProcess]


@contextmanager
def worker_hosts(folder: Path) -> Iterator[StartHost]:
    """Start worker hosts of a daemon, or of an ``address`` before it, and end them at the end."""
    with ExitStack() as stack:

        def start(
            daemon: DaemonProcess,
            *options: str,
            workers: int = 2,
            address: str | None = None,
            through: Sequence[str] = (),
            environment: dict[str, str] | None = None,
        ) -> WorkerHostProcess:
            where = address or daemon.status()["pool"]["address"]
            how: dict[str, Any] = {"through": through, "environment": environment}
            host = WorkerHostProcess(folder, where, "--workers", str(workers), *options, **how)
            stack.callback(host.close)
            return host

        yield start


def pool_keys(gateways: int = 1) -> dict[str, Any]:
    """Return keys of [daemon]: one local worker, and worker hosts on loopback by some gateways."""
    more = {"pool_gateways": gateways} if gateways > 1 else {}
    return {"workers": 1, "worker_address": f"127.0.0.1:{free_port(gateways)}", **more}


def links(daemon: DaemonProcess) -> list[dict[str, Any]]:
    """Return the worker hosts in the daemon's status."""
    found: list[dict[str, Any]] = daemon.status()["pool"]["links"]
    return found


def gateway_of(daemon: DaemonProcess) -> int:
    """Return the process of its gateway."""
    (pid,) = wait_until(lambda: gateways_of(daemon.pid), "there is a gateway")
    return pid


def wait_gateways(daemon: DaemonProcess, number: int) -> set[int]:
    """Wait until there are so many gateways, and return their processes."""
    return wait_until(
        lambda: pids if len(pids := gateways_of(daemon.pid)) == number else set(),
        f"there are {number} gateways",
    )


def wait_serving(daemon: DaemonProcess, hosts: int, *streams: str) -> None:
    """Read epochs until so many worker hosts have proved themselves for each stream."""
    names = streams or ("photos",)
    with ExitStack() as stack:
        count = -(-len(names) // SUBSCRIPTIONS_MAX)
        connections = [stack.enter_context(batchd_client.connect(daemon.address)) for _ in range(count)]
        trainers = zip(names, cycle(connections), strict=False)
        waiting = {name: stack.enter_context(connection.stream(name)) for name, connection in trainers}

        def are_serving() -> bool:
            for batches in waiting.values():
                see(batches)
            served = [name for link in links(daemon) for name in link["streams"]]
            for name in [name for name in waiting if served.count(name) >= hosts]:
                waiting.pop(name).close()
            return not waiting

        wait_until(are_serving, f"{hosts} worker hosts serve {', '.join(names)}")
