"""The one writer of what commands print: widths, encodings, readers that are gone."""

import io
import os
import sys
from collections.abc import Iterator
from contextlib import chdir, contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from unittest.mock import patch

import pytest

from batchd.cli import terminal
from batchd.cli.text import aligned, width_of, wrapped
from batchd.errors import BatchdError
from support.commands import FakeTerminal

TEXT = "the daemon at ipc:///run/batchd uses it: `batchd check batchd.toml` says more, in /a/path/that/has/no/room/at/all/here"


@pytest.mark.parametrize("width", [10, 30, 60, 80])
def test_lines_end_between_words(width) -> None:
    """Every word is whole, and only a line of one word is longer than the width."""
    lines = wrapped(TEXT, width, "first: ", "  ")

    assert " ".join(" ".join(lines).split()) == f"first: {TEXT}"
    assert all(len(line) <= width or len(line.split()) == 1 for line in lines)
    assert all(line.startswith("  ") for line in lines[1:])


def test_a_command_that_has_room_on_a_line_is_on_one() -> None:
    """So it can be copied; a longer one is broken as other words are."""
    assert wrapped("see `batchd check x`, too", 20) == ["see", "`batchd check x`,", "too"]
    assert wrapped("see `batchd check x`", 10) == ["see", "`batchd", "check x`"]


def test_wide_and_styled_characters_take_their_columns() -> None:
    """An ideograph has two columns, an accent and a colour none."""
    assert [width_of(text) for text in ("abc", "猫", "e\u0301", "\x1b[1mx\x1b[0m")] == [3, 2, 1, 1]
    assert aligned([["猫", "x"], ["cat", "y"]]) == ["猫   x", "cat  y"]


@contextmanager
def screen(folder: Path, **environment: str) -> Iterator[tuple[io.BytesIO, io.BytesIO]]:
    """A terminal of 30 columns, for a person in ``folder``: gives what both streams showed."""
    shown = io.BytesIO(), io.BytesIO()
    output, errors = (FakeTerminal(buffer, "utf-8", write_through=True) for buffer in shown)
    with chdir(folder), patch.dict("os.environ", {"COLUMNS": "30", "NO_COLOR": "", **environment}):
        with redirect_stdout(output), redirect_stderr(errors):
            yield shown
        output.detach(), errors.detach()


def test_text_for_people_fits_and_paths_begin_where_the_person_stands(tmp_path) -> None:
    """What programs read is as it is."""
    file = tmp_path / "photos" / "a.jpg"
    with screen(tmp_path) as (output, errors):
        terminal.say(f"  {file} is one of the bad files of this stream")
        terminal.emit(f"path = '{file}'")
        terminal.warn(f"{file} is bad")

    shown = ["  photos/a.jpg is one of the", "  bad files of this stream", f"path = '{file}'"]
    assert output.getvalue().decode().splitlines() == shown
    assert errors.getvalue().decode() == "\x1b[1;31mbatchd:\x1b[0m photos/a.jpg is bad\n"


def test_an_address_and_the_folder_itself_stay_whole(tmp_path, monkeypatch) -> None:
    """Only the path of what is below the folder is shortened."""
    monkeypatch.chdir(tmp_path)
    for text in (f"ipc://{tmp_path}/run", str(tmp_path), f"/other{tmp_path}/x"):
        assert terminal.near(text) == text
    assert terminal.near(f"uses {tmp_path}/run.") == "uses run."


def test_no_colors_are_written_where_none_are_wanted(tmp_path) -> None:
    """NO_COLOR holds for everything; a pipe never has colours."""
    with screen(tmp_path, NO_COLOR="1") as (_output, errors):
        terminal.warn("plain")
    assert errors.getvalue() == b"batchd: plain\n"


@pytest.mark.parametrize(
    ("encoding", "shown"), [("ascii", "#=-.. ~ -> \\xe9 \\u732b"), ("latin-1", "#=-.\xb7 ~ -> \xe9 \\u732b")]
)
def test_what_an_encoding_lacks_falls_back(monkeypatch, encoding, shown) -> None:
    """Bars have characters of ASCII, and names escapes."""
    stream = io.TextIOWrapper(io.BytesIO(), encoding, write_through=True)
    monkeypatch.setattr(sys, "stdout", stream)
    terminal.accept_any_text()
    terminal.say("█▓▒░· … → é 猫")
    assert stream.buffer.getvalue().decode(encoding) == f"{shown}\n"  # type: ignore[attr-defined]


def test_nothing_that_is_said_moves_the_cursor(tmp_path) -> None:
    """Colours are the commands' own; everything else that a terminal obeys is shown as text."""
    with screen(tmp_path) as (output, _errors):
        terminal.say("a\x1b[2Jb\rc\u202ed", "\x1b[1mbold\x1b[0m")
    assert output.getvalue().decode() == "a\\x1b[2Jb\\rc\\u202ed\n\x1b[1mbold\x1b[0m\n"


def test_a_name_that_is_no_text_is_escaped(monkeypatch) -> None:
    """A file's name may be bytes that no encoding has."""
    stream = io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True)
    monkeypatch.setattr(sys, "stdout", stream)
    terminal.accept_any_text()
    terminal.say(os.fsdecode(b"caf\xe9.jpg"))
    assert stream.buffer.getvalue() == b"caf\\udce9.jpg\n"  # type: ignore[attr-defined]


def test_no_one_reads_standard_error(monkeypatch) -> None:
    """A closed or full standard error ends no command."""
    for stream in (None, Path("/dev/full").open("w")):  # noqa: SIM115  the test closes it
        monkeypatch.setattr(sys, "stderr", stream)
        terminal.warn("unheard")
    with pytest.raises(OSError, match="No space"):
        sys.stderr.close()


def test_a_full_disk_is_an_error_of_standard_output(monkeypatch) -> None:
    """The message says which file has no room."""
    monkeypatch.setattr(sys, "stdout", Path("/dev/full").open("w"))  # noqa: SIM115  the guard replaces it
    with (
        pytest.raises(BatchdError, match="standard output cannot be written: No space left"),
        terminal.guarded_output(),
    ):
        terminal.say("lost")
    sys.stdout.close()


def test_a_folder_that_is_gone_shortens_nothing(tmp_path, monkeypatch) -> None:
    """Commands work in a folder that was removed meanwhile."""
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert terminal.near(f"{tmp_path}/x") == f"{tmp_path}/x"
