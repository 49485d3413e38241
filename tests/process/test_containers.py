"""Trainers and daemons in containers: what they must share and see, and which users may connect."""

import os
import re
import signal
import subprocess
import sys
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

import batchd_client
from support.commands import batchd
from support.containers import RUNTIME_DIRECTORY, Container, need_containers, process_inside
from support.daemon_process import DaemonProcess, clean_environment
from support.expected import Expected
from support.kernel import mapped_slots
from support.network import free_port, two_hosts
from support.seen import see
from support.settings import folder_stream
from support.trainer_process import TrainerFailed, TrainerProcess
from support.waiting import PATIENCE_S, wait_until

PORT = 7072
STRANGER = 54_321
STRANGERS_GROUP = 54_322
DIRECTORY_GROUP = 54_323
SECRET = "/run/secrets/batchd.key"

CONNECT = """
import batchd_client, logging, sys
logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
batchd_client.connect(connect_timeout_s=10.0).close()
"""
USER_MAPS = {"of the same users": None, "as root": ["--map-root-user"], "as nobody": []}
"""Arguments of `unshare --user`: the user of a container, as seen inside."""


@pytest.fixture(scope="module", autouse=True)
def _containers():
    """These tests need namespaces."""
    need_containers()


@pytest.fixture
def container(tmp_path):
    """Make containers."""
    made = []

    def make(**options):
        root = tmp_path / f"root{len(made)}"
        root.mkdir()
        made.append(Container(root, **options))
        return made[-1]

    return make


@pytest.fixture
def start_inside(container):
    """Start trainers in containers; they end with the test."""
    trainers = []

    def start(address=None, **options):
        trainers.append(TrainerProcess(address, through=container(**options).command))
        return trainers[-1]

    yield start
    for trainer in trainers:
        trainer.close()


@pytest.fixture
def start_contained(daemons_folder, container, photos):
    """Start daemons in containers; they end with the test, and their folder has one path."""
    with ExitStack() as stack:

        def start(*, ready=True, runtime_dir=None, **options):
            settings = {"runtime_dir": str(runtime_dir)} if runtime_dir else {}
            daemon = DaemonProcess(daemons_folder, {"photos": folder_stream(photos)}, **settings)
            stack.callback(daemon.close)
            shares = {path: str(path) for path in (daemon.folder, photos, runtime_dir) if path}
            daemon.through = container(shares=shares, **options).command
            return daemon.start(ready=ready)

        yield start


def trainers(daemon):
    """Return the status of the test's trainers."""
    return [one for one in daemon.status()["trainers"] if one["name"] == "trainer_program.py"]


def namespaces(pid):
    """Return the namespaces of a process."""
    return {name: Path(f"/proc/{pid}/ns/{name}").readlink() for name in ("mnt", "pid", "ipc", "net", "uts")}


def run_inside(container):
    """Connect from inside the container, disconnect, and return what the program logged."""
    command = [*container.command, sys.executable, "-c", CONNECT]
    done = subprocess.run(
        command, check=True, env=clean_environment(), capture_output=True, text=True, timeout=PATIENCE_S
    )
    return done.stdout


# --- what must be shared --------------------------------------------------------------------------


@pytest.mark.thorough
def test_a_trainer_that_shares_only_the_runtime_directory_gets_shared_memory(start_daemon, start_inside):
    """The directory may be at another path, and the container's /dev/shm may be anything."""
    daemon = start_daemon()
    for shm_kib in (64, 0):
        trainer = start_inside(shares={daemon.runtime_dir: RUNTIME_DIRECTORY}, shm_kib=shm_kib).ready()
        pid = process_inside(trainer.pid)
        ours = namespaces("self")
        assert not set(namespaces(pid).values()) & set(ours.values())
        assert Path(f"/proc/{pid}/root/dev/shm").exists() == bool(shm_kib)
        seen = trainer.hold(3)
        assert mapped_slots(pid) >= 3
        [status] = trainers(daemon)
        assert (status["transport"], status["pid"], status["user"]) == ("shared memory", pid, 0)
        assert trainer.look() == seen
        trainer.release()
        assert seen + trainer.take() == Expected(daemon.config).epoch(0)
        trainer.close()
        wait_until(lambda: not trainers(daemon), "the killed trainer has no session")


