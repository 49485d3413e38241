"""``batchd serve``: the daemon in the foreground. Becomes the DAEMON process (``cli.daemon``)."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from batchd.cli.daemon import run_daemon
from batchd.cli.options import config_options, log_options

if TYPE_CHECKING:
    from batchd.cli.log_lines import LogFormat


@click.command("serve")
@config_options
@log_options
def command(config_file: Path, overrides: dict[str, str], log_level: str, log_format: "LogFormat") -> None:
    """Serve the streams of a configuration in the foreground.

    Prints its address when it is ready. SIGTERM or Ctrl-C finishes work in progress and exits; a
    second one exits immediately. SIGHUP, or `batchd reload`, reads the configuration again.
    """
    run_daemon(config_file, overrides, log_level, log_format)
