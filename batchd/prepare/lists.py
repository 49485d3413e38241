"""The lists of all runs of files become one list. The process of ``batchd prepare``."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from batchd.errors import BatchdError
from batchd.prepare.sinks import FILES


class FileSet(NamedTuple):
    """The files that were written: below ``root``, all named in ``list_file``, ``total_bytes`` together.

    ``path_bytes``: how long the longest of their paths is. ``has_all_classes``: whether each class
    of the source has a file, so that the folder says the labels, too.
    """

    root: Path
    list_file: Path
    total_bytes: int
    path_bytes: int
    has_all_classes: bool


def gather(folder: Path, name: str, runs: Sequence[str], class_names: Sequence[str]) -> FileSet:
    """Make the list of all files from those of the ``runs`` in ``folder``. Raises ``BatchdError``."""
    root, list_file = folder / FILES, folder / f"{name}.list"
    labels, total_bytes, path_bytes = set(), 0, 0
    unfinished = list_file.with_name(f"{list_file.name}.unfinished")
    try:
        with unfinished.open("wb") as stream:
            for line in _lines(folder, runs):
                path, label = line.rsplit(maxsplit=1)
                total_bytes += os.stat(os.path.join(os.fsencode(root), path)).st_size  # noqa: PTH116, PTH118  bytes
                path_bytes = max(path_bytes, len(path))
                labels.add(int(label))
                stream.write(line)
            stream.flush()
            os.fsync(stream.fileno())
        unfinished.rename(list_file)
    except FileNotFoundError as error:
        raise BatchdError(
            f"{os.fsdecode(error.filename)} has gone since it was written; remove {folder}, and prepare it again"
        ) from None
    except OSError as error:
        raise BatchdError(f"{list_file} cannot be written: {error.strerror}") from None
    return FileSet(root, list_file, total_bytes, path_bytes, labels >= set(range(len(class_names))))


def _lines(folder: Path, runs: Sequence[str]) -> Iterator[bytes]:
    for run in runs:
        with (folder / run).open("rb") as stream:
            yield from stream
