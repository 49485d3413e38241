"""Turns pydantic's errors into problems for users: path, message, meaning, line. Daemon and CLI.

    pydantic: ('streams', 'photos', 'pipeline', 1, 'resize', 'sise')  unexpected_keyword_argument
    user:     streams.photos.pipeline[1].sise: unknown key; did you mean size?

``tomllib`` reads values but not their places. ``key_places`` walks over text that ``tomllib`` has
accepted, so it only tells strings, brackets and commas apart, and validates nothing.

Invariant: each error becomes a part of exactly one problem, and no path has two problems. A key
that is missing because another one is its misspelling is no error of its own.
Invariant: ``key_places(text)`` has the paths of ``tomllib.loads(text)``: tables, keys and items.
"""

import json
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import NamedTuple

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from batchd.config.schema import example_text, item_at, kinds_at, known_keys, problem_at
from batchd.config.synonyms import key_meant, key_misspelt, kind_meant
from batchd.data.pipeline.options import STEP_KINDS
from batchd.data.samples.checks import OptionsInvalid
from batchd.errors import KeyPath, Problem, ProblemKind, path_text
from batchd.runtime.suggestions import known_here, nearest, probably_meant, suggestion

VALUE_CHARACTERS_MAX = 60
NAME_RULE = 'a stream\'s name is made of letters, digits, "_", "." and "-", at most 64 of them'
_MUST_BE = "must be "
_TYPES = {
    "int_type": "an integer",
    "int_from_float": "an integer",
    "float_type": "a number",
    "bool_type": "a boolean: true or false",
    "string_type": "a string",
    "path_type": "a string, the path of a file or folder",
    "tuple_type": "an array",
    "list_type": "an array",
    "dict_type": "a table",
    "model_type": "a table",
    "model_attributes_type": "a table",
    "dataclass_type": "a table",
    "dataclass_exact_type": "a table",
}
"""TOML's names of the types whose absence pydantic reports."""
_TEXTS = ("string_type", "path_type")
_KIND_WORDS = ("type", "op", "kind", "name", "transform", "step", "class", "_target_")
"""Keys by which other tools tell kinds apart."""
_STREAM_KEYS = frozenset(("source", "batch_size", "pipeline"))
_TOKEN = re.compile(
    r"""
    (?P<blank>   [ \t\r]+ | \#[^\n]* )
  | (?P<newline> \n )
  | (?P<text>    \"{3} (?: \\. | [^\\] )*? \"{3,5} | '{3} .*? '{3,5} | " (?: \\. | [^"\\\n] )* " | '[^'\n]*' )
  | (?P<mark>    [\[\]{}=,.] )
  | (?P<bare>    [^\s\[\]{}=,.\#"']+ )
    """,
    re.VERBOSE | re.DOTALL,
)


def problems_from(error: ValidationError, data: Mapping[str, object]) -> list[Problem]:
    """One problem for each path of pydantic's errors in ``data``, without lines."""
    messages: dict[KeyPath, list[str]] = {}
    kinds: dict[KeyPath, ProblemKind] = {}
    values: dict[KeyPath, str] = {}
    meant: dict[KeyPath, str] = {}
    for details in error.errors(include_url=False):
        if details["type"] == "too_short" and len(details["input"]) >= details["ctx"]["min_length"]:
            continue  # pydantic also calls a list too short if its items are wrong
        path, kind, message = _read(details, data)
        if details["type"] == "literal_error" and isinstance(details["input"], str):
            choice = probably_meant(details["input"], re.findall("'([^']*)'", details["ctx"]["expected"]))
            meant[path] = f'; did you mean "{choice}"?' if choice is not None else ""
        cause = details.get("ctx", {}).get("error")
        # the checks of a table may report several problems
        found = cause.found if isinstance(cause, OptionsInvalid) else [((), message)]
        for key, text in found:
            if text not in messages.setdefault((*path, *key), []):
                messages[*path, *key].append(text)
            values[*path, *key] = _value(details)
            kinds.setdefault((*path, *key), kind)
    misspelt = {_meant_path(path, data) for path, kind in kinds.items() if kind is ProblemKind.UNKNOWN_KEY}
    return [
        problem_at(path, kinds[path], _join(texts, values[path]) + meant.get(path, ""), data)
        for path, texts in messages.items()
        if kinds[path] is not ProblemKind.MISSING_KEY or path not in misspelt
    ]


