"""A process that is taken over: hostile code runs in a worker, as a function, or in a scan."""

import json
import os
import socket
from pathlib import Path
from textwrap import dedent

import numpy as np
import pytest

import batchd_client
from batchd.data.sources.arrays.options import NpySource
from batchd.data.sources.scan import isolated_scan
from batchd.data.storage.access import Storage
from batchd.data.storage.survey import Survey
from batchd.errors import SourceInvalid
from batchd.runtime.children import start
from batchd.runtime.sandbox import version
from support.observing import ANYWHERE, fetch, observer_of
from support.settings import SLOT_BYTES, folder_stream
from support.source_files import nothing
from support.waiting import wait_until

pytestmark = pytest.mark.skipif(not version(), reason="this kernel does not let a process enclose itself")

ATTACKS = """
    import ctypes, json, os, pathlib, platform, resource, signal, socket, subprocess
    import numpy as np
    HERE = pathlib.Path(__file__).parent
    NEW = {"x86_64": 0, "aarch64": 1}[platform.machine()]
    libc = ctypes.CDLL(None, use_errno=True)

    def call(numbers, *arguments):
        number = numbers if isinstance(numbers, int) else numbers[NEW]
        if libc.syscall(number, *arguments) < 0:
            raise OSError(ctypes.get_errno(), "")

    def connect(address, family):
        with socket.socket(family) as one:
            one.connect(address)

    def listen():
        with socket.socket() as one:
            one.bind(("127.0.0.1", 0))
            one.listen()

    def peer_by_datagram(address):
        one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        one.connect(address)

    def unshare():
        child = libc.syscall((56, 220)[NEW], 0x10000000 | signal.SIGCHLD, 0, 0, 0, 0)
        if child == 0:
            os._exit(0)
        if child < 0:
            raise OSError(ctypes.get_errno(), "")
        os.waitpid(child, 0)

    def flag(path):
        with open(path, "rb") as file:
            call((16, 29), file.fileno(), 0x40086602, ctypes.byref(ctypes.c_int(1)))

    def own_capabilities():
        facts = pathlib.Path("/proc/self/status").read_text()
        if not int(facts.partition("CapPrm:")[2].split()[0], 16) & ~0b11000110:
            raise PermissionError

    def attacks(at):
        photo, key, lifeline = at["photo"], at["key"], at["lifeline"]
        daemon = at["daemon"]
        yield "reads a key", lambda: pathlib.Path(key).read_bytes()
        yield "reads the configuration", lambda: pathlib.Path(at["config"]).read_bytes()
        yield "reads the passwords", lambda: pathlib.Path("/etc/passwd").read_bytes()
        yield "lists a folder", lambda: os.listdir(at["folder"])
        yield "reads by a link", lambda: pathlib.Path(at["link"]).read_bytes()
        yield "writes a file", lambda: pathlib.Path(at["folder"], "new").write_bytes(b"")
        yield "writes a photograph", lambda: open(photo, "r+b").close()
        yield "shortens a photograph", lambda: os.truncate(photo, 1)
        yield "removes a photograph", lambda: os.unlink(photo)
        yield "renames a photograph", lambda: os.rename(photo, photo + "x")
        yield "links a photograph", lambda: os.link(photo, photo + "y")
        yield "makes a link", lambda: os.symlink("/", photo + "z")
        yield "makes a folder", lambda: os.mkdir(photo + "d")
        yield "changes a mode", lambda: os.chmod(photo, 0o777)
        yield "changes a time", lambda: os.utime(photo)
        yield "sets an attribute", lambda: os.setxattr(photo, "user.x", b"")
        yield "writes its own module", lambda: open(__file__, "a").close()
        yield "runs a program", lambda: subprocess.run(["/bin/true"], check=True)
        yield "connects by TCP", lambda: connect(("127.0.0.1", at["port"]), socket.AF_INET)
        yield "listens", listen
        yield "connects to the daemon", lambda: connect(lifeline, socket.AF_UNIX)
        yield "connects to an abstract socket", lambda: connect(chr(0) + at["abstract"], socket.AF_UNIX)
        yield "connects by a pair", lambda: peer_by_datagram(at["datagrams"])
        yield "signals the daemon", lambda: os.kill(daemon, 0)
        yield "signals its parent", lambda: os.kill(os.getppid(), 0)
        yield "signals by a pidfd", lambda: signal.pidfd_send_signal(os.pidfd_open(daemon), 0)
        yield "reads the daemon's memory", lambda: open(f"/proc/{daemon}/mem", "rb").close()
        yield "reads the daemon's variables", lambda: open(f"/proc/{daemon}/environ", "rb").close()
        yield "takes the daemon's descriptors", lambda: call(438, os.pidfd_open(daemon), 0, 0)
        yield "limits the daemon", lambda: resource.prlimit(daemon, resource.RLIMIT_CPU)
        yield "places the daemon", lambda: os.sched_setaffinity(daemon, os.sched_getaffinity(daemon))
        yield "slows the daemon", lambda: os.setpriority(os.PRIO_PROCESS, daemon, 19)
        yield "lets the daemon idle", lambda: os.sched_setscheduler(daemon, os.SCHED_IDLE, os.sched_param(0))
        yield "slows its user", lambda: os.setpriority(os.PRIO_USER, 0, 19)
        yield "makes a namespace", unshare
        yield "flags a photograph", lambda: flag(photo)
        yield "has capabilities", own_capabilities
        for name, numbers in UNUSUAL.items():
            yield name, lambda numbers=numbers: call(numbers, 0, 0, 0, 0, 0)

    UNUSUAL = {
        "ptrace": (101, 117), "process_vm_readv": (310, 270), "mount": (165, 40), "chroot": (161, 51),
        "setns": (308, 268), "bpf": (321, 280), "keyctl": (250, 219), "userfaultfd": (323, 282),
        "io_uring_setup": 425, "init_module": (175, 105), "kexec_load": (246, 104),
        "clone3": 435, "setxattrat": 463, "shmget": (29, 194), "mq_open": (240, 180), "fanotify_init": (300, 262),
    }

    def attempt(sample, rng):
        at = json.loads((HERE / "targets.json").read_text())
        names, attack = list(zip(*attacks(at)))[0], list(attacks(at))
        number = int(next(iter(sample.values())))
        if number >= len(names):
            return {"done": np.uint8(0)}
        name, act = attack[number]
        try:
            act()
        except PermissionError:
            return {"done": np.uint8(1)}
        except OSError:
            return {"done": np.uint8(1 + (name not in UNUSUAL))}  # for the kernel to judge: it was asked
        return {"done": np.uint8(2)}
"""
REFUSED, DONE = 1, 2
SCAN = """
    import json, sys
    from attack import attempt
    from batchd.data.sources.scan import answer
    from batchd.errors import SourceInvalid

    def scan(source, survey):
        raise SourceInvalid(json.dumps([int(attempt({"n": number}, None)["done"]) for number in range(64)]))

    if __name__ == "__main__":
        sys.exit(answer(scan))
"""
PLAIN = 26
"""The attacks that any process of the daemon's user can carry out."""


