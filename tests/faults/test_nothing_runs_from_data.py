"""Under attack, no daemon or worker unpickles, loads byte-code, evaluates or compiles anything.

``support/audit`` records the interpreter's own audit events (PEP 578) in the daemon and its worker.
Python imports modules when they are first needed, which causes events, too, so an epoch is read
before the attack; from then on no event may occur.
"""

import marshal
import pickle
import subprocess
import sys
from pathlib import Path

import msgpack
import pytest

import batchd_client
import support.images as made
from batchd_wire import PROTOCOL_VERSION
from batchd_wire.channel import receive_message, send_message
from batchd_wire.messages import TO_TRAINER_LIFELINE, AskReload, AskStatus, Hello, Refused, Status, Welcome
from support.daemon_process import clean_environment
from support.expected import Expected
from support.kernel import parent_of
from support.raw_peer import RawPeer
from support.seen import see
from support.settings import folder_stream

AUDIT = Path(__file__).parents[1] / "support" / "audit"
CODES_MAX = 40
"""Above the number of every message that a daemon accepts."""


class Burglar:
    """An object that, if unpickled, runs a program that leaves a file behind."""

    def __init__(self, trace: Path) -> None:
        self._trace = trace

    def __reduce__(self):
        return subprocess.call, (["touch", str(self._trace)],)


@pytest.fixture
def trace(tmp_path):
    """Return the path of the file that exists once code of ours has run."""
    return tmp_path / "trace"


@pytest.fixture
def payloads(trace):
    """Return code as data, in every form that Python has for it."""
    source = f"__import__('pathlib').Path({str(trace)!r}).touch()"
    pickles = [pickle.dumps(Burglar(trace), protocol) for protocol in range(pickle.HIGHEST_PROTOCOL + 1)]
    return [*pickles, marshal.dumps(compile(source, "data", "exec")), source.encode()]


@pytest.fixture
def audited(tmp_path):
    """Return the environment of an audited process, and the file that it writes."""
    file = tmp_path / "audit"
    return {"PYTHONPATH": str(AUDIT), "BATCHD_TEST_AUDIT": str(file)}, file


def nested(data, levels):
    """Return ``data`` inside arrays inside arrays."""
    return b"\x91" * levels + msgpack.packb(data)


def words_with(payload):
    """Return messages that carry the payload in every possible way."""
    yield payload
    yield msgpack.packb(payload)
    yield msgpack.packb(msgpack.ExtType(5, payload))
    yield msgpack.packb({"__reduce__": payload, "__class__": "os.system"})
    yield from (nested(payload, levels) for levels in (10, 500, 3000))
    for code in range(CODES_MAX):
        for fields in range(12):
            yield msgpack.packb([code] + [payload] * fields)
        yield msgpack.packb([code, msgpack.ExtType(1, payload)])
        if code not in {AskStatus.code, AskReload.code}:  # these skip all but one field
            yield msgpack.packb([code, 1, payload.decode("latin-1"), 0, 1, 2, 0, 0, 1, None, False])


def attack(daemon, payloads):
    """Send all of it over ZeroMQ, before and within a session, and on lifelines."""
    for payload in payloads:
        with RawPeer(daemon.runtime_dir) as stranger, RawPeer(daemon.runtime_dir) as member:
            member.open()
            for words in words_with(payload):
                for peer in (stranger, member):
                    assert isinstance(peer.ask_raw(words), Refused)
            assert isinstance(member.ask(AskStatus(1)), Status)
        for words in [*list(words_with(payload))[:20], msgpack.packb([1, PROTOCOL_VERSION, payload, 1])]:
            with RawPeer(daemon.runtime_dir) as peer:
                peer.lifeline.send(words)
                assert peer.is_hung_up()
        with RawPeer(daemon.runtime_dir) as peer:
            send_message(peer.lifeline, Hello(PROTOCOL_VERSION, payload.decode("latin-1"), 1))
            welcome, _ = receive_message(peer.lifeline, TO_TRAINER_LIFELINE)
            assert isinstance(welcome, Welcome)


