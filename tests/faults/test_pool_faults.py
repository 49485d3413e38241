"""Worker hosts, their workers, the gateway or the daemon die or hang: positions stay exact."""

import os
import random
import signal
import subprocess
import threading
import time
from collections import Counter
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

import batchd_client
from support.commands import batchd
from support.expected import Expected
from support.fake_gateway import WorkerHostProcess
from support.kernel import gateways_of, is_alive, workers_of
from support.network import Proxy, free_port, two_hosts
from support.pools import gateway_of, links, pool_keys, wait_serving
from support.seen import see
from support.waiting import PATIENCE_S, wait_until

BETWEEN = 10
"""Batches between two faults."""
CHANCE = random.Random(1)
FEW = 100
"""So many kills surely are of every kind."""
LOST = 0.05
"""Part of the data that a lossy wire loses."""


class Reader:
    """A trainer in a thread reads epochs, and compares each with the expected one."""

    def __init__(self, daemon) -> None:
        self.batches = 0
        self.wrong: list[object] = []
        self._daemon = daemon
        self._expected = Expected(daemon.config)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._read)

    @contextmanager
    def reading(self):
        """Read while the block runs; afterwards no batch may have been wrong."""
        self._thread.start()
        try:
            yield self
            self.goes_on()
        finally:
            self._ended.set()
            self._thread.join()
        assert self.wrong == []

    def goes_on(self, batches: int = 60) -> None:
        """Wait until the trainer has read so many more batches."""
        goal = self.batches + batches
        wait_until(lambda: self.batches >= goal or self.wrong, "the trainer gets its batches")
        assert self.wrong == []

    def _read(self) -> None:
        try:
            with batchd_client.connect(self._daemon.address, reconnect_timeout_s=PATIENCE_S) as connection:
                stream = connection.stream("photos")
                epoch = 0
                while not self._ended.is_set():
                    seen = see(stream)
                    if seen != self._expected.epoch(epoch):
                        self.wrong.append(seen)
                    self.batches += len(seen)
                    epoch += 1
        except Exception as error:  # noqa: BLE001  told to the test
            self.wrong.append(error)


@pytest.fixture
def pool(start_daemon, start_host):
    """Start a daemon with a local worker, two serving worker hosts, and a trainer that reads."""
    daemon = start_daemon(**pool_keys(), chunk_rows=2)
    hosts = [start_host(daemon, "--name", name) for name in ("one", "two")]
    wait_serving(daemon, 2)
    with Reader(daemon).reading() as reader:
        reader.goes_on()
        yield daemon, hosts, reader


def test_a_killed_worker_host_costs_no_batch_and_may_come_again(pool, start_host):
    daemon, hosts, reader = pool
    hosts[0].process.kill()
    wait_until(lambda: len(links(daemon)) == 1, "the daemon knows of its end")
    reader.goes_on()
    start_host(daemon, "--name", "again")
    wait_until(lambda: sum(link["state"] == "serving" for link in links(daemon)) == 2, "another one serves")


@pytest.mark.thorough
def test_killed_workers_of_a_worker_host_are_replaced(pool):
    daemon, hosts, reader = pool
    for host in hosts:
        for pid in host.worker_pids():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    reader.goes_on()
    wait_until(lambda: sum(link["workers"] for link in links(daemon)) == 4, "there are new workers")


@pytest.mark.thorough
def test_a_killed_gateway_is_replaced_and_the_hosts_return_by_themselves(pool):
    daemon, _hosts, reader = pool
    before = gateway_of(daemon)
    os.kill(before, signal.SIGKILL)
    reader.goes_on()
    wait_until(lambda: gateway_of(daemon) != before, "there is another gateway")
    wait_until(lambda: sum(link["state"] == "serving" for link in links(daemon)) == 2, "both hosts serve again")


@pytest.mark.thorough
def test_a_killed_one_of_several_gateways_ends_its_links_alone_and_its_hosts_are_spread_again(start_daemon, start_host):
    """The other links stay open; each gateway is killed in turn."""
    daemon = start_daemon(**pool_keys(3), chunk_rows=2)
    for name in range(6):
        start_host(daemon, "--name", str(name), workers=1)
    wait_serving(daemon, 6)
    with Reader(daemon).reading() as reader:
        for gateway in range(3):
            wait_until(lambda: _spread(daemon) == [2, 2, 2], "two hosts come through each gateway")
            others = {link["link"] for link in links(daemon) if link["gateway"] != gateway}
            os.kill(_gateway_at(daemon, gateway), signal.SIGKILL)
            wait_until(lambda gateway=gateway: gateway in daemon.status()["pool"]["gateways_down"], "its end is known")
            assert others <= {link["link"] for link in links(daemon)}
            reader.goes_on()
        wait_until(lambda: _spread(daemon) == [2, 2, 2], "two hosts come through each gateway")
        wait_until(lambda: sum(link["state"] == "serving" for link in links(daemon)) == 6, "all hosts serve again")