@pytest.fixture
def target(tmp_path, write):
    """Write what an attacker wants, and the attacks, as samples and as a function."""
    write("attack.py", ATTACKS)
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "key").write_bytes(b"secret")
    data = tmp_path / "data"
    data.mkdir()
    np.save(data / "numbers.npy", np.arange(64))
    (data / "photo").write_bytes(b"pixels")
    (data / "link").symlink_to(secret / "key")
    with socket.create_server(("127.0.0.1", 0)) as tcp, socket.socket(socket.AF_UNIX) as abstract:
        name = f"batchd-test-{os.getpid()}"
        abstract.bind(f"\0{name}")
        abstract.listen()
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as datagrams:
            datagrams.bind(str(secret / "datagrams"))
            yield {
                "photo": str(data / "photo"),
                "link": str(data / "link"),
                "key": str(secret / "key"),
                "folder": str(secret),
                "port": tcp.getsockname()[1],
                "abstract": name,
                "datagrams": str(secret / "datagrams"),
            }


def attacked(start_daemon, target, code, **daemon_keys):
    """What became of each attack, by its number: refused, done, or 0 behind the last one."""
    stream = {
        "source": {"type": "npy", "path": target["photo"].replace("photo", "numbers.npy")},
        "batch_size": 64,
        "shuffle": False,
        "pipeline": [{"op": "call", "function": "attack:attempt", "outputs": {"done": "uint8"}, "random": False}],
        "read": [],
    }
    daemon = start_daemon({"numbers": stream}, python_path=[str(code)], workers=1, **daemon_keys)
    lifeline = next(str(path) for path in daemon.runtime_dir.iterdir() if path.is_socket())
    tell(code, {**target, "daemon": daemon.pid, "config": str(daemon.config), "lifeline": lifeline})
    with batchd_client.connect(daemon.address) as connection, connection.stream("numbers", epochs=1) as batches:
        (done,) = [batch["done"].tolist() for batch in batches]
        assert not connection.bad("numbers").samples
    return dict(enumerate(one for one in done if one))


