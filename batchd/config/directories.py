"""The runtime directory: the configured one, else the first that this user may have.

Invariant: the choice creates nothing. The runtime directory that is chosen exists and is writable
for this user, or this user can create it.
"""

import os
from pathlib import Path

from batchd.config.schema import problem_at
from batchd.errors import ConfigInvalid, ProblemKind
from batchd_wire.runtime import RuntimeDirectory, candidate_directories, runtime_directory


def choose_runtime_directory(configured: Path | None) -> RuntimeDirectory:
    """The configured directory, else the first usable one of ``candidate_directories``.

    Raises ``ConfigInvalid`` if there is none, or if the path is too long for a socket.
    """
    directory = configured or next(filter(is_usable, candidate_directories()), None)
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


def is_usable(directory: Path) -> bool:
    """True if this user may create sockets in it, or may create it."""
    existing = directory if os.path.exists(directory) else directory.parent  # noqa: PTH110  Path's may raise
    return os.path.isdir(existing) and os.access(existing, os.W_OK | os.X_OK)  # noqa: PTH112  the same
