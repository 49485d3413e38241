"""`batchd bad` shows names of files that somebody chose to trouble whoever looks at them."""

from typing import Self

from click.testing import CliRunner

from batchd.cli import bad
from batchd_wire.messages import AskBad, BadSamples


class FakeAttachment:
    """A daemon with one bad sample."""

    def __init__(self, _directory: object) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        return None

    def ask(self, question: AskBad, _answer: type[BadSamples]) -> BadSamples:
        return BadSamples(question.request, 1, [(7, "a\x1b[2J\nb.jpg", "no JPEG\nline 2\x07", 1)])


def test_a_path_cannot_command_the_terminal(monkeypatch) -> None:
    """Its control characters are written out; a reason of several lines keeps them."""
    monkeypatch.setattr(bad, "find_daemon", lambda _address: None)
    monkeypatch.setattr(bad, "Attachment", FakeAttachment)
    shown = CliRunner().invoke(bad.command, ["photos"]).output

    assert shown == "a\\x1b[2J\\nb.jpg: no JPEG (met 1 time, sample 7)\nline 2\\x07\n"
