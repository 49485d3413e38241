"""``batchd``: the group of all commands; errors become messages and exit codes here.

A command is the attribute ``command`` of its module, which is imported when the command is called,
so ``batchd --help`` does not wait for pydantic or ZeroMQ. The overview's line for each command is
here for the same reason.

Invariant: a ``BatchdError`` becomes one message on standard error and its own exit code; any other
exception is a bug in batchd and keeps its traceback. What the system lacks (space, descriptors,
memory, a reader of the output) becomes a sentence, too.
"""

import sys
from importlib import import_module

import click

from batchd.cli import terminal
from batchd.cli.options import CommandGroup
from batchd.errors import EXIT_CODE_MEANINGS, BatchdError, ExitCode
from batchd.runtime import __version__
from batchd.runtime.suggestions import probably_meant

COMMANDS = {
    "init": "Look at data, and write the configuration that serves it.",
    "bench": "Measure a stream on this machine, and say what would help.",
    "demo": "Serve photographs to two trainers, and draw a batch.",
    "serve": "Serve the streams of a configuration until SIGTERM or Ctrl-C.",
    "worker": "Run workers on this machine for a daemon on another one.",
    "ray": "Run worker hosts on a Ray cluster, as many as the daemon wants.",
    "check": "Validate a configuration and print every problem.",
    "explain": "Explain a problem of a configuration, or an event of the log.",
    "doctor": "Check the machine: limits, memory, processors, decoders, storage.",
    "config": "Print all keys with their defaults and meanings.",
    "status": "Show the daemon, its streams, trainers and warnings.",
    "top": "Watch streams, trainers and workers, live.",
    "reload": "Have the daemon read its configuration again.",
    "logs": "Print the last lines of the daemon's log, and follow it.",
    "stop": "Stop the daemon of this host, when its work in progress is done.",
    "why": "Show what each trainer waits for, and what helps.",
    "usage": "Show what each user and key has had of each stream.",
    "peek": "Draw a batch of a stream, with labels.",
    "replay": "Make the batch of any position again, and say how.",
    "seen": "Say when the model saw a file, a class or a sample.",
    "blame": "Name what stands out in the batches whose loss jumped.",
    "card": "Save what it takes to make a run's batches again.",
    "diff": "Say where the batches of two runs begin to differ, and why.",
    "prepare": "Run a pipeline once over a whole source, into shards on the disk.",
    "bad": "List the bad samples of a stream, with reasons.",
    "define": "Define the streams of a file in a running daemon.",
    "streams": "List the streams of a daemon, and remove defined ones.",
    "keys": "Make, list and revoke the keys of trainers on other hosts.",
}
"""Every command in the order of the overview; ``batchd.cli.NAME`` has it as ``command``."""

ENVIRONMENT = {
    "BATCHD_ADDRESS": "where the daemon is, such as ipc:///run/batchd",
    "BATCHD_KEY": "connection file of a trainer or a worker host on another machine",
    "BATCHD_CONNECTIONS": "number of TCP connections of a trainer",
    "BATCHD_RECONNECT_TIMEOUT": "seconds that a trainer waits for a daemon that went away",
    "BATCHD_NAME": "name of a trainer's run in status, top, why and the page",
    "BATCHD_WORKERS, ...": "each key of [daemon] in capitals; overrides batchd.toml",
}


class _LazyGroup(CommandGroup):
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
    terminal.accept_any_text()
    try:
        with terminal.guarded_output():
            status = cli.main(args=arguments, prog_name="batchd", standalone_mode=False)
    except click.Abort:
        sys.exit(ExitCode.INTERRUPTED)
    except click.ClickException as error:
        _show_misuse(error)
        sys.exit(error.exit_code)
    except BatchdError as error:
        from batchd.cli.problems import show_error  # noqa: PLC0415  errors only

        show_error(error)
        sys.exit(error.exit_code)
    sys.exit(status or ExitCode.FINE)


def _show_misuse(error: click.ClickException) -> None:
    """Print what is wrong with the words of a command, and how it is used."""
    context = getattr(error, "ctx", None)
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        terminal.note(error.format_message())
        return
    text = error.format_message().rstrip(".")
    if isinstance(error, click.NoSuchOption):
        known = [name for one in context.command.get_params(context) for name in one.opts] if context else []
        meant = probably_meant(error.option_name, known)
        text = f"there is no option {error.option_name}" + (f"; did you mean {meant}?" if meant else "")
    terminal.warn(text if text[:2].isupper() else text[:1].lower() + text[1:])  # EPOCH:STEP stays
    if context is not None:
        terminal.note(context.get_usage(), f"`{context.command_path} --help` says more")
