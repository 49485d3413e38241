"""``batchd worker``: workers on this machine for a daemon on another one. WORKER HOST process.

As in ``batchd serve``, the fork server of the workers is started before this process imports its
own modules.

Invariant: standard output has one line for each link, with the streams, once workers take orders.
All else is log, on standard error.
"""

import gc
import os
import sys
from pathlib import Path
from typing import Annotated

import click

from batchd.cli import terminal
from batchd.cli.daemon import imports_for_a_daemon
from batchd.cli.options import LogFormat, LogLevel, argument, as_command, option, worker_address
from batchd.core.work import HOST_WORKERS_MAX
from batchd.errors import BatchdError, KeysInvalid
from batchd.runtime.addresses import is_loopback
from batchd.runtime.children import collect_output, fill_standard_streams, stop_collecting
from batchd.runtime.compiled import outdated_extension
from batchd.runtime.cpus import available_cpus
from batchd.runtime.sizes import parse_bytes, round_bytes
from batchd.worker.fork_server import start_early
from batchd_wire.keys import KEY_VARIABLE, ConnectionKey, Role, read_connection_key
from batchd_wire.runtime import TcpAddress

GIVE_UP_MAX_S = 7 * 86_400.0


def _size(text: str | int) -> int:
    """Parse an amount of memory, such as 8GiB; an error shows how to write one."""
    try:
        return text if isinstance(text, int) else parse_bytes(text)
    except ValueError as error:
        raise click.BadParameter(str(error)) from error


@as_command("worker")
def command(
    *,
    address: Annotated[str, argument()],
    key_file: Annotated[
        Path | None,
        option(
            f"Connection file of a key with the role worker, written by `batchd keys new`. Default: ${KEY_VARIABLE}. "
            "Not needed on loopback.",
            "--key",
            envvar=KEY_VARIABLE,
        ),
    ],
    workers: Annotated[
        int | None,
        option(
            "Number of worker processes. Default: the number of CPUs that this process may use.",
            limits=(1, HOST_WORKERS_MAX),
        ),
    ],
    name: Annotated[str, option("Name of this worker host in the daemon's log and status. Default: the host's.")] = "",
    maps: Annotated[
        tuple[str, ...],
        option(
            "Folder FROM on the daemon's host is folder TO on this one: --map /data=/mnt/data. Repeatable.",
            "--map",
            metavar="FROM=TO",
        ),
    ],
    cache_memory: Annotated[
        int,
        option(
            "Memory for caches of samples on this host, such as 8GiB, for streams that have a cache on the daemon's.",
            type=_size,
            metavar="SIZE",
            show_default=False,
        ),
    ] = 0,
    cache_dir: Annotated[
        Path | None,
        option(
            "Folder on a local disk for caches of samples, instead of memory; they outlive this program. Needs --cache-size.",
            metavar="DIR",
        ),
    ],
    cache_size: Annotated[
        int, option("Maximum size of each file in --cache-dir.", type=_size, metavar="SIZE", show_default=False)
    ] = 0,
    index_dir: Annotated[
        Path | None,
        option(
            "Folder that keeps the indexes of sources for the next start. Default: in the user's cache directory.",
            metavar="DIR",
        ),
    ],
    give_up: Annotated[
        float,
        option(
            "Exit if no gateway admits this host for so long; until then, keep reconnecting.",
            limits=(0.1, GIVE_UP_MAX_S),
            metavar="SECONDS",
        ),
    ] = 60.0,
    log_level: LogLevel,
    log_format: LogFormat,
) -> None:
    """Run workers on this machine for the daemon at ADDRESS, such as tcp://gpu1:7072.

    The daemon needs `worker_address` in [daemon]. This machine needs the same version of batchd,
    and the data at the same paths, or --map. Prints a line when it serves. SIGTERM or Ctrl-C
    finishes work in progress and exits; a second one exits immediately.
    """
    fill_standard_streams()
    place = worker_address(address)
    pairs = [_pair(text) for text in maps]
    if (cache_dir is None) != (not cache_size) or (cache_dir is not None and cache_memory):
        raise click.UsageError("set either --cache-memory, or --cache-dir and --cache-size")
    if outdated := outdated_extension():
        raise BatchdError(outdated)
    gc.disable()
    output = collect_output()
    fork_server = start_early()
    try:
        key = _key(key_file, place)  # no worker has it
        with imports_for_a_daemon():  # imported here for the reasons in ``daemon``
            from batchd.cli.log_lines import log_unknown_variables, print_line, set_up_logs  # noqa: PLC0415
            from batchd.pool.worker_host.connection import GatewayAddress  # noqa: PLC0415
            from batchd.pool.worker_host.host import HostOptions, run_host  # noqa: PLC0415
            from batchd.pool.worker_host.streams import CacheBudget, PathMap  # noqa: PLC0415
            from batchd.runtime.directories import default_cache_dir  # noqa: PLC0415

        gc.freeze()
        gc.enable()
        set_up_logs(log_level, log_format)
        log_unknown_variables()
        cache = default_cache_dir()
        options = HostOptions(
            gateway=GatewayAddress(place, key, give_up),
            workers=workers or available_cpus(),
            name=name or "",
            paths=PathMap(pairs),
            budget=CacheBudget(cache_memory, cache_dir, cache_size),
            index_folder=index_dir or (cache / "worker-host" if cache is not None else None),
            launched=fork_server,
            progress=_show_progress if terminal.is_terminal(sys.stderr) else None,
            serving=print_line,
            output=output,
        )
        run_host(options)
    finally:
        stop_collecting()
        if fork_server is not None:
            fork_server.child.end()
            fork_server.channel.close()


def _pair(text: str) -> tuple[str, str]:
    there, equals, here = text.partition("=")
    if not equals or not Path(there).is_absolute() or not Path(here).is_absolute():
        raise click.BadParameter(
            f"{text!r} is not FROM=TO with absolute paths, such as /data=/mnt/data", param_hint="--map"
        )
    return os.path.normpath(there), os.path.normpath(here)


def _key(file: Path | None, address: TcpAddress) -> ConnectionKey | None:
    """Read the key. Raises ``KeysInvalid`` if it cannot be read, or is missing."""
    if file is None:
        if is_loopback(address.host):
            return None
        raise KeysInvalid(
            f"{address.address} is another host, which needs a key: make one on the daemon's host ({Role.WORKER.command}), "
            f"and name its file with --key or {KEY_VARIABLE}"
        )
    try:
        return read_connection_key(file, Role.WORKER)
    except (OSError, ValueError) as error:
        from batchd.data.storage.paths import why_unreadable  # noqa: PLC0415  errors only

        text = str(error) if isinstance(error, ValueError) else why_unreadable(file, error)
        raise KeysInvalid(text) from None


def _show_progress(streams: str, received: int, size: int) -> None:
    """Show how much of an index has arrived, on a line that the last call clears."""
    text = f"index of {streams}: {round_bytes(received)} of {round_bytes(size)}" if received < size else ""
    terminal.show_progress(text)
