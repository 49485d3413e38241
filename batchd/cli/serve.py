"""``batchd serve``: the daemon in the foreground. Runs as the DAEMON process.

What workers are forked from is started before the daemon imports its own, since both take as long:
see ``serving``. What is imported stays, so the collector of garbage does not look through it: not
meanwhile, which is a tenth of the time, and not later. ``structlog`` loads ``rich`` where it can,
for tracebacks that the daemon never prints: another tenth.
"""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import click

from batchd.children import start_linked
from batchd.cli.log_lines import fill_standard_streams
from batchd.cli.options import config_options

if TYPE_CHECKING:
    from batchd.cli.logs import LogFormat


@click.command("serve")
@config_options
@click.option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"]),
    default="info",
    show_default=True,
    help="Minimum log level.",
)
@click.option(
    "--log-format",
    type=click.Choice(["auto", "text", "json"]),
    default="auto",
    show_default=True,
    help="Format of the log. auto is text on a terminal and in the journal (with its levels), JSON otherwise.",
)
@click.option("--lifeline", type=int, default=None, hidden=True, help="A descriptor; the daemon ends with it.")
def command(
    config_file: Path, overrides: dict[str, str], log_level: str, log_format: "LogFormat", lifeline: int | None
) -> None:
    """Serve the streams of a configuration in the foreground.

    Prints its address when it is ready. SIGTERM or Ctrl-C finishes work in progress and exits; a
    second one exits immediately. SIGHUP, or `batchd reload`, reads the configuration again.
    """
    fill_standard_streams()
    launched = None
    with suppress(OSError):  # it is tried again, and said, when the first worker is wanted
        launched = start_linked("batchd.worker")
    try:
        gc.disable()
        with _hidden("rich"):
            from batchd.cli.serving import run  # noqa: PLC0415  see above

        gc.freeze()
        gc.enable()
        run(config_file, overrides, (log_level, log_format), lifeline, launched)
    finally:
        if launched is not None:
            launched.child.end()


@contextmanager
def _hidden(package: str) -> Iterator[None]:
    """Within it, a package that is not loaded yet looks as if it were not installed."""
    if package in sys.modules:
        yield
        return
    modules: dict[str, ModuleType | None] = sys.modules  # type: ignore[assignment]
    modules[package] = None  # which the import system takes for "not there"
    try:
        yield
    finally:
        del modules[package]
