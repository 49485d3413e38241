"""``batchd why``: one line for each trainer about what it waits for. In the user's shell."""

import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated

from rich.text import Text

from batchd.cli import terminal
from batchd.cli.asking import running_daemon
from batchd.cli.options import Address, argument, as_command, option, stream_unknown
from batchd.cli.tables import paragraph
from batchd.cli.text import escaped
from batchd.errors import BatchdError
from batchd.observe.diagnosis.pool import pool_view, summary
from batchd.observe.diagnosis.readings import compare
from batchd.observe.diagnosis.verdicts import Verdict, judge
from batchd_client.asking import ask_status

SECONDS = 5.0


@as_command("why")
def command(
    *,
    stream: Annotated[str | None, argument()],
    address: Address,
    seconds: Annotated[float, option("Seconds between the two samples.", limits=(0.5, 3600))] = SECONDS,
    as_json: Annotated[bool, option("Print the verdicts as JSON, for programs.", "--json")],
) -> None:
    """Show what each trainer waits for, the evidence, and the fix.

    Samples the daemon's counters twice. With STREAM, only its trainers.
    """
    with running_daemon(address) as session:
        before = ask_status(session)
        if stream is not None and before.stream(stream) is None:
            raise stream_unknown(stream, (one.name for one in before.streams))
        if terminal.is_terminal(sys.stderr):
            terminal.note(f"looking for {seconds:g} s")
        time.sleep(seconds)
        after = ask_status(session)
    reading = compare(before, after)
    if reading is None:
        raise BatchdError("the daemon restarted in between, so its numbers cannot be compared: try again")
    verdicts = [verdict for verdict in judge(reading) if stream in (None, verdict.stream)]
    if as_json:
        terminal.emit_json([asdict(verdict) | {"kind": verdict.kind.value} for verdict in verdicts])
        return
    read = [status.name for status in after.streams if status.subscriptions and stream in (None, status.name)]
    stopped = [one for one in after.streams if one.stopped is not None and stream in (None, one.name)]
    for one in stopped:
        text = f"stream {one.name} has stopped: {escaped(str(one.stopped))}"
        terminal.say(text, "  once that is mended, `batchd reload` starts it again")
    if verdicts:
        echo_verdicts(verdicts)
    elif stopped:
        pass
    elif read:
        terminal.say(f"the trainers of {', '.join(read)} connected less than {reading.seconds:.0f} s ago: try again")
    else:
        terminal.say(f"no trainer reads {stream or 'any stream'}, so none waits")
    if after.pool is not None:
        view = pool_view(after.pool, reading.pool)
        terminal.say(f"worker hosts: {escaped(summary(view))}", *(f"  {escaped(note)}" for note in view.notes))


def echo_verdicts(verdicts: Sequence[Verdict]) -> None:
    """Print one line for each, for programs; on a terminal, paragraphs that fit it."""
    if terminal.is_terminal(sys.stdout):
        terminal.draw(in_columns(verdict, terminal.columns()) for verdict in verdicts)
    else:
        terminal.say(*map(str, verdicts))


def in_columns(verdict: Verdict, width: int) -> Text:
    """A verdict for a terminal of ``width`` columns: who, why, the evidence, and what helps."""
    rank = f" rank {verdict.rank} of {verdict.world_size}" if verdict.world_size > 1 else ""
    text = Text(f"{escaped(verdict.trainer)} on {escaped(verdict.stream)}{rank}: ", "bold")
    text.append(verdict.kind.value, "green" if verdict.kind.is_healthy else "yellow")
    text.append(f"\n{paragraph(escaped(verdict.proof), width)}", "not bold")
    if verdict.remedy:
        text.append(f"\n{paragraph(escaped(verdict.remedy), width, '→ ')}", "not bold")
    return text
