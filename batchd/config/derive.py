"""A stream with other settings than those of the file, as a trainer asks for it. DERIVING process.

    configuration of "photos" + {"pipeline.1.scale": [0.2, 1]} -> schema and checks of the file

Who asks is not the operator. So only keys that need no scan of the source may be set, and the
result runs no function and names no file that the stream of the file does not.

Invariant: the result is a whole valid ``Config``, or a ``ConfigInvalid`` with all problems.
"""

import json
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import replace
from math import isqrt
from typing import Any

import numpy as np

from batchd.config.load import apply, dotted_path, validated
from batchd.config.schema import change_paths
from batchd.config.tree import Config, Mark, StreamConfig, keys_marked
from batchd.data.pipeline.call.options import Call
from batchd.data.pipeline.options import StepOptions, with_inner
from batchd.errors import ConfigInvalid, KeyPath, Problem, ProblemKind, path_text
from batchd.runtime.suggestions import known_here, suggestion

SET_KEYS_MAX = 64
LIMITS = ("max_pixels", "max_bytes", "cache_bytes")
"""Options that protect the daemon: none may be above the highest in the stream of the file."""
SIDES = ("size", "sizes", "shorter_side", "longer_side", "max_longer_side", "multiple_of", "padding", "border")
SIDE_MAX = 4_096
"""Pixels of a side of an image between two steps, if the file has none that is longer: 50 MB."""


class Settings:
    """The values of ``set=``, by dotted paths in the stream ``name``; and where they were set."""

    def __init__(self, name: str, text: str) -> None:
        """``text``: a JSON object. Raises ``ConfigInvalid``."""
        self._table = ("streams", name)
        self._places: dict[str, str] = {}
        """The keys by their paths in the stream, as problems name these."""
        try:
            given = json.loads(text, parse_constant=_refuse_constant)
        except ValueError as error:
            raise ConfigInvalid([_problem("set", f"is not JSON: {error}")]) from None
        if not isinstance(given, dict) or len(given) > SET_KEYS_MAX:
            raise ConfigInvalid([_problem("set", f"must be a table of at most {SET_KEYS_MAX} keys")])
        self._given = given

    def config(self, whole: Mapping[str, Any]) -> Config:
        """The configuration ``whole``, valid and of the stream alone, with them.

        Raises ``ConfigInvalid``.
        """
        data = deepcopy(dict(whole))
        problems = list(self._apply(data["streams"][self._table[1]]))
        if problems:
            raise ConfigInvalid(problems)
        config, problems = validated(data)
        if config is not None:
            problems = list(_not_theirs(whole, data))
        if config is None or problems:
            raise self.located(problems)
        return config

    def located(self, problems: list[Problem]) -> ConfigInvalid:
        """Problems of the stream as those of the settings: ``set["pipeline.1.scale"]``."""
        return ConfigInvalid([self._located(problem) for problem in problems])

    def _located(self, problem: Problem) -> Problem:
        table = path_text(self._table)
        path = problem.path.removeprefix(table).removeprefix(".")
        message = problem.message.replace(f"[{table}]", "set=")
        for place, key in self._places.items():
            if path == place or path.startswith((f"{place}.", f"{place}[")):
                return replace(problem, path=_shown(key) + path.removeprefix(place), message=message)
        return replace(problem, path=path or "set", message=message)

    def _apply(self, stream: dict[str, Any]) -> Iterator[Problem]:
        """Set them in the table of a stream; the problems."""
        known = list(keys_marked(Mark.DERIVES, StreamConfig))
        for key, value in self._given.items():
            path = dotted_path(key)
            if path is None:
                yield _problem(_shown(key), 'is not a path of keys, such as "pipeline.1.scale"')
            elif path[0] in StreamConfig.model_fields.keys() - set(known):
                yield _problem(_shown(key), f"is for the operator of the daemon to set; {known_here(known)}")
            elif path[0] not in known:
                yield _problem(_shown(key), f"unknown key; {suggestion(str(path[0]), known)}")
            else:
                try:
                    found, _value = apply(stream, path, lambda _path, value=value: value)  # type: ignore[misc]
                except LookupError as error:
                    yield _problem(_shown(key), str(error.args[0]))
                else:
                    self._places[path_text(found)] = key


def _not_theirs(whole: Mapping[str, Any], data: Mapping[str, Any]) -> Iterator[Problem]:
    """Problems of what a trainer may not do with the stream of ``whole``; both are valid."""
    before, after = (_steps(plain) for plain in (whole, data))
    side_max = max([SIDE_MAX, *(side for step in before.values() for _name, side in _sides(step))])
    functions = {step.function for step in before.values() if isinstance(step, Call)}
    for key, step in after.items():
        if isinstance(step, Call) and step.function not in functions:
            text = f"{step.function!r} is no function of the stream in the file: it is for the operator to add"
            yield _problem(path_text((*key, "function")), text)
        for limit in LIMITS:
            theirs = [value for other in before.values() if (value := getattr(other, limit, None)) is not None]
            if theirs and (getattr(step, limit, None) or 0) > max(theirs):
                yield _problem(path_text((*key, limit)), f"may be {max(theirs)} at most, as in the file")
        for name, text in too_large(step, side_max):
            yield _problem(path_text((*key, name)), text)
    for file in sorted(_files(data) - _files(whole)):
        yield _problem("", f"names {file}, which is no file of the stream in the file")


def too_large(step: StepOptions, side_max: int = SIDE_MAX) -> Iterator[tuple[str, str]]:
    """Options of a step that ask for images with longer sides: each with what is wrong."""
    for name, side in _sides(step):
        if side > side_max:
            yield name, f"may be {side_max} pixels at most, as a worker has the whole image, and not {side}"


def _steps(plain: Mapping[str, Any]) -> dict[KeyPath, StepOptions]:
    """All steps of a valid configuration of one stream, by their paths in it."""
    config, _problems = validated(plain)
    assert config is not None, "it is valid"
    (stream,) = config.streams.values()
    return with_inner({("pipeline", place): step for place, step in enumerate(stream.pipeline)})


def _sides(step: StepOptions) -> Iterator[tuple[str, int]]:
    """The longest side that each option of a step asks for."""
    for name in SIDES:
        numbers = np.ravel(getattr(step, name, None) or 0)
        if numbers.dtype.kind == "i":  # a step of text may have such a name for something else
            yield name, int(numbers.max())
    yield "pixels", isqrt(getattr(step, "pixels", None) or 0)


def _files(plain: Mapping[str, Any]) -> set[str]:
    """The files and folders that a configuration names."""
    found = set[str]()

    def noted(path: str) -> str:
        found.add(path)
        return path

    change_paths(dict(plain), noted)
    return found


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


def _problem(path: str, text: str) -> Problem:
    return Problem(path, ProblemKind.WRONG_OVERRIDE, text)


def _shown(key: str) -> str:
    return f"set[{json.dumps(key, ensure_ascii=False)}]"
