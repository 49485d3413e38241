"""Frames of ``batchd top``: what they show of generated statuses, in terminals of all sizes."""

import io
import os
import sys
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from batchd.cli import top
from batchd.cli.frame import EVERYTHING, SORTS, TopView, frame
from batchd.cli.tables import bar
from batchd.observe.diagnosis.overview import StatusWindow, overview_between
from support.statuses import later, two_looks


def drawn(overview, width: int = 140, height: int | None = None, notice: str = "", view: TopView = EVERYTHING) -> str:
    """The frame as text."""
    console = Console(file=io.StringIO(), width=width, markup=False, highlight=False)
    console.print(frame(overview, width, height, notice=notice, view=view))
    file: Any = console.file
    return file.getvalue()


def test_a_frame_shows_streams_trainers_and_workers():
    """The frame has rates, the parts of a sample's time, positions, waits and the verdict."""
    text = drawn(
        overview_between(
            *two_looks(waits={"workers_s": 4.0}, trainer={"waiting": True}, work={"busy_s": 19.0, "cpu_s": 19.0})
        )
    )

    for expected in ("photos", "1,000", "read", "decode", "train-01", "0:40", "40%", "decode-bound", "shared memory"):
        assert expected in text
    assert "95% busy" in text


def test_a_ring_is_a_bar_of_its_slots():
    """Leased, ready, filling and free slots have parts of the bar in proportion to their number."""
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
    """An amount that is too large does not make the bar longer."""
    assert bar(zip(amounts, "ab", ("", ""), strict=True), 4, 4).plain == expected


def test_a_stalled_trainer_is_shown_as_such():
    """The frame shows how long the trainer has waited, or has not asked for a batch."""
    for is_waiting, words in ((True, "waiting for 40 s"), (False, "stands still for 40 s")):
        _before, status = two_looks(trainer={"waiting": is_waiting})
        window = StatusWindow()
        for seconds in (0, 40):
            window.add(later(status, seconds))
        assert words in drawn(window.overview())


def test_names_and_rates_are_whole_in_a_terminal_of_80_columns():
    """Most terminals open with 80 columns; the bars are shorter there."""
    text = drawn(overview_between(*two_looks(stream={"name": "imagenet-train"})), 80)

    for expected in ("imagenet-train", "decoded/s", "delivered/s", "leased", "ready", "bad"):
        assert expected in text


@pytest.mark.parametrize("width", [20, 40, 60, 80, 120, 200])
def test_no_line_is_wider_than_the_terminal(width):
    """Less important columns are left out, and long words are wrapped."""
    overview = overview_between(*two_looks(waits={"workers_s": 4.0}, stream={"name": "a" * 70}))

    assert max(len(line) for line in drawn(overview, width).splitlines()) <= width


def test_of_long_lists_so_much_is_shown_as_there_is_room_for():
    """The frame counts the rows that it leaves out."""
    text = drawn(overview_between(*two_looks(workers=200)), height=30)

    assert len(text.splitlines()) <= 30
    assert "more" in text


def test_a_narrow_line_has_the_largest_parts_of_a_samples_time():
    """They keep their order; dots stand for those that are left out."""
    overview = overview_between(*two_looks())
    parts = (("read", 0.04), ("cache", 0.01), ("decode", 0.57), ("random_resized_crop", 0.05), ("no CPU", 6.8))
    overview = replace(overview, streams=(replace(overview.streams[0], parts=parts, sample_ms=7.5),))

    def line(width):
        (found,) = (one for one in drawn(overview, width).splitlines() if "7.50 ms/sample" in one)
        return [name for name, _ms in parts if f" {name} " in found], found.endswith("…"), len(found) <= width

    assert line(160) == (["read", "cache", "decode", "random_resized_crop", "no CPU"], False, True)
    assert line(80) == (["decode", "no CPU"], True, True)


@pytest.mark.parametrize("trainers", [1, 2, 12])
def test_a_terminal_of_24_lines_has_room_for_workers_and_keys(trainers):
    """Verdicts are shown as far as they fit; a line tells how many are left."""
    overview = overview_between(
        *two_looks(waits={"workers_s": 4.0}, trainer={"waiting": True}, work={"busy_s": 19.0, "cpu_s": 19.0})
    )
    text = drawn(replace(overview, trainers=overview.trainers * trainers), width=80, height=24)

    lines = text.splitlines()
    assert len(lines) <= 24
    assert lines[-1].startswith("q quit")
    assert any(line.startswith("worker ") for line in lines)
    assert text.count("train-01  photos") >= min(trainers, 2)
    assert text.count("  train-01: decode-bound: ") == 1
    assert [line.strip() for line in lines if "batchd why" in line] == {
        1: [],
        2: ["and 1 verdict more: batchd why"],
        12: ["and 11 verdicts more: batchd why"],
    }[trainers]


def test_names_that_a_terminal_would_obey_are_written_out():
    """A trainer chooses its name freely."""
    before, after = two_looks(stream={"stopped": "\x1b]0;owned\x07"})
    for status in (before, after):
        status.trainers[0].name = "\x1b[2Jevil[bold]"

    text = drawn(overview_between(before, after))

    assert "\x1b" not in text
    assert "\\x1b[2Jevil[bold]" in text


def test_nothing_to_show_is_said():
    """There is no trainer, no worker and no rate."""
    _before, status = two_looks(workers=0)
    status.streams[0].subscriptions = ()

    text = drawn(overview_between(status, status), notice="the daemon has gone")

    assert "no trainer reads any stream" in text
    assert "no worker runs" in text
    assert text.startswith("the daemon has gone")


