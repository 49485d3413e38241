"""The process that reads a configuration again, tested by itself."""

import json
import os
import socket
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import pytest
import structlog

from batchd import __version__
from batchd.config.load import load_config
from batchd.daemon.reload import rescan
from batchd.daemon.reload.messages import (
    SILENCE_MAX_S,
    TO_DAEMON_FROM_RESCAN,
    ConfigRead,
    ReloadRequest,
    ScanProgressed,
)
from batchd.daemon.reload.rescan import LOOK_MAX_S
from batchd.data.storage.access import Storage
from batchd.data.storage.index_cache import IndexCache
from batchd.errors import ExitCode
from batchd.runtime.available import RESERVE_BYTES
from batchd.runtime.child_log import ChildLogged
from batchd.stream.cache_memory import CacheSpec
from batchd.stream.rings import plan_rings
from batchd.stream.served import open_stream
from batchd_wire.channel import ChannelClosed, receive_message
from support.forked import Forked
from support.producers import push_stream
from support.settings import folder_stream, write_settings


def run(request):
    """Return everything that the process sends, with the document at the end."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    messages, document = [], None
    with ours:
        with theirs:
            reader = Forked(rescan.main, [str(theirs.fileno())], json.dumps(request).encode())
        with suppress(ChannelClosed):
            while True:
                message, given = receive_message(ours, TO_DAEMON_FROM_RESCAN)
                messages.append(message)
                if isinstance(message, ConfigRead):
                    (answer,) = given
                    with os.fdopen(answer) as written:
                        document = json.load(written)
                else:
                    for descriptor in given:
                        os.close(descriptor)
        with reader.stdout:
            assert reader.wait() == 0
    return messages, document


class Served:
    """Two streams of 1 MiB, some of which a daemon serves; or ``streams``."""

    def __init__(self, tmp_path: Path, photos: Path, streams=None, **daemon):
        if streams is None:
            streams = {name: folder_stream(photos, batch_size=4, memory="1MiB") for name in ("one", "two")}
        settings = {"memory": "64MiB", "workers": 1, "runtime_dir": str(tmp_path / "run"), "http": "off", **daemon}
        self.file = write_settings(tmp_path / "batchd.toml", streams, settings)
        self.config = load_config(self.file, {})
        rings = plan_rings(self.config, Storage())
        self.slots = {name: ring.slots_max for name, ring in rings.items()}
        self.ring = next(iter(rings.values()))
        self.ring_bytes = self.ring.ring_bytes

    def request(self, signatures=(), made_bytes=0, cached_bytes=()):
        daemon = self.config.daemon.model_dump(mode="json")
        facts = {}, daemon, dict(signatures), self.slots, made_bytes, dict(cached_bytes)
        return asdict(ReloadRequest(__version__, str(self.file), *facts))


@pytest.fixture
def served(tmp_path, photos):
    return Served(tmp_path, photos)


@pytest.fixture
def has(monkeypatch):
    """Set how much free memory the machine has."""
    return lambda available: monkeypatch.setattr(rescan, "available_bytes", lambda: available)


@pytest.fixture
def eager(monkeypatch):
    """Report progress after every sample."""
    monkeypatch.setattr(rescan, "PROGRESS_EVERY_S", 0.0)


def outcome(document):
    return ExitCode(document["exit_code"])


def test_a_ring_that_is_replaced_gives_its_memory_to_the_new_one(served, has) -> None:
    """Both streams have changed, and the machine's small rest of memory is enough."""
    has(RESERVE_BYTES)
    _messages, document = run(served.request(made_bytes=2 * served.ring_bytes))
    assert outcome(document) is ExitCode.FINE, document
    _messages, document = run(served.request(made_bytes=2 * served.ring_bytes - 1))
    assert outcome(document) is ExitCode.NOT_ENOUGH_MEMORY
    assert "need 1 B of shared memory, have 0 B" in document["problem"]


def test_a_cache_counts_with_all_that_it_may_still_take(tmp_path, photos, has) -> None:
    """The cache counts once for both streams, without the memory that it has already."""
    keys = {"batch_size": 4, "memory": "1MiB", "cache": "encoded", "cache_memory": "8MiB"}
    served = Served(tmp_path, photos, {name: folder_stream(photos, **keys) for name in ("one", "two")})
    need_bytes = RESERVE_BYTES + 2 * served.ring_bytes + (8 << 20)

    has(need_bytes)
    _messages, document = run(served.request())
    assert outcome(document) is ExitCode.FINE, document
    (key,) = {CacheSpec(*stream["cache"]).key for stream in document["streams"].values()}
    has(need_bytes - 1)
    _messages, document = run(served.request())
    assert outcome(document) is ExitCode.NOT_ENOUGH_MEMORY
    _messages, document = run(served.request(cached_bytes={key: 1}))
    assert outcome(document) is ExitCode.FINE, document


def test_what_a_ring_that_stays_has_not_made_yet_is_not_given_away(served, has) -> None:
    """A new stream fits into the free memory, but not beside the reserved part of the other."""
    has(1 << 40)
    _messages, document = run(served.request())
    signature = document["streams"]["one"]["signature"]
    has(RESERVE_BYTES + served.ring_bytes)
    _messages, document = run(served.request({"one": signature}))
    assert outcome(document) is ExitCode.NOT_ENOUGH_MEMORY
    _messages, document = run(served.request({"one": signature}, made_bytes=served.ring_bytes))
    assert outcome(document) is ExitCode.FINE, document


