"""`batchd bad` prints file names that an attacker may have chosen."""

from click.testing import CliRunner

from batchd.cli.main import cli
from batchd_wire.messages import AskBad, BadSamples
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
