"""Worker hosts on real clusters of Ray, whose parts are killed and stopped.

Except in one test, a stand-in replaces ``batchd worker``, and a file has the wanted number of
workers.
"""

import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

import batchd_client
from batchd.runtime.keys import open_keys
from support.daemon_process import clean_environment
from support.kernel import is_alive, process_ids
from support.network import free_port
from support.ray_cluster import RayCluster
from support.waiting import PATIENCE_S, wait_until

pytest.importorskip("ray", reason="Ray is not installed (make test-ray)")

TESTS = Path(__file__).parents[1]
ADDRESS = "tcp://gpu1:7072"
KEY_NAME = "ray-gpu1-7072"
LONG_S = PATIENCE_S
"""A timeout for Ray's own delays, on a busy machine."""


class Hosts:
    """The worker hosts of one pool, as their stand-ins write into a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.want(0)

    def want(self, workers: int) -> None:
        """Let the daemon want so many workers."""
        (self.folder / "new").write_text(str(workers))
        (self.folder / "new").rename(self.folder / "wanted")

    def running(self) -> dict[int, dict]:
        """Return what each running one has written, by its process."""
        found = {}
        for file in self.folder.glob("*.json"):
            if Path("/proc", file.stem).exists():
                found[int(file.stem)] = json.loads(file.read_text())
        return found

    def wait(self, count: int, besides=()) -> dict[int, dict]:
        """Wait for so many, besides the known ones."""

        def there() -> dict[int, dict] | None:
            found = {pid: facts for pid, facts in self.running().items() if pid not in besides}
            return found if len(found) == count else None

        if not count:
            wait_until(lambda: not self.running(), "no worker host runs", LONG_S)
            return {}
        return wait_until(there, f"{count} worker hosts run", LONG_S)

    @property
    def left(self) -> set[int]:
        """Return those that have finished their work."""
        file = self.folder / "left"
        return set(map(int, file.read_text().split())) if file.exists() else set()


@pytest.fixture
def hosts(tmp_path) -> Hosts:
    return Hosts(tmp_path)


@pytest.fixture
def start_cluster(tmp_path):
    """Start clusters; they end with the test."""
    with ExitStack() as stack:

        def start(*, autoscaled: bool = False, **environment: str) -> RayCluster:
            cluster = RayCluster(tmp_path, {**clean_environment(), **environment}, autoscaled=autoscaled)
            stack.callback(cluster.close)
            return cluster

        yield start


@pytest.fixture
def start_driver(tmp_path):
    """Start drivers; they end with the test."""
    with ExitStack() as stack:

        def start(cluster: RayCluster, *arguments: str) -> "subprocess.Popen[bytes]":
            words = [ADDRESS, "--address", cluster.address, "--cpus", "1", "--keys-dir", str(tmp_path / "keys")]
            log = stack.enter_context((tmp_path / "driver.log").open("ab"))
            command = [sys.executable, "-m", "support.ray_driver", str(tmp_path), *words, *arguments]
            driver = stack.enter_context(subprocess.Popen(command, cwd=TESTS, env=cluster.environment, stderr=log))
            stack.callback(driver.kill)
            return driver

        yield start


def batchd_ray(cluster: RayCluster, *arguments: str, status: int = 0) -> str:
    """Run another command of ``batchd ray``; return its output."""
    done = subprocess.run(
        [sys.executable, "-m", "batchd", "ray", *arguments, "--address", cluster.address],
        env=cluster.environment,
        capture_output=True,
        text=True,
        timeout=LONG_S,
        check=False,
    )
    assert done.returncode == status, done.stdout + done.stderr
    return done.stderr if status else done.stdout


def events(folder: Path) -> list[str]:
    """Return the events that the drivers have logged."""
    lines = (folder / "driver.log").read_text().splitlines()
    return [json.loads(line)["event"] for line in lines if line.startswith("{")]


def test_worker_hosts_come_and_go_with_the_demand(start_cluster, start_driver, hosts, tmp_path) -> None:
    """Worker hosts have the pool's own key, are listed, and drain before they leave."""
    cluster = start_cluster()
    cluster.add(4)
    driver = start_driver(cluster, "--", "--map", "/data=/mnt/data")
    hosts.want(3)

    first = hosts.wait(3)
    listed = batchd_ray(cluster, "status")
    hosts.want(1)
    hosts.wait(1)

    arguments = [ADDRESS, "--key", "/proc/self/fd/0", "--workers", "1", "--map", "/data=/mnt/data"]
    assert {tuple(facts["arguments"]) for facts in first.values()} == {tuple(arguments)}
    assert listed.count("running") == 3
    assert f"serving {ADDRESS}" in listed
    assert len(hosts.left) == 2
    keys = open_keys(tmp_path / "keys")
    assert [key.name for key in keys.workers.accepted()] == [KEY_NAME]
    batchd_ray(cluster, "down", ADDRESS, "--keys-dir", str(tmp_path / "keys"))
    assert hosts.left == set(first)
    assert driver.wait(LONG_S) == 0
    assert events(tmp_path)[-1] == "pool taken down"
    assert not keys.workers.accepted()
    assert "no worker hosts" in batchd_ray(cluster, "status")


