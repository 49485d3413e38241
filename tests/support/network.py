"""Faulty networks: a free port, a proxy before the daemon, two hosts as namespaces. Tests only."""

import json
import os
import random
import re
import select
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from ipaddress import IPv4Network, ip_network
from typing import Self

import pytest

from support.keeper import cleared_by
from support.kernel import started_at

PORTS = range(10_000, 32_000)
"""Below the ephemeral ports, so no connection takes a port between its choice and its use."""
_PREFIX = "batchd-test-"
_SUBNETS = IPv4Network("10.213.0.0/16")
_SUBNET_BITS = 30
_ATTEMPTS = 20


def free_port(number: int = 1) -> int:
    """Return a free loopback port; the first of ``number`` ports in a row."""
    for port in random.Random().sample(PORTS, len(PORTS)):
        with suppress(OSError), ExitStack() as stack:
            for one in range(port, port + number):
                stack.enter_context(socket.create_server(("127.0.0.1", one)))
            return port
    raise OSError("no port of loopback is free")


class Proxy:
    """A proxy that passes bytes between clients and a port, in a thread.

    Tests can change the treatment of the bytes at any time.

    ``cut_after``: connections are closed after so many bytes from the daemon, in the middle of a
    message, as long as there are ``cuts_left``. ``delay_s`` is slept before each part is passed
    on. While ``is_open`` is false, no new connection gets through. While ``is_stalled`` is true,
    neither bytes nor the end of a connection get through. ``alter`` returns the bytes that the
    trainer gets instead of each part from the daemon, and ``spoil`` does the same in the other
    direction. ``passed`` counts the bytes from the daemon on each connection; the connection after
    ``connections_max`` does not get through.
    """

    def __init__(self, port: int) -> None:
        self.port = free_port()
        self.delay_s = 0.0
        self.cut_after: int | None = None
        self.cuts_left = 1 << 30
        self.is_open = True
        self.is_stalled = False
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

    def drop(self, only: int | None = None) -> int:
        """Cut every present connection, or ``only`` the last but so many; return how many."""
        pairs = list(zip(self._ends[::2], self._ends[1::2], strict=True))
        if only is not None:
            pairs = [pairs[-1 - only]]
        return sum(_shut(ours) | _shut(theirs) for ours, theirs in pairs)

    def close(self) -> None:
        """Close all connections."""
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
                if self.is_stalled:
                    time.sleep(0.05)
                    continue
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
        """Return whether this connection ends within the part that is passed on next."""
        if self.cut_after is None or passing <= self.cut_after or self.cuts_left == 0:
            return False
        self.cuts_left -= 1
        return True


def _shut(end: socket.socket) -> bool:
    """End a connection; false if it has ended."""
    try:
        end.shutdown(socket.SHUT_RDWR)
    except OSError:
        return False
    return True


def _ip(*arguments: str) -> str:
    return subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True).stdout