@pytest.mark.thorough
def test_a_stopped_one_of_several_gateways_delays_no_trainer(start_daemon, start_host):
    """The gateway answers no withdrawal, so the daemon kills it; its hosts return."""
    daemon = start_daemon(**pool_keys(2), chunk_rows=2)
    for name in ("one", "two"):
        start_host(daemon, "--name", name)
    wait_serving(daemon, 2)
    with Reader(daemon).reading() as reader:
        reader.goes_on()
        stopped = _gateway_at(daemon, 1)
        os.kill(stopped, signal.SIGSTOP)
        wait_until(lambda: not is_alive(stopped), "it is killed")
        reader.goes_on()
        wait_until(lambda: _spread(daemon) == [1, 1], "a host comes through each gateway")


@pytest.mark.thorough
def test_a_killed_daemon_gets_its_hosts_back(pool):
    daemon, _hosts, reader = pool
    daemon.restart()
    reader.goes_on()
    wait_until(lambda: sum(link["state"] == "serving" for link in links(daemon)) == 2, "both hosts serve again")


@pytest.mark.thorough
def test_no_trainer_waits_for_a_worker_host_that_is_stopped(pool):
    """The host's orders are withdrawn; when it continues, its rows are dropped."""
    daemon, hosts, reader = pool
    for host in hosts:
        host.send(signal.SIGSTOP)
    wait_until(lambda: _has_withdrawn(daemon), "their orders are withdrawn")
    reader.goes_on(200)
    for host in hosts:
        host.send(signal.SIGCONT)
    reader.goes_on()
    wait_until(lambda: sum(link["state"] == "serving" for link in links(daemon)) == 2, "both hosts serve again")


@pytest.mark.thorough
def test_a_stopped_worker_of_a_worker_host_delays_no_trainer(pool):
    _daemon, hosts, reader = pool
    stopped = min(hosts[0].worker_pids())
    os.kill(stopped, signal.SIGSTOP)
    try:
        reader.goes_on(200)
    finally:
        os.kill(stopped, signal.SIGCONT)


@pytest.mark.thorough
def test_a_network_that_is_cut_longer_than_every_time_out_heals(start_daemon, start_host):
    daemon = start_daemon(**pool_keys(), chunk_rows=2)
    port = int(daemon.status()["pool"]["address"].rpartition(":")[2])
    with Proxy(port) as proxy:
        start_host(daemon, address=f"tcp://127.0.0.1:{proxy.port}")
        wait_serving(daemon, 1)
        with Reader(daemon).reading() as reader:
            reader.goes_on()
            proxy.is_open, proxy.is_stalled = False, True
            wait_until(lambda: not links(daemon), "the heartbeats have ended the link")
            reader.goes_on()
            proxy.is_open, proxy.is_stalled = True, False
            wait_until(lambda: [link["state"] for link in links(daemon)] == ["serving"], "it serves again")


def _resend_some(data: bytes) -> bytes:
    """Pass on bytes as TCP does over a lossy wire: it sends lost ones again after 0.2 s."""
    if CHANCE.random() < LOST:
        time.sleep(0.2)
    return data


@pytest.mark.thorough(after_first=True)
@pytest.mark.parametrize("wire", ["slow", "lossy"])
def test_rows_over_a_slow_or_lossy_wire_are_exact(start_daemon, start_host, wire):
    """They come late, in part after their withdrawal, and are in their batches once."""
    daemon = start_daemon(**pool_keys(), chunk_rows=2)
    with Proxy(int(daemon.status()["pool"]["address"].rpartition(":")[2])) as proxy:
        if wire == "slow":
            proxy.delay_s = 0.05
        else:
            proxy.alter = proxy.spoil = _resend_some
        start_host(daemon, address=f"tcp://127.0.0.1:{proxy.port}")
        wait_serving(daemon, 1)
        with Reader(daemon).reading():
            goal = _remote_samples(daemon) + 20
            wait_until(lambda: _remote_samples(daemon) > goal, "rows come over the wire")