def test_a_daemon_gets_its_worker_hosts(start_cluster, start_daemon, tmp_path) -> None:
    """Without a stand-in, one starts while a trainer waits, returns after a kill, and leaves."""
    cluster, keys, port = start_cluster(), tmp_path / "keys", free_port()
    cluster.add(2)
    open_keys(keys).make_daemon_key()
    daemon = start_daemon(worker_address=f"127.0.0.1:{port}", keys_dir=str(keys), workers=1)
    options = ("--address", cluster.address, "--daemon", daemon.address, "--keys-dir", str(keys))

    def links() -> set[int]:
        return {link["link"] for link in daemon.status()["pool"]["links"] if link["workers"]}

    command = [sys.executable, "-m", "batchd", "ray", *options, "--min", "0", "--max", "1", "--cpus", "1"]
    with subprocess.Popen(command, env=cluster.environment) as driver:
        with reading(daemon.address):
            wait_until(links, "a worker host is connected", LONG_S)
        listed = batchd_ray(cluster, "status")
        first = links()
        [actor] = [pid for pid in process_ids() if Path(f"/proc/{pid}/comm").read_text() == "ray::HostActor\n"]
        os.kill(actor, signal.SIGKILL)
        wait_until(lambda: links() - first, "the killed one is connected again", LONG_S)
        with batchd_client.connect(daemon.address) as trainers:
            rows = sum(len(batch["index"]) for batch in trainers.stream("photos", epochs=1))
        batchd_ray(cluster, "down", "--keys-dir", str(keys))
        assert driver.wait(LONG_S) == 0

    assert f"tcp://127.0.0.1:{port}" in listed
    assert rows == daemon.stream_status()["samples"]
    wait_until(lambda: not daemon.status()["pool"]["links"], "no worker host is left", LONG_S)


@contextmanager
def reading(address: str) -> Iterator[None]:
    """Run a trainer that releases its batches at once, so it waits for workers."""
    end = threading.Event()

    def read() -> None:
        with batchd_client.connect(address) as daemon:
            stream = daemon.stream("photos")
            while not end.is_set():
                for _batch in stream:
                    pass

    trainer = threading.Thread(target=read)
    trainer.start()
    try:
        yield
    finally:
        end.set()
        trainer.join()


def test_a_killed_actor_comes_back(start_cluster, start_driver, hosts, tmp_path) -> None:
    """The old actor's worker host finishes by itself."""
    cluster = start_cluster()
    cluster.add(2)
    start_driver(cluster)
    hosts.want(1)
    [(host, facts)] = hosts.wait(1).items()

    os.kill(facts["parent"], signal.SIGKILL)

    hosts.wait(1, besides=[host])
    wait_until(lambda: host in hosts.left, "the old worker host has finished")
    wait_until(lambda: events(tmp_path).count("worker host started") == 2, "the driver knows of its end", LONG_S)


def test_worker_hosts_of_a_killed_raylet_come_back_on_another_node(
    start_cluster, start_driver, hosts, tmp_path
) -> None:
    """The driver requests no others meanwhile."""
    cluster = start_cluster()
    raylet = cluster.add(1)
    start_driver(cluster)
    hosts.want(1)
    [(host, _)] = hosts.wait(1).items()

    os.kill(raylet, signal.SIGKILL)
    wait_until(lambda: not hosts.running(), "the worker host has ended", LONG_S)
    cluster.add(1)

    hosts.wait(1, besides=[host])
    wait_until(lambda: events(tmp_path).count("worker host started") == 2, "the driver knows of its end", LONG_S)
    assert events(tmp_path).count("worker host asked for") == 1


def test_a_worker_host_of_a_stopped_raylet_is_replaced(start_cluster, start_driver, hosts) -> None:
    """The old host continues until its raylet learns that the cluster takes it for dead."""
    cluster = start_cluster()
    raylet = cluster.add(1)
    start_driver(cluster)
    hosts.want(1)
    [(host, _)] = hosts.wait(1).items()

    os.kill(raylet, signal.SIGSTOP)
    cluster.add(1)
    [(other, _)] = hosts.wait(1, besides=[host]).items()
    assert host in hosts.running()
    os.kill(raylet, signal.SIGCONT)

    wait_until(lambda: set(hosts.running()) == {other}, "the first one has ended", LONG_S)


