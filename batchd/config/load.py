"""Reads batchd.toml, the environment and the command line into one ``Config``. Daemon and CLI.

    --set PATH=VALUE   over   BATCHD_<KEY OF [daemon]>   over   batchd.toml   over   the defaults

Relative paths in the file are relative to the file, all others to the current directory. A leading
``~`` is the home directory.

Invariant: the result is a whole valid ``Config``, or a ``ConfigInvalid`` with all problems.
"""

import json
import os
import re
import tomllib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from pydantic import ValidationError

from batchd.config.draft import daemon_draft
from batchd.config.environment import DAEMON_VARIABLES
from batchd.config.problems import Place, key_places, problems_from
from batchd.config.schema import change_paths, item_at, path_keys
from batchd.config.tree import Config
from batchd.data.samples.location import looks_like_url
from batchd.data.storage.paths import why_unreadable
from batchd.errors import REMEDY, BatchdError, ConfigInvalid, KeyPath, Problem, ProblemKind, path_text
from batchd.runtime.compiled import outdated_extension
from batchd.runtime.suggestions import suggestion
from batchd_wire.record import frozen
from batchd_wire.wording import counted

FILE_BYTES_MAX = 4 << 20
_NOTHING: Mapping[str, str] = MappingProxyType({})
_TOML_PLACE = re.compile(r"\s*\(at (?:line (\d+), column (\d+)|end of document)\)$")
_TOPMOST = ("", "daemon", "streams")
_TOML_TWICE = re.compile(r"Cannot declare \((.*)\) twice")


class _Change(NamedTuple):
    """A value of the environment or the command line. ``origin``: its variable or option."""

    path: KeyPath
    value: object
    origin: str


def load_config(
    file: Path, overrides: Mapping[str, str] = _NOTHING, environment: Mapping[str, str] | None = None
) -> Config:
    """Read and validate a configuration.

    ``overrides`` maps dotted paths to values in TOML, or plain text:
    ``{"streams.photos.batch_size": "64"}``; ``environment`` is by default the process's.
    Raises ``ConfigInvalid`` with all problems, and their lines if they are in the file.
    """
    reading = read_config(file, overrides, environment)
    if reading.config is None or reading.problems:
        raise ConfigInvalid(reading.located(reading.problems), str(file))
    return reading.config


@frozen
class LoadedConfig:
    """A configuration as it was read, valid or not."""

    config: Config | None
    """None if ``data`` is not valid."""
    data: Mapping[str, object]
    """The merged values of file, environment and command line."""
    problems: tuple[Problem, ...]
    """Without lines yet."""
    changes: tuple[_Change, ...]
    text: str
    """The file."""

    @property
    def python_path(self) -> tuple[Path, ...]:
        """The folders of the user's modules, as far as they can be read."""
        daemon = self.config.daemon if self.config is not None else daemon_draft(self.data)[0]
        return tuple(daemon.python_path or ())

    def part(self, streams: Collection[str]) -> Config | None:
        """The configuration with these streams alone, and defaults for what is wrong in [daemon].

        None if they are not valid either.
        """
        daemon, _wrong = daemon_draft(self.data)
        tables = self.data.get("streams")
        try:
            part = {"streams": {name: tables[name] for name in streams} if isinstance(tables, dict) else {}}
            config = Config.model_validate_json(json.dumps(part, default=str), strict=True)
        except ValidationError:
            return None
        return config.model_copy(update={"daemon": daemon})

    def located(self, problems: Sequence[Problem]) -> list[Problem]:
        """Problems in the order of the file, with their lines, or origins outside of it.

        The line is that of the key, or of the nearest table around it.
        """
        places = {path_text(path): place for path, place in key_places(self.text).items()}
        changes = [(path_text(change.path), change.origin) for change in self.changes]
        located = []
        for problem in problems:
            origins = [origin for path, origin in changes if _is_within(problem.path, path)]
            if origins:
                located.append(replace(problem, message=_noted(problem.message, f" (set by {origins[-1]})")))
                continue
            is_part = problem.path not in _TOPMOST
            parts = [origin for path, origin in changes if is_part and _is_within(path, problem.path)]
            words = f" (in part set by {' and '.join(parts)})" if parts else ""
            around = max((path for path in places if _is_within(problem.path, path)), key=len, default="")
            found = _placed(problem, places[around], self.text) if around and problem.line is None else problem
            located.append(replace(found, message=_noted(found.message, words)))
        return sorted(located, key=lambda problem: problem.line or 0)


