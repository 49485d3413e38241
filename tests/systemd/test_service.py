"""The unit under a real systemd: start, status, watchdog, end; trainers survive all of it."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from support.machine import CONFIG, CONFIG_FILE, ROOT, Machine
from support.trainer_process import TrainerFailed, TrainerProcess
from support.waiting import wait_until

ADDRESS = "ipc:///run/batchd"
STEPS = 10
WATCHDOG = "[Service]\nWatchdogSec=10\n"

HUNGRY = """
from pathlib import Path

EATEN = Path("/var/lib/batchd/eaten")


def eat(sample, rng):
    if not EATEN.exists():
        EATEN.touch()
        b"1" * (2 << 30)
    return sample
"""
"""A function that once takes more memory than there is."""
SLOW = """
from time import sleep


class Data:
    def __init__(self):
        sleep(20)

    def __len__(self):
        return 40

    def __getitem__(self, index):
        return index
"""
"""A source whose length takes longer than a reload usually may."""
SLOW_STREAM = """
[streams.slow]
batch_size = 4
source = { type = "python", function = "slow:Data", fields = { x = "int64" } }
"""

Train = Callable[..., TrainerProcess]


def main_pid(machine: Machine, unit: str = "batchd") -> str:
    return machine.show(unit, "MainPID")


def is_active(machine: Machine, unit: str = "batchd") -> bool:
    return machine.show(unit, "ActiveState") == "active"


def workers_of(machine: Machine) -> set[str]:
    """Return the pids of the workers: children of the fork server, which is the daemon's child."""
    children = machine.children(main_pid(machine))
    servers = {pid for pid in children if "batchd.worker" in machine.run("cat", f"/proc/{pid}/cmdline", check=False)}
    return {worker for server in servers for worker in machine.children(server)}


def test_the_start_is_over_when_trainers_can_be_served(started: Machine, train: Train) -> None:
    """Every worker is ready then; a user in the group reads an epoch, other users are rejected."""
    assert started.show("batchd", "StatusText") == "1 stream, 2 workers, 0 trainers, 0 samples/s"
    assert len(train(ADDRESS).take()) == STEPS
    with pytest.raises(TrainerFailed, match=r"[Pp]ermi"):
        train(ADDRESS, user="nobody")


def test_the_status_shows_what_trainers_get(started: Machine, train: Train) -> None:
    """``systemctl status`` has the line."""
    trainer = train(ADDRESS)
    trainer.hold(2)
    wait_until(
        lambda: re.search(r"1 stream, 2 workers, 1 trainer, [1-9]\d* samples/s", started.show("batchd", "StatusText")),
        "the status has a rate",
        every_s=0.2,
    )
    assert 'Status: "1 stream, 2 workers, 1 trainer' in started.run("systemctl", "status", "batchd")


def test_a_loop_that_stalls_is_aborted_and_the_daemon_started_again(
    machine: Machine, drop_in: Callable[[str], None], train: Train
) -> None:
    """The journal has the stacks; the trainer continues at its position."""
    drop_in(WATCHDOG)
    machine.run("systemctl", "start", "batchd")
    trainer = train(ADDRESS)
    first = trainer.take(3)
    stalled = main_pid(machine)
    machine.signal(stalled, "STOP")
    wait_until(lambda: machine.show("batchd", "NRestarts") == "1", "the watchdog has acted", every_s=0.5)
    rest = trainer.take()
    assert [seen.step for seen in first + rest] == list(range(STEPS))
    wait_until(lambda: is_active(machine), "it is active again", every_s=0.2)
    assert main_pid(machine) != stalled
    said = machine.said("batchd")
    assert "Watchdog timeout" in said
    assert "Fatal Python error: Aborted" in said
    assert re.search(r'File ".*/batchd/daemon/loop.py", line \d+ in run', said)


def test_a_daemon_that_gets_on_is_left_alone_by_the_watchdog(
    machine: Machine, drop_in: Callable[[str], None], train: Train
) -> None:
    """The daemon feeds it without trainers and with one, for twice the watchdog's own time."""
    drop_in("[Service]\nWatchdogSec=8\n")
    machine.run("systemctl", "start", "batchd")
    fed = float(machine.show("batchd", "WatchdogTimestampMonotonic"))
    train(ADDRESS).take()
    wait_until(
        lambda: float(machine.show("batchd", "WatchdogTimestampMonotonic")) > fed + 2 * 8e6,
        "the watchdog was fed for twice its time",
        every_s=0.5,
    )
    assert machine.show("batchd", "NRestarts") == "0"


def test_a_trainer_lives_through_a_restart(started: Machine, train: Train) -> None:
    """The trainer continues with the next batch, and the bytes equal those without a restart."""
    undisturbed = train(ADDRESS).take()
    trainer = train(ADDRESS)
    first = trainer.take(3)
    before = main_pid(started)
    started.run("systemctl", "restart", "batchd")
    assert main_pid(started) != before
    assert first + trainer.take() == undisturbed