def test_the_next_driver_finds_the_worker_hosts_of_a_killed_one(start_cluster, start_driver, hosts, tmp_path) -> None:
    """The next driver has their key, and starts no second ones."""
    cluster = start_cluster()
    cluster.add(2)
    driver = start_driver(cluster)
    hosts.want(2)
    before = hosts.wait(2)

    driver.kill()
    driver.wait()
    again = start_driver(cluster)
    wait_until(lambda: events(tmp_path).count("keeping worker hosts") == 2, "the next driver runs", LONG_S)
    hosts.want(1)
    [(left, facts)] = hosts.wait(1).items()

    assert {pid: one["key"] for pid, one in before.items()}[left] == facts["key"]
    assert hosts.left == set(before) - {left}
    again.terminate()
    assert again.wait(LONG_S) == 0
    assert set(hosts.running()) == {left}
    assert events(tmp_path)[-1] == "worker hosts left to themselves"


def test_worker_hosts_with_a_revoked_key_are_replaced(start_cluster, start_driver, hosts, tmp_path) -> None:
    """The next driver replaces them, with a new key."""
    cluster = start_cluster()
    cluster.add(2)
    driver = start_driver(cluster)
    hosts.want(1)
    [(host, facts)] = hosts.wait(1).items()
    driver.terminate()
    driver.wait(LONG_S)

    open_keys(tmp_path / "keys").revoke(KEY_NAME)
    start_driver(cluster)

    [(_, again)] = hosts.wait(1, besides=[host]).items()
    assert again["key"] != facts["key"]
    assert host in hosts.left


def test_worker_hosts_outlive_the_death_of_the_gcs_for_a_while(start_cluster, start_driver, hosts, tmp_path) -> None:
    """Worker hosts end when the raylets give up; Ray ends the driver, with a message."""
    cluster = start_cluster()
    cluster.add(1)
    driver = start_driver(cluster)
    hosts.want(1)
    [(host, _)] = hosts.wait(1).items()

    os.kill(cluster.gcs, signal.SIGKILL)

    assert host in hosts.running()
    assert driver.wait(LONG_S) == 1
    assert "Failed to connect to GCS" in (tmp_path / "driver.log").read_text().splitlines()[-1]
    wait_until(lambda: not hosts.running(), "the worker host has ended", LONG_S)


def test_rays_autoscaler_follows_the_worker_hosts(start_cluster, start_driver, hosts) -> None:
    """A pending worker host is enough demand for a node, and an idle node is removed."""
    # `ray start` uses a token that it finds
    cluster = start_cluster(autoscaled=True, RAY_AUTH_MODE="disabled")
    start_driver(cluster)
    hosts.want(2)
    both = hosts.wait(2)
    assert len(raylets()) == 1 + 2

    hosts.want(0)
    hosts.wait(0)

    wait_until(lambda: len(raylets()) == 1, "the nodes are removed", LONG_S)
    assert hosts.left == set(both)


def raylets() -> list[int]:
    """Return all raylets of this process namespace."""
    return [pid for pid in process_ids() if is_alive(pid) and Path(f"/proc/{pid}/comm").read_text() == "raylet\n"]


def test_a_key_on_the_nodes_is_not_made(start_cluster, start_driver, hosts, tmp_path) -> None:
    """The nodes have the key."""
    cluster = start_cluster()
    cluster.add(1)
    (tmp_path / "pool.key").write_text("on the node")
    start_driver(cluster, "--key-on-nodes", str(tmp_path / "pool.key"))
    hosts.want(1)

    [facts] = hosts.wait(1).values()

    assert facts["key"] == hashlib.sha256(b"on the node").hexdigest()
    assert not (tmp_path / "keys").exists()


def test_without_a_cluster_it_says_how_to_start_one(start_cluster) -> None:
    """A cluster that has ended is covered, too: Ray itself would wait for minutes."""
    cluster = start_cluster()
    cluster.close()

    said = batchd_ray(cluster, "status", status=1)

    assert f"batchd: no Ray cluster answers at '{cluster.address}': start one with `ray start --head`" in said


def test_a_cluster_with_a_token_lets_only_its_holders_in(start_cluster, start_driver, hosts) -> None:
    """Ray checks the token; worker hosts do not have it."""
    cluster = start_cluster(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN="a" * 64)
    cluster.add(1)
    start_driver(cluster)
    hosts.want(1)

    [facts] = hosts.wait(1).values()

    assert facts["ray"] == []
    cluster.environment = {**cluster.environment, "RAY_AUTH_TOKEN": "b" * 64}
    assert "refuses this driver" in batchd_ray(cluster, "status", status=1)
