"""The format of the log on a terminal, in the journal and elsewhere.

No peer can forge a line, and a blocked log does not stop the daemon.
"""

import fcntl
import json
import os
import pty
import re
import termios
from contextlib import closing
from pathlib import Path

import pytest
import structlog

from batchd.cli import log_lines
from batchd.cli.log_lines import PORTION_BYTES, VALUE_CHARACTERS_MAX, LogLines, is_journal, set_up_logs
from batchd.cli.text import escaped
from batchd.runtime.children import fill_standard_streams

EVIL = 'x.jpg\n<0>forged: ok\x1b[2J\r\x9b31m\u202e "quoted"'
ANSI = re.compile(r"\x1b\[[0-9;]*m")


class Reader:
    """The read end of a pipe that serves as standard error of a test."""

    def __init__(self, monkeypatch):
        self.descriptor, self.written = os.pipe()
        os.set_blocking(self.descriptor, False)
        monkeypatch.setattr(log_lines, "STANDARD_ERROR", self.written)

    def close(self):
        os.close(self.written)
        os.close(self.descriptor)

    @property
    def text(self):
        """Return all text that arrived since the last call."""
        parts = []
        try:
            while part := os.read(self.descriptor, 1 << 16):
                parts.append(part)
        except BlockingIOError:
            pass
        return b"".join(parts).decode()

    def journal_stream(self):
        """Return the value that systemd would set in the environment for this pipe."""
        status = os.fstat(self.written)
        return f"{status.st_dev}:{status.st_ino}"


@pytest.fixture
def reader(monkeypatch):
    monkeypatch.delenv("JOURNAL_STREAM", raising=False)
    with closing(Reader(monkeypatch)) as reader:
        yield reader


def test_elsewhere_a_line_is_an_object(reader):
    """Each line is a JSON object with the keys that programs sort by."""
    set_up_logs("info")
    structlog.get_logger().warning("worker ended", worker=3, how="signal 9")

    line = json.loads(reader.text)
    assert {**line, "timestamp": None} == {
        "event": "worker ended",
        "level": "warning",
        "worker": 3,
        "how": "signal 9",
        "timestamp": None,
    }
    assert line["timestamp"].endswith("Z")


@pytest.mark.parametrize(
    ("level", "priority"), [("debug", "<7>"), ("info", "<6>"), ("warning", "<4>"), ("error", "<3>")]
)
def test_in_the_journal_a_line_has_its_priority_and_no_time(reader, monkeypatch, level, priority):
    """The journal adds the time itself, and its levels are those of syslog."""
    monkeypatch.setenv("JOURNAL_STREAM", reader.journal_stream())
    set_up_logs("debug")
    getattr(structlog.get_logger(), level)("worker ended", worker=3, how="signal 9", key="", pid=None)

    assert reader.text == f'{priority}worker ended: worker=3 how="signal 9" key="" pid=None\n'


def test_json_in_the_journal_has_its_priority_too(reader, monkeypatch):
    """Programs that read the journal need the priority, too."""
    monkeypatch.setenv("JOURNAL_STREAM", reader.journal_stream())
    set_up_logs("info", "json")
    structlog.get_logger().error("stream stopped", stream="photos")

    text = reader.text
    assert text.startswith("<3>{")
    assert json.loads(text[3:]) == {"event": "stream stopped", "level": "error", "stream": "photos"}


def test_the_journal_is_told_by_device_and_inode(reader):
    """An inherited variable that names another descriptor has no effect."""
    assert is_journal(reader.written, {"JOURNAL_STREAM": reader.journal_stream()})
    assert not is_journal(reader.written, {"JOURNAL_STREAM": "1:2"})
    assert not is_journal(reader.written, {})


def test_text_can_be_had_elsewhere(reader):
    """The text has no colours, because only a terminal interprets them."""
    set_up_logs("info", "text")
    structlog.get_logger().info("serving", address="ipc:///run/batchd")

    assert re.match(r"\d\d:\d\d:\d\d info    serving: address=ipc:///run/batchd\n$", reader.text)


def test_levels_below_the_one_that_is_wanted_are_not_written(reader):
    """With ``--log-level warning`` the log has no ``info`` lines."""
    set_up_logs("warning")
    structlog.get_logger().info("serving")

    assert not reader.text


@pytest.mark.parametrize("form", ["auto", "text", "json"])
@pytest.mark.parametrize("in_journal", [True, False])
def test_what_peers_and_files_say_cannot_forge_a_line(reader, monkeypatch, form, in_journal):
    """Every event is one line without control characters, in each format."""
    if in_journal:
        monkeypatch.setenv("JOURNAL_STREAM", reader.journal_stream())
    set_up_logs("info", form)
    structlog.get_logger().warning("bad sample", path=EVIL, reason="\udcff\0")

    line, rest = reader.text.split("\n", 1)
    assert not rest
    assert line.isprintable()
    assert "x.jpg\\n<0>forged" in line


