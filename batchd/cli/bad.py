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
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list, for programs.")
def command(stream: str, address: str | None, as_json: bool) -> None:
    """List the bad samples of STREAM: path, reason, number of occurrences, index in the source."""
    with running_daemon(address) as session:
        deadline = monotonic() + ANSWER_TIMEOUT_S
        answer = session.request(lambda request: AskBad(request, stream), BadSamples, deadline)
    if as_json:
        keys = ("sample", "path", "reason", "times")
        click.echo(json.dumps([dict(zip(keys, bad, strict=True)) for bad in answer.samples], indent=2))
        return
    if not answer.total:
        click.echo(f"no bad samples so far in stream {stream}")
        return
    for sample, path, reason, times in answer.samples:
        first, *more = map(escaped, reason.splitlines() or [""])
        click.echo("\n".join([f"{escaped(path)}: {first} (met {counted(times, 'time')}, sample {sample})", *more]))
    if answer.total > len(answer.samples):
        click.echo(f"... and {answer.total - len(answer.samples):,} more")