def _read(details: ErrorDetails, data: Mapping[str, object]) -> tuple[KeyPath, ProblemKind, str]:
    path = _real_path(details, data)
    context = details.get("ctx", {})
    match details["type"]:
        case "missing" if isinstance(path[-1], int):  # of an array that is too short
            example = example_text(path[:-1], data)
            return (
                path[:-1],
                ProblemKind.WRONG_VALUE,
                "has too few items" + (f"; write for example {example}" if example else ""),
            )
        case "missing":
            need = (
                ": the daemon needs at least one table [streams.NAME]; `batchd init PATH` writes one"
                if path == ("streams",)
                else ""
            )
            return path, ProblemKind.MISSING_KEY, f"missing{need}"
        case "extra_forbidden" | "unexpected_keyword_argument":
            return path, ProblemKind.UNKNOWN_KEY, f"unknown key; {_key_help(path, data)}"
        case "union_tag_invalid":
            key = context["discriminator"].strip("'")
            known = context["expected_tags"].replace("'", "").split(", ")
            meant = kind_meant(str(context["tag"]), known) or probably_meant(str(context["tag"]), known)
            helps = f'did you mean {key} = "{meant}"?' if meant is not None else known_here(known)
            return (*path, key), ProblemKind.UNKNOWN_KIND, f'"{context["tag"]}" is unknown; {helps}'
        case "union_tag_not_found":
            key = context["discriminator"].strip("'")
            return (
                (*path, key),
                ProblemKind.MISSING_KIND,
                f"missing; {_kind_help(key, details['input'], kinds_at(path, data))}",
            )
        case "string_pattern_mismatch" if details["loc"][-1:] == ("[key]",):
            return path, ProblemKind.WRONG_VALUE, NAME_RULE
        case "value_error":
            return path, ProblemKind.WRONG_VALUE, str(context["error"])
        case "too_short":
            return (
                path,
                ProblemKind.WRONG_VALUE,
                f"must have {context['min_length']} or more items, not {context['actual_length']}",
            )
        case "too_long":
            return (
                path,
                ProblemKind.WRONG_VALUE,
                f"must have {context['max_length']} or fewer items, not {context['actual_length']}",
            )
        case kind:
            named = ProblemKind.WRONG_TYPE if kind in _TYPES else ProblemKind.WRONG_VALUE
            text = _must_be(kind, path, data) or details["msg"].replace("Input should be ", _MUST_BE)
            return path, named, text


def _meant_path(path: KeyPath, data: Mapping[str, object]) -> KeyPath | None:
    """The key of the same table that an unknown one stands for; None if it stands for none."""
    if _is_stream(path, data):
        return ("streams",)
    meant = key_misspelt(str(path[-1]), known_keys(path[:-1], data))
    return (*path[:-1], meant) if meant is not None else None


def _is_stream(path: KeyPath, data: Mapping[str, object]) -> bool:
    """True for a table [photos] with keys of [streams.photos]."""
    table = data.get(str(path[0]))
    return len(path) == 1 and isinstance(table, dict) and not _STREAM_KEYS.isdisjoint(table)


def _key_help(path: KeyPath, data: Mapping[str, object]) -> str:
    """A hint for an unknown key: the key that was probably meant, here or in another table."""
    name, known = str(path[-1]), known_keys(path[:-1], data)
    if _is_stream(path, data):
        return f"did you mean [{path_text(('streams', name))}]?"
    stream = path[:2] if len(path) > 2 and path[0] == "streams" else ("streams", "NAME")  # noqa: PLR2004  a key in it
    tables: list[KeyPath] = [("daemon",), stream]
    elsewhere = {f"[{path_text(table)}]": known_keys(table, data) for table in tables}
    is_stream = "pipeline" in known
    if is_stream:
        elsewhere["a step of pipeline"] = list({option.name for kind in STEP_KINDS.values() for option in fields(kind)})
    meant = key_meant(name, known, elsewhere)
    step = name if name in STEP_KINDS else kind_meant(name, list(STEP_KINDS))
    if not meant and step and is_stream:
        return f'that is a step: write {{ op = "{step}" }} into pipeline'
    return meant or suggestion(name, known)


def _kind_help(key: str, table: object, kinds: Sequence[str]) -> str:
    """A hint for a missing ``op`` or ``type``, which often has another name there."""
    given = [str(name) for name in table] if isinstance(table, dict) else []
    for name in (*_KIND_WORDS, *(name for name in given if nearest(name, [key]))):
        word = item_at(table, name)
        kind = kind_meant(word, kinds) or nearest(word, kinds) if isinstance(word, str) else None
        if kind is not None:
            return f'write {key} = "{kind}" instead of {name} = {json.dumps(word, ensure_ascii=False)}'
    return known_here(kinds)


def _must_be(kind: str, path: KeyPath, data: Mapping[str, object]) -> str:
    """The expected type at ``path`` with an example; "" if the error is not about the type."""
    if kind not in _TYPES:
        return ""
    text = f"{_MUST_BE}{_TYPES[kind]}"
    example = example_text(path, data)
    if not example or kind == "bool_type":
        return text
    if example.startswith('"') and kind not in _TEXTS:
        return f"{text} or a text such as {example}" if path[-1] == "memory" else text
    return f"{text}, such as {example}"


