"""The bases of all options of sources, all kinds, and sources in messages. Standard library only.

Workers import this, so it does not import pydantic: ``__pydantic_config__`` is plain data, which
``config.tree`` reads. The string under a field of a source is its documentation everywhere: in
error messages, ``batchd config``, the JSON Schema and the manual.

Invariant: ``source_from_plain(source_to_plain(source)) == source``.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from math import prod
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, get_type_hints

from batchd.data.samples.checks import Checks
from batchd.data.samples.columns import Column, parse_column
from batchd.data.samples.kinds import Kinds
from batchd.data.samples.location import Url, as_location, check_written
from batchd.data.storage.patterns import resolve_braces
from batchd.runtime.plain import Readers, from_plain, to_plain
from batchd.runtime.suggestions import nearest
from batchd_wire.wording import counted

PATH_BYTES_MAX = 4096


class Patterns(NamedTuple):
    """Patterns of files below ``root``, under ``key``. ``allow_outside_root`` is about links."""

    root: Path
    texts: Sequence[str]
    key: str
    allow_outside_root: bool


class SourceOptions:
    """Base of the sources, each a dataclass. Unknown keys are refused."""

    __slots__ = ()
    __pydantic_config__: ClassVar[dict[str, object]] = {"extra": "forbid"}
    __dataclass_fields__: ClassVar[dict[str, Any]]
    is_live: ClassVar[bool] = False
    """True if samples arrive while they are read: a number is a place in the stream, and reading it
    again gives another sample."""

    is_own_code: ClassVar[bool] = False
    """True if its samples come from the user's own code."""
    requires: ClassVar[tuple[str, ...]] = ()
    """Modules that its scan and its reader need beyond batchd's own dependencies."""
    extra: ClassVar[str] = ""
    """The extra of the distribution that installs them."""
    endings: ClassVar[tuple[str, ...]] = ()
    """Endings of the names of its files, in lower case: `batchd init` knows them by these."""

    shares_decoding: ClassVar[bool] = False
    """Whether neighbours are read in less time by one worker than by several."""

    outranks: ClassVar[bool] = False
    """Whether it says more of the same images than sources of files alone, for `batchd init`."""
    box_form: ClassVar[Mapping[str, object]] = {}
    """What its boxes are, as options of a step ``follow`` say it: in pixels, without these."""

    type: str
    """The name of the kind."""

    @property
    def place(self) -> str:
        """The place of the samples, for messages: one path, or a root and what is below it."""
        path: Path | None = getattr(self, "path", None)
        if path is not None:
            return str(path)
        below = next(getattr(self, name) for name in ("shards", "files", "patterns") if hasattr(self, name))
        return f"{getattr(self, 'root', None)}: {' '.join(below)}"

    @property
    def libraries(self) -> tuple[str, ...]:
        """Distributions whose version decides its samples: it is in the stream's fingerprint."""
        return ()

    @property
    def unscanned(self) -> str:
        """The part that `batchd check` does not see since it does not scan; "" if it scans."""
        return ""

    @property
    def unread(self) -> str:
        """The content that `batchd check` cannot see; "" for the content of its samples."""
        return ""

    @property
    def reads_urls(self) -> bool:
        """True if its samples are on a server; of a source with parts, ask these."""
        return any(isinstance(getattr(self, field.name), Url) for field in fields(self))

    def __post_init__(self) -> None:
        self.checked().done()

    def checked(self, *, is_partial: bool = False) -> Checks:
        """The problems of the options; ``is_partial``: required ones that are wrong are not set."""
        checks = Checks(is_partial=is_partial)
        with checks.at():
            self._check(checks)
        return checks

    def _check(self, checks: Checks) -> None:
        """Note all problems of the options; a kind that raises the first has ``__post_init__``."""

    def settle_paths(self) -> None:
        """Check all paths, and make ``Url`` of URLs; each source does. Raises ``ValueError``."""
        for field in fields(self):
            path = getattr(self, field.name)
            if isinstance(path, Path):
                check_written(field.name, path)
                object.__setattr__(self, field.name, as_location(field.name, path))