def test_a_mailbox_that_is_made_before_the_memory_is_looked_at_is_not_asked_for_twice(tmp_path, photos, has) -> None:
    """Only the memory of the slots must still be free."""
    served = Served(tmp_path, photos, {"live": {**push_stream(), "memory": "8MiB"}})
    assert served.ring.mailbox_bytes
    has(RESERVE_BYTES + served.ring_bytes - served.ring.mailbox_bytes)
    _messages, document = run(served.request())
    assert outcome(document) is ExitCode.FINE, document


@pytest.mark.usefixtures("eager")
def test_a_scan_says_that_it_gets_on(served) -> None:
    """Progress is sent before each stream, and while samples are found."""
    messages, _document = run(served.request())
    told = [message for message in messages if isinstance(message, ScanProgressed)]
    assert [(message.name, message.found) for message in told] == [
        ("", 0),
        ("one", 0),
        ("one", 40),
        ("two", 0),
        ("two", 40),
    ]


@pytest.mark.thorough
@pytest.mark.usefixtures("eager")
def test_a_scan_says_how_long_it_may_be_silent(tmp_path, photos) -> None:
    """The time includes that of servers, and of users' functions in any part of the source."""
    (tmp_path / "mine.py").write_text("def numbers():\n    return [0] * 8\n")
    numbers = {"type": "python", "function": "mine:numbers", "fields": {"x": "int64"}, "length_timeout_s": 1000.0}
    source = {"type": "concat", "sources": [numbers, {**numbers, "length_timeout_s": 10.0}]}
    streams = {"one": folder_stream(photos), "two": {"source": source, "batch_size": 4}}
    served = Served(tmp_path, photos, streams, storage_timeout_s=50.0, storage_retries=3)
    messages, _document = run(served.request())
    patience = {message.name: message.patience_s for message in messages if isinstance(message, ScanProgressed)}
    assert patience == {"": SILENCE_MAX_S + 2 * LOOK_MAX_S, "one": SILENCE_MAX_S + 200, "two": SILENCE_MAX_S + 1200}


def test_what_is_to_be_logged_is_the_daemons_to_log(tmp_path, photos, capfd) -> None:
    """So the line has the format and the minimum level of the daemon's log."""
    cache = tmp_path / "cache"
    cache.mkdir()
    cache.chmod(0o777)
    messages, _document = run(Served(tmp_path, photos, cache_dir=str(cache)).request())
    event = "no index is kept or used: others may write into the folder"
    said = [message for message in messages if isinstance(message, ChildLogged)]
    assert said == [ChildLogged("warning", event, {"folder": str(cache)})] * 2
    assert event not in "".join(capfd.readouterr())


def test_a_line_that_no_message_can_carry_is_cut_and_written_out(served, monkeypatch) -> None:
    """Names of files need not be text, and reasons may be long."""

    def check(_reading, _file, _storage):
        structlog.get_logger().warning("odd", file=os.fsdecode(b"\xff"), long="x" * 1_000_000)
        raise OSError("enough")

    monkeypatch.setattr(rescan, "check_reading", check)
    messages, document = run(served.request())
    (said,) = (message for message in messages if isinstance(message, ChildLogged))
    assert said.facts["file"] == "\\udcff"
    assert said.facts["long"] == "x" * 4_000
    assert "enough" in document["problem"]


def test_it_ends_with_a_daemon_that_left_a_message_unread() -> None:
    """The kernel reports a reset then, instead of an end of file."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    def say_and_wait() -> int:
        ours.close()
        theirs.send(b"unread")
        with suppress(OSError):
            rescan._end_with_daemon(theirs)
        return 3

    reader = Forked(say_and_wait, [], b"")
    theirs.close()
    ours.recv(1, socket.MSG_PEEK)
    ours.close()
    reader.stdout.close()
    assert reader.wait() == 1


@pytest.mark.parametrize(("memory", "restart"), [("64MiB", []), ("2MiB", ["define"])])
def test_the_first_definitions_need_memory_that_no_ring_has(tmp_path, photos, memory, restart):
    """Where the rings of the file take all, the table waits for a restart; else it is in force.

    Names of users are numbers then, and roots real folders, so that the daemon asks for neither.
    """
    served = Served(tmp_path, photos, {name: folder_stream(photos) for name in ("one", "two")}, memory=memory)
    link = tmp_path / "link"
    link.symlink_to(photos)
    table = f'define = {{ who = ["user:root", "group:4711"], roots = ["{link}"] }}'
    served.file.write_text(served.file.read_text().replace("[daemon]", f"[daemon]\n{table}"))
    signatures = {name: stream.facts.signature for name, stream in opened(served).items()}
    _messages, document = run(served.request(signatures))
    assert (document["problem"], document["restart"], document["same"]) == ("", restart, ["one", "two"])
    assert ("define" in document["daemon"]) is not bool(restart)
    assert document["numbers"] == ({} if restart else {"user:root": 0, "group:4711": 4711})
    assert document["roots"][0] == ([] if restart else [str(photos.resolve())])


def opened(served):
    """The streams as a daemon serves them."""
    rings = plan_rings(served.config, Storage())
    cache = IndexCache(None)
    streams = {
        name: open_stream(1, name, served.config, rings[name], Storage(), cache, lambda _found: None)
        for name in served.config.streams
    }
    for stream in streams.values():
        stream.close()
    return streams