def test_it_stops_within_its_time(started: Machine, train: Train) -> None:
    """A trainer holds batches; the daemon ends by itself, and nothing of it remains."""
    trainer = train(ADDRESS)
    trainer.hold(2)
    processes = {main_pid(started), *workers_of(started)}
    assert all(started.lives(pid) for pid in processes)
    started.run("systemctl", "stop", "batchd")
    assert started.show("batchd", "Result") == "success"
    assert started.show("batchd", "ExecMainStatus") == "0"
    assert not any(started.lives(pid) for pid in processes)
    assert started.run("ls", "/run/batchd").split() == ["lock"]
    said = started.said("batchd")
    assert "State 'stop-sigterm' timed out" not in said


def test_a_worker_that_the_kernel_kills_for_memory_leaves_the_unit_active(
    machine: Machine, drop_in: Callable[[str], None], train: Train
) -> None:
    """``OOMPolicy=`` prevents a stop. Another worker starts; the trainer misses no batch."""
    if "memory" not in machine.run("cat", "/sys/fs/cgroup/cgroup.controllers", check=False).split():
        pytest.skip("the container has no memory controller (cgroup version 2) for kills in it")
    machine.write("/opt/hungry/hungry.py", HUNGRY)
    call = '{ op = "call", function = "hungry:eat" }'
    machine.write(
        CONFIG_FILE,
        CONFIG.replace("[daemon]", '[daemon]\npython_path = ["/opt/hungry"]').replace("32] }]", f"32] }}, {call}]"),
    )
    drop_in("[Service]\nMemoryMax=1G\nMemorySwapMax=0\n")
    machine.run("systemctl", "start", "batchd")
    daemon = main_pid(machine)
    assert [seen.step for seen in train(ADDRESS).take()] == list(range(STEPS))
    machine.run("test", "-e", "/var/lib/batchd/eaten")
    wait_until(
        lambda: "killed by the OOM killer" in machine.said("batchd"), "systemd has seen it and says so", every_s=0.2
    )
    wait_until(lambda: len(workers_of(machine)) == 2, "another worker is ready", every_s=0.2)
    assert is_active(machine)
    assert main_pid(machine) == daemon
    machine.run("rm", "-r", "/opt/hungry", "/var/lib/batchd/eaten")


def test_a_killed_worker_leaves_the_unit_active(started: Machine, train: Train) -> None:
    """Another worker starts, and the trainer notices nothing."""
    trainer = train(ADDRESS)
    first = trainer.take(2)
    daemon, workers = main_pid(started), workers_of(started)
    victim = min(workers)
    started.signal(victim, "KILL")
    wait_until(
        lambda: len(now := workers_of(started)) == 2 and victim not in now, "another worker is ready", every_s=0.2
    )
    assert [seen.step for seen in first + trainer.take()] == list(range(STEPS))
    assert is_active(started)
    assert main_pid(started) == daemon


def test_a_wrong_configuration_is_not_tried_again(machine: Machine) -> None:
    """A restart would fail in the same way; the journal has the problem."""
    machine.write(CONFIG_FILE, CONFIG.replace("batch_size = 4", "batch_size = 0"))
    assert not machine.succeeds("systemctl", "start", "batchd")
    assert machine.show("batchd", "ActiveState") == "failed"
    assert machine.show("batchd", "NRestarts") == "0"
    assert "streams.photos.batch_size" in machine.said("batchd")


def test_faults_for_tests_are_refused_in_a_service(machine: Machine, drop_in: Callable[[str], None]) -> None:
    """A service must not have them, whatever its environment says."""
    drop_in("[Service]\nEnvironment=BATCHD_FAILPOINTS=daemon.starting=kill\nRestart=no\n")
    assert not machine.succeeds("systemctl", "start", "batchd")
    assert "faults are for tests" in machine.said("batchd")


def test_keys_come_as_credentials(machine: Machine, train: Train) -> None:
    """Root makes them, unreadable for the daemon; a revocation takes effect at the next start."""
    machine.write(CONFIG_FILE, CONFIG.replace("[daemon]", '[daemon]\ntcp = "127.0.0.1:7070"'))
    for name in ("one", "two"):
        told = machine.run("batchd", "keys", "new", "--name", name, "-o", f"/home/alice/{name}.key")
        assert "systemctl restart batchd" in told
        machine.run("chown", "alice:", f"/home/alice/{name}.key")
    machine.run("systemctl", "start", "batchd")
    assert not machine.succeeds("runuser", "-u", "batchd", "--", "cat", "/etc/batchd/keys/daemon.key")
    tcp = "tcp://127.0.0.1:7070"
    assert len(train(tcp, key="/home/alice/one.key").take()) == STEPS

    machine.run("batchd", "keys", "revoke", "one")
    machine.run("systemctl", "restart", "batchd")
    with pytest.raises(TrainerFailed, match="key"):
        train(tcp, key="/home/alice/one.key")
    assert len(train(tcp, key="/home/alice/two.key").take()) == STEPS
    machine.run("rm", "/home/alice/one.key", "/home/alice/two.key")


