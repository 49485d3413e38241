"""Directories that the daemon uses where the configuration names none. Daemon and CLI.

Invariant: the choice creates nothing. The runtime directory that is chosen exists and is writable
for this user, or this user can create it.
"""

import os
from pathlib import Path

from batchd.config.schema import problem_at
from batchd.errors import ConfigInvalid, Problem, ProblemKind
from batchd_wire.runtime import RuntimeDirectory, candidate_directories, runtime_directory

SYSTEM_KEYS_DIRECTORY = Path("/etc/batchd/keys")
SYSTEM_CACHE_DIRECTORY = Path("/var/cache/batchd")


def choose_runtime_directory(configured: Path | None) -> RuntimeDirectory:
    """The configured directory, else the first usable one of ``candidate_directories``.

    Raises ``ConfigInvalid`` if there is none, or if the path is too long for a socket.
    """
    directory = configured or next(filter(_is_usable, candidate_directories()), None)
    if directory is None:
        text = (
            f"no directory for the sockets: uid {os.geteuid()} may not write "
            f"{' or '.join(map(str, candidate_directories()))}; set runtime_dir in batchd.toml"
            + ("" if os.environ.get("XDG_RUNTIME_DIR") else ", or $XDG_RUNTIME_DIR, which is not set")
        )
        raise ConfigInvalid([problem_at(("daemon", "runtime_dir"), ProblemKind.RUNTIME_DIRECTORY, text)])
    try:
        return runtime_directory(directory)
    except ValueError as error:
        raise ConfigInvalid(
            [problem_at(("daemon", "runtime_dir"), ProblemKind.RUNTIME_DIRECTORY, str(error))]
        ) from None


def default_cache_dir() -> Path | None:
    """Directory of the index cache; None for a user without a home, who gets no cache."""
    given = Path(os.environ.get("CACHE_DIRECTORY", "").partition(":")[0])
    if given.is_absolute():
        return given
    if os.geteuid() == 0:
        return SYSTEM_CACHE_DIRECTORY
    base = _users_directory("XDG_CACHE_HOME", "~/.cache")
    return base / "batchd" if base is not None else None


def default_keys_dir() -> Path:
    """Directory of the keys. Raises ``ConfigInvalid`` for a user without a home."""
    if os.geteuid() == 0:
        return SYSTEM_KEYS_DIRECTORY
    base = _users_directory("XDG_CONFIG_HOME", "~/.config")
    if base is None:
        text = f"no directory for the keys: uid {os.geteuid()} has no home; set keys_dir in [daemon]"
        raise ConfigInvalid([Problem("daemon.keys_dir", ProblemKind.MISSING_KEYS, f"{text} (or BATCHD_KEYS_DIR)")])
    return base / "batchd" / "keys"


def _users_directory(variable: str, default: str) -> Path | None:
    """The directory that an XDG variable names, else ``default`` in the home directory."""
    base = Path(os.environ.get(variable, ""))
    if not base.is_absolute():
        base = Path(os.path.expanduser(default))  # noqa: PTH111  Path's raises for unknown users
    return base if base.is_absolute() else None


def _is_usable(directory: Path) -> bool:
    """True if this user may create sockets in it, or may create it."""
    existing = directory if os.path.exists(directory) else directory.parent  # noqa: PTH110  Path's may raise
    return os.path.isdir(existing) and os.access(existing, os.W_OK | os.X_OK)  # noqa: PTH112  the same
