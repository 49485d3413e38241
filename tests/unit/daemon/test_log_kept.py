"""The log lines that the daemon keeps for `batchd logs` and `batchd status`."""

from time import time

import msgpack
import structlog

from batchd.cli.log_lines import log_place, set_up_logs, unit_of
from batchd.daemon.kept_log import ALIKE_MAX, LINES_MAX, LIVE_S, TEXT_CHARACTERS_MAX, WARNINGS_MAX, KeptLog
from batchd_wire.codec import MESSAGE_BYTES_MAX


def test_the_last_lines_are_kept_and_counted_from_the_start() -> None:
    """A reader that sends a number receives the lines after that number."""
    log = KeptLog("a file")
    for number in range(1, LINES_MAX + 11):
        log.add("info", "event", "", f"event: n={number}")

    assert [line.number for line in log.after(0)] == list(range(11, LINES_MAX + 11))
    assert [line.text for line in log.after(LINES_MAX + 9)] == [f"event: n={LINES_MAX + 10}"]
    assert log.after(LINES_MAX + 10) == ()
    assert log.warnings == ()


def test_one_event_does_not_push_the_other_warnings_out() -> None:
    """The log keeps the last lines of each event, and the last lines of all events."""
    log = KeptLog()
    log.add("error", "gateway ended", "", "gateway ended")
    for number in range(100):
        log.add("warning", "bad sample", "photos", f"bad sample: n={number}")

    assert [line.text for line in log.warnings] == [
        "gateway ended",
        *(f"bad sample: n={n}" for n in range(100 - ALIKE_MAX, 100)),
    ]
    for number in range(100):
        log.add("critical", f"event {number}", "", f"event {number}")
    assert len(log.warnings) == WARNINGS_MAX


def test_a_repair_ends_the_warnings_of_its_kind_and_stream() -> None:
    """A repair of no stream ends those of all; a new warning is live again."""
    log = KeptLog()
    for stream in ("photos", "check"):
        log.add("warning", "storage away", stream, f"storage away: stream={stream}")
    log.add("warning", "worker ended", "", "worker ended: worker=1")
    log.add("info", "storage back", "photos", "storage back: stream=photos")
    assert [line.text for line in log.warnings] == ["storage away: stream=check", "worker ended: worker=1"]

    log.add("info", "worker started", "", "worker started: worker=3")
    log.add("info", "storage back", "check", "storage back: stream=check")
    assert log.warnings == ()
    log.add("warning", "storage away", "check", "storage away: stream=check")
    assert len(log.warnings) == 1


def test_a_warning_that_nothing_repairs_is_live_for_some_minutes(monkeypatch) -> None:
    """Afterwards the log alone has it."""
    log = KeptLog()
    log.add("warning", "peer refused", "", "peer refused")
    monkeypatch.setattr("batchd.daemon.kept_log.time", lambda: time() + LIVE_S + 1)

    assert log.warnings == ()
    assert [line.text for line in log.after(0)] == ["peer refused"]


def test_all_kept_lines_fit_into_a_message_beside_the_status() -> None:
    """The message fits even with the widest characters."""
    log = KeptLog()
    for _ in range(LINES_MAX):
        log.add("warning", "x", "", "\U0001f40c" * 10 * TEXT_CHARACTERS_MAX)
    packed = msgpack.packb([[line.number, line.time_s, line.level, line.text] for line in log.after(0)])

    assert {len(line.text) for line in log.after(0)} == {TEXT_CHARACTERS_MAX}
    assert len(packed) < MESSAGE_BYTES_MAX * 0.6


def test_what_is_written_is_kept_as_one_line_of_text(capfd) -> None:
    """The format of the log does not matter, and lines below the log level are not kept."""
    kept = []
    set_up_logs("info", "json", lambda *line: kept.append(line))
    structlog.get_logger().debug("not written")
    structlog.get_logger().warning("bad sample", path="a\nb.jpg", stream="photos")

    assert kept == [("warning", "bad sample", "photos", "bad sample: path=a\\nb.jpg stream=photos")]
    assert capfd.readouterr().err.count("\n") == 1


def test_the_place_of_the_log_is_known(tmp_path, monkeypatch) -> None:
    """A file is named by its path, and the service of a unit by its name."""
    with (tmp_path / "batchd.log").open("w") as file:
        monkeypatch.setattr("batchd.cli.log_lines.STANDARD_ERROR", file.fileno())
        assert log_place() == str(tmp_path / "batchd.log")
        status = tmp_path.joinpath("batchd.log").stat()
        monkeypatch.setenv("JOURNAL_STREAM", f"{status.st_dev}:{status.st_ino}")
        assert log_place().startswith("the journal")
    groups = tmp_path / "cgroup"
    groups.write_text("0::/system.slice/batchd-2.service\n")
    assert unit_of(groups) == "batchd-2.service"
    groups.write_text("0::/user.slice/session-3.scope\n")
    assert unit_of(groups) == ""
    assert unit_of(tmp_path / "none") == ""
