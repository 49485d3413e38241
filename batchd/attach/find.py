"""Where a daemon of this host is: the address given, or the first directory in which one answers. Commands."""

import os
import socket

from batchd.attach.session import ANSWER_TIMEOUT_S
from batchd.errors import DaemonUnreachable
from batchd_wire.runtime import ADDRESS_VARIABLE, RuntimeDirectory, candidate_directories, parse_address


def find_daemon(address: str | None) -> RuntimeDirectory:
    """The runtime directory of the address given, of ``$BATCHD_ADDRESS``, or the first where a daemon answers.

    Sockets alone are no daemon: one that was killed leaves them. Where none answers, but something is there, connecting to it
    will say what is wrong.
    """
    named = address or os.environ.get(ADDRESS_VARIABLE)
    if named:
        try:
            place = parse_address(named)
        except ValueError as error:
            raise DaemonUnreachable(str(error)) from None
        if isinstance(place, RuntimeDirectory):
            return place
        raise DaemonUnreachable(
            f"{place.address} is for trainers; this command asks a daemon on its own host: run it there, "
            "with --address ipc:///run/batchd or none"
        )
    directories = [RuntimeDirectory(path) for path in candidate_directories()]
    problems = {directory: _problem(directory) for directory in directories}
    answering = [directory for directory, problem in problems.items() if problem is None]
    silent = [directory for directory, problem in problems.items() if not isinstance(problem, FileNotFoundError)]
    if answering or silent:
        return (answering or silent)[0]
    tried = ", ".join(str(directory.path) for directory in directories)
    raise DaemonUnreachable(
        f"no daemon was found in {tried}: start one with `batchd serve`, or name its address with --address or {ADDRESS_VARIABLE}"
    )


def _problem(directory: RuntimeDirectory) -> OSError | None:
    """Knock: why does nobody answer? None where somebody does."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
        probe.settimeout(ANSWER_TIMEOUT_S)
        try:
            probe.connect(os.fspath(directory.lifeline_path))
        except OSError as error:
            return error
    return None
