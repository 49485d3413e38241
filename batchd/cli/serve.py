"""``batchd serve``: the daemon in the foreground. Runs as the DAEMON process.

Invariant: standard output has one line, the address, when trainers may come; everything else is log, on standard error.
"""

import faulthandler
import sys
from pathlib import Path

import click

from batchd.cli.logs import LogFormat, set_up_logs
from batchd.cli.options import config_options
from batchd.config.load import load_config
from batchd.daemon.reload import Origin
from batchd.daemon.serve import ServeOptions, serve
from batchd_wire.wording import counted


@click.command("serve")
@config_options
@click.option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"]),
    default="info",
    show_default=True,
    help="The least important lines that are written.",
)
@click.option(
    "--log-format",
    type=click.Choice(["auto", "text", "json"]),
    default="auto",
    show_default=True,
    help="How the lines look. auto is text on a terminal and in the journal (with its levels), JSON otherwise.",
)
@click.option("--lifeline", type=int, default=None, hidden=True, help="A descriptor; the daemon ends with it.")
def command(
    config_file: Path, overrides: dict[str, str], log_level: str, log_format: LogFormat, lifeline: int | None
) -> None:
    """Serve the streams of a configuration in the foreground.

    Prints its address when trainers may come. SIGTERM or Ctrl-C finishes what the workers have in hand and ends; a second one
    ends at once. SIGHUP, or `batchd reload`, reads the configuration again.
    """
    set_up_logs(log_level, log_format)
    config = load_config(config_file, overrides)
    origin = Origin(config_file.absolute(), overrides)
    options = ServeOptions(lifeline=lifeline, progress=_ScanProgress(), ready=_say_ready, origin=origin)
    if sys.stderr is not None:  # closed by whoever started us
        faulthandler.enable()  # who aborts the daemon because it hangs finds in the log where
    serve(config, options)


def _say_ready(address: str) -> None:
    click.echo(address)
    sys.stdout.flush()


class _ScanProgress:
    """A line on the terminal that counts while a source is scanned; nothing where nobody looks."""

    def __init__(self) -> None:
        self._shows = sys.stderr is not None and sys.stderr.isatty()  # None where it was closed

    def __call__(self, stream: str, found: int) -> None:
        if self._shows:
            click.echo(f"\rscanning {stream}: {counted(found, 'sample')}\x1b[K\r", err=True, nl=False)
