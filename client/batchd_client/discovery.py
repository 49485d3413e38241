"""Where is the daemon? Finds it, or says precisely why there is none. Runs in the trainer.

Tried in this order: the address that the program gave, else ``$BATCHD_ADDRESS``, else the first runtime directory of
``batchd_wire.runtime.candidate_directories`` whose lifeline socket takes a connection.
"""

import grp
import os
import time
from collections.abc import Sequence
from pathlib import Path

from batchd_client.connection import first_line, patiently_open
from batchd_client.errors import AddressInvalid, ConnectTimeout, DaemonNotFound, PermissionDenied
from batchd_client.lifeline import DaemonBusy
from batchd_client.session import Context, Session
from batchd_wire.runtime import (
    ADDRESS_VARIABLE,
    RuntimeDirectory,
    candidate_directories,
    parse_address,
    runtime_directory,
)


def find_daemon(context: Context, address: str | None, connect_timeout_s: float) -> tuple[RuntimeDirectory, Session]:
    """Open a session with the daemon at ``address``, or wherever one answers first.

    Raises ``AddressInvalid``, ``DaemonNotFound``, ``PermissionDenied``, ``ConnectTimeout``, ``VersionMismatch`` or
    ``ProtocolError``.
    """
    give_up = time.monotonic() + connect_timeout_s
    failures: list[tuple[RuntimeDirectory, OSError]] = []
    for directory in _directories(address):
        try:
            return directory, patiently_open(context, directory, give_up, connect_timeout_s, retry=(DaemonBusy,))
        except DaemonBusy as error:
            raise ConnectTimeout(f"after {connect_timeout_s:g} s: {first_line(error)}") from error
        except OSError as error:
            failures.append((directory, error))
    raise _explain(failures)


def _directories(address: str | None) -> Sequence[RuntimeDirectory]:
    origin, given = "connect()", address
    if given is None:
        origin, given = f"${ADDRESS_VARIABLE}", os.environ.get(ADDRESS_VARIABLE) or None
    try:
        if given is not None:
            return [parse_address(given)]
        return [runtime_directory(path) for path in candidate_directories()]
    except ValueError as error:
        raise AddressInvalid(f"{origin}: {error}") from None


def _explain(failures: Sequence[tuple[RuntimeDirectory, OSError]]) -> DaemonNotFound | PermissionDenied:
    tried = "; ".join(f"{directory.path}: {_reason(directory, error)}" for directory, error in failures)
    if any(isinstance(error, PermissionError) for _, error in failures):
        return PermissionDenied(f"tried {tried}")
    return DaemonNotFound(f"tried {tried}")


def _reason(directory: RuntimeDirectory, error: OSError) -> str:
    match error:
        case PermissionError():
            return f"permission denied{_group(directory.path)}"
        case ConnectionRefusedError():
            return "there is a socket, but nobody listens on it any more: the daemon has ended"
        case FileNotFoundError() if directory.path.is_dir():
            return f"the directory exists, but has no {directory.lifeline_path.name}: no daemon runs there"
        case FileNotFoundError():
            return "no such directory"
        case _:
            return first_line(error)


def _group(path: Path) -> str:
    """Which group opens the directory, where that can be seen from outside."""
    try:
        return f" (its group is {grp.getgrgid(path.stat().st_gid).gr_name!r})"
    except (OSError, KeyError):
        return ""