def attacked_by_a_scan(target, code, config, *, encloses):
    """As ``attacked``, of the process that scans a source; this one is its daemon."""
    (code / "hostile_scan.py").write_text(dedent(SCAN))
    source = NpySource(path=Path(target["photo"].replace("photo", "numbers.npy")))
    with socket.socket(socket.AF_UNIX) as lifeline:
        lifeline.bind(str(code / "lifeline"))
        lifeline.listen()
        tell(code, {**target, "daemon": os.getpid(), "config": str(config), "lifeline": str(code / "lifeline")})
        with pytest.raises(SourceInvalid) as caught, Storage(encloses=encloses) as storage:
            isolated_scan("hostile_scan", source, Survey(nothing, storage=storage))
    return dict(enumerate(one for one in json.loads(str(caught.value)) if one))


FORKING = """
    import json, os, sys
    from pathlib import Path
    from types import SimpleNamespace
    from attack import attempt
    from batchd.data.sources import scan as scans
    from batchd.data.sources.arrays.options import NpySource
    from batchd.data.storage.access import Storage
    from batchd.data.storage.index_cache import IndexCache
    from batchd.errors import SourceInvalid

    def scan(source, survey):
        links = [f"/proc/self/fd/{number}" for number in range(3, 999)]
        held = [os.readlink(link) for link in links if os.path.lexists(link)]
        done = [int(attempt({"n": number}, None)["done"]) for number in range(64)]
        raise SourceInvalid(json.dumps([done, held]))

    scans.kind_of = lambda source: SimpleNamespace(scan=scan)
    secret = open(sys.argv[3])
    with Storage() as storage:
        storage.forks_scans = True
        try:
            scans.scan_source(NpySource(path=Path(sys.argv[2])), lambda found: None, IndexCache(None), storage)
        except SourceInvalid as error:
            os.write(int(sys.argv[1]), str(error).encode())
"""


def test_an_attacker_in_a_fork_that_scans_reaches_nothing(target, code, tmp_path, monkeypatch):
    """It is a fork of the daemon, and has none of its descriptors."""
    monkeypatch.setenv("PYTHONPATH", str(code))
    (code / "forking_scan.py").write_text(dedent(FORKING))
    (tmp_path / "batchd.toml").touch()
    numbers = target["photo"].replace("photo", "numbers.npy")
    with socket.socket(socket.AF_UNIX) as lifeline, os.fdopen(os.memfd_create("answer"), "r+b") as answer:
        lifeline.bind(str(code / "lifeline"))
        lifeline.listen()
        tell(
            code,
            {
                **target,
                "daemon": os.getpid(),
                "config": str(tmp_path / "batchd.toml"),
                "lifeline": lifeline.getsockname(),
            },
        )
        words = [str(answer.fileno()), numbers, target["key"]]
        with start("forking_scan", *words, descriptors=[answer.fileno()]) as daemon:
            assert daemon.reap() == 0
        answer.seek(0)
        done, held = json.loads(answer.read())
    assert set(done) == {REFUSED, 0}
    assert done.count(REFUSED) > PLAIN
    assert [one for one in held if "batchd-scan" not in one and not one.startswith("socket:")] == []
    assert len([one for one in held if one.startswith("socket:")]) == 1, "its channel"


OBSERVER = """
    import json, os, socket, sys
    from attack import attempt
    from batchd.observe.http import __main__ as observer
    from batchd.runtime.children import command

    os.set_inheritable(int(sys.argv[1]), True)
    if sys.argv[2] == "enclosed":
        observer.enclose_observer("[]")
    if sys.argv[3] == "child":
        words = command("hostile_observer", sys.argv[1], "", "")
        os.execv(words[0], words)
    done = [int(attempt({"n": number}, None)["done"]) for number in range(64)]
    os.write(int(sys.argv[1]), json.dumps(done).encode())
"""


def attacked_by_the_observer(target, code, config, *, encloses, by_child):
    """As ``attacked``, of the process that answers HTTP, or of one that it starts for a sheet."""
    (code / "hostile_observer.py").write_text(dedent(OBSERVER))
    with socket.socket(socket.AF_UNIX) as lifeline:
        lifeline.bind(str(code / "lifeline"))
        lifeline.listen()
        tell(code, {**target, "daemon": os.getpid(), "config": str(config), "lifeline": str(code / "lifeline")})
        answer = os.memfd_create("answer")
        how = ["enclosed" if encloses else "", "child" if by_child else ""]
        with start("hostile_observer", str(answer), *how, descriptors=[answer]) as observer:
            assert observer.reap() == 0
        with os.fdopen(answer, "rb") as found:
            found.seek(0)
            return dict(enumerate(one for one in json.load(found) if one))


def tell(code, targets):
    """Tell the attacker where things are."""
    (code / "targets.json").write_text(json.dumps(targets))


