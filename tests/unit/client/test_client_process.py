"""The client inside a program: its imports, forks of the program, and the program's end."""

import os
import re
import subprocess
import sys
import textwrap

import pytest

import batchd_client
from batchd_client.errors import ForkedConnection
from support.fake_daemon import FakeDaemon
from support.waiting import PATIENCE_S


@pytest.fixture
def fake(tmp_path):
    with FakeDaemon(tmp_path / "run") as fake:
        yield fake


def run_program(text: str, *arguments: str, mode: str = "dev") -> subprocess.CompletedProcess[str]:
    """Run a program; ``dev`` mode warns about everything that is left open."""
    return subprocess.run(
        [sys.executable, "-X", mode, "-c", textwrap.dedent(text), *arguments],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


def test_import_needs_only_numpy_zmq_and_msgpack() -> None:
    """The client is light, independent of the server's dependencies, and safe before a fork."""
    done = run_program(
        """
        import os, sys
        present = set(sys.modules)
        import msgpack, numpy, zmq  # numpy's BLAS has threads of its own
        before, threads = set(sys.modules), os.listdir("/proc/self/task")
        import batchd_client
        for name in batchd_client.__all__:  # each brings its module at its first use
            getattr(batchd_client, name)
        print(os.listdir("/proc/self/task") == threads)
        for known in (present, before):
            print(*sorted({name.partition(".")[0] for name in set(sys.modules) - known}))
        """
    )

    same_threads, loaded, by_us = (line.split() for line in done.stdout.splitlines())
    assert same_threads == ["True"], done.stderr
    others = [name for name in loaded if name not in sys.stdlib_module_names and "cython" not in name]
    assert others == ["batchd_client", "batchd_wire", "msgpack", "numpy", "zmq"]
    assert not {"asyncio", "multiprocessing", "concurrent", "http", "email", "unittest"}.intersection(by_us)


def test_the_first_call_of_an_extension_imports_its_module() -> None:
    """A program that draws nothing loads nothing for it."""
    done = run_program(
        """
        import sys
        from batchd_client.stream import html_of_stream
        print("batchd_client.notebook" in sys.modules)
        try:
            html_of_stream(None)
        except AttributeError as error:
            print(error.name)
        """
    )

    assert done.stdout.split() == ["False", "epoch"], done.stderr


def test_forked_child_must_connect_itself_and_the_parent_continues(fake) -> None:
    """Use of the copy in the child does not end the parent's session."""
    with batchd_client.connect(fake.address) as daemon:
        stream = daemon.stream("photos")
        batch = next(iter(stream))
        child = os.fork()
        if child == 0:
            os._exit(use_in_child(daemon, stream, batch))
        _, status = os.waitpid(child, 0)

        assert os.waitstatus_to_exitcode(status) == 0
        assert [batch.step for batch in stream] == [1, 2, 3, 4]
        assert fake.ended_sessions == 1  # the session of the child
        assert stream.statistics().resubscribed == 0


def use_in_child(daemon, stream, batch) -> int:
    """Use the inherited objects in a child; return 0 if each refuses or works as it should."""
    for use in (lambda: next(iter(stream)), daemon.status, lambda: daemon.stream("photos"), lambda: stream.seek(0)):
        try:
            use()
        except ForkedConnection:
            continue
        return 1
    if batch["label"][0] != 0:
        return 2
    batch.release()
    stream.close()
    daemon.close()
    with batchd_client.connect(daemon.address) as own:
        return 0 if [batch.step for batch in own.stream("photos")] == [0, 1, 2, 3, 4] else 3


def test_forked_child_that_ends_normally_leaves_the_parent_alone(fake) -> None:
    """The child's interpreter tears down all inherited objects."""
    done = run_program(
        """
        import os, sys, batchd_client
        daemon = batchd_client.connect(sys.argv[1])
        stream = daemon.stream("photos")
        batch = next(iter(stream))
        child = os.fork()
        if child == 0:
            sys.exit(0)
        print(os.waitpid(child, 0)[1], [batch.step for batch in stream], stream.statistics().resubscribed)
        """,
        fake.address,
        mode="utf8",  # dev mode would warn: pyzmq never counts a socket as closed in a child
    )

    assert (done.stdout, done.stderr) == ("0 [1, 2, 3, 4] 0\n", "")


ENDINGS = {
    "holding everything": "",
    "holding an array": "batch = batch['label']; del daemon, stream",
    "after close": "daemon.close()",
    "in a cycle": "cycle = [daemon, stream, batch]; cycle.append(cycle); del daemon, stream, batch",
    "having forgotten the connection": "del daemon, stream, batch",
    "with another thread that waits": (
        "import threading; other = daemon.stream('photos');"
        "threading.Thread(target=lambda: [batches.append(one) for one in other for batches in [[]]], daemon=True).start()"
    ),
}


@pytest.mark.thorough(after_first=True)
@pytest.mark.parametrize("ending", ENDINGS.values(), ids=ENDINGS)
def test_program_ends_silently(fake, ending: str) -> None:
    """It does not hang or warn, and the daemon sees the end of the lifeline."""
    done = run_program(
        f"""
        import sys, batchd_client
        daemon = batchd_client.connect(sys.argv[1])
        stream = daemon.stream("photos")
        batch = next(iter(stream))
        {ending}
        """,
        fake.address,
    )

    assert (done.returncode, done.stderr) == (0, "")
    fake.wait_until(lambda: fake.ended_sessions == 1)


CLOSED_LATE = {
    "by a generator that is still suspended": """
        def batches():
            with batchd_client.connect(sys.argv[1]) as daemon:
                yield from daemon.stream("photos")
        taken = batches()
        next(taken)
        """,
    "by a function that was registered first": """
        daemon = batchd_client.connect(sys.argv[1])
        stream = daemon.stream("photos")
        next(iter(stream))
        closed_at_last += stream, daemon
        """,
    "by an object of the module": """
        class Model:
            def __init__(self):
                self.daemon = batchd_client.connect(sys.argv[1])
                self.stream = self.daemon.stream("photos")
                next(iter(self.stream))
            def __del__(self):
                self.stream.close()
                self.daemon.close()
        model = Model()
        """,
}


@pytest.mark.thorough(after_first=True)
@pytest.mark.parametrize("closed", CLOSED_LATE.values(), ids=CLOSED_LATE)
def test_connection_is_closed_after_the_program_has_ended_it(fake, closed: str) -> None:
    """Nothing is left to do then, and the daemon does not have to be waited for."""
    done = run_program(
        """
        import atexit, sys
        closed_at_last = []
        atexit.register(lambda: [one.close() for one in closed_at_last])
        import batchd_client
        """
        + closed,
        fake.address,
    )

    assert (done.returncode, done.stderr) == (0, "")
    fake.wait_until(lambda: fake.ended_sessions == 1)


def test_connection_that_the_program_has_ended_refuses_use(fake) -> None:
    """Code that uses it later during the exit gets an error."""
    done = run_program(
        """
        import atexit, sys
        used_at_last = []
        def use():
            for one in used_at_last:
                try:
                    one()
                except batchd_client.errors.DaemonClosed:
                    print("closed")
        atexit.register(use)
        import batchd_client
        daemon = batchd_client.connect(sys.argv[1])
        used_at_last += daemon.status, lambda: daemon.stream("photos")
        """,
        fake.address,
    )

    assert (done.returncode, done.stdout, done.stderr) == (0, "closed\nclosed\n", "")


@pytest.mark.thorough
def test_thread_that_waits_for_a_batch_can_be_joined_at_the_end(fake) -> None:
    """A function that runs after the connection's end joins the thread."""
    fake.grants_at_most = 0
    done = run_program(
        """
        import atexit, sys, threading
        threads = []
        atexit.register(lambda: [thread.join() for thread in threads])
        import batchd_client
        daemon = batchd_client.connect(sys.argv[1])
        stream = daemon.stream("photos")
        def wait():
            try:
                next(iter(stream))
            except batchd_client.errors.DaemonClosed:
                print("closed")
        threads.append(threading.Thread(target=wait, daemon=True))
        threads[0].start()
        """,
        fake.address,
    )

    assert (done.returncode, done.stdout, done.stderr) == (0, "closed\n", "")


def test_failed_connect_leaves_nothing_behind(tmp_path) -> None:
    """No descriptors or threads remain, so a program can retry in a loop."""
    done = run_program(
        """
        import os, sys, batchd_client
        connect = batchd_client.connect  # it brings numpy, whose BLAS has threads of its own
        def look():
            return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))
        before = look()
        for attempt in range(50):
            try:
                connect(sys.argv[1], connect_timeout_s=0)
            except batchd_client.errors.DaemonNotFound:
                pass
        print(look() == before)
        """,
        str(tmp_path),
    )

    assert (done.stdout, done.stderr) == ("True\n", "")


def test_daemon_knows_the_program_by_its_name(fake, tmp_path) -> None:
    """`batchd status` shows this name."""
    script = tmp_path / "train.py"
    script.write_text("import sys, batchd_client; batchd_client.connect(sys.argv[1]).close()")
    subprocess.run([sys.executable, script, fake.address], check=True, timeout=PATIENCE_S)

    assert re.fullmatch(r"train\.py-\d+", fake.heard[0].name)


@pytest.mark.thorough(after_first=True)
@pytest.mark.parametrize("threads", [0, 1, 2])
def test_program_that_may_start_no_thread_gets_an_error(fake, threads) -> None:
    """ZeroMQ would abort the program.

    Its address space has room for the stacks of this many threads; a connection needs two.
    """
    stack_bytes = 1 << 32
    done = subprocess.run(
        [
            "prlimit",
            f"--stack={stack_bytes}",
            sys.executable,
            "-c",
            textwrap.dedent(
                """
                import resource, sys
                from batchd_client import connect, errors
                used = 4096 * int(open("/proc/self/statm").read().split()[0])
                room = int((float(sys.argv[2]) + 0.5) * int(sys.argv[3]))
                resource.setrlimit(resource.RLIMIT_AS, (used + room, used + room))
                try:
                    connect(sys.argv[1]).close()
                    print("connected")
                except errors.ThreadsExhausted as error:
                    print(error)
                """
            ),
            fake.address,
            str(threads),
            str(stack_bytes),
        ],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )

    said = "connected" if threads == 2 else f"ZeroMQ needs 2 threads, and only {threads} could be started"
    assert (done.returncode, done.stdout.partition("\n")[0]) == (0, said), done.stderr
