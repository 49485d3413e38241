"""`batchd bad` prints file names that an attacker may have chosen."""

import json

from click.testing import CliRunner

from batchd.cli.main import cli
from batchd.cli.seen import KnownBad
from batchd_wire.messages import AskBad, AskStatus, BadSamples, Status
from support.fake_daemon import FakeDaemon


def test_a_path_cannot_command_the_terminal(tmp_path) -> None:
    """The command escapes its control characters; a reason of several lines keeps its lines."""

    def answer(session, message) -> bool:
        if isinstance(message, AskBad):
            sample = (7, "a\x1b[2J\nb.jpg", "no JPEG\nline 2\x07", 1)
            fake.send(session, BadSamples(message.request, 1, [sample]))
        return isinstance(message, AskBad)

    with FakeDaemon(tmp_path / "run") as fake:
        fake.answer = answer
        shown = CliRunner().invoke(cli, ["bad", "photos", "--address", fake.address]).output

    assert shown == "a\\x1b[2J\\nb.jpg: no JPEG (met 1 time, sample 7)\nline 2\\x07\n"


def test_samples_with_one_reason_are_listed_below_it_and_a_stop_is_said(tmp_path) -> None:
    """A function that gives the wrong type has one line, and a line for each sample."""
    reason = "mine:fn changes 'image' from uint8[8] to float32[8]"

    def answer(session, message) -> bool:
        match message:
            case AskBad():
                samples = [(7, "a.jpg", reason, 1), (8, "b.jpg", "empty file", 2), (9, "c.jpg", reason, 1)]
                fake.send(session, BadSamples(message.request, 3, samples))
            case AskStatus():
                streams = [{"name": "photos", "stopped": "too many bad samples"}]
                fake.send(session, Status(message.request, {"streams": streams}))
        return isinstance(message, AskBad | AskStatus)

    with FakeDaemon(tmp_path / "run") as fake:
        fake.answer = answer
        shown = CliRunner().invoke(cli, ["bad", "photos", "--address", fake.address]).output

    assert shown.splitlines() == [
        "stream photos has stopped: too many bad samples",
        f"2 samples: {reason}",
        "  a.jpg (met 1 time, sample 7)",
        "  c.jpg (met 1 time, sample 9)",
        "b.jpg: empty file (met 2 times, sample 8)",
    ]


def test_what_is_left_out_is_said_with_the_file_that_has_it(tmp_path) -> None:
    """Text and JSON have the total; `batchd seen --bad` reads either form."""

    def answer(session, message) -> bool:
        if isinstance(message, AskBad):
            samples = [(7, "a.jpg", "empty file", 1)]
            fake.send(session, BadSamples(message.request, 2_001, samples, "/cache/batchd-photos.bad"))
        return isinstance(message, AskBad)

    with FakeDaemon(tmp_path / "run") as fake:
        fake.answer = answer
        words = ["bad", "photos", "--address", fake.address]
        shown, printed = (CliRunner().invoke(cli, [*words, *more]).output for more in ([], ["--json"]))

    assert shown.endswith("\n... and 2,000 more, 2,001 in total; all are in /cache/batchd-photos.bad\n")
    plain = json.loads(printed)
    assert (plain["total"], plain["left_out"], plain["file"]) == (2_001, 2_000, "/cache/batchd-photos.bad")
    (tmp_path / "object.json").write_text(printed)
    (tmp_path / "lines.bad").write_text('{"sample": 7, "path": "a.jpg"}\n{"sample": 9, "path": "b.jpg"}\n')
    assert (KnownBad.read(tmp_path / "object.json").samples, KnownBad.read(tmp_path / "object.json").total) == (
        (7,),
        2_001,
    )
    assert (KnownBad.read(tmp_path / "lines.bad").samples, KnownBad.read(tmp_path / "lines.bad").total) == ((7, 9), 2)
