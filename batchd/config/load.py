"""From batchd.toml, the environment and the command line to one ``Config``. Daemon and CLI.

    --set PATH=VALUE   over   BATCHD_<KEY OF [daemon]>   over   batchd.toml   over   the defaults

Relative paths in the file are relative to the file, all others to the current directory. A leading
``~`` is the home directory.

Invariant: either a whole valid ``Config`` comes back, or a ``ConfigInvalid`` with everything that
is wrong.
"""

import json
import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pydantic import ValidationError

from batchd.config.problems import key_lines, locate, problems_from
from batchd.config.schema import path_keys, path_places
from batchd.config.tree import Config, DaemonConfig
from batchd.errors import ConfigInvalid, KeyPath, Problem, path_text
from batchd.storage.location import looks_like_url
from batchd.suggestions import suggestion

ENVIRONMENT_PREFIX = "BATCHD_"
FILE_BYTES_MAX = 4 << 20
_NOTHING: Mapping[str, str] = MappingProxyType({})
_TOML_PLACE = re.compile(r"\s*\(at (?:line (\d+), column (\d+)|end of document)\)$")
_BRACKETS = re.compile(r"""("[^"]*"|'[^']*')|\[([0-9]+)\]""")
_TOPMOST = ("", "daemon", "streams")
_TOML_TWICE = re.compile(r"Cannot declare \((.*)\) twice")


@dataclass(frozen=True, slots=True)
class _Change:
    """A value from outside of the file. ``origin`` is what the user wrote it with."""

    path: KeyPath
    value: Any
    origin: str


def load_config(
    file: Path, overrides: Mapping[str, str] = _NOTHING, environment: Mapping[str, str] | None = None
) -> Config:
    """Read and check a configuration.

    ``overrides`` maps dotted paths to values in TOML, or plain text:
    ``{"streams.photos.batch_size": "64"}``; the default of ``environment`` is the process's own.
    Raises ``ConfigInvalid`` with all problems, each with its line where it has one.
    """
    reading = read_config(file, overrides, environment)
    if reading.config is None or reading.problems:
        raise ConfigInvalid(reading.located(reading.problems), str(file))
    return reading.config


@dataclass(frozen=True, slots=True)
class LoadedConfig:
    """A configuration as it was read, right or wrong.

    ``data`` is what the file, the environment and the command line say together; ``config`` is None
    where that is no tree.
    """

    config: Config | None
    data: Mapping[str, Any]
    problems: tuple[Problem, ...]
    """Without lines yet."""
    changes: tuple["_Change", ...]
    lines: Mapping[KeyPath, int]

    def located(self, problems: Sequence[Problem]) -> list[Problem]:
        """Problems with their lines, in the order of the file; values from outside of it have their origins instead."""
        return _locate_outside(_name_origins(problems, self.changes), self.changes, self.lines)


def read_config(
    file: Path, overrides: Mapping[str, str] = _NOTHING, environment: Mapping[str, str] | None = None
) -> LoadedConfig:
    """Read a configuration as ``load_config`` does. Raises ``ConfigInvalid`` only where the file is no TOML."""
    text = read_text(file)
    data = _parse(text, file)
    _make_paths_absolute(data, file.absolute().parent)
    if isinstance(daemon := data.setdefault("daemon", {}), dict):
        daemon.setdefault("python_path", [str(file.absolute().parent)])
    changes, problems = _change(data, overrides, os.environ if environment is None else environment)
    config = None
    try:
        # JSON is the way in, because pydantic's strict mode takes a table for a dataclass only from
        # there.
        config = Config.model_validate_json(json.dumps(data, default=str), strict=True)
    except ValidationError as error:
        problems += problems_from(error, data)
    return LoadedConfig(config, data, tuple(problems), tuple(changes), key_lines(text))


