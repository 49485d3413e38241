"""``batchd bad``: the bad samples of a stream, with reasons. Runs in the user's shell."""

from collections.abc import Iterator
from time import monotonic

from batchd.cli import terminal
from batchd.cli.asking import RunningStream, running_daemon
from batchd.cli.options import Address, JsonObject, as_command
from batchd.cli.text import escaped
from batchd_client.asking import ANSWER_TIMEOUT_S, ask_status
from batchd_wire.messages import AskBad, BadSamples
from batchd_wire.wording import counted


@as_command("bad")
def command(*, stream: RunningStream, address: Address, as_json: JsonObject) -> None:
    """List the bad samples of STREAM: path, reason, number of occurrences, index in the source.

    Samples with one reason are listed below it. A stream that has stopped says why.

    Of many, the first ones by their index; then a file of the daemon's cache_dir has the names of
    all, a line of JSON each. With --json an object: `total`, `left_out` (of the list `samples`),
    and that `file`, or null.
    """
    with running_daemon(address) as session:
        deadline = monotonic() + ANSWER_TIMEOUT_S
        answer = session.request(lambda request: AskBad(request, stream), BadSamples, deadline)
        now = None if as_json else ask_status(session).stream(stream)
    if as_json:
        terminal.emit_json(answer.to_plain())
        return
    if now is not None and now.stopped is not None:
        terminal.say(f"stream {stream} has stopped: {escaped(now.stopped)}")
    if not answer.total:
        terminal.say(f"no bad samples so far in stream {stream}")
        return
    by_reason: dict[str, list[tuple[str, str]]] = {}
    for sample, path, reason, times in answer.samples:
        known = f"met {counted(times, 'time')}, sample {sample}"
        by_reason.setdefault(reason, []).append((escaped(path), known))
    for reason, samples in by_reason.items():
        terminal.say(*_shown(reason, samples))
    if answer.left_out:
        where = f"; all are in {escaped(answer.file)}" if answer.file else ""
        terminal.say(f"... and {answer.left_out:,} more, {answer.total:,} in total{where}")


def _shown(reason: str, samples: list[tuple[str, str]]) -> Iterator[str]:
    """Lines for the samples, each with its path and what is known of it, that have one reason."""
    first, *more = map(escaped, reason.splitlines() or [""])
    if len(samples) == 1:
        ((path, known),) = samples
        yield from (f"{path}: {first} ({known})", *more)
        return
    yield from (f"{counted(len(samples), 'sample')}: {first}", *more)
    yield from (f"  {path} ({known})" for path, known in samples)
