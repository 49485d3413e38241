"""Contact sheets for the page: which batch is drawn, and what follows if it cannot be drawn."""

from dataclasses import replace

import pytest

from batchd.observe.http import contact_sheets as sheets
from batchd.observe.http.contact_sheets import ContactSheets, current_position
from support.statuses import two_looks
from support.waiting import PATIENCE_S


def subscription(position=None, last=None, *, is_spectator=False):
    """The status of one trainer; positions are (epoch, step)."""
    (epoch, step), (last_epoch, last_step) = position or (None, None), last or (None, None)
    places = {"epoch": epoch, "step": step, "last_epoch": last_epoch, "last_step": last_step}
    return replace(two_looks()[1].streams[0].subscriptions[0], **places, is_spectator=is_spectator)


@pytest.mark.parametrize(
    ("subscriptions", "position"),
    [
        ([], (0, 0)),
        ([subscription((3, 0))], (3, 0)),
        ([subscription((0, 1), (0, 0)), subscription((1, 0), (0, 399)), subscription((0, 9), (0, 8))], (0, 399)),
        ([subscription(None, (1, 399)), subscription((0, 9), (0, 8))], (1, 399)),
        ([subscription((7, 1), (7, 0), is_spectator=True), subscription((0, 4), (0, 3))], (0, 3)),
        ([subscription((7, 1), (7, 0), is_spectator=True)], (0, 0)),
    ],
)
def test_the_current_batch_is_what_the_foremost_trainer_took_last(subscriptions, position):
    """Spectators do not count; a trainer without a batch so far is at its first position."""
    assert current_position(replace(two_looks()[1].streams[0], subscriptions=subscriptions)) == position


@pytest.mark.parametrize(
    ("failure", "text"),
    [
        (MemoryError(), "no sheet can be drawn: out of memory"),
        (OSError(12, "Cannot allocate memory"), "no sheet can be drawn: Cannot allocate memory"),
    ],
)
def test_a_sheet_that_cannot_be_drawn_says_why_and_the_next_one_is_tried(monkeypatch, failure, text):
    """A lack of memory may be over by the next request."""
    drawing = ContactSheets("ipc:///nowhere")

    def fail(*_arguments):
        raise failure

    monkeypatch.setattr(drawing, "drawn", fail)
    assert drawing.sheet("photos", (0, 0), PATIENCE_S).text == text

    monkeypatch.setattr(sheets, "KEPT_S", 0.0)
    monkeypatch.setattr(drawing, "drawn", lambda *_arguments: (b"PNG", ""))
    assert drawing.sheet("photos", (0, 0), PATIENCE_S).picture == b"PNG"


def test_a_sheet_for_which_there_is_no_thread_says_so_and_the_next_one_is_tried(monkeypatch):
    """The machine may be able to start threads again later."""
    drawing = ContactSheets("ipc:///nowhere")

    def fail(_thread):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(sheets.Thread, "start", fail)
        assert drawing.sheet("photos", (0, 0), 0.0).text == "no sheet can be drawn: can't start new thread"

    monkeypatch.setattr(sheets, "KEPT_S", 0.0)
    monkeypatch.setattr(drawing, "drawn", lambda *_arguments: (b"PNG", ""))
    assert drawing.sheet("photos", (0, 0), PATIENCE_S).picture == b"PNG"