def read_text(file: Path) -> str:
    """Read a configuration file. Raises ``ConfigInvalid`` saying why it cannot be read."""
    try:
        with file.open("rb") as stream:
            content = stream.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        hint = "; write one with `batchd config > batchd.toml`" if isinstance(error, FileNotFoundError) else ""
        raise _unusable(file, f"cannot be read: {error.strerror}{hint}") from None
    if len(content) > FILE_BYTES_MAX:
        raise _unusable(file, f"is longer than {FILE_BYTES_MAX} bytes, so it is no configuration")
    try:
        return content.decode().replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise _unusable(file, f"is not UTF-8: byte 0x{content[error.start]:02x}", line) from None


def _unusable(file: Path, message: str, line: int | None = None) -> ConfigInvalid:
    return ConfigInvalid([Problem("", message, line=line)], str(file))


def _parse(text: str, file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise _unusable(file, "has arrays or tables in one another too deep to read") from None
    except ValueError as error:
        raise _syntax_error(str(error), text, file) from None


def _syntax_error(message: str, text: str, file: Path) -> ConfigInvalid:
    """Say in our words what tomllib says, with its line. A key given twice is the mistake that people make."""
    place = _TOML_PLACE.search(message)
    what = message[: place.start()] if place else message
    line = int(place[1]) if place and place[1] else text.count("\n") + 1
    twice = _TOML_TWICE.search(what)
    if twice:
        names = tuple(re.findall(r"'([^']*)'", twice[1]))
        return ConfigInvalid([Problem(path_text(names), "this table stands twice in the file", line=line)], str(file))
    if what in ("Cannot overwrite a value", "Cannot mutate immutable namespace") or what.startswith("Duplicate"):
        return _unusable(file, f"a key or table stands twice in the file ({what})", line)
    return _unusable(file, f"is not TOML: {what}" + (f", column {place[2]}" if place and place[2] else ""), line)


def _change(
    data: dict[str, Any], overrides: Mapping[str, str], environment: Mapping[str, str]
) -> tuple[list[_Change], list[Problem]]:
    """Do to ``data`` what the environment and the command line change, weakest first."""
    changes: list[_Change] = []
    problems: list[Problem] = []
    given: list[tuple[KeyPath, str, str]] = []
    known = list(data["streams"]) if isinstance(data.get("streams"), dict) else []
    for name in DaemonConfig.model_fields:
        variable = ENVIRONMENT_PREFIX + name.upper()
        if environment.get(variable):
            given.append((("daemon", name), environment[variable], variable))
    for dotted, text in overrides.items():
        path = _dotted_path(dotted)
        if path is None:
            problems.append(Problem(dotted, "is no path of keys; write for example --set streams.photos.batch_size=64"))
        else:
            given.append((path, text, f"--set {dotted}"))
    for path, text, origin in given:
        if text.encode(errors="replace").decode() != text:
            problems.append(Problem(path_text(path), f"is not UTF-8 (set by {origin})"))
            continue
        try:
            changes.append(_apply(data, path, text, origin))
        except LookupError as error:
            problems.append(Problem(path_text(path), f"cannot be set by {origin}: {error.args[0]}"))
    return changes, problems + _without_strangers(data, known, changes)


def _without_strangers(data: dict[str, Any], known: Sequence[str], changes: Sequence[_Change]) -> list[Problem]:
    """Take out streams that the file has not and the changes do not make, which are misspelt; and what to say of them."""
    problems: list[Problem] = []
    streams = data.get("streams")
    if not known or not isinstance(streams, dict):
        return []
    for name in [name for name in streams if name not in known]:
        if not _could_be_stream(streams[name]):
            del streams[name]
            problems += [
                Problem(path_text(change.path), f"the file has no stream {name!r}; {suggestion(name, known)}")
                for change in changes
                if change.path[:2] == ("streams", name)
            ]
    return problems


def _could_be_stream(table: object) -> bool:
    source = table.get("source") if isinstance(table, dict) else None
    return isinstance(source, dict) and "type" in source


def _dotted_path(dotted: str) -> KeyPath | None:
    """Split a path as TOML does, quotes and all; ``[1]`` behind a list is as good as ``.1``. None where it is no path."""
    try:
        data: Any = tomllib.loads(f"{_BRACKETS.sub(_without_brackets, dotted)} = 0")
    except ValueError:
        return None
    path: KeyPath = ()
    while isinstance(data, dict) and len(data) == 1:
        name, data = next(iter(data.items()))
        path += (name,)
    return path if data == 0 and "\n" not in dotted else None


def _without_brackets(match: re.Match[str]) -> str:
    return match[1] or f".{match[2]}"


def _value_from_text(path: KeyPath, text: str) -> Any:
    """Read a value as TOML does; what is not TOML is text, so that ``auto`` and ``/data`` need no quotes."""
    try:
        parsed = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        parsed = {}
    value = parsed.get("value")
    usable = len(parsed) == 1 and isinstance(value, (str, bool, int, float, list, dict))
    if not usable or (path[-1] in path_keys() and not isinstance(value, str)):
        value = text
    changed: Any = [value] if isinstance(path[-1], int) else {path[-1]: value}
    around: Any = changed
    for name in reversed(path[:-1]):
        around = [around] if isinstance(name, int) else {name: around}
    _make_paths_absolute(around, Path.cwd())
    return changed[0 if isinstance(path[-1], int) else path[-1]]


def _apply(data: dict[str, Any], path: KeyPath, text: str, origin: str) -> _Change:
    """Set one value, making the tables around it where they are missing. Raises ``LookupError`` saying why it cannot be done."""
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
    here[key] = _value_from_text(found, text)
    return _Change(found, here[key], origin)


def _key_in(here: object, name: str | int, path: KeyPath) -> str | int:
    """What ``name`` is in what stands at ``path``: a key of a table, or the number of an item. Raises ``LookupError``."""
    if isinstance(here, dict):
        return name
    if isinstance(here, list) and re.fullmatch(r"[0-9]{1,9}", str(name)) and int(name) < len(here):
        return int(name)
    where = path_text(path)
    if isinstance(here, list):
        numbers = {0: "", 1: ", number 0"}.get(len(here), f", numbers 0 to {len(here) - 1}")
        text = f"{where} has {len(here)} item{'s' * (len(here) != 1)}{numbers}, and there is no {name}"
    else:
        text = f"{where} is no table, and no list"
    raise LookupError(text)


def _make_paths_absolute(data: Any, base: Path) -> None:
    """Join every path in a configuration, or in a part of one, to ``base``; URLs stay, and empty ones, which are refused."""
    for around, place in list(path_places(data)):
        if around[place] and not looks_like_url(around[place]):
            around[place] = str(base / os.path.expanduser(around[place]))  # noqa: PTH111  Path's raises for unknown users


def _origin(problem: Problem, changes: Sequence[_Change]) -> str | None:
    """What outside of the file set the value that ``problem`` is about."""
    for change in reversed(changes):
        text = path_text(change.path)
        if problem.path == text or problem.path.startswith((f"{text}.", f"{text}[")):
            return change.origin
    return None


def _name_origins(problems: Sequence[Problem], changes: Sequence[_Change]) -> list[Problem]:
    """Say of each problem what outside of the file set the value that it is about, or a part of it."""
    named = []
    for problem in problems:
        origin = _origin(problem, changes)
        parts = _origins_within(problem, changes)
        words = f"set by {origin}" if origin else f"in part set by {' and '.join(parts)}" if parts else ""
        named.append(replace(problem, message=f"{problem.message} ({words})") if words else problem)
    return named


def _origins_within(problem: Problem, changes: Sequence[_Change]) -> list[str]:
    """What outside of the file set parts of the table or list that ``problem`` is about."""
    if problem.path in _TOPMOST:
        return []
    within = (f"{problem.path}.", f"{problem.path}[")
    return [change.origin for change in changes if path_text(change.path).startswith(within)]


def _locate_outside(
    problems: Sequence[Problem], changes: Sequence[_Change], lines: Mapping[KeyPath, int]
) -> list[Problem]:
    """Add lines, except to values that do not stand in the file; then sort by line."""
    located = [problem if _origin(problem, changes) else locate([problem], lines)[0] for problem in problems]
    return sorted(located, key=lambda problem: problem.line or 0)