def test_two_instances_keep_apart(machine: Machine, train: Train) -> None:
    """Each has its own file, sockets and trainers; the end of one does not affect the other."""
    for name, size in (("small", 32), ("large", 64)):
        machine.write(f"/etc/batchd/{name}.toml", CONFIG.replace("[32, 32]", f"[{size}, {size}]"))
    machine.run("systemctl", "start", "batchd@small", "batchd@large")
    small, large = train("ipc:///run/batchd-small"), train("ipc:///run/batchd-large")
    first = large.take(2)
    assert small.take(2) != first, "the two instances have images of different sizes"
    small.close()
    machine.run("systemctl", "stop", "batchd@small")
    assert [seen.step for seen in first + large.take()] == list(range(STEPS))
    assert is_active(machine, "batchd@large")


def test_data_in_a_home_needs_the_drop_in(machine: Machine, drop_in: Callable[[str], None], train: Train) -> None:
    """The drop-in of deploy/examples gives access to that folder, and to no other home."""
    machine.run("cp", "-r", "/srv/photos", "/home/alice/photos")
    machine.write(CONFIG_FILE, CONFIG.replace("/srv/photos", "/home/alice/photos"))
    assert not machine.succeeds("systemctl", "start", "batchd")
    machine.run("systemctl", "reset-failed", "batchd", check=False)
    drop_in(Path(ROOT / "deploy/examples/data-in-home.conf").read_text())
    machine.run("systemctl", "start", "batchd")
    assert len(train(ADDRESS).take()) == STEPS
    inside = machine.run("nsenter", "-t", main_pid(machine), "-m", "ls", "-A", "/home/alice").split()
    assert inside == ["photos"]


def test_workers_keep_to_the_cpus_of_the_drop_in(
    machine: Machine, drop_in: Callable[[str], None], train: Train
) -> None:
    """``workers = "auto"`` is one worker for each of them."""
    machine.write(CONFIG_FILE, CONFIG.replace("workers = 2", 'workers = "auto"'))
    example = Path(ROOT / "deploy/examples/cpus.conf").read_text()
    assert "CPUAffinity=0-15\n" in example
    drop_in(example.replace("CPUAffinity=0-15\n", "CPUAffinity=0\n"))
    machine.run("systemctl", "start", "batchd")
    assert len(train(ADDRESS).take()) == STEPS
    (worker,) = workers_of(machine)
    assert "Cpus_allowed_list:\t0\n" in machine.run("cat", f"/proc/{worker}/status")


def test_a_reload_changes_what_is_asked_for_alone(started: Machine, train: Train) -> None:
    """A second stream is added; the trainer of the first one has no gap."""
    trainer = train(ADDRESS)
    first = trainer.take(3)
    daemon = main_pid(started)
    second = CONFIG[CONFIG.index("[streams.photos]") :].replace("streams.photos", "streams.more")
    started.write(CONFIG_FILE, CONFIG + second)
    started.run("systemctl", "reload", "batchd")
    assert len(train(ADDRESS, "more").take()) == STEPS
    assert [seen.step for seen in first + trainer.take()] == list(range(STEPS))
    assert main_pid(started) == daemon


def test_a_reload_gets_the_time_that_its_scan_takes(started: Machine, drop_in: Callable[[str], None]) -> None:
    """The scan exceeds ``TimeoutStartSec=``, after which systemd would kill ``batchd reload``."""
    drop_in("[Service]\nTimeoutStartSec=10\n")
    started.write("/opt/slow/slow.py", SLOW)
    started.write(CONFIG_FILE, CONFIG.replace("[daemon]", '[daemon]\npython_path = ["/opt/slow"]') + SLOW_STREAM)
    started.run("systemctl", "reload", "batchd")
    assert "slow" in started.run("batchd", "status", "--address", "/run/batchd")
    assert "Reload operation timed out" not in started.said("batchd")
    started.run("rm", "-r", "/opt/slow")


def test_a_bad_reload_is_refused_and_the_old_configuration_stays(started: Machine, train: Train) -> None:
    """``systemctl reload`` fails and the unit does not; the journal has the problem."""
    trainer = train(ADDRESS)
    first = trainer.take(3)
    started.write(CONFIG_FILE, CONFIG.replace("batch_size = 4", "batch_size = 0"))
    assert not started.succeeds("systemctl", "reload", "batchd")
    assert is_active(started)
    assert "streams.photos.batch_size" in started.said("batchd")
    assert [seen.step for seen in first + trainer.take()] == list(range(STEPS))


def test_the_journal_knows_how_important_a_line_is(started: Machine) -> None:
    """``journalctl -p warning`` has the worker that ended, and not the start."""
    started.signal(min(workers_of(started)), "KILL")

    def priority_of(event: str) -> set[str]:
        return {entry["PRIORITY"] for entry in started.journal("batchd") if event in str(entry["MESSAGE"])}

    wait_until(lambda: priority_of("worker ended"), "the death is in the journal", every_s=0.2)
    assert priority_of("worker ended") == {"4"}
    assert priority_of("serving") == {"6"}
