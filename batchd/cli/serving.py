"""What ``batchd serve`` does when the process that workers are forked from has begun. Runs as the DAEMON process.

Invariant: standard output has one line, the address, when trainers may come, or, for the script
that embeds the daemon, why it does not start; everything else is log, on standard error.
"""

import faulthandler
import sys
from pathlib import Path

import click

from batchd.children import Linked
from batchd.cli.logs import LogFormat, set_up_logs
from batchd.config.load import load_config
from batchd.daemon.reload.requests import Origin
from batchd.daemon.serve import ServeOptions, serve
from batchd.errors import BatchdError
from batchd_wire.wording import counted


def run(
    config_file: Path,
    overrides: dict[str, str],
    logs: tuple[str, LogFormat],
    lifeline: int | None,
    launched: Linked | None,
) -> None:
    """Serve until the end. ``logs``: level and format. Raises ``BatchdError``, which a script that embeds us is told, too."""
    set_up_logs(*logs)
    try:
        _serve(config_file, overrides, lifeline, launched)
    except BatchdError as error:
        if lifeline is not None:
            click.echo(str(error))
        raise


def _serve(config_file: Path, overrides: dict[str, str], lifeline: int | None, launched: Linked | None) -> None:
    config = load_config(config_file, overrides)
    options = ServeOptions(
        lifeline=lifeline,
        progress=_ScanProgress(),
        ready=_say_ready,
        origin=Origin(config_file.absolute(), overrides),
        launched=launched,
    )
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
