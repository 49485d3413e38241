"""``batchd``: the group of all commands; errors become messages and exit codes here.

A command is the attribute ``command`` of its module, which is imported when the command is called,
so ``batchd --help`` does not wait for pydantic or ZeroMQ. The overview's line for each command is
here for the same reason.

Invariant: a ``BatchdError`` becomes one message on standard error and its own exit code; any other
exception is a bug in batchd and keeps its traceback. What the system lacks (space, descriptors,
memory, a reader of the output) becomes a sentence, too.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path

import click

from batchd.errors import EXIT_CODE_MEANINGS, BatchdError, ExitCode, scarcity
from batchd.runtime import __version__
from batchd.runtime.suggestions import suggestion

COMMANDS = {
    "init": "Look at data, and write the configuration that serves it.",
    "bench": "Measure a stream on this machine, and say what would help.",
    "demo": "Serve photographs to two trainers, and draw a batch.",
    "serve": "Serve the streams of a configuration until SIGTERM or Ctrl-C.",
    "worker": "Run workers on this machine for a daemon on another one.",
    "ray": "Run worker hosts on a Ray cluster, as many as the daemon wants.",
    "check": "Validate a configuration and print every problem.",
    "explain": "Explain a problem of a configuration, with examples.",
    "doctor": "Check the machine: limits, memory, processors, decoders, storage.",
    "config": "Print all keys with their defaults and meanings.",
    "status": "Show the daemon, its streams, trainers and last warnings.",
    "top": "Watch streams, trainers and workers, live.",
    "reload": "Have the daemon read its configuration again.",
    "logs": "Print the last lines of the daemon's log, and follow it.",
    "stop": "Stop the daemon of this host, when its work in progress is done.",
    "why": "Show what each trainer waits for, and what helps.",
    "peek": "Draw a batch of a stream, with labels.",
    "replay": "Make the batch of any position again, and say how.",
    "seen": "Say when the model saw a file, a class or a sample.",
    "blame": "Name what stands out in the batches whose loss jumped.",
    "card": "Save what it takes to make a run's batches again.",
    "diff": "Say where the batches of two runs begin to differ, and why.",
    "prepare": "Run a pipeline once over a whole source, into shards on the disk.",
    "bad": "List the bad samples of a stream, with reasons.",
    "keys": "Make, list and revoke the keys of trainers on other hosts.",
}
"""Every command in the order of the overview; ``batchd.cli.NAME`` has it as ``command``."""

ENVIRONMENT = {
    "BATCHD_ADDRESS": "where the daemon is, such as ipc:///run/batchd",
    "BATCHD_KEY": "connection file of a trainer or a worker host on another machine",
    "BATCHD_CONNECTIONS": "number of TCP connections of a trainer",
    "BATCHD_RECONNECT_TIMEOUT": "seconds that a trainer waits for a daemon that went away",
    "BATCHD_NAME": "name of a trainer's run in status, top, why and the page",
    "BATCHD_WORKERS, …": "each key of [daemon] in capitals; overrides batchd.toml",
}


class _LazyGroup(click.Group):
    """A group whose commands are imported when they are called."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002  click's interface
        """All commands, in the order of the overview."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002  click's interface
        """Import one command; None if there is none of that name."""
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = import_module(f"batchd.cli.{cmd_name}").command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the called command; suggest a name for an unknown one."""
        if args[0] not in COMMANDS and not ctx.resilient_parsing:
            ctx.fail(f"No such command '{args[0]}'; {suggestion(args[0], list(COMMANDS))}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002  click's interface
        """Write the overview without importing anything."""
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002  click's interface
        """Write the meanings of the exit codes."""
        with formatter.section("Exit codes"):
            formatter.write_dl([(str(int(code)), meaning) for code, meaning in EXIT_CODE_MEANINGS.items()])
        with formatter.section("Environment"):
            formatter.write_dl(list(ENVIRONMENT.items()))


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, message="batchd %(version)s", help="Print the version.")
def cli() -> None:
    """Decode training batches once, into shared memory, for every trainer on the machine.

    Start with `batchd init PATH`: it looks at your data, writes batchd.toml and shows a batch. Then
    run `batchd serve`. `batchd config` explains all keys, and `batchd COMMAND --help` tells more of
    each command.
    """


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit; the entry point of the console script."""
    try:
        with _output_guarded():
            cli.main(args=arguments, prog_name="batchd")
    except BatchdError as error:
        from batchd.cli.problems import echo_error  # noqa: PLC0415  errors only

        with suppress(OSError):  # the exit code says it, too
            echo_error(error)
        sys.exit(error.exit_code)


@contextmanager
def _output_guarded() -> Iterator[None]:
    """Write all of the output, and make a sentence of what keeps a command from writing.

    Raises ``BatchdError``. A reader that is gone, such as `head`, ends a command in silence.
    """
    if sys.stdout is None:  # it was closed
        sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115  it lasts as long as the process
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except OSError as error:
        is_output = _is_stuck()
        if isinstance(error, BrokenPipeError) and is_output:
            sys.exit(ExitCode.FAILED)
        text = scarcity(error)
        if text is None:
            raise
        raise BatchdError(f"standard output cannot be written: {text}" if is_output else text) from None


def _is_stuck() -> bool:
    """Whether standard output takes nothing.

    What it has not taken is dropped, not tried at exit.
    """
    try:
        sys.stdout.write("\n")  # where nothing is buffered, only another write tells
        sys.stdout.flush()
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
        return True
    return False
