"""Directories of caches and keys where the configuration names none.

Invariant: the choice creates nothing.
"""

import os
from pathlib import Path

from batchd.errors import ConfigInvalid, Problem, ProblemKind

SYSTEM_KEYS_DIRECTORY = Path("/etc/batchd/keys")
SYSTEM_CACHE_DIRECTORY = Path("/var/cache/batchd")


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
