"""Networks that misbehave: a free port, a proxy between trainer and daemon, and two hosts made of namespaces. Tests only."""

import os
import select
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Self

import pytest


def free_port() -> int:
    """A port of loopback that nobody listens on just now."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


class Proxy:
    """Passes bytes between whoever connects and a port, in a thread. What it does to them can be changed at any time.

    ``cut_after``: connections end when so many bytes have come from the daemon, in the middle of whatever it is, as long as there
    are ``cuts_left``; ``delay_s`` is slept before each part is passed on; while ``is_open`` is false nobody gets through;
    ``alter`` gives what the trainer gets instead of each part that the daemon says, and ``spoil`` the other way round. ``passed``
    counts the bytes from the daemon on each connection; the one after ``connections_max`` is not let through.
    """

    def __init__(self, port: int) -> None:
        self.port = free_port()
        self.delay_s = 0.0
        self.cut_after: int | None = None
        self.cuts_left = 1 << 30
        self.is_open = True
        self.alter: Callable[[bytes], bytes] = bytes
        self.connections = 0
        self.spoil: Callable[[bytes], bytes] = bytes
        self.connections_max = 1 << 30
        self.passed: list[int] = []
        self._target = port
        self._server = socket.create_server(("127.0.0.1", self.port))
        self._ends: list[socket.socket] = []
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def drop(self, only: int | None = None) -> None:
        """Cut every connection there is, or ``only`` the last but so many."""
        pairs = list(zip(self._ends[::2], self._ends[1::2], strict=True))
        for pair in pairs if only is None else [pairs[-1 - only]]:
            for end in pair:
                with suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End everything."""
        self._stop.set()
        self.drop()
        for thread in self._threads:
            thread.join()
        self._server.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def _accept(self) -> None:
        while not self._stop.is_set():
            if not select.select([self._server], [], [], 0.05)[0]:
                continue
            ours, _address = self._server.accept()
            theirs = None
            with suppress(OSError):
                theirs = socket.create_connection(("127.0.0.1", self._target))
            if theirs is None or not self.is_open or self.connections >= self.connections_max:
                ours.close()
                if theirs is not None:
                    theirs.close()
                continue
            number = self.connections
            self.connections += 1
            self.passed.append(0)
            self._ends += [ours, theirs]
            thread = threading.Thread(target=self._pass_on, args=(ours, theirs, number), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _pass_on(self, trainer: socket.socket, daemon: socket.socket, number: int) -> None:
        passed = 0
        with trainer, daemon, suppress(OSError):
            while not self._stop.is_set():
                ready, _, _ = select.select([trainer, daemon], [], [], 0.05)
                for end in ready:
                    data = end.recv(1 << 16)
                    if not data:
                        return
                    if end is daemon:
                        data = self.alter(data)
                    if self.delay_s:
                        time.sleep(self.delay_s)
                    if end is daemon and self._is_cut(passed + len(data)):
                        assert self.cut_after is not None
                        trainer.sendall(data[: self.cut_after - passed])
                        return
                    if end is daemon:
                        passed += len(data)
                        self.passed[number] = passed
                        trainer.sendall(data)
                    else:
                        daemon.sendall(self.spoil(data))

    def _is_cut(self, passing: int) -> bool:
        """Is this connection to end within the part that is to be passed on?"""
        if self.cut_after is None or passing <= self.cut_after or self.cuts_left == 0:
            return False
        self.cuts_left -= 1
        return True


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


class TwoHosts:
    """A second host, made of a network namespace, with a cable to ours that can be pulled. Needs root."""

    OURS, THEIRS = "10.213.77.1", "10.213.77.2"

    def __init__(self) -> None:
        self._namespace = f"batchd-{os.getpid()}"
        self._cable = f"bd{os.getpid() % 100_000}"

    def make(self) -> None:
        """Make host and cable. Raises ``CalledProcessError`` or ``OSError`` where that is not allowed."""
        _ip("netns", "add", self._namespace)
        _ip("link", "add", f"{self._cable}a", "type", "veth", "peer", "name", f"{self._cable}b")
        _ip("link", "set", f"{self._cable}b", "netns", self._namespace)
        _ip("addr", "add", f"{self.OURS}/24", "dev", f"{self._cable}a")
        _ip("link", "set", f"{self._cable}a", "up")
        _ip("netns", "exec", self._namespace, "ip", "addr", "add", f"{self.THEIRS}/24", "dev", f"{self._cable}b")
        _ip("netns", "exec", self._namespace, "ip", "link", "set", f"{self._cable}b", "up")
        _ip("netns", "exec", self._namespace, "ip", "link", "set", "lo", "up")

    def pull_cable(self) -> None:
        """From now on nothing arrives, on either side, and nobody is told."""
        _ip("link", "set", f"{self._cable}a", "down")

    def plug_in(self) -> None:
        """Mend the cable. The address went with the link's state on some kernels, so it is given again."""
        _ip("link", "set", f"{self._cable}a", "up")
        _ip("addr", "replace", f"{self.OURS}/24", "dev", f"{self._cable}a")

    def on_the_other(self, *command: str) -> list[str]:
        """The command that runs ``command`` on the other host."""
        return ["ip", "netns", "exec", self._namespace, *command]

    def remove(self) -> None:
        """Take everything away."""
        for arguments in (("link", "del", f"{self._cable}a"), ("netns", "del", self._namespace)):
            subprocess.run(["ip", *arguments], check=False, capture_output=True)


@contextmanager
def two_hosts() -> Iterator[TwoHosts]:
    """Make two hosts, or skip the test and say why."""
    hosts = TwoHosts()
    with ExitStack() as stack:
        stack.callback(hosts.remove)
        try:
            hosts.make()
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"no network namespaces can be made here (root and iproute2 are needed): {error}")
        yield hosts