class TwoHosts:
    """A second host: a network namespace with a cable to this host that can be pulled.

    Needs root.

    The namespace is named after the process that made it, so a later run finds it and removes it
    if that process has ended. The cable is named after its subnet: it is made only if no other run
    uses that subnet.
    """

    def __init__(self) -> None:
        self.ours = self.theirs = ""
        self._namespace = f"{_PREFIX}{os.getpid()}-{started_at(os.getpid())}"
        self._cable = ""

    def make(self) -> None:
        """Make host and cable.

        Raises ``CalledProcessError`` or ``OSError`` where that is not allowed.
        """
        for namespace in _left_namespaces():
            subprocess.run(["ip", "netns", "del", namespace], check=False, capture_output=True)
        _ip("netns", "add", self._namespace)
        self._cable, self.ours, self.theirs = _lay_cable(self._namespace)
        _ip("addr", "add", f"{self.ours}/{_SUBNET_BITS}", "dev", f"{self._cable}a")
        _ip("link", "set", f"{self._cable}a", "up")
        self._on_theirs("addr", "add", f"{self.theirs}/{_SUBNET_BITS}", "dev", f"{self._cable}b")
        self._on_theirs("link", "set", f"{self._cable}b", "up")
        self._on_theirs("link", "set", "lo", "up")

    @property
    def removal(self) -> tuple[str, ...]:
        """Return the command that removes all: a namespace takes its end of the pair with it."""
        return "ip", "netns", "del", self._namespace

    def pull_cable(self) -> None:
        """Stop all traffic in both directions without a notice to either side."""
        _ip("link", "set", f"{self._cable}a", "down")

    def plug_in(self) -> None:
        """Mend the cable.

        Some kernels remove the address with the link's state, so it is set again.
        """
        _ip("link", "set", f"{self._cable}a", "up")
        _ip("addr", "replace", f"{self.ours}/{_SUBNET_BITS}", "dev", f"{self._cable}a")

    def narrow(self, rate: str) -> None:
        """Let the other host send no more than ``rate`` ("2mbit"), and drop what exceeds 4 kB.

        Raises ``CalledProcessError`` or ``OSError`` without tc and its token bucket.
        """
        bucket = ("root", "tbf", "rate", rate, "burst", "2kb", "limit", "4kb")
        command = self.on_the_other("tc", "qdisc", "replace", "dev", f"{self._cable}b", *bucket)
        subprocess.run(command, check=True, capture_output=True)

    def dropped(self) -> int:
        """Count the packets that the narrow cable has dropped."""
        command = self.on_the_other("tc", "-s", "-json", "qdisc", "show", "dev", f"{self._cable}b")
        (bucket,) = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
        return int(bucket["drops"])

    def on_the_other(self, *command: str) -> list[str]:
        """Return the command that runs ``command`` on the other host."""
        return ["ip", "netns", "exec", self._namespace, *command]

    def _on_theirs(self, *arguments: str) -> None:
        _ip("-netns", self._namespace, *arguments)


def _left_namespaces() -> list[str]:
    """Return the namespaces of runs that have ended."""
    left = []
    for line in _ip("netns", "list").splitlines():
        name = line.split()[0]
        made_by = re.fullmatch(rf"{_PREFIX}(\d+)-(\d+)", name)
        if made_by and started_at(int(made_by[1])) != int(made_by[2]):
            left.append(name)
    return left


def _lay_cable(namespace: str) -> tuple[str, str, str]:
    """Connect ``namespace`` by a veth pair in an unused subnet.

    Return its name, our address and their address.
    """
    used = [
        ip_network(route["dst"])
        for route in json.loads(_ip("-json", "route", "show", "table", "all"))
        if _is_ipv4(route)
    ]
    free = [subnet for subnet in _SUBNETS.subnets(new_prefix=_SUBNET_BITS) if not any(map(subnet.overlaps, used))]
    for subnet in random.Random().sample(free, min(len(free), _ATTEMPTS)):
        cable = f"bd{int(subnet.network_address):x}"
        with suppress(subprocess.CalledProcessError):  # another run was quicker: the name is taken
            _ip("link", "add", f"{cable}a", "type", "veth", "peer", "name", f"{cable}b", "netns", namespace)
            ours, theirs = map(str, subnet.hosts())
            return cable, ours, theirs
    raise OSError(f"none of {_ATTEMPTS} subnets of {_SUBNETS} was free")


def _is_ipv4(route: dict[str, str]) -> bool:
    return route["dst"] != "default" and ":" not in route["dst"]


@contextmanager
def two_hosts() -> Iterator[TwoHosts]:
    """Make two hosts, or skip the test with the reason."""
    hosts = TwoHosts()
    with ExitStack() as stack:
        stack.enter_context(cleared_by(*hosts.removal))
        stack.callback(subprocess.run, hosts.removal, check=False, capture_output=True)
        try:
            hosts.make()
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"no network namespaces can be made here (root and iproute2 are needed): {error}")
        yield hosts