def test_a_trainers_container_and_the_daemon_outlive_each_other(start_daemon, start_inside):
    """The lifeline ends with a killed trainer, whatever namespaces the trainer was in.

    A restarted daemon has new sockets in the same directory, so the mount stays valid.
    """
    daemon = start_daemon()
    shares = {daemon.runtime_dir: RUNTIME_DIRECTORY}
    killed = start_inside(shares=shares).ready()
    killed.hold(3)
    assert daemon.stream_status()["leased_slots"] >= 3
    os.kill(process_inside(killed.pid), signal.SIGKILL)
    wait_until(lambda: not daemon.stream_status()["subscriptions"], "its claim has ended")
    assert daemon.stream_status()["leased_slots"] == 0
    trainer = start_inside(shares=shares).ready()
    seen = trainer.take(2)
    daemon.restart()
    assert seen + trainer.take() == Expected(daemon.config).epoch(0)


@pytest.mark.thorough
def test_a_trainer_that_shares_nothing_gets_tcp(start_daemon, start_inside, tmp_path):
    """Address and secret come from the trainer's environment; root owns it, as in Kubernetes."""
    keys, key = tmp_path / "keys", tmp_path / "conn.key"
    batchd("keys", "new", "--name", "box", "--keys-dir", keys, "-o", key)
    os.chown(key, 0, DIRECTORY_GROUP)
    key.chmod(0o440)
    user = (STRANGER, STRANGERS_GROUP, DIRECTORY_GROUP)
    with two_hosts() as hosts:
        daemon = start_daemon(tcp=f"{hosts.ours}:{PORT}", keys_dir=str(keys))
        environment = {"BATCHD_ADDRESS": f"tcp://{hosts.ours}:{PORT}", "BATCHD_KEY": SECRET}
        place = {"shares": {key: SECRET}, "environment": environment, "network": hosts.on_the_other()}
        trainer = start_inside(identity=user, **place).ready()
        [status] = trainers(daemon)
        assert (status["transport"], status["host"], status["key"]) == ("tcp", hosts.theirs, "box")
        assert trainer.take() == Expected(daemon.config).epoch(0)


def test_a_trainer_that_has_neither_is_told_what_a_container_needs(start_inside):
    """The error names the directory to share, and the address to set."""
    with pytest.raises(
        TrainerFailed, match=r"/run/batchd: no such directory[\s\S]*-v /run/batchd:/run/batchd"
    ) as caught:
        start_inside().ready()
    assert "BATCHD_ADDRESS=tcp://" in str(caught.value)


# --- the message about the shorter way ------------------------------------------------------------


@pytest.mark.thorough
def test_a_contained_trainer_that_came_over_tcp_is_told_which_directory_to_share(start_daemon, container):
    """The message does not name the address of the daemon's host alone: it would not help."""
    daemon = start_daemon(tcp=f"127.0.0.1:{free_port()}")
    told = run_inside(container(environment={"BATCHD_ADDRESS": daemon.tcp_address}, network=()))
    assert f"-v {daemon.runtime_dir}:{daemon.runtime_dir}" in told
    assert daemon.address in told
    told = run_inside(
        container(
            environment={"BATCHD_ADDRESS": daemon.tcp_address},
            network=(),
            shares={daemon.runtime_dir: str(daemon.runtime_dir)},
        )
    )
    assert f"runs on this host: {daemon.address} is faster" in told


# --- process ids ----------------------------------------------------------------------------------


def test_a_daemon_in_a_container_serves_trainers_outside_of_it_and_in_others(start_contained, start_inside):
    """The daemon reports that it does not know their pids, and ends cleanly as process 1.

    Neither side can name the other's processes; the lifeline works all the same.
    """
    daemon = start_contained()
    with batchd_client.connect(daemon.address) as connection:
        stream = connection.stream("photos")
        assert see(stream) == Expected(daemon.config).epoch(0)
        [trainer, *_] = connection.status()["trainers"]
        printed = batchd("status", address=daemon.address).stdout
    assert (trainer["transport"], trainer["pid"], trainer["user"]) == ("shared memory", None, os.getuid())
    assert re.search(r" -  shared memory  photos ", printed)
    trainer = start_inside(shares={daemon.runtime_dir: RUNTIME_DIRECTORY}).ready()
    seen = trainer.hold(2)
    [status] = trainers(daemon)
    assert status["pid"] is None
    trainer.release()
    assert seen + trainer.take() == Expected(daemon.config).epoch(0)
    trainer.kill()
    wait_until(lambda: not daemon.stream_status()["subscriptions"], "its claim has ended")
    os.kill(process_inside(daemon.pid), signal.SIGTERM)
    assert daemon.wait() == 0
    assert daemon.files() == {"lock", "log"}


# --- users ----------------------------------------------------------------------------------------