class DeclaredOptions(SourceOptions):
    """Base of the sources whose users declare the fields of a sample, with their types."""

    __slots__ = ()
    fields: dict[str, str] | None
    names: dict[str, str]
    """The names of fields in the data, if they differ; some kinds have no such names."""

    @property
    def columns(self) -> tuple[Column, ...]:
        """The declared fields, in their order."""
        return tuple(parse_column(name, text) for name, text in (self.fields or {}).items())

    def name_of(self, field: str) -> str:
        """The name of a field in the data."""
        return self.names.get(field, field)

    def names_of(self, column: Column) -> tuple[str, ...]:
        """The names of the numbers that are an array together: ``pixel{0..783}``; else one name."""
        name = self.name_of(column.name)
        if column.kind != "array" or not column.shape or None in column.shape or "{" not in name:
            return (name,)
        try:
            return names_in(name)
        except ValueError:
            return (name,)

    def check_joined(self, checks: Checks) -> None:
        """Add a problem for each field of several names that are not as many as its numbers."""
        for name, text in (self.fields or {}).items():
            with suppress(ValueError):
                column = parse_column(name, text)
                names, numbers = self.names_of(column), prod(length or 1 for length in column.shape)
                if 1 < len(names) != numbers:
                    problem = f"names.{name} stands for {len(names)} names, and {text} has {counted(numbers, 'number')}"
                    checks.say(problem, "names", name)


def names_in(text: str) -> tuple[str, ...]:
    """The names that braces stand for: ``pixel{0..783}``. Raises ``ValueError``."""
    return tuple(resolve_braces(text))


class PatternOptions(SourceOptions):
    """Base of the sources whose files are below a folder and match patterns."""

    __slots__ = ()
    patterns_key: ClassVar[str] = "files"
    root: Path | None
    allow_outside_root: bool

    @property
    def file_patterns(self) -> Patterns:
        """The patterns, of a source that has them."""
        assert self.root is not None, "either a path or a root"
        return Patterns(self.root, getattr(self, self.patterns_key), self.patterns_key, self.allow_outside_root)


class ShardOptions(DeclaredOptions, PatternOptions):
    """Base of the kinds of records, which are in files below a folder."""

    __slots__ = ()
    patterns_key: ClassVar[str] = "shards"
    root: Path
    shards: tuple[str, ...]

    def check_shards(self, checks: Checks, *key: str) -> None:
        """Check the paths, whose problems are of the ``key``, and that there are shards."""
        with checks.at(*key):
            self.settle_paths()
        with checks.at("shards"):
            if not self.shards or not all(self.shards):
                raise ValueError("shards must not be empty")


class FilesOptions(PatternOptions):
    """Base of the sources that are either one file, or several files below a folder."""

    __slots__ = ()
    path: Path | None
    files: tuple[str, ...]

    def check_files(self) -> None:
        """Raise ``ValueError`` unless one of both is set."""
        if (self.path is None) == (not self.files) or (self.root is None) != (not self.files):
            raise ValueError("set either path, for one file, or root and files, for several")
        if not all(self.files):
            raise ValueError("files must not hold an empty path")


def check_chosen(checks: Checks, fields: Sequence[str], types: Mapping[str, str]) -> None:
    """Add a problem for each of ``fields`` that is none of ``types``, and if one comes twice."""
    for place, name in enumerate(fields):
        if name not in types:
            meant = nearest(name, types)
            text = f"a sample has no {name!r}, but {', '.join(types)}"
            checks.say(f"{text}; did you mean {meant}?" if meant else text, "fields", place)
    if not fields or len(set(fields)) < len(fields):
        checks.say("fields must name at least one field, and each once", "fields")


def check_path_bytes(count: int) -> None:
    """Raise ``ValueError`` if no field can be so long."""
    if not 0 <= count <= PATH_BYTES_MAX:
        raise ValueError(f"path_bytes must be from 0 to {PATH_BYTES_MAX}, not {count}")


SOURCE_KINDS = Kinds("batchd.data.sources", SourceOptions, "type", first="files")
"""The options class of each kind, by its ``type``."""


def source_to_plain(source: SourceOptions) -> dict[str, object]:
    """The source as strings, numbers, booleans, lists, tables and None, for a message."""
    return {field.name: to_plain(getattr(source, field.name)) for field in fields(SOURCE_KINDS[source.type])}


def source_from_plain(plain: Mapping[str, object]) -> SourceOptions:
    """Read what ``source_to_plain`` wrote. Raises ``ValueError`` or ``TypeError``."""
    kind = SOURCE_KINDS.get(str(plain.get("type")))
    if kind is None:
        raise ValueError(f"the source {plain.get('type')!r} is not one of {', '.join(SOURCE_KINDS)}")
    hints = get_type_hints(kind)
    names = {field.name for field in fields(kind)}
    if plain.keys() != names:
        raise ValueError(f"the source {plain['type']!r} has the options {sorted(names)}, not {sorted(plain)}")
    return kind(**{name: from_plain(hints[name], value, _READERS) for name, value in plain.items()})


_READERS: Readers = {SourceOptions: source_from_plain}