def odd_files(payloads):
    """Return files that are broken images, other files, or images of a rare kind."""
    photo = made.photo()
    jpeg, png = made.jpeg(photo), made.encode(photo, ".png")
    return [
        *payloads,
        jpeg[: len(jpeg) // 2],
        jpeg[:20] + payloads[0] + jpeg[20:],
        jpeg[:2] + b"\xff\xe1" + (len(payloads[0]) + 8).to_bytes(2, "big") + b"Exif\0\0" + payloads[0] + jpeg[2:],
        png[:33] + made.png_chunk(b"zTXt", b"pickle\0\0" + payloads[0]) + png[33:],
        png[:-20],
        made.with_right_checksums(png[:60] + bytes(100) + png[160:]),
        made.huge_jpeg_header(),
        made.huge_png_header(),
        made.cmyk_jpeg((10, 20, 200)),
        made.progressive_jpeg(photo),
        made.png16(photo),
        made.encode(photo, ".webp"),
        made.animation(".gif", [photo, photo]),
        made.jpeg_with_exif(jpeg, 6),
        b"\x93NUMPY\x01\x00\x46\x00{'descr': '|O', 'fortran_order': False, 'shape': (1,), }" + payloads[0],
        b"",
    ]


@pytest.fixture
def spoilt(tmp_path, payloads):
    """Make a folder of photographs; return the content that will replace each of them."""
    files = odd_files(payloads)
    paths = made.write_photos(tmp_path / "odd", {"": len(files)})
    return tmp_path / "odd", dict(zip(paths, files, strict=True))


@pytest.fixture
def daemon(start_daemon, photos, audited, spoilt):
    """Start an audited daemon; after a read of both streams its worker has made all imports."""
    folder, _ = spoilt
    odd = folder_stream(folder, batch_size=4, on_error="mask", max_bad_fraction=1.0)
    return start_daemon({"photos": folder_stream(photos), "odd": odd}, environment=audited[0], workers=1)


def test_nothing_runs_from_hostile_messages_and_files(daemon, audited, spoilt, payloads, trace):
    """A good trainer reads meanwhile, and gets the expected batches."""
    _, audit = audited
    _, replacements = spoilt
    with batchd_client.connect(daemon.address) as connection:
        good, odd = connection.stream("photos", epochs=2), connection.stream("odd", epochs=20)
        see(good)
        with RawPeer(daemon.runtime_dir) as peer:
            peer.open()
        see(odd)
        before = audit.read_text()
        forkers = {parent_of(pid) for pid in daemon.worker_pids()}  # workers inherit their audit
        assert {int(line.split()[0]) for line in before.splitlines()} >= {daemon.pid, *forkers}

        for path, data in replacements.items():
            path.write_bytes(data)
        attack(daemon, payloads)
        seen = see(good)
        for _ in range(3):
            see(odd)
        bad = connection.status()["streams"][1]["bad_samples"]

    assert seen == Expected(daemon.config).epoch(1)
    assert bad >= len(payloads)
    assert audit.read_text()[len(before) :] == ""
    assert not trace.exists()


@pytest.mark.parametrize(
    ("code", "event"),
    [
        ("pickle.loads(pickle.dumps(OSError))", "pickle.find_class"),
        ("marshal.loads(marshal.dumps(1))", "marshal.loads"),
        ("eval('1')", "exec"),
        ("compile('1', 'data', 'eval')", "compile"),
        ("os.system('true')", "os.system"),
        ("(lambda: 0).__code__.replace(co_name='x')", "code.__new__"),
    ],
)
def test_what_would_run_is_written_down(audited, code, event):
    """The audit records each of them, so a clean record in the test above proves their absence."""
    environment, audit = audited
    program = f"import marshal, os, pickle; print(os.stat({str(audit)!r}).st_size, flush=True); {code}"
    done = subprocess.run(
        [sys.executable, "-P", "-c", program],
        env={**clean_environment(), **environment},
        capture_output=True,
        check=True,
        text=True,
    )
    after = audit.read_text()[int(done.stdout.splitlines()[0]) :]
    assert event in {line.split()[1] for line in after.splitlines()}


def test_a_burglar_that_is_let_in_leaves_its_trace(payloads, trace):
    """The payloads do what they claim."""
    pickle.loads(payloads[0])
    assert trace.exists()
