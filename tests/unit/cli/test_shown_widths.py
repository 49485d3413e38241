"""The output of commands in terminals of all widths."""

import io
from dataclasses import replace

import pytest
from rich.console import Console

from batchd.cli.check import described
from batchd.cli.status import detail, log_line, whole
from batchd.cli.tables import TableColumn, table
from batchd.cli.terminal import PIPED_COLUMNS, draw
from batchd.cli.why import in_columns
from batchd.config.load import load_config
from batchd.data.storage.access import Storage
from batchd.data.storage.values import CHECK_LIMITS
from batchd.observe.diagnosis.readings import compare
from batchd.observe.diagnosis.verdicts import judge
from batchd.stream.rings import plan_rings
from batchd_wire.status import CacheStatistics, LogLine, StreamDescription
from support.images import write_photos
from support.statuses import link, two_looks, with_pool

WIDTHS = (40, 80, 100, 200)
DESCRIPTION = StreamDescription(
    "files /data/imagenet/train",
    ("image uint8[250, 224, 224, 3]", "label int64[250]", "index int64[250]"),
    ("decode", "random_resized_crop(size=[224, 224])", "random_flip"),
)
TRAINER = "a-rather-long-name-of-a-run-that-someone-chose-in-slurm-4711"


def printed(parts, width: int) -> str:
    """The parts, as a terminal of this width shows them."""
    file = io.StringIO()
    draw(parts, Console(file=file, width=width, markup=False, highlight=False, force_terminal=True, color_system=None))
    return file.getvalue()


def widest(text: str) -> int:
    """The length of the longest line, without paths, which are never broken."""
    return max(len(line) for line in text.splitlines() if "/" not in line)


def looks(**changes):
    """Two statuses of a daemon that has everything that can be shown."""
    stream = {
        "name": "imagenet-train",
        "cache": CacheStatistics("encoded", 10, 1 << 30, 1 << 34, 1),
        "description": DESCRIPTION,
        "filling_slots": 2,
        "partial_slots": 1,
        "bad_samples": 3,
        "stopped": "too many bad samples: " + "/data/imagenet/train/n01440764 " * 5,
    }
    both = two_looks(stream={**stream, **changes}, waits={"workers_s": 6.0}, slowest={"/data/huge.jpg": 1.5})
    with_pool(both, link(), link(2, refused=("photos: /data is missing",)))
    for status in both:
        status.streams[0].name = "imagenet-train"
        status.trainers[0].name = TRAINER
        status.daemon.host = "bigbox"
        status.warnings = (LogLine(7, 1.7e9, "error", "bad sample: " + "path=/data/x.jpg " * 20),)
    return both


@pytest.mark.parametrize("width", WIDTHS)
def test_a_status_fits_its_terminal_and_has_the_important_columns(width) -> None:
    """At any width, it shows who reads which stream, whether it waits, and whether workers work."""
    text = printed(whole(looks()[1], width), width)

    assert widest(text) <= width
    for column in ("stream", "delivered", "trainer", "state", "worker", "busy", "worker host"):
        assert column in text
    assert " ago  bad sample: " in text
    assert ("4 of 4" in text) == (width >= 80)
    assert ("shared memory" in text) == (width == PIPED_COLUMNS)
    assert (TRAINER in text) == (width == PIPED_COLUMNS)
    if width >= 80:
        assert "imagenet-train" in text
        assert "0:40" in text
        assert "bigbox" in text


@pytest.mark.parametrize("width", [60, *WIDTHS[1:]])
def test_a_stream_in_detail_fits_its_terminal(width) -> None:
    """The detail has the stream's description, the parts of a sample's time, and its trainers."""
    status = looks()[1]
    text = printed(detail(status, status.streams[0], width), width)

    assert widest(text) <= width
    flat = " ".join(text.split())
    for expected in (
        "/data/imagenet/train",
        "uint8[250,",
        "random_flip",
        "1 leased, 4 ready, 2 filling, 1 partial of 8",
    ):
        assert expected in flat
    assert "decode 0.90" in flat
    assert "/data/huge.jpg" in flat
    assert "encoded samples has 10 of" in flat


def test_a_stream_of_an_older_daemon_has_what_it_says() -> None:
    """An older daemon sends no description, and this stream has no trainer."""
    _before, status = looks(description=None, filling_slots=None, partial_slots=None)
    status.streams[0].subscriptions = ()
    text = printed(detail(status, status.streams[0], 80), 80)

    assert "source" not in text
    assert "no trainer reads it" in text


@pytest.mark.parametrize("width", WIDTHS)
def test_verdicts_are_paragraphs_of_a_terminal(width) -> None:
    """Every word of the line for programs is shown, in as many lines as needed."""
    reading = compare(*looks(stopped=None))
    assert reading is not None
    (verdict,) = judge(reading)
    text = printed([in_columns(verdict, width)], width)

    assert max(map(len, text.splitlines())) <= max(width, len(TRAINER) + len(" on imagenet-train: decode-bound"))
    assert set(verdict.proof.split()) | set(verdict.remedy.split()) <= set(text.split())


@pytest.mark.parametrize("width", WIDTHS[1:])
def test_a_check_is_a_table_or_paragraphs(width, tmp_path) -> None:
    """Where the table does not fit, each stream has lines of its own with the same facts."""
    write_photos(tmp_path / "photos", {"cat": 2})
    file = tmp_path / "batchd.toml"
    file.write_text(
        "[streams.photos]\nbatch_size = 2\nmemory = '1 MiB'\nsource = { type = 'folder', path = 'photos' }\n"
        "pipeline = [{ op = 'decode' }, { op = 'resize', size = [32, 32] }]\n"
    )
    config = load_config(file, {})
    with Storage(CHECK_LIMITS) as storage:
        lines = described(config, plan_rings(config, storage), width)

    assert (len(lines) == 2) == (width == PIPED_COLUMNS)
    assert max(len(line) for line in lines if " /" not in line) <= width
    assert "image uint8[2, 32, 32, 3]" in " ".join(" ".join(lines).split())


def test_the_least_important_column_is_left_out_first() -> None:
    """Columns that must stay are shortened instead."""
    columns = [
        TableColumn("first", 0, lambda row: row * 10, is_text=True),
        TableColumn("rare", 30, lambda row: row),
        TableColumn("usual", 20, lambda row: row),
        TableColumn("last", 0, lambda row: row),
    ]

    def titles(width: int, row: str) -> list[str]:
        return printed([table(columns, [row], width)], width).split("\n")[0].split()

    assert titles(60, "x") == ["first", "rare", "usual", "last"]
    assert titles(29, "x") == ["first", "usual", "last"]
    assert titles(33, "xx") == ["first", "usual", "last"]
    assert titles(20, "xx") == ["first", "last"]
    assert max(map(len, printed([table(columns, ["x" * 9], 20)], 20).splitlines())) <= 20


def test_a_line_of_the_log_shows_when_it_was_written(monkeypatch) -> None:
    """The line has the day if that is not today."""
    now = 1.7e9
    monkeypatch.setattr("batchd.cli.status.time", lambda: now)
    line = LogLine(1, now, "error", "worker ended: \x1b[2J")

    assert len(log_line(line, 80).plain.split()[0]) == len("22:13:20")
    assert "\x1b" not in log_line(line, 80).plain
    assert log_line(replace(line, time_s=now - 1e6), 80).plain.startswith("2023-11-")