class WatchedSource:
    """A source with planned answers: after the last one, it presses q."""

    def __init__(self, news: list[bool], keys: int) -> None:
        self.window, self.notice = StatusWindow(), ""
        self._news, self._keys = iter(news), keys

    def ask(self) -> None:
        """Ask nothing."""

    @property
    def descriptors(self) -> list[int]:
        """No descriptor becomes readable by itself."""
        return []

    def take(self) -> bool:
        """Return the next planned answer; after the last one, press q."""
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
        """Count one more frame."""
        self.drawn += refresh


@pytest.mark.parametrize(
    ("news", "drawn"),
    [([], 1), ([True], 1), ([True, True, True], 3), ([True, False, False, False], 2), ([False, False], 1)],
)
def test_only_what_is_news_is_drawn(monkeypatch, news, drawn):
    """An answer, another notice and the first frame are drawn; other wake-ups draw nothing."""
    keys, pressed = os.pipe()
    wake = os.eventfd(0)
    screen = CountedScreen()
    with os.fdopen(keys) as terminal:
        monkeypatch.setattr(sys, "stdin", terminal)
        top.watch(WatchedSource(news, pressed), screen, wake, 0.001)
    os.close(pressed)
    os.close(wake)

    assert screen.drawn == drawn


def three_trainers():
    """An overview of "b", which waits, the fast "A", and "c" on another stream and a named host."""
    (one,) = overview_between(*two_looks()).trainers
    (stream,) = overview_between(*two_looks()).streams
    return replace(
        overview_between(*two_looks()),
        streams=(stream, replace(stream, name="masks"), replace(stream, name="idle")),
        trainers=(
            replace(one, name="b", wait_share=0.9, batches_per_s=1.0, ready_ahead=0),
            replace(one, name="A", wait_share=0.0, batches_per_s=9.0, ready_ahead=4),
            replace(
                replace(one, name="c", stream="masks", wait_share=None, batches_per_s=None, ready_ahead=2),
                trainer=replace(one.trainer, host="node7"),
            ),
        ),
    )


@pytest.mark.parametrize(
    ("sort", "order"),
    [("", "bAc"), ("name", "Abc"), ("waits", "bAc"), ("batches/s", "Abc"), ("ahead", "bcA")],
)
def test_trainers_are_sorted_as_chosen(sort, order):
    """The trainer that needs attention most is at the top."""
    assert "".join(one.name for one in TopView(sort=sort).trainers(three_trainers().trainers)) == order


@pytest.mark.parametrize(
    ("text", "trainers", "streams"),
    [
        ("", "bAc", ["photos", "masks", "idle"]),
        ("a", "Ac", ["photos", "masks"]),
        ("MASKS", "c", ["masks"]),
        ("node7", "c", ["masks"]),
        ("idle", "", ["idle"]),
        ("nothing", "", []),
    ],
)
def test_a_filter_leaves_what_it_names(text, trainers, streams):
    """The text matches names, streams and hosts; streams of the remaining trainers remain, too."""
    overview, view = three_trainers(), TopView(text_filter=text)
    if text == "a":
        nowhere = [replace(one, trainer=replace(one.trainer, transport="")) for one in overview.trainers]
        overview = replace(overview, trainers=tuple(nowhere))
    left = view.trainers(overview.trainers)

    assert "".join(one.name for one in left) == trainers
    assert [one.name for one in view.streams(overview.streams, left)] == streams


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ("s", TopView(sort="name")),
        ("s" * len(SORTS), TopView()),
        ("/ps\rp", TopView(text_filter="ps", is_paused=True)),
        ("/ab\x7f", TopView(text_filter="a", is_typing=True)),
        ("/q", TopView(text_filter="q", is_typing=True)),
        ("/ab\r\x1b", TopView()),
        ("pp", TopView()),
        ("xyz", TopView()),
        ("q", None),
        ("/\x03", None),
    ],
)
def test_keys_choose_what_is_shown(keys, expected):
    """While a user types a filter, its letters are no commands; Ctrl-C always quits."""
    view: TopView | None = TopView()
    for key in keys:
        assert view is not None
        view = view.pressed(key)

    assert view == expected


def test_the_keys_are_below_the_frame_and_say_what_is_chosen():
    """The line is for terminals, where users press keys; the frame still has room for it."""
    overview = overview_between(*two_looks(workers=200))
    view = TopView("waits", "photo", is_typing=True, is_paused=True)
    text = drawn(overview, 80, 30, view=view)

    assert text.splitlines()[-1] == "q quit  s sort  / filter  p pause  sorted by waits  filter: photo_  paused"
    assert len(text.splitlines()) <= 30
    assert "q quit" not in drawn(overview, 80)


def test_a_paused_view_is_not_drawn_again(monkeypatch):
    """Answers are not shown, and the daemon is not asked."""
    keys, pressed = os.pipe()
    wake = os.eventfd(0)
    screen = CountedScreen()
    source = WatchedSource([True, True, True], pressed)
    source.ask = lambda: pytest.fail("it is asked")
    with os.fdopen(keys) as terminal:
        monkeypatch.setattr(sys, "stdin", terminal)
        top.watch(source, screen, wake, 0.001, TopView(is_paused=True))
    os.close(pressed)
    os.close(wake)

    assert screen.drawn == 1


def test_an_arrow_key_is_no_escape(monkeypatch):
    """An arrow key begins with the escape character, and must not clear the filter."""
    keys, pressed = os.pipe()
    wake = os.eventfd(0)
    screen, source = CountedScreen(), WatchedSource([False], pressed)
    os.write(pressed, b"\x1b[A")
    with os.fdopen(keys) as terminal:
        monkeypatch.setattr(sys, "stdin", terminal)
        top.watch(source, screen, wake, 0.001, TopView(text_filter="photos"))
    os.close(pressed)
    os.close(wake)

    assert screen.drawn == 1, "a changed filter would give another frame"
