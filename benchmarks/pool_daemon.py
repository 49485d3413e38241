"""Daemons and worker hosts of the pool's benchmarks, each a process tree on loopback."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import children, command_line
from scaling_daemon import DECISIONS

import batchd_client

PROGRAM = [sys.executable, "-P", "-m", "batchd"]
SLEEPING = [sys.executable, "-P", os.fspath(Path(__file__).with_name("scaling_daemon.py"))]
LOOK_S = 0.01
START_TIMEOUT_S = 120.0


@dataclass(slots=True)
class Daemon:
    """A running daemon. ``status`` asks it; ``key`` is one of a worker host, if it wants keys."""

    pid: int
    address: str
    key: Path | None
    client: batchd_client.Daemon
    folder: Path

    def status(self) -> Any:
        """What the daemon says of itself."""
        return self.client.status()

    @property
    def links(self) -> list[Any]:
        """Its worker hosts."""
        links: list[Any] = self.status()["pool"]["links"]
        return links

    @property
    def remote_samples(self) -> int:
        """Samples that its present worker hosts have filled."""
        return sum(link["samples"] for link in self.links)

    @property
    def samples(self) -> int:
        """Samples that all workers have filled."""
        (stream,) = self.status()["streams"]
        return int(stream["decoded_samples"])

    @property
    def gateways(self) -> list[int]:
        """The processes of its gateways."""
        return [pid for pid in children(self.pid) if b"batchd.pool.gateway" in command_line(pid)]

    def wait_serving(self, hosts: int) -> None:
        """Wait until so many worker hosts have proved themselves; a trainer reads meanwhile."""
        wait_until(lambda: sum(link["state"] == "serving" for link in self.links) >= hosts, f"{hosts} worker hosts")


@contextmanager
def run_daemon(  # noqa: PLR0913  the facts of one side
    folder: Path,
    stream: str,
    *,
    workers: int = 1,
    gateways: int = 1,
    with_key: bool = False,
    image_us: float = 0.0,
    more: str = "",
    decisions: Path | None = None,
) -> Iterator[Daemon]:
    """Run ``batchd serve`` with its files in ``folder``.

    With ``image_us`` its own workers sleep so long for an image.
    """
    folder.mkdir(exist_ok=True)
    keys, key, config = folder / "keys", folder / "pool.key", folder / "batchd.toml"
    if with_key and not key.exists():
        words = ["keys", "new", "--role", "worker", "--name", "pool", "-o", key, "--keys-dir", keys]
        subprocess.run([*PROGRAM, *words], check=True, stdout=subprocess.DEVNULL)
    pool = ""
    if gateways:
        pool = (
            f'worker_address = "127.0.0.1:{_free_ports(gateways)}"\nkeys_dir = "{keys}"\npool_gateways = {gateways}\n'
        )
    config.write_text(
        f'[daemon]\nworkers = {workers}\nmemory = "1GiB"\nhttp = "off"\nruntime_dir = "{folder}/run"\n{pool}{more}{stream}'
    )
    environment = {**os.environ, "SCALING_IMAGE_US": str(image_us)}
    if decisions is not None:
        decisions.write_bytes(bytes(DECISIONS.size))
        environment["SCALING_DECISIONS"] = os.fspath(decisions)
    words = ["serve", "--config", os.fspath(config), "--log-level", "error"]
    with _running([*(SLEEPING if image_us else PROGRAM), *words], environment, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        address = process.stdout.readline().decode().strip()
        with batchd_client.connect(address, connect_timeout_s=START_TIMEOUT_S) as client:
            yield Daemon(process.pid, address, key if with_key else None, client, folder)


def _free_ports(number: int) -> int:
    """The first of so many free ports in a row."""
    while True:
        with ExitStack() as stack, suppress(OSError, OverflowError):
            first: int = stack.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1]
            for port in range(first + 1, first + number):
                stack.enter_context(socket.create_server(("127.0.0.1", port)))
            return first


@contextmanager
def run_host(
    daemon: Daemon, *, workers: int = 2, image_us: float = 0.0, index_dir: Path | None = None
) -> Iterator[int]:
    """Run ``batchd worker`` for a daemon: its process id. Its workers sleep with ``image_us``."""
    words = ["worker", daemon.status()["pool"]["address"], "--workers", str(workers), "--log-level", "error"]
    if not words[1].startswith("tcp://"):
        words[1] = f"tcp://{words[1]}"
    words += ["--index-dir", os.fspath(index_dir or daemon.folder / "indexes")]
    words += ["--key", os.fspath(daemon.key)] if daemon.key else []
    environment = {**os.environ, "SCALING_IMAGE_US": str(image_us)}
    with _running([*(SLEEPING if image_us else PROGRAM), *words], environment, stdout=subprocess.DEVNULL) as process:
        yield process.pid


@contextmanager
def _running(words: list[str], environment: dict[str, str], stdout: int) -> Iterator["subprocess.Popen[bytes]"]:
    with subprocess.Popen(words, stdout=stdout, env=environment) as process:
        try:
            yield process
        finally:
            with suppress(ProcessLookupError):
                process.send_signal(signal.SIGCONT)
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Wait for ``what``; raises ``TimeoutError`` after START_TIMEOUT_S."""
    end_s = time.monotonic() + START_TIMEOUT_S
    while not condition():
        if time.monotonic() > end_s:
            raise TimeoutError(f"no {what} after {START_TIMEOUT_S:g} s")
        time.sleep(LOOK_S)
