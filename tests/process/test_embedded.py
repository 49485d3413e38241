"""A daemon inside a script: a child that ends with its parent, however the parent ends."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import batchd
import batchd_client
from batchd.embedded import address_of_child
from batchd.errors import BatchdError
from batchd.runtime.children import Child
from batchd_client import discovery
from support.commands import batchd as run_batchd
from support.daemon_process import clean_environment
from support.expected import Expected
from support.images import jpeg, photo
from support.kernel import children_of, descriptors_of, is_alive, members_of, workers_of
from support.seen import look_at, see
from support.settings import folder_stream, write_settings
from support.waiting import PATIENCE_S, wait_until

SCRIPT = """
import os, select, sys
import batchd, batchd_client

with batchd.serve(sys.argv[1]) as address:
    with batchd_client.connect(address) as connection:
        stream = connection.stream("photos")
        batch = next(iter(stream))
        daemon = connection.status()["daemon"]["pid"]
        try:
            print(address, daemon, flush=True)
            while not select.select([sys.stdin], [], [], 0.05)[0]:
                pass  # a read for ever would miss a signal that comes just before it
        except KeyboardInterrupt:
            print("interrupted at step", stream.step, batch["image"].any(), len(next(iter(stream))), flush=True)
print("left", flush=True)
"""


@pytest.fixture
def config(tmp_path, photos, daemons_folder, monkeypatch):
    """Write a configuration with one stream; the leak check knows the daemon's directory."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(daemons_folder))
    return write_settings(
        tmp_path / "batchd.toml", {"photos": folder_stream(photos)}, {"workers": 2, "memory": "16MiB"}
    )


@pytest.fixture
def script(config, daemons_folder):
    """Run a script with an embedded daemon until its input ends; return process and daemon's id."""
    with subprocess.Popen(
        [sys.executable, "-c", SCRIPT, config],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**clean_environment(), "XDG_RUNTIME_DIR": str(daemons_folder)},
        process_group=0,
        text=True,
    ) as process:
        address, daemon = process.stdout.readline().split()
        assert Path(address.removeprefix("ipc://")).is_dir()
        yield process, int(daemon)
        process.kill()


def test_a_script_serves_itself_and_leaves_nothing(config, daemons_folder):
    """The daemon answers commands within the context; afterwards no process or directory is left.

    This process has two ends that report each other's death, and a pidfd. Batches stay readable.
    """
    expected, before, descriptors = Expected(config), children_of(os.getpid()), len(descriptors_of("self"))
    with batchd.serve(config) as address:
        assert len(descriptors_of("self")) <= descriptors + 3
        status = json.loads(run_batchd("status", "--json", "--address", address).stdout)
        assert [stream["name"] for stream in status["streams"]] == ["photos"]
        assert children_of(os.getpid()) - before == {status["daemon"]["pid"]}
        with batchd_client.connect(address) as connection:
            assert see(connection.stream("photos", epochs=1)) == expected.epoch(0)
            assert "<td>photos</td>" in connection._repr_html_()
            batch = next(iter(connection.stream("photos")))

    assert look_at(batch) == expected.batch(0, 0)
    batch.release()
    assert list(daemons_folder.iterdir()) == []
    assert children_of(os.getpid()) == before


def test_the_address_is_the_line_that_begins_as_one():
    """A user's source may print text before and after that line."""
    says = "print('scanning'); print('ipc:///run/x'); print('ready')"
    with Child(subprocess.Popen([sys.executable, "-c", says], stdout=subprocess.PIPE)) as child:
        assert address_of_child(child, PATIENCE_S) == "ipc:///run/x"


def test_an_exception_in_the_script_ends_the_daemon_too(config):
    """The exception passes through unchanged."""
    with pytest.raises(ZeroDivisionError), batchd.serve(config):
        raise ZeroDivisionError


def test_two_at_once_do_not_meet(config):
    """Each has a directory of its own; overrides, as ``batchd serve --set`` takes them, win."""
    overrides = {"daemon.workers": "1", "streams.photos.batch_size": "5", "streams.photos.seed": "1"}
    with batchd.serve(config) as one, batchd.serve(config, overrides=overrides) as other:
        assert one != other
        with batchd_client.connect(one) as here, batchd_client.connect(other) as there:
            first, second = (connection.stream("photos", epochs=1) for connection in (here, there))
            assert first.fingerprint != second.fingerprint
            assert see(first) != see(second)
            assert second.batch_size == 5
            assert len(there.status()["workers"]) == 1


