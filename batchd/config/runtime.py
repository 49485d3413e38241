"""Which directories the daemon takes where none is configured. Daemon and CLI.

Invariant: the choice creates nothing; the directory that comes back exists and is writable for this
user, or could be made.
"""

import os
from pathlib import Path

from batchd.config.schema import meaning_of
from batchd.errors import ConfigInvalid, Problem
from batchd_wire.runtime import RuntimeDirectory, candidate_directories, runtime_directory

SYSTEM_CACHE_DIRECTORY = Path("/var/cache/batchd")
_KEY = "daemon.runtime_dir"


def choose_runtime_directory(configured: Path | None) -> RuntimeDirectory:
    """Take what is configured, else the first of /run/batchd and $XDG_RUNTIME_DIR/batchd that is ours.

    Raises ``ConfigInvalid`` where none of them is, or where the path is too long for a socket.
    """
    directory = configured or next(filter(_is_ours, candidate_directories()), None)
    if directory is None:
        raise _invalid(
            f"no directory for the sockets: uid {os.geteuid()} may not write "
            f"{' or '.join(map(str, candidate_directories()))}; set runtime_dir in batchd.toml"
            + ("" if os.environ.get("XDG_RUNTIME_DIR") else ", or $XDG_RUNTIME_DIR, which is not set")
        )
    try:
        return runtime_directory(directory)
    except ValueError as error:
        raise _invalid(str(error)) from None


def default_cache_dir() -> Path | None:
    """Where the indexes of large sources are kept; None for a user without a home, whose sources are scanned each time."""
    given = Path(os.environ.get("CACHE_DIRECTORY", "").partition(":")[0])
    if given.is_absolute():
        return given
    if os.geteuid() == 0:
        return SYSTEM_CACHE_DIRECTORY
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not base.is_absolute():
        base = Path(os.path.expanduser("~/.cache"))  # noqa: PTH111  Path's raises for unknown users
    return base / "batchd" if base.is_absolute() else None


def _is_ours(directory: Path) -> bool:
    """Whether this user may put sockets there, or may make it."""
    place = directory if os.path.exists(directory) else directory.parent  # noqa: PTH110  Path's may raise
    return os.path.isdir(place) and os.access(place, os.W_OK | os.X_OK)  # noqa: PTH112  the same


def _invalid(message: str) -> ConfigInvalid:
    return ConfigInvalid([Problem(_KEY, message, meaning_of(("daemon", "runtime_dir"), {}))])