def read_config(
    file: Path, overrides: Mapping[str, str] = _NOTHING, environment: Mapping[str, str] | None = None
) -> LoadedConfig:
    """Read a configuration like ``load_config``. Raises ``ConfigInvalid`` if it is not TOML."""
    return parse_config(_read_text(file), file, overrides, environment)


def parse_config(
    text: str, file: Path, overrides: Mapping[str, str] = _NOTHING, environment: Mapping[str, str] | None = None
) -> LoadedConfig:
    """Read a text as if it were in ``file``, like ``read_config``.

    Raises ``BatchdError`` if an extension has to be compiled again before batchd can serve.
    """
    if outdated := outdated_extension():
        raise BatchdError(outdated)
    data = _parse(text, file)
    _make_paths_absolute(data, file.absolute().parent)
    if isinstance(daemon := data.setdefault("daemon", {}), dict):
        daemon.setdefault("python_path", [str(file.absolute().parent)])
    changes, problems = _change(data, overrides, os.environ if environment is None else environment)
    problems += _name_classes(data)
    config, wrong = validated(data)
    return LoadedConfig(config, data, (*problems, *wrong), tuple(changes), text)


def validated(data: Mapping[str, object]) -> tuple[Config | None, list[Problem]]:
    """Validate the values of a configuration: it, or None and its problems, without lines."""
    try:
        # JSON is the way in, because pydantic's strict mode takes a table for a dataclass only from
        # there.
        return Config.model_validate_json(json.dumps(data, default=str), strict=True), []
    except ValidationError as error:
        return None, problems_from(error, data)


def _name_classes(data: Mapping[str, object]) -> list[Problem]:
    """Put the classes of a stream, its names or its folder, where a source names the stream."""
    streams = data.get("streams")
    tables = streams if isinstance(streams, dict) else {}
    problems = []
    for key, source in [one for name, table in tables.items() for one in _sources_in(("streams", name), table)]:
        other = source.get("classes")
        if source.get("type") != "folder" or not isinstance(other, str):
            continue
        found = _classes_of(tables, other)
        if found is not None:
            source["classes"] = found
            continue
        problem = (
            f"classes are those of stream {other!r}, which has no source of the type folder; write them as a list"
            if other in tables
            else f"there is no stream {other!r}, whose classes are meant; {suggestion(other, list(tables))}"
        )
        source["classes"] = []
        problems.append(Problem(path_text((*key, "classes")), ProblemKind.WRONG_VALUE, problem))
    return problems


def _sources_in(key: KeyPath, table: object) -> Iterator[tuple[KeyPath, dict[str, object]]]:
    """The tables of a source, and of those that it is made of, below a table."""
    if isinstance(table, dict):
        inner: list[tuple[KeyPath, object]] = [(("source",), table.get("source")), (("of",), table.get("of"))]
        several = table.get("sources")
        inner += [
            (("sources", number), part) for number, part in enumerate(several if isinstance(several, list) else [])
        ]
        for more, source in inner:
            if isinstance(source, dict):
                yield (*key, *more), source
            yield from _sources_in((*key, *more), source)


def _classes_of(tables: Mapping[str, object], stream: str) -> object:
    """The classes of a stream with a folder: its list, or the path of the folder; else None."""
    seen = set[str]()
    while stream not in seen:
        seen.add(stream)
        folders = [source for _key, source in _sources_in((), tables.get(stream)) if source.get("type") == "folder"]
        if not folders:
            return None
        classes = folders[0].get("classes")
        if not isinstance(classes, str):
            return classes or folders[0].get("path")
        if classes not in tables:
            return classes
        stream = classes
    return None


def _placed(problem: Problem, place: Place, text: str) -> Problem:
    """The problem with its place, and the line of ``text`` that is there."""
    lines = text.split("\n")
    source = lines[place.line - 1] if place.line <= len(lines) else ""
    return replace(problem, line=place.line, column=place.column, length=place.length, source=source)


def _noted(message: str, words: str) -> str:
    """A message with more words behind the problem, and before its remedy."""
    problem, semicolon, remedy = message.partition(REMEDY)
    return f"{problem}{words}{semicolon}{remedy}"