def make_directory(folder):
    """Make a runtime directory as an operator does, for a group that is not the daemon's own."""
    folder.mkdir()
    os.chown(folder, -1, DIRECTORY_GROUP)
    folder.chmod(0o750)
    return folder


@pytest.fixture(scope="module")
def groups_directory(_containers, tmp_path_factory):
    """Make one such directory for all tests of users."""
    return make_directory(tmp_path_factory.mktemp("users") / "run")


@pytest.fixture(scope="module")
def daemon_for_group(start_shared_daemon, groups_directory):
    """Start a daemon in that directory."""
    return serving(start_shared_daemon(runtime_dir=str(groups_directory), ready=False))


def serving(daemon):
    """Wait until trainers can connect."""
    wait_until(lambda: daemon.log_lines("serving"), "it serves")
    return daemon


@contextmanager
def modes_taken_away(directory):
    """Open all modes to every user, so that only the daemon itself can reject a user."""
    places = [directory / name for name in ("lifeline.sock", "batchd.sock", ".")]
    before = [place.stat().st_mode for place in places]
    for place in places:
        place.chmod(0o755 if place.is_dir() else 0o666)
    yield
    for place, mode in zip(places, before, strict=True):
        place.chmod(mode)


@pytest.mark.thorough(after_first=True)
@pytest.mark.parametrize("user_map", USER_MAPS.values(), ids=USER_MAPS)
def test_a_member_of_the_directorys_group_may_connect_with_any_user_id_inside(
    daemon_for_group, groups_directory, start_inside, user_map
):
    """The daemon sees the user that the host knows, and that user's groups."""
    trainer = start_inside(
        shares={groups_directory: RUNTIME_DIRECTORY},
        identity=(STRANGER, STRANGERS_GROUP, DIRECTORY_GROUP),
        user_map=user_map,
    ).ready()
    with batchd_client.connect(str(groups_directory)) as connection:
        users = {one["name"]: one["user"] for one in connection.status()["trainers"]}
    assert users["trainer_program.py"] == STRANGER
    assert trainer.take() == Expected(daemon_for_group.config).epoch(0)


@pytest.mark.thorough(after_first=True)
@pytest.mark.usefixtures("daemon_for_group")
@pytest.mark.parametrize("user_map", USER_MAPS.values(), ids=USER_MAPS)
def test_a_stranger_may_not_connect_with_any_user_id_inside(groups_directory, start_inside, user_map):
    """Root of a user namespace is a stranger to the directory's mode, and to the daemon."""
    group = f"has gid {DIRECTORY_GROUP}" if user_map is None else "is one that is not mapped into this user namespace"
    identity = (STRANGER, STRANGERS_GROUP)
    stranger = {"shares": {groups_directory: RUNTIME_DIRECTORY}, "identity": identity, "user_map": user_map}
    with pytest.raises(TrainerFailed, match=rf"PermissionDenied: .*\(its group {group}\)[\s\S]*--group-add"):
        start_inside(**stranger).ready()
    refused = f"PermissionDenied: the daemon says: user {STRANGER} is not in the group"
    with modes_taken_away(groups_directory), pytest.raises(TrainerFailed, match=refused):
        start_inside(**stranger).ready()


@pytest.mark.thorough
def test_a_daemon_with_users_of_its_own_serves_members_of_the_hosts_group(start_contained, start_inside, tmp_path):
    """The directory's group has no number in there, so the daemon cannot identify its members.

    A closed directory is enough, as the kernel has let them in. An open one is not: all unmapped
    groups have the same number, so the daemon admits no member of them.
    """
    directory = make_directory(tmp_path / "run")
    directory.chmod(0o2750)
    daemon = serving(start_contained(runtime_dir=directory, ready=False, user_map=["--map-root-user"]))
    member = {"identity": (STRANGER, STRANGERS_GROUP, DIRECTORY_GROUP), "shares": {directory: RUNTIME_DIRECTORY}}
    assert start_inside(**member).ready().take() == Expected(daemon.config).epoch(0)
    stranger = {**member, "identity": (STRANGER, STRANGERS_GROUP)}
    with pytest.raises(TrainerFailed, match=r"PermissionDenied: .*permission denied"):
        start_inside(**stranger).ready()
    refused = r"PermissionDenied: the daemon says: .* cannot tell members of its group"
    with modes_taken_away(directory), pytest.raises(TrainerFailed, match=refused):
        start_inside(**stranger).ready()
    with batchd_client.connect(str(directory)) as connection:
        assert connection.status()["daemon"]["pid"] == 1
