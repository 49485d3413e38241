"""``batchd ray`` without Ray: its arguments, and the key of a pool."""

import sys
import tomllib
from types import SimpleNamespace

import pytest

from batchd.cli import ray
from batchd.errors import BatchdError
from batchd.runtime.keys import KeyDirectory
from batchd_wire.runtime import TcpAddress
from batchd_wire.status import PoolStatistics
from support.commands import batchd

GPU = TcpAddress("gpu1", 7072)


@pytest.fixture
def keys(tmp_path) -> KeyDirectory:
    return KeyDirectory(tmp_path / "keys")


def test_a_pool_has_a_key_of_a_worker_host(keys) -> None:
    """The key has the name of the daemon."""
    text = ray.pool_key(keys, GPU, None)

    [key] = keys.workers.accepted()
    assert (key.name, key.public) == ("ray-gpu1-7072", tomllib.loads(text)["public"])
    assert tomllib.loads(text)["role"] == "worker"


def test_a_pool_keeps_the_key_of_its_running_worker_hosts(keys) -> None:
    """An earlier driver made the key."""
    former = ray.pool_key(keys, GPU, None)

    assert ray.pool_key(keys, GPU, former) == former


@pytest.mark.parametrize("is_revoked", [True, False])
def test_a_lost_or_revoked_key_is_replaced(keys, is_revoked) -> None:
    """Worker hosts with such a key cannot connect."""
    former = ray.pool_key(keys, GPU, None)
    if is_revoked:
        keys.revoke("ray-gpu1-7072")

    new = ray.pool_key(keys, GPU, former if is_revoked else None)

    [key] = keys.workers.accepted()
    assert tomllib.loads(former)["public"] != key.public == tomllib.loads(new)["public"]


@pytest.mark.parametrize(
    ("listens_at", "reached_at"),
    [
        ("tcp://0.0.0.0:7072", TcpAddress("10.0.0.7", 7072)),
        ("tcp://*:7072", TcpAddress("10.0.0.7", 7072)),
        ("tcp://[::]:7072", TcpAddress("10.0.0.7", 7072)),
        ("tcp://eth0:7072", TcpAddress("10.0.0.7", 7072)),
        ("tcp://10.1.0.7:7072", TcpAddress("10.1.0.7", 7072)),
    ],
)
def test_worker_hosts_reach_a_daemon_at_its_address_or_at_that_of_its_machine(listens_at, reached_at) -> None:
    """In a cluster the daemon may listen at every address."""
    assert ray.reached_at(listens_at, "10.0.0.7") == reached_at


def test_an_absent_daemon_is_asked_again(monkeypatch) -> None:
    """Until it answers, there is no number."""
    wanted = ray.WorkerDemand(None)
    answers = iter([4, BatchdError("away"), BatchdError("away"), 6])

    def pool() -> PoolStatistics:
        answer = next(answers)
        if isinstance(answer, BatchdError):
            raise answer
        return PoolStatistics("tcp://0.0.0.0:7072", (), 0, "", wanted=answer)

    monkeypatch.setattr(wanted, "pool", pool)

    assert [wanted() for _ in range(4)] == [4, None, None, 6]


def test_a_daemon_without_worker_hosts_says_how_to_allow_them(monkeypatch) -> None:
    """The error names the setting."""
    monkeypatch.setattr(ray, "ask_status", lambda _session: SimpleNamespace(pool=None))
    monkeypatch.setattr(ray, "running_daemon", lambda _address: ray.suppress())

    with pytest.raises(BatchdError, match=r"--set daemon.worker_address=0.0.0.0:7072"):
        ray.WorkerDemand(None).pool()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["ipc:///run/batchd"], "worker hosts need a network address, such as tcp://gpu1:7072"),
        (["tcp://gpu1"], "is not of the form tcp://host:7070"),
        (["up", "--min", "4", "--max", "2"], "--min 4 is more than --max 2"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(arguments, said) -> None:
    """The command refuses them before it does anything else."""
    assert said in batchd("ray", *arguments, status=2).stderr


@pytest.mark.parametrize("arguments", [["tcp://gpu1:7072"], ["--", "--map", "/a=/b"], ["status"], ["down"]])
def test_without_ray_it_says_what_to_install(monkeypatch, arguments) -> None:
    """No other part of batchd needs Ray."""
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "batchd.pool.ray.pool", raising=False)

    assert "pip install 'batchd[ray]'" in batchd("ray", *arguments, status=1).stderr
