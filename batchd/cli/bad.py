"""``batchd bad``: the bad samples of a stream, with reasons. Runs in the user's shell."""

import json
from time import monotonic

import click

from batchd.cli.asking import running_daemon, running_streams
from batchd.cli.options import address_option
from batchd.cli.text import escaped
from batchd_client.asking import ANSWER_TIMEOUT_S
from batchd_wire.messages import AskBad, BadSamples
from batchd_wire.wording import counted


@click.command("bad")
@click.argument("stream", shell_complete=running_streams)
@address_option
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object, for programs.")
def command(stream: str, address: str | None, as_json: bool) -> None:
    """List the bad samples of STREAM: path, reason, number of occurrences, index in the source.

    Of many, the first ones by their index; then a file of the daemon's cache_dir has the names of
    all, a line of JSON each. With --json an object: `total`, `left_out` (of the list `samples`),
    and that `file`, or null.
    """
    with running_daemon(address) as session:
        deadline = monotonic() + ANSWER_TIMEOUT_S
        answer = session.request(lambda request: AskBad(request, stream), BadSamples, deadline)
    if as_json:
        click.echo(json.dumps(answer.to_plain(), indent=2))
        return
    if not answer.total:
        click.echo(f"no bad samples so far in stream {stream}")
        return
    for sample, path, reason, times in answer.samples:
        first, *more = map(escaped, reason.splitlines() or [""])
        click.echo("\n".join([f"{escaped(path)}: {first} (met {counted(times, 'time')}, sample {sample})", *more]))
    if answer.left_out:
        where = f"; all are in {escaped(answer.file)}" if answer.file else ""
        click.echo(f"... and {answer.left_out:,} more, {answer.total:,} in total{where}")