def test_on_a_terminal_only_our_colours_are_obeyed(monkeypatch):
    """Without batchd's colours, the line contains no sequence that a terminal interprets."""
    ours, theirs = pty.openpty()
    try:
        attributes = termios.tcgetattr(theirs)
        attributes[1] &= ~termios.OPOST
        termios.tcsetattr(theirs, termios.TCSANOW, attributes)
        monkeypatch.setattr(log_lines, "STANDARD_ERROR", theirs)
        set_up_logs("info")
        structlog.get_logger().warning("bad sample", path=EVIL)
        text = os.read(ours, 1 << 16).decode()
    finally:
        os.close(ours)
        os.close(theirs)

    assert text.endswith("\n")
    assert ANSI.search(text)
    assert ANSI.sub("", text)[:-1].isprintable()


def test_a_value_without_end_is_cut(reader):
    """A peer that sends a megabyte as its name does not get a megabyte of the log."""
    set_up_logs("info")
    structlog.get_logger().info("trainer subscribed", name="x" * 1_000_000)

    assert len(reader.text) < VALUE_CHARACTERS_MAX + 200


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain, with Umlaut: ä", "plain, with Umlaut: ä"),
        ("a\nb\tc", "a\\nb\\tc"),
        ("\x1b]0;title\x07", "\\x1b]0;title\\x07"),
        ("\u202egpj.exe", "\\u202egpj.exe"),
        ("\u2028", "\\u2028"),
        ("\udc80", "\\udc80"),
    ],
)
def test_what_is_no_visible_character_is_written_out(text, shown):
    """Visible characters stay unchanged."""
    assert escaped(text) == shown


# --- a log that cannot be written -----------------------------------------------------------------


def test_a_full_disk_loses_lines_and_stops_no_process():
    """A write to /dev/full fails as on a full disk."""
    with open("/dev/full", "wb", buffering=0) as full:  # noqa: PTH123
        lines = LogLines(full.fileno())
        for _ in range(3):
            lines.write("a line")

    assert lines.lost == 3


def test_a_reader_that_has_ended_loses_lines_and_stops_no_process():
    """This happens when the terminal of a foreground daemon is closed."""
    nobody, written = os.pipe()
    os.close(nobody)
    lines = LogLines(written)
    lines.write("a line")
    os.close(written)

    assert lines.lost == 1


def test_a_reader_that_sleeps_is_not_waited_for_again_and_again(reader, monkeypatch):
    """The first line that does not fit waits for a moment.

    The following lines do not wait, and the next written line gives the number of lost lines.
    """
    fcntl.fcntl(reader.written, fcntl.F_SETPIPE_SZ, 4096)
    set_up_logs("info")
    log = structlog.get_logger()
    lines = _waits(monkeypatch)
    for number in range(100):
        log.info("worker started", worker=number)
    before = reader.text
    log.info("serving")

    kept = before.count("\n")
    assert 0 < kept < 100
    assert lines.waits == 1
    last = json.loads(reader.text)
    assert last["event"] == "serving"
    assert last["lost_lines"] == 100 - kept


def _waits(monkeypatch):
    """Count how often the log waits for room."""

    class Counted:
        waits = 0

    original = LogLines._has_room

    def has_room(self):
        Counted.waits += not self._is_stuck and not self._poll.poll(0)
        return original(self)

    monkeypatch.setattr(LogLines, "_has_room", has_room)
    monkeypatch.setattr(log_lines, "PATIENCE_MS", 1)
    return Counted


def test_a_line_that_was_cut_is_ended_before_the_next(reader, monkeypatch):
    """The next line starts on a line of its own, so it can be read."""
    fcntl.fcntl(reader.written, fcntl.F_SETPIPE_SZ, 4096)
    monkeypatch.setattr(log_lines, "PATIENCE_MS", 1)
    lines = LogLines(reader.written)
    lines.write("x" * (2 * PORTION_BYTES))
    assert lines.lost == 1
    cut = reader.text
    lines.write("after")

    assert set(cut) == {"x"}
    assert reader.text == "\nafter\n"
    assert lines.lost == 0


def test_closed_standard_streams_are_filled():
    """Otherwise the next file that the daemon opens would become its standard error.

    The test starts a process without standard streams.
    """
    child = os.fork()
    if child == 0:
        status = 1
        try:
            for descriptor in range(3):
                os.close(descriptor)
            fill_standard_streams()
            paths = {str(Path(f"/proc/self/fd/{number}").readlink()) for number in range(3)}
            status = 0 if paths == {"/dev/null"} and os.get_inheritable(2) else 2
        finally:
            os._exit(status)

    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
