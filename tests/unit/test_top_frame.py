"""Frames of ``batchd top``: what they show of made statuses, in terminals of all sizes."""

import io
import os
import sys
from typing import Any

import pytest
from rich.console import Console

from batchd.cli import top
from batchd.cli.frame import bar, frame
from batchd.diagnosis.overview import StatusWindow, overview_between
from support.statuses import later, two_looks


def drawn(overview, width: int = 140, height: int | None = None, notice: str = "") -> str:
    """The frame as text."""
    console = Console(file=io.StringIO(), width=width, markup=False, highlight=False)
    console.print(frame(overview, width, height, notice=notice))
    file: Any = console.file
    return file.getvalue()


def test_a_frame_shows_streams_trainers_and_workers():
    """Rates, the parts of a sample's time, positions, waiting and the verdict."""
    text = drawn(
        overview_between(
            *two_looks(waits={"workers_s": 4.0}, trainer={"waiting": True}, work={"busy_s": 19.0, "cpu_s": 19.0})
        )
    )

    for expected in ("photos", "1,000", "read", "decode", "train-01", "0:40", "40%", "decode-bound", "shared memory"):
        assert expected in text
    assert "95% busy" in text


def test_a_ring_is_a_bar_of_its_slots():
    """Leased, ready, filling and free, each so wide as it is many."""
    text = drawn(overview_between(*two_looks(stream={"slots": 6, "slots_max": 8, "ready_slots": 4, "leased_slots": 1})))

    assert "█" * 3 + "▓" * 9 + "░" * 6 + "·" * 6 in text


@pytest.mark.parametrize(
    ("amounts", "expected"),
    [
        ((2, 2), "aabb"),
        ((1, 1), "ab··"),
        ((0, 4), "bbbb"),
        ((0.001, 3.9), "abbb"),
        ((0, 0), "····"),
        ((3, 0), "aaa·"),
        ((9, 9), "aaaa"),
    ],
)
def test_what_is_not_nothing_is_seen_in_a_bar(amounts, expected):
    """And what is too much does not make it longer."""
    assert bar(zip(amounts, "ab", ("", ""), strict=True), 4, 4).plain == expected


def test_a_stalled_trainer_is_shown_as_such():
    """With how long it has waited, or has not even asked."""
    for is_waiting, words in ((True, "waiting for 40 s"), (False, "stands still for 40 s")):
        _before, status = two_looks(trainer={"waiting": is_waiting})
        window = StatusWindow()
        for seconds in (0, 40):
            window.add(later(status, seconds))
        assert words in drawn(window.overview())


def test_names_and_rates_are_whole_in_a_terminal_of_80_columns():
    """As most open; the bars are shorter there."""
    text = drawn(overview_between(*two_looks(stream={"name": "imagenet-train"})), 80)

    for expected in ("imagenet-train", "decoded/s", "delivered/s", "leased", "ready", "bad"):
        assert expected in text


@pytest.mark.parametrize("width", [20, 40, 60, 80, 120, 200])
def test_no_line_is_wider_than_the_terminal(width):
    """Columns that matter less are left out, and long words go on in the next line."""
    overview = overview_between(*two_looks(waits={"workers_s": 4.0}, stream={"name": "a" * 70}))

    assert max(len(line) for line in drawn(overview, width).splitlines()) <= width


def test_of_long_lists_so_much_is_shown_as_there_is_room_for():
    """And how many are left out."""
    text = drawn(overview_between(*two_looks(workers=200)), height=30)

    assert len(text.splitlines()) <= 30
    assert "more" in text


def test_names_that_a_terminal_would_obey_are_written_out():
    """A trainer may call itself anything."""
    before, after = two_looks(stream={"stopped": "\x1b]0;owned\x07"})
    for status in (before, after):
        status.trainers[0].name = "\x1b[2Jevil[bold]"

    text = drawn(overview_between(before, after))

    assert "\x1b" not in text
    assert "\\x1b[2Jevil[bold]" in text


def test_nothing_to_show_is_said():
    """No trainer, no worker, no rates."""
    _before, status = two_looks(workers=0)
    status.streams[0].subscriptions = ()

    text = drawn(overview_between(status, status), notice="the daemon has gone")

    assert "no trainer reads any stream" in text
    assert "no worker runs" in text
    assert text.startswith("the daemon has gone")


class WatchedSource:
    """A daemon that answers some of the questions; with the last one, q is pressed."""

    def __init__(self, news: list[bool], keys: int) -> None:
        self.window, self.notice = StatusWindow(), ""
        self._news, self._keys = iter(news), keys

    def ask(self) -> None:
        """Nothing is asked."""

    @property
    def descriptors(self) -> list[int]:
        """Nothing comes by itself."""
        return []

    def take(self) -> bool:
        """What was planned; at the end, somebody has had enough."""
        news = next(self._news, None)
        if news is None:
            os.write(self._keys, b"q")
        self.notice = "no answer" if news is False and self.notice == "" else self.notice
        return bool(news)


class CountedScreen:
    """Counts how often it is drawn."""

    def __init__(self) -> None:
        self.console, self.drawn = Console(file=io.StringIO(), width=80, height=24), 0

    def update(self, _frame: object, *, refresh: bool) -> None:
        """One more."""
        self.drawn += refresh


@pytest.mark.parametrize(
    ("news", "drawn"),
    [([], 1), ([True], 1), ([True, True, True], 3), ([True, False, False, False], 2), ([False, False], 1)],
)
def test_only_what_is_news_is_drawn(monkeypatch, news, drawn):
    """An answer, another notice, and the first frame; not each time that something wakes it."""
    keys, pressed = os.pipe()
    wake = os.eventfd(0)
    screen = CountedScreen()
    with os.fdopen(keys) as terminal:
        monkeypatch.setattr(sys, "stdin", terminal)
        top._watch(WatchedSource(news, pressed), screen, wake, 0.001)
    os.close(pressed)
    os.close(wake)

    assert screen.drawn == drawn
