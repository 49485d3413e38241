"""Trainers that keep reading while others misbehave, and check the content of every batch.

For tests of processes.

with good_trainers(daemon) as good: ...      a local one, and one over TCP if there is a port
good.read()                                  each takes and compares its next batch

Invariant: at the end of the ``with`` the daemon has removed all other sessions, and no worker and
no stream has failed.
"""

import itertools
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import batchd_client
from support.daemon_process import DaemonProcess
from support.expected import Expected
from support.seen import look_at
from support.waiting import wait_until

EPOCHS = 1 << 20


class GoodTrainer:
    """Reads one batch after the other, and checks the content of each."""

    def __init__(self, expected: Expected, connection: batchd_client.Daemon) -> None:
        self._expected = expected
        self._batches = iter(
            itertools.chain.from_iterable(itertools.repeat(connection.stream("photos", epochs=EPOCHS)))
        )
        steps = expected.plan.steps
        self._positions = ((epoch, step) for epoch in range(EPOCHS) for step in range(steps))

    def read(self) -> None:
        """Take the next batch, and check its position and its content."""
        with next(self._batches) as batch:
            assert look_at(batch) == self._expected.batch(*next(self._positions))


class GoodTrainers:
    """All good trainers of one daemon."""

    def __init__(self, daemon: DaemonProcess, connections: list[batchd_client.Daemon]) -> None:
        expected = Expected(daemon.config)
        self._connections = connections
        self._all = [GoodTrainer(expected, connection) for connection in connections]

    def read(self) -> None:
        """Let each read its next batch."""
        for one in self._all:
            one.read()

    def status(self) -> dict[str, Any]:
        """The daemon's status, from one of them."""
        return self._connections[0].status()

    def wait_until_alone(self) -> None:
        """Wait until the daemon has read everything, and has removed all other sessions."""
        wait_until(
            lambda: len(self.status()["trainers"]) == len(self._all), "the daemon has removed the other trainers"
        )


@contextmanager
def good_trainers(daemon: DaemonProcess, key: Path | None = None) -> Iterator[GoodTrainers]:
    """Good trainers of this daemon; the one over TCP has ``key``.

    At the end, the daemon has had no failure.
    """
    with ExitStack() as stack:
        connections = [stack.enter_context(batchd_client.connect(daemon.address))]
        if daemon.tcp_address is not None:
            far = batchd_client.connect(daemon.tcp_address, key=str(key) if key else None, reconnect_timeout_s=0.0)
            connections.append(stack.enter_context(far))
        good = GoodTrainers(daemon, connections)
        good.read()
        yield good
        good.wait_until_alone()
        good.read()
        status = good.status()
        assert (status["daemon"]["worker_deaths"], status["streams"][0]["stopped"]) == (0, None)
    assert "Traceback" not in daemon.log


def private_bytes(pid: int) -> int:
    """The private memory of a process, in bytes."""
    text = Path(f"/proc/{pid}/status").read_text()
    found = re.search(r"^RssAnon:\s+(\d+) kB$", text, re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


def descriptor_count(pid: int) -> int:
    """Number of a process's open descriptors without slots: a ring grows on first use."""
    found = 0
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # the descriptor was closed meanwhile
            found += not str(link.readlink()).startswith("/memfd:")
    return found