@pytest.mark.thorough
def test_rows_over_a_cable_that_drops_packets_are_exact(start_daemon, start_host, tmp_path):
    """A token bucket between two hosts passes on 300 kbit/s, with keys and thus encrypted."""
    keys, pool = tmp_path / "keys", tmp_path / "pool.key"
    batchd("keys", "new", "--role", "worker", "--name", "pool", "-o", str(pool), "--keys-dir", str(keys))
    with two_hosts() as hosts:
        try:
            hosts.narrow("300kbit")
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"there is no token bucket here (tc is needed): {error}")
        address = f"{hosts.ours}:{free_port()}"
        daemon = start_daemon(**{**pool_keys(), "worker_address": address}, keys_dir=str(keys), chunk_rows=2)
        options = "--key", str(pool)
        start_host(daemon, *options, address=f"tcp://{address}", through=hosts.on_the_other())
        wait_serving(daemon, 1)
        with Reader(daemon).reading():
            goal = _remote_samples(daemon) + 20
            wait_until(
                lambda: _remote_samples(daemon) > goal and hosts.dropped(),
                "rows come over the cable, and packets are dropped",
            )


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("seed", "kills", "gateways"),
    [(6, 8, 2), *(pytest.param(seed, 250, 1 + seed % 2, marks=pytest.mark.slow) for seed in (2, 3, 4, 5))],
)
def test_random_kills_stops_and_cuts_lose_and_repeat_nothing(start_daemon, start_host, seed, kills, gateways):
    """The slow cases have a thousand kills and cuts, and in addition stops and orderly ends.

    They hit worker hosts, their workers, local workers, gateways, the daemon and the links.
    """
    daemon = start_daemon(**pool_keys(gateways), chunk_rows=2)
    chance = random.Random(seed)
    with Proxy(int(daemon.status()["pool"]["address"].rpartition(":")[2])) as proxy:
        disorder = Disorder(daemon, proxy, start_host, chance)
        wait_serving(daemon, 2)
        with Reader(daemon).reading() as reader:
            while disorder.kills.total() < kills:
                disorder.strike()
                reader.goes_on(BETWEEN)
            disorder.end()
            reader.goes_on()
            wait_until(lambda: any(link["state"] == "serving" for link in links(daemon)), "a host serves in the end")
    assert kills < FEW or disorder.kills.keys() == disorder.deadly.keys()


class Disorder:
    """Two worker hosts, one of them behind a proxy, and the faults that hit them.

    ``kills`` counts the processes that were killed and the connections that were cut, by kind; the
    kinds are those of ``deadly``.
    """

    def __init__(self, daemon, proxy: Proxy, start_host, chance: random.Random) -> None:
        self._daemon, self._proxy, self._start_host, self._chance = daemon, proxy, start_host, chance
        self._hosts = [self._start(0), self._start(1)]
        self._stopped: set[int] = set()
        self.kills: Counter[str] = Counter()
        self.deadly = {
            "worker host": lambda: self._end_host(signal.SIGKILL),
            "worker of a host": lambda: self._kill_one_of(self._any_host().worker_pids()),
            "gateway": lambda: self._kill_one_of(gateways_of(daemon.pid)),
            "local worker": lambda: self._kill_one_of(workers_of(daemon.pid)),
            "daemon": self._restart,
            "link": proxy.drop,
        }
        self._other = [lambda: self._end_host(signal.SIGTERM), self._stop_host, self.end]

    def strike(self) -> None:
        """Do one fault. One that hits no process and no connection does not count."""
        kind, fault = self._chance.choice([*self.deadly.items(), *((None, other) for other in self._other)])
        hit = fault()
        if kind is not None and hit:
            self.kills[kind] += 1

    def end(self) -> None:
        """Continue all stopped processes."""
        for pid in self._stopped:
            _signal(pid, signal.SIGCONT)
        self._stopped.clear()

    def _start(self, place: int) -> WorkerHostProcess:
        return self._start_host(self._daemon, address=f"tcp://127.0.0.1:{self._proxy.port}" if place else None)

    def _any_host(self) -> WorkerHostProcess:
        return self._hosts[self._chance.randrange(2)]

    def _end_host(self, number: signal.Signals) -> bool:
        place = self._chance.randrange(2)
        is_hit = self._hosts[place].process.poll() is None
        self._hosts[place].send(number)
        self._hosts[place] = self._start(place)
        return is_hit

    def _stop_host(self) -> None:
        pid = self._any_host().pid
        _signal(pid, signal.SIGSTOP)
        self._stopped.add(pid)

    def _restart(self) -> bool:
        self._daemon.restart()
        return True

    def _kill_one_of(self, pids: set[int]) -> bool:
        return bool(pids) and _signal(self._chance.choice(sorted(pids)), signal.SIGKILL)


def _spread(daemon) -> list[int]:
    """Return the number of worker hosts of each gateway."""
    numbers = Counter(link["gateway"] for link in links(daemon))
    return [numbers[gateway] for gateway in range(daemon.status()["pool"]["gateways"])]


def _gateway_at(daemon, number: int) -> int:
    """Return the process of a gateway."""
    host, _colon, port = daemon.status()["pool"]["address"].rpartition(":")
    endpoint = f"{host}:{int(port) + number}".encode()
    (pid,) = (
        pid for pid in gateways_of(daemon.pid) if endpoint in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    )
    return pid


def _remote_samples(daemon) -> int:
    """Return the number of samples that the present worker hosts have filled."""
    return sum(link["samples"] for link in links(daemon))


def _has_withdrawn(daemon) -> bool:
    """Tell whether orders were withdrawn, or moved because heartbeats ended the link."""
    pool = daemon.status()["pool"]
    return any(link["withdrawn"] for link in pool["links"]) or pool["ended_links"] > 0


def _signal(pid: int, number: signal.Signals) -> bool:
    """Send a signal; false if the process has ended."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True
