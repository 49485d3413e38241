"""The actor that keeps a worker host alive, without Ray: what it starts, and how that ends."""

import hashlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from batchd.pool.ray import actor
from batchd.pool.ray.actor import ActorOptions, HostActor
from support.waiting import PATIENCE_S, wait_until

TESTS = Path(__file__).parents[1]
STAND_IN = TESTS / "support" / "stand_in_host.py"
ADDRESS = "tcp://gpu1:7072"
KEY = 'name = "pool"\nsecret = "do not tell"\n'


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch):
    monkeypatch.setattr(actor, "PAUSE_S", (0.01, 0.02))


def options(folder, *words, **changes) -> ActorOptions:
    """Return options that start the stand-in, which writes into ``folder``."""
    program = (sys.executable, str(STAND_IN), str(folder), *words)
    return ActorOptions(**{"address": ADDRESS, "workers": 3, "key": KEY, "program": program, **changes})


@pytest.fixture
def start():
    """Start worker hosts; they leave with the test."""
    started = []

    def start(chosen) -> HostActor:
        started.append(HostActor(chosen))
        return started[-1]

    yield start
    for one in started:
        one.leave()


def running(folder, besides=()) -> tuple[int, dict]:
    """Wait for a running stand-in; return its process and what it has written."""
    [file] = wait_until(
        lambda: [one for one in folder.glob("*.json") if int(one.stem) not in besides], "a worker host runs"
    )
    return int(file.stem), json.loads(file.read_text())


def test_a_worker_host_gets_its_address_its_workers_and_the_further_arguments(start, tmp_path) -> None:
    """The arguments have this order; ``batchd worker`` precedes them without a stand-in."""
    start(options(tmp_path, arguments=("--map", "/data=/mnt/data")))

    _, facts = running(tmp_path)

    assert facts["arguments"] == [ADDRESS, "--key", "/proc/self/fd/0", "--workers", "3", "--map", "/data=/mnt/data"]


def test_the_key_is_in_no_command_line_and_in_no_file_that_others_may_read(start, tmp_path) -> None:
    """The child reads it from memory; no message and no ``repr`` shows it."""
    chosen = options(tmp_path)
    start(chosen)

    pid, facts = running(tmp_path)

    assert facts["key"] == hashlib.sha256(KEY.encode()).hexdigest()
    assert facts["key_mode"] == 0o600
    assert b"do not tell" not in Path(f"/proc/{pid}/cmdline").read_bytes()
    assert "do not tell" not in repr(chosen)


def test_a_key_on_the_nodes_is_named(start, tmp_path) -> None:
    """The actor does not send such a key."""
    file = tmp_path / "pool.key"
    file.write_text("on the node")
    start(options(tmp_path, key=None, key_path=str(file)))

    _, facts = running(tmp_path)

    assert facts["arguments"][1:3] == ["--key", str(file)]
    assert facts["key"] == hashlib.sha256(b"on the node").hexdigest()


def test_a_worker_host_gets_no_variable_of_ray(start, tmp_path, monkeypatch) -> None:
    """Users' functions must not see the token of a cluster."""
    monkeypatch.setenv("RAY_AUTH_TOKEN", "do not tell")
    start(options(tmp_path))

    assert running(tmp_path)[1]["ray"] == []


def test_a_killed_worker_host_is_started_again(start, tmp_path) -> None:
    """The report says how it ended."""
    one = start(options(tmp_path))
    pid, _ = running(tmp_path)

    os.kill(pid, signal.SIGKILL)
    again, _ = running(tmp_path, besides=[pid])

    report = one.report()
    assert (report["pid"], report["starts"]) == (again, 2)
    assert report["ended"] == "signal 9 (SIGKILL)"


def test_a_leaving_worker_host_finishes_and_is_not_started_again(start, tmp_path) -> None:
    """The actor sends it SIGTERM."""
    one = start(options(tmp_path))
    pid, _ = running(tmp_path)

    one.leave()

    assert (tmp_path / "left").read_text() == f"{pid}\n"
    assert one.report()["pid"] is None
    assert one.report()["ended"] == "exit status 0"


def test_a_worker_host_that_does_not_finish_is_killed(start, tmp_path, monkeypatch) -> None:
    """The actor kills it after its timeout."""
    monkeypatch.setattr(actor, "LEAVE_S", 0.1)
    one = start(options(tmp_path))
    pid, _ = running(tmp_path)
    os.kill(pid, signal.SIGSTOP)

    one.leave()

    assert one.report()["ended"] == "signal 9 (SIGKILL)"


def test_a_rejected_worker_host_says_why_in_the_report(start, tmp_path) -> None:
    """The actor retries, as a new key may arrive."""
    one = start(options(tmp_path, "refuse"))

    report = wait_until(lambda: one.report()["starts"] > 2 and one.report(), "it was started again")

    assert report["last_line"] == "the daemon rejects this worker host: its key was revoked"
    assert report["ended"] == "exit status 1"


def test_a_program_that_is_not_there_is_reported(start, tmp_path) -> None:
    """The actor stays alive."""
    one = start(options(tmp_path, program=(str(tmp_path / "none"),)))

    wait_until(lambda: "No such file" in one.report()["last_line"], "the report names the reason")


def test_a_worker_host_finishes_when_its_actor_is_killed(tmp_path) -> None:
    """The kernel notifies the worker host; no other process could."""
    program = (
        "import sys, time\nfrom batchd.pool.ray.actor import ActorOptions, HostActor\n"
        f"HostActor(ActorOptions('{ADDRESS}', 1, key='', program=tuple(sys.argv[1:])))\ntime.sleep(3600)"
    )
    with subprocess.Popen([sys.executable, "-c", program, sys.executable, STAND_IN, tmp_path]) as parent:
        pid, facts = running(tmp_path)
        assert facts["parent"] == parent.pid
        parent.kill()
    wait_until(lambda: not Path(f"/proc/{pid}").exists(), "the worker host has ended")
    assert (tmp_path / "left").read_text() == f"{pid}\n"


def test_a_worker_host_whose_actor_was_gone_before_does_not_start() -> None:
    """The actor's number now belongs to another process, or to none."""
    done = subprocess.run(
        [sys.executable, "-P", "-m", "batchd.pool.ray.actor", "0", "true"],
        timeout=PATIENCE_S,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 1