def _real_path(details: ErrorDetails, data: Mapping[str, object]) -> KeyPath:
    """Pydantic's path without the tags of alternatives, which are no keys of the file."""
    path: KeyPath = ()
    here: object = data
    *inner, last = details["loc"] or [""]
    for name in inner:
        item = item_at(here, name)
        if item is not None:
            here, path = item, (*path, name)
    return (*path, last) if item_at(here, last) is not None or details["type"] == "missing" else path


def _value(details: ErrorDetails) -> str:
    """The value in JSON if it is short enough for a message, else ""."""
    value = details["input"]
    if details["type"] in ("value_error", "missing", "too_short", "too_long") or isinstance(value, (dict, list)):
        return ""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= VALUE_CHARACTERS_MAX else text[: VALUE_CHARACTERS_MAX - 3] + "..."


def _join(messages: Sequence[str], value: str) -> str:
    """Join the demands of all alternatives of a key: must be a number or "auto", not "many"."""
    first, *others = messages
    text = " or ".join([first, *(other.removeprefix(_MUST_BE) for other in others)])
    return f"{text}, not {value}" if value and first.startswith(_MUST_BE) else text


class Place(NamedTuple):
    """The start of a key, or of an array's item: line and column, from 1; ``length`` of a key."""

    line: int
    column: int
    length: int


class _TomlToken(NamedTuple):
    kind: str
    text: str
    place: Place


class _Walk:
    """One walk over the text; ``places`` grows with each key."""

    def __init__(self, text: str) -> None:
        self.places: dict[KeyPath, Place] = {}
        self._tokens = list(_tokens(text + "\n"))
        self._at = 0
        self._arrays: dict[KeyPath, int] = {}

    def run(self) -> None:
        """Walk from the first to the last statement."""
        table: KeyPath = ()
        while self._at < len(self._tokens):
            if self._next_is("\n"):
                self._at += 1
            elif self._next_is("["):
                table = self._header()
            else:
                self._assignment(table)

    def _header(self) -> KeyPath:
        """Path of ``[a.b]`` or ``[[a.b]]``, with the current index behind each array of tables."""
        doubled = self._skip("[") == 2  # noqa: PLR2004  the two brackets of an array of tables
        names = self._key()
        path: KeyPath = ()
        for position, (name, place) in enumerate(names, 1):
            path += (name,)
            self.places.setdefault(path, place)
            if doubled and position == len(names):
                self._arrays[path] = self._arrays.get(path, -1) + 1
            if path in self._arrays:
                path += (self._arrays[path],)
                self.places.setdefault(path, place)
        self._skip("]")
        return path

    def _assignment(self, path: KeyPath) -> None:
        for name, place in self._key():
            path += (name,)
            self.places.setdefault(path, place)
        self._skip("=")
        self._value(path)

    def _key(self) -> list[tuple[str, Place]]:
        """Read the names of a dotted key; ``tomllib`` reads quoted ones, because of escapes."""
        names = []
        while not self._next_is("=", "]"):
            kind, text, place = self._tokens[self._at]
            self._at += 1
            if kind == "text":
                names.append((next(iter(tomllib.loads(f"{text} = 0"))), place))
            elif kind == "bare":
                names.append((text, place))
        return names

    def _value(self, path: KeyPath) -> None:
        if self._next_is("["):
            self._items(path, "]")
        elif self._next_is("{"):
            self._items(path, "}")
        else:
            while not self._next_is("\n", ",", "]", "}"):
                self._at += 1

    def _items(self, path: KeyPath, end: str) -> None:
        """Walk over an array, or an inline table."""
        self._at += 1
        position = 0
        while not self._next_is(end):
            if self._next_is("\n", ","):
                self._at += 1
            elif end == "}":
                self._assignment(path)
            else:
                item = (*path, position)
                self.places[item] = self._tokens[self._at].place._replace(length=1)
                self._value(item)
                position += 1
        self._at += 1

    def _next_is(self, *texts: str) -> bool:
        return self._tokens[self._at].text in texts

    def _skip(self, text: str) -> int:
        """Skip each ``text`` at this place; returns their number."""
        start = self._at
        while self._next_is(text):
            self._at += 1
        return self._at - start


def key_places(text: str) -> dict[KeyPath, Place]:
    """The place of each table, key and item: ``("streams", "photos", "pipeline", 0)``.

    ``text`` must be TOML that ``tomllib`` reads.
    """
    walk = _Walk(text)
    walk.run()
    return walk.places


def _tokens(text: str) -> Iterator[_TomlToken]:
    line, begins = 1, 0
    for match in _TOKEN.finditer(text):
        if match.lastgroup != "blank":
            place = Place(line, match.start() - begins + 1, len(match[0]))
            yield _TomlToken(str(match.lastgroup), match[0], place)
        if "\n" in match[0]:
            line += match[0].count("\n")
            begins = match.start() + match[0].rindex("\n") + 1