def _read_text(file: Path) -> str:
    try:
        with file.open("rb") as stream:
            content = stream.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        text = why_unreadable(file, error)
        if isinstance(error, IsADirectoryError):
            text = f"{file} is a folder{REMEDY}`batchd init {file}` writes a configuration for the data in it"
        if isinstance(error, FileNotFoundError):
            text += f"{' ' if REMEDY in text else REMEDY}`batchd init PATH` writes one for your data"
        raise _unusable(file, text) from None
    if len(content) > FILE_BYTES_MAX:
        raise _unusable(file, f"is longer than {FILE_BYTES_MAX} bytes, so it is not a configuration")
    try:
        return content.decode().replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        place, text = Place(line, 1, 1), content.decode(errors="replace")
        raise _unusable(
            file, f"is not UTF-8: byte 0x{content[error.start]:02x}{REMEDY}save the file as UTF-8", place, text
        ) from None


def _unusable(
    file: Path,
    message: str,
    place: Place | None = None,
    text: str = "",
    kind: ProblemKind = ProblemKind.UNREADABLE_FILE,
) -> ConfigInvalid:
    problem = Problem("", kind, message)
    return ConfigInvalid([problem if place is None else _placed(problem, place, text)], str(file))


def _parse(text: str, file: Path) -> dict[str, object]:
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise _unusable(
            file, "has arrays or tables in one another too deep to read", kind=ProblemKind.NOT_TOML
        ) from None
    except ValueError as error:
        raise _syntax_error(str(error), text, file) from None


def _syntax_error(message: str, text: str, file: Path) -> ConfigInvalid:
    """Word the error of tomllib for users, with its line. A repeated key is the usual mistake."""
    found = _TOML_PLACE.search(message)
    what = message[: found.start()] if found else message
    line, column = (int(found[1]), int(found[2])) if found and found[1] else (text.count("\n") + 1, 1)
    place = Place(line, column, 1)
    twice = _TOML_TWICE.search(what)
    if twice:
        names = tuple(re.findall(r"'([^']*)'", twice[1]))
        problem = Problem(path_text(names), ProblemKind.KEY_TWICE, "this table stands twice in the file")
        return ConfigInvalid([_placed(problem, place, text)], str(file))
    if what in ("Cannot overwrite a value", "Cannot mutate immutable namespace") or what.startswith("Duplicate"):
        return _unusable(file, f"a key or table stands twice in the file ({what})", place, text, ProblemKind.KEY_TWICE)
    where = f", column {column}" if found and found[1] else ""
    opened = text.split("\n")[line - 1][: column - 1].rstrip()
    is_broken = opened.endswith(("{", ",")) and opened.count("{") > opened.count("}")
    if found and found[1] and (is_broken or what.startswith("Unclosed inline table")):
        what = f"a table in braces is on one line{where}"
        remedy = "write it on one line, or break it inside of a list in brackets only"
        return _unusable(file, f"is not TOML: {what}{REMEDY}{remedy}", place, text, ProblemKind.NOT_TOML)
    return _unusable(file, f"is not TOML: {what}{where}", place, text, ProblemKind.NOT_TOML)


def _change(
    data: dict[str, object], overrides: Mapping[str, str], environment: Mapping[str, str]
) -> tuple[list[_Change], list[Problem]]:
    """Apply the environment to ``data``, then the command line."""
    changes: list[_Change] = []
    problems: list[Problem] = []
    streams = data.get("streams")
    known = list(streams) if isinstance(streams, dict) else []
    given: list[tuple[KeyPath, str, str]] = [
        (("daemon", name), environment[variable], variable)
        for name, variable in DAEMON_VARIABLES.items()
        if environment.get(variable)
    ]
    for dotted, text in overrides.items():
        path = dotted_path(dotted)
        if path is None:
            problems.append(
                Problem(
                    dotted,
                    ProblemKind.WRONG_OVERRIDE,
                    "is not a path of keys; write for example --set streams.photos.batch_size=64",
                )
            )
        else:
            given.append((path, text, f"--set {dotted}"))
    for path, text, origin in given:
        if text.encode(errors="replace").decode() != text:
            problems.append(Problem(path_text(path), ProblemKind.WRONG_OVERRIDE, f"is not UTF-8 (set by {origin})"))
            continue
        try:
            found, value = apply(data, path, partial(_value_from_text, text=text))
            changes.append(_Change(found, value, origin))
        except LookupError as error:
            problems.append(
                Problem(path_text(path), ProblemKind.WRONG_OVERRIDE, f"cannot be set by {origin}: {error.args[0]}")
            )
    return changes, problems + _without_strangers(data, known, changes)


