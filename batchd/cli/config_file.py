"""The configuration that ``batchd init`` writes: a new file, or a file in use. In the user's shell.

    a new file       comments, [streams.photos]
    a file in use    its text, byte for byte; a blank line; comments, [streams.photos-2]

A table at the end of a TOML file changes nothing before it, so comments and line ends stay.

Invariant: a file is replaced as a whole, after its new text has passed the checks. It keeps its
mode and owner, and a symbolic link stays one.
"""

import os
import shutil
import tomllib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from batchd.cli.check import checked
from batchd.config.load import parse_config, read_config
from batchd.config.problems import key_places
from batchd.config.schema import toml_key, toml_value
from batchd.config.tree import Config, StreamConfig
from batchd.daemon.config_checks import preview_streams
from batchd.data.sources.composed.options import sources_in
from batchd.data.sources.options import SourceOptions, source_to_plain
from batchd.data.storage.access import Storage
from batchd.data.storage.paths import why_unwritable
from batchd.data.storage.values import CHECK_LIMITS
from batchd.errors import BatchdError, ConfigInvalid, MemoryTooSmall, ProblemKind, path_text
from batchd.runtime.available import available_bytes, shortage
from batchd.stream.rings import memory_problem, needed_bytes, plan_rings

_PLACES = ("type", "path", "root", "patterns", "shards", "files", "arrays")
"""Keys of a source that say which files it reads."""


class NewFile:
    """A configuration that is only written."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config: Config | None = None
        """The streams that are in the file; None if there are none."""

    @property
    def streams(self) -> Mapping[str, StreamConfig]:
        """The streams that are in the file."""
        return {} if self.config is None else self.config.streams

    def check_folder(self) -> None:
        """Raise ``BatchdError`` if the file cannot be written; called before the data is read."""
        folder = self.path.resolve().parent
        if not folder.is_dir():
            raise BatchdError(why_unwritable(self.path, FileNotFoundError()))
        if not os.access(folder, os.W_OK | os.X_OK):
            text = f"{self.path} cannot be written: this user may not write to {folder}"
            raise BatchdError(f"{text}; {self.remedy}")

    remedy = "use -o FILE"

    def check(self, text: str) -> None:
        """Check new streams as ``batchd check`` does. Raises ``BatchdError``.

        Of this machine, only the memory counts: where the daemon will run is not known.
        """
        reading = parse_config(text, self.path)
        assert reading.config is not None, reading.problems
        with Storage() as storage:
            try:
                rings = plan_rings(reading.config, storage, thoroughly=True)
            except (ConfigInvalid, MemoryTooSmall) as error:
                raise type(error)(reading.located(error.problems), str(self.path)) from None
            if problems := preview_streams(reading.config, rings, storage):
                raise ConfigInvalid(reading.located(problems), str(self.path))
        short = shortage(needed_bytes(reading.config, rings), available_bytes())
        if (problem := memory_problem(reading.config, short)) is not None:
            raise MemoryTooSmall(reading.located([problem]), str(self.path))

    def write(self, text: str) -> None:
        """Write the whole file or nothing. Raises ``BatchdError``."""
        _replace(self.path.resolve(), text.encode())


class FileInUse(NewFile):
    """A configuration that gets further streams. Raises ``BatchdError`` if it has a problem."""

    remedy = "--dry-run prints what to add"

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        reading = read_config(path)
        problems = [one for one in reading.problems if (one.path, one.kind) != ("streams", ProblemKind.MISSING_KEY)]
        if problems:
            raise ConfigInvalid(reading.located(problems), str(path))
        self.config = reading.config
        self._bytes = path.read_bytes()

    def check(self, text: str) -> None:
        """Check the file with the new streams as ``batchd check`` does. Raises ``BatchdError``."""
        new = tomllib.loads(text)["streams"]
        try:
            reading = parse_config(self._with(text).decode(), self.path)
        except ConfigInvalid:
            raise self._is_inline(new, line=key_places(self._bytes.decode())[("streams",)].line) from None
        added = ", ".join(f"[{path_text(('streams', name))}]" for name in new)
        with Storage(CHECK_LIMITS) as storage:
            checked(reading, Path(f"{self.path} with {added}"), storage)

    def write(self, text: str) -> None:
        """Write the file with the new streams. Raises ``BatchdError``; then it is unchanged."""
        real = self.path.resolve()
        if not real.is_file() or real.read_bytes() != self._bytes:
            raise BatchdError(f"{self.path} was changed by another program meanwhile, so nothing is added; try again")
        _replace(real, self._with(text))

    def _with(self, text: str) -> bytes:
        end = b"\r\n" if b"\r\n" in self._bytes else b"\n"
        before = self._bytes if self._bytes.endswith(b"\n") or not self._bytes else self._bytes + end
        return before + (end if before else b"") + text.encode().replace(b"\n", end)

    def _is_inline(self, tables: Mapping[str, object], line: int) -> BatchdError:
        """The error for streams in one inline table, which ends where it is closed."""
        lines = [f"  , {toml_key(name)} = {toml_value(table)}" for name, table in tables.items()]
        return BatchdError(
            f"{self.path}:{line} has all streams in one inline table, streams = {{ ... }}, and TOML allows no table "
            "[streams.NAME] beside it; paste this before its closing brace:\n" + "\n".join(lines)
        )


def served_as(config: Config | None, source: SourceOptions) -> str | None:
    """The stream that reads the same files, also as a part of its source; None if none does."""
    files = _files_of(source)
    streams = {} if config is None else config.streams
    parts = ((name, part) for name, stream in streams.items() for _key, part in sources_in(stream.source))
    return next((name for name, part in parts if _files_of(part) == files), None)


def _files_of(source: SourceOptions) -> dict[str, object]:
    """What says which files a source reads: the same for two paths of one folder."""
    plain = {key: value for key, value in source_to_plain(source).items() if key in _PLACES}
    for key in ("path", "root"):
        where = getattr(source, key, None)
        if isinstance(where, Path):
            plain[key] = os.path.realpath(where)
    return plain


def _replace(file: Path, content: bytes) -> None:
    """Write the whole file or nothing; one that is there keeps its mode, and its owner as root."""
    unfinished = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        try:
            unfinished.write_bytes(content)
            if file.exists():
                shutil.copymode(file, unfinished)
                with suppress(PermissionError):
                    os.chown(unfinished, file.stat().st_uid, file.stat().st_gid)
            unfinished.replace(file)
        finally:
            unfinished.unlink(missing_ok=True)
    except OSError as error:
        raise BatchdError(why_unwritable(file, error)) from None
