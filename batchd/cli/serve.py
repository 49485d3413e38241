"""``batchd serve``: the daemon in the foreground, or in the background with --detach.

    in the foreground   this process becomes the DAEMON process (``cli.daemon``)
    in the background   this process --fork--> its waiting parent --fork--> the DAEMON process
                               <------------------ pid, then address

The waiting parent has a session of its own, so no terminal ends it. It logs how the daemon ended,
which the daemon cannot do where it is killed.
"""

import os
import signal
import sys
from pathlib import Path
from textwrap import shorten
from typing import Annotated

import click

from batchd.cli import terminal
from batchd.cli.daemon import run_daemon
from batchd.cli.options import ConfigFile, LogFormat, LogLevel, Overrides, as_command, option
from batchd.data.storage.paths import why_unwritable
from batchd.errors import BatchdError, ExitCode

REASON_CHARACTERS_MAX = 300
"""Of a line of the log; the command prints all of it."""


@as_command("serve")
def command(
    *,
    config_file: ConfigFile,
    overrides: Overrides,
    log_level: LogLevel,
    log_format: LogFormat,
    detach: Annotated[bool, option("Serve in the background, and return when trainers can connect.", "-d", "--detach")],
    log_file: Annotated[
        Path | None,
        option("With --detach: the file that the log is appended to. Default: the configuration's name with .log."),
    ],
) -> None:
    """Serve the streams of a configuration in the foreground.

    Prints its address when it is ready. SIGTERM, Ctrl-C or the end of its terminal finishes work in
    progress and exits; a second signal exits immediately. SIGHUP, or `batchd reload`, reads the
    configuration again. With --detach it outlives the terminal: `batchd logs` and `batchd stop`
    find it.
    """
    if log_file is not None and not detach:
        raise click.UsageError("--log-file goes with --detach; the log of a daemon in the foreground is standard error")
    if not detach or not config_file.exists():
        run_daemon(config_file, overrides, log_level, log_format)
        return
    path = (log_file or config_file.with_suffix(".log")).absolute()
    try:
        log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o640)
    except OSError as error:
        raise BatchdError(f"{why_unwritable(path, error)} with --log-file") from None
    began = os.fstat(log).st_size
    told, telling = os.pipe()
    parent = os.fork()
    if parent:
        os.close(telling)
        sys.exit(await_start(parent, told, path, began))
    os.close(told)
    log_format = "text" if log_format == "auto" else log_format
    daemon = _fork_daemon(log)
    if daemon:
        os.write(telling, b"%d\n" % daemon)
        os.close(telling)
        _await_end(daemon, log_level, log_format)

    is_ready = False

    def ready(address: str) -> None:
        nonlocal is_ready
        is_ready = True
        os.write(telling, f"{address}\n".encode())
        os.close(telling)

    try:
        run_daemon(config_file, overrides, log_level, log_format, ready=ready)
    except BatchdError as error:
        # the reason is for who started it; the log may be that of a daemon that runs
        if not is_ready:
            import structlog  # noqa: PLC0415  the daemon has imported it

            _log = structlog.get_logger()
            _log.error("daemon not started", pid=os.getpid(), reason=shorten(str(error), REASON_CHARACTERS_MAX))
            os.dup2(telling, 2)
        raise


def await_start(parent: int, told: int, path: Path, began: int) -> int:
    """Print pid and address of a daemon that starts, or why it does not; return the exit status.

    ``parent``: the child that waits for the daemon; without a daemon it closes ``told`` unwritten.
    A daemon that ends without a reason has logged one.
    """
    pid, reason = 0, ""
    with open(told, encoding="utf-8") as lines:
        try:
            pid = int(next(lines, "0"))
            if pid:
                terminal.note(f"starting the daemon (pid {pid}); its log: {path}")
            address = next(lines, "")
            if "://" in address.partition(" ")[0]:
                terminal.emit(address)
                return 0
            reason = address + lines.read()
        except KeyboardInterrupt:
            if pid:
                os.kill(pid, signal.SIGTERM)
            os.waitpid(parent, 0)
            return ExitCode.INTERRUPTED
    _, status = os.waitpid(parent, 0)
    with path.open("rb") as log:
        log.seek(began)
        terminal.note(*(reason or log.read().decode(errors="replace")).splitlines())
    return os.waitstatus_to_exitcode(status)


def _fork_daemon(log: int) -> int:
    """Fork in a session of its own, with the log as output; return the child's number, or 0."""
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    for ours, standard in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(ours, standard)
    os.close(nothing)
    os.close(log)
    return os.fork()


def _await_end(daemon: int, log_level: str, log_format: LogFormat) -> None:
    """Log by which signal the daemon ends, and exit as it did. Does not return.

    Whatever else ends it, it logs itself.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the daemon's alone
    _, waited = os.waitpid(daemon, 0)
    status = os.waitstatus_to_exitcode(waited)
    if status >= 0:
        os._exit(status)
    import structlog  # noqa: PLC0415  only this process needs it

    from batchd.cli.log_lines import set_up_logs  # noqa: PLC0415  the same
    from batchd.runtime.children import describe  # noqa: PLC0415  the same

    set_up_logs(log_level, log_format)
    _log = structlog.get_logger()
    _log.error("daemon ended", pid=daemon, how=describe(status))
    os._exit(128 - status)