def _without_strangers(data: dict[str, object], known: Sequence[str], changes: Sequence[_Change]) -> list[Problem]:
    """Remove streams that only overrides name and that have no source; report them as misspelt."""
    problems: list[Problem] = []
    streams = data.get("streams")
    if not known or not isinstance(streams, dict):
        return []
    for name in [name for name in streams if name not in known]:
        source = item_at(streams[name], "source")
        if not isinstance(source, dict) or "type" not in source:
            del streams[name]
            problems += [
                Problem(
                    path_text(change.path),
                    ProblemKind.WRONG_OVERRIDE,
                    f"the file has no stream {name!r}; {suggestion(name, known)}",
                )
                for change in changes
                if change.path[:2] == ("streams", name)
            ]
    return problems


def _value_from_text(path: KeyPath, text: str) -> object:
    """Read a value as TOML; other text is a string, so ``auto`` and ``/data`` need no quotes."""
    try:
        parsed = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        parsed = {}
    value = parsed.get("value")
    usable = len(parsed) == 1 and isinstance(value, (str, bool, int, float, list, dict))
    if not usable or (path[-1] in path_keys() and not isinstance(value, str)):
        value = text
    # the schema knows which values are paths by the tables around them
    holder: dict[str | int, object] | list[object] = [value] if isinstance(path[-1], int) else {path[-1]: value}
    around: object = holder
    for name in reversed(path[:-1]):
        around = [around] if isinstance(name, int) else {name: around}
    _make_paths_absolute(around, Path.cwd())
    return next(iter(holder.values() if isinstance(holder, dict) else holder))


def _make_paths_absolute(data: object, base: Path) -> None:
    """Join each path in ``data`` to ``base``, but URLs and empty paths, which are refused later."""

    def absolute(path: str) -> str:
        if not path or looks_like_url(path):
            return path
        return str(base / os.path.expanduser(path))  # noqa: PTH111  Path's raises for unknown users

    change_paths(data, absolute)


def _is_within(path: str, table: str) -> bool:
    return path == table or path.startswith((f"{table}.", f"{table}["))


_BRACKETS = re.compile(r"""("[^"]*"|'[^']*')|\[([0-9]+)\]""")


def dotted_path(dotted: str) -> KeyPath | None:
    """Split a path like TOML, with quotes; ``[1]`` is the same as ``.1``. None if it is no path."""
    try:
        data: object = tomllib.loads(_BRACKETS.sub(lambda match: match[1] or f".{match[2]}", dotted) + " = 0")
    except ValueError:
        return None
    path: KeyPath = ()
    while isinstance(data, dict) and len(data) == 1:
        name, data = next(iter(data.items()))
        path += (name,)
    return path if data == 0 and "\n" not in dotted else None


def apply(data: object, path: KeyPath, value_at: Callable[[KeyPath], object]) -> tuple[KeyPath, object]:
    """Set the value at ``path``, and create missing tables around it. Raises ``LookupError``.

    ``value_at`` gets the path with the indices of lists as numbers. Returns that and the value.
    """
    here: Any = data
    found: KeyPath = ()
    for name in path[:-1]:
        key = _key_in(here, name, found)
        found += (key,)
        if isinstance(here, dict):
            here.setdefault(key, {})
        here = here[key]
    key = _key_in(here, path[-1], found)
    found += (key,)
    here[key] = value_at(found)
    return found, here[key]


def _key_in(here: object, name: str | int, path: KeyPath) -> str | int:
    """``name`` as a key of the table, or index of the list, at ``path``. Raises ``LookupError``."""
    if isinstance(here, dict):
        return name
    if isinstance(here, list):
        if re.fullmatch(r"[0-9]{1,9}", str(name)) and int(name) < len(here):
            return int(name)
        numbers = {0: "", 1: ", number 0"}.get(len(here), f", numbers 0 to {len(here) - 1}")
        raise LookupError(f"{path_text(path)} has {counted(len(here), 'item')}{numbers}, and there is no {name}")
    raise LookupError(f"{path_text(path)} is neither a table nor a list")