@pytest.mark.thorough(after_first=True)
@pytest.mark.parametrize(
    ("text", "overrides", "status", "reason"),
    [
        ("batch_size = 0", {}, 2, "batch_size: must be greater than or equal to 1, not 0"),
        ('batch_size = 1\nsource = { type = "npy", path = "none.npy" }', {}, 2, "none.npy cannot be read"),
        (None, {"daemon.http": "127.0.0.1:{port}"}, 2, "address already in use"),
        (None, {"daemon.memory": "64KiB", "streams.photos.batch_size": "64"}, 5, "need .* have 64.0 KiB"),
        (None, {"daemon.worker": "1"}, 2, "unknown key .*did you mean workers"),
    ],
)
def test_a_daemon_that_does_not_start_is_an_exception_with_its_reason(config, text, overrides, status, reason, capfd):
    """Standard error, which a notebook may not show, does not repeat the reason."""
    if text is not None:
        config.write_text(f"[streams.a]\n{text}\n")
    ended = rf"ended with exit status {status} before it was ready: [\s\S]*{reason}"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        given = {key: value.format(port=taken.getsockname()[1]) for key, value in overrides.items()}
        with pytest.raises(BatchdError, match=ended), batchd.serve(config, overrides=given):
            pytest.fail("no daemon should have started")

    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("key", ["", "daemon.workers=1"])
def test_an_override_that_names_no_key_is_refused(config, key):
    """The error comes before a daemon starts with a wrong command line."""
    with pytest.raises(BatchdError, match="not a path of keys"), batchd.serve(config, overrides={key: "1"}):
        pytest.fail("no daemon should have started")


def test_what_an_embedded_daemon_logs_is_lines_of_text(config, tmp_path, capfd):
    """A bad sample is one line: people read a script's standard error, also in a file."""
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "broken.jpg").write_bytes(b"no image")
    (tmp_path / "more" / "good.jpg").write_bytes(jpeg(photo()))
    source = f'{{ type = "glob", root = "{tmp_path}/more", patterns = ["*.jpg"] }}'
    overrides = {"streams.photos.source": source, "streams.photos.max_bad_fraction": "1.0"}
    with batchd.serve(config, overrides=overrides) as address, batchd_client.connect(address) as connection:
        assert [batch.samples for batch in connection.stream("photos", epochs=1)] == [2]

    (line,) = capfd.readouterr().err.splitlines()
    assert re.fullmatch(r"\d\d:\d\d:\d\d warning bad sample: .*path=\S*broken\.jpg.*", line)


def test_the_death_of_the_script_ends_its_daemon(script, daemons_folder):
    """The script cannot clean up; the kernel notifies the daemon, which removes everything."""
    process, daemon = script
    assert len(workers_of(daemon)) == 2
    process.kill()
    assert process.wait() == -signal.SIGKILL

    wait_until(lambda: not is_alive(daemon) and not members_of(daemon), "daemon and workers have ended")
    assert list(daemons_folder.iterdir()) == []


def test_ctrl_c_reaches_the_script_alone(script):
    """The script decides when its daemon ends; until then, batches arrive."""
    process, _daemon = script
    os.killpg(process.pid, signal.SIGINT)

    assert process.stdout.readline() == "interrupted at step 1 True 3\n"
    assert process.stdout.readline() == "left\n"
    assert process.wait() == 0
    assert process.stderr.read() == ""


def test_a_killed_daemon_does_not_hang_the_script(config, monkeypatch):
    """Nobody starts it again: the client waits seconds by default, not hours."""
    monkeypatch.setattr(discovery, "RECONNECT_TO_CHILD_S", 0.2)
    with batchd.serve(config) as address, batchd_client.connect(address) as connection:
        os.kill(connection.status()["daemon"]["pid"], signal.SIGKILL)
        with pytest.raises(batchd_client.errors.DaemonUnavailable):
            connection.stream("photos")
