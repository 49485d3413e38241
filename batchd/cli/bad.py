"""``batchd bad``: the bad samples of a stream, with reasons. Runs in the user's shell."""

from time import monotonic

from batchd.cli import terminal
from batchd.cli.asking import RunningStream, running_daemon
from batchd.cli.options import Address, JsonObject, as_command
from batchd.cli.text import escaped
from batchd_client.asking import ANSWER_TIMEOUT_S
from batchd_wire.messages import AskBad, BadSamples
from batchd_wire.wording import counted


@as_command("bad")
def command(*, stream: RunningStream, address: Address, as_json: JsonObject) -> None:
    """List the bad samples of STREAM: path, reason, number of occurrences, index in the source.

    Of many, the first ones by their index; then a file of the daemon's cache_dir has the names of
    all, a line of JSON each. With --json an object: `total`, `left_out` (of the list `samples`),
    and that `file`, or null.
    """
    with running_daemon(address) as session:
        deadline = monotonic() + ANSWER_TIMEOUT_S
        answer = session.request(lambda request: AskBad(request, stream), BadSamples, deadline)
    if as_json:
        terminal.emit_json(answer.to_plain())
        return
    if not answer.total:
        terminal.say(f"no bad samples so far in stream {stream}")
        return
    for sample, path, reason, times in answer.samples:
        first, *more = map(escaped, reason.splitlines() or [""])
        terminal.say(f"{escaped(path)}: {first} (met {counted(times, 'time')}, sample {sample})", *more)
    if answer.left_out:
        where = f"; all are in {escaped(answer.file)}" if answer.file else ""
        terminal.say(f"... and {answer.left_out:,} more, {answer.total:,} in total{where}")