def test_an_attacker_in_a_worker_reaches_nothing(start_daemon, target, code):
    """It reads no key and no other file, writes none, reaches no socket, ends no process."""
    done = attacked(start_daemon, target, code, sandbox="on")

    assert len(done) > PLAIN
    assert [number for number, what in done.items() if what != REFUSED] == []


def test_an_attacker_in_a_worker_has_the_slots_of_its_orders_alone(start_daemon, target, code, write, photos):
    """All slots are there from the start; the worker has none of a stream without an order."""
    write(
        "count.py",
        """
        import numpy as np

        def memories(sample, rng):
            with open("/proc/self/maps") as maps:
                lines = [line.split(None, 5) for line in maps if "memfd:batchd-slot" in line]
            sizes = [int(end, 16) - int(start, 16) for line in lines for start, end in [line[0].split("-")]]
            return {"sizes": np.array((sizes + [0] * 16)[:16], np.int64)}
        """,
    )
    own = {
        "source": {"type": "npy", "path": target["photo"].replace("photo", "numbers.npy")},
        "batch_size": 64,
        "pipeline": [{"op": "call", "function": "count:memories", "outputs": {"sizes": "int64[16]"}}],
        "read": [],
        "window": 2,
    }
    streams = {"own": own, "other": folder_stream(photos, memory=8 * SLOT_BYTES)}
    daemon = start_daemon(streams, python_path=[str(code)], workers=1, sandbox="on", reserve="start")
    wait_until(lambda: daemon.stream_status("other")["slots"] == 8, "all slots are there")
    with batchd_client.connect(daemon.address) as connection, connection.stream("own", epochs=2) as batches:
        sizes = {size for batch in batches for size in batch["sizes"].ravel().tolist()} - {0}
    assert len(sizes) == 1
    assert not sizes & {SLOT_BYTES}


def test_without_the_sandbox_all_plain_attacks_succeed(start_daemon, target, code):
    """Else the test above would show nothing."""
    done = attacked(start_daemon, target, code, sandbox="off")

    assert [number for number in range(PLAIN) if done[number] != DONE] == []


@pytest.mark.parametrize(("encloses", "outcome"), [(True, REFUSED), (False, DONE)])
def test_an_attacker_in_a_scan_reaches_nothing_and_all_without_the_sandbox(
    target, code, tmp_path, monkeypatch, encloses, outcome
):
    """A damaged file that takes over pyarrow gets no further than one that takes over a worker."""
    monkeypatch.setenv("PYTHONPATH", str(code))
    (tmp_path / "batchd.toml").touch()

    done = attacked_by_a_scan(target, code, tmp_path / "batchd.toml", encloses=encloses)

    assert len(done) > PLAIN
    assert [number for number in range(len(done) if encloses else PLAIN) if done[number] != outcome] == []


OBSERVER_MAY = {
    2: "the names of users",
    17: "programs, enclosed as it is",
    20: "sockets of this host",
    22: "the same",
    31: "what it starts is nicer",
}
"""The attacks that are not ones there, by number."""


@pytest.mark.parametrize("by_child", [False, True], ids=["itself", "sheet"])
@pytest.mark.parametrize(("encloses", "outcome"), [(True, REFUSED), (False, DONE)])
def test_an_attacker_in_the_observer_reaches_no_file_and_no_process(
    target, code, tmp_path, monkeypatch, encloses, outcome, by_child
):
    """Nor does one in the child that draws sheets; both may make sockets of this host."""
    monkeypatch.setenv("PYTHONPATH", str(code))
    (tmp_path / "batchd.toml").touch()

    done = attacked_by_the_observer(target, code, tmp_path / "batchd.toml", encloses=encloses, by_child=by_child)

    judged = [number for number in range(len(done) if encloses else PLAIN) if number not in OBSERVER_MAY]
    assert [number for number in judged if done[number] != outcome] == []


def test_a_running_observer_is_enclosed_unless_the_operator_wants_no_sandbox(start_daemon):
    """The kernel says so, and pages and sheets are as they were."""
    for sandbox, is_enclosed in (("on", True), ("off", False)):
        daemon = start_daemon(http=ANYWHERE, sandbox=sandbox)
        assert fetch(daemon, "/healthz").status == 200
        observer = observer_of(daemon)
        assert fetch(daemon, "/status.json").status == 200
        assert observer_of(daemon) == observer, "it has ended once it was enclosed"
        facts = Path(f"/proc/{observer_of(daemon)}/status").read_text()
        assert f"Seccomp:\t{2 * is_enclosed}" in facts
        assert f"NoNewPrivs:\t{int(is_enclosed)}" in facts
