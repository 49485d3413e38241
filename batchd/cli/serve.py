"""``batchd serve``: the daemon in the foreground. Becomes the DAEMON process (``cli.daemon``)."""

from batchd.cli.daemon import run_daemon
from batchd.cli.options import ConfigFile, LogFormat, LogLevel, Overrides, as_command


@as_command("serve")
def command(*, config_file: ConfigFile, overrides: Overrides, log_level: LogLevel, log_format: LogFormat) -> None:
    """Serve the streams of a configuration in the foreground.

    Prints its address when it is ready. SIGTERM or Ctrl-C finishes work in progress and exits; a
    second one exits immediately. SIGHUP, or `batchd reload`, reads the configuration again.
    """
    run_daemon(config_file, overrides, log_level, log_format)
