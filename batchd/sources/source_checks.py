"""Checks of a source: a quick look at the daemon's start and in ``batchd check``, and there a scan on trial as well.

Each problem is reported at its own key, and once: a part whose columns are unknown hides neither
those of the others nor adds problems that follow from it. A trial finds what the daemon would
refuse at its start, in the same words:

    small source      the scan runs to its end
    large source      the scan is left behind some 10,000 samples, or after ``SECONDS_MAX``
    server, own code  not scanned: ``check`` waits for no server, and runs no code of the user

Invariants: a source without problems has columns; a trial says what it has not looked at.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple

from batchd.errors import KeyPath, SourceInvalid, path_text
from batchd.samples.columns import Column
from batchd.sources.code.options import GeneratorSource, PluginSource, PythonSource
from batchd.sources.composed.options import SubsetSource, parts_of
from batchd.sources.composed.scan import agreed_columns
from batchd.sources.interface import BuiltInKind, SourceProblem, kind_of
from batchd.sources.options import SourceOptions
from batchd.sources.push.options import PushSource
from batchd.storage.access import Storage
from batchd.storage.index import SourceIndex
from batchd.storage.location import Url
from batchd.storage.survey import Survey
from batchd_wire.wording import counted

SAMPLES_MAX = 10_000
"""A scan that has found more is left at its next report."""
SECONDS_MAX = 2.0
_ABSENT = re.compile(r"^there is no (file|folder) | is no (file|folder|regular file)$| is not readable for this user$")


class Look(NamedTuple):
    """What a look at a source gives; ``columns`` is None where nobody can tell them."""

    columns: tuple[Column, ...] | None
    problems: tuple[SourceProblem, ...]


def look_at(source: SourceOptions, storage: Storage, *, thoroughly: bool = True) -> Look:
    """Look at a source without scanning it. Not ``thoroughly``: find its columns alone, and what is wrong with these."""
    parts = [(key, look_at(part, storage, thoroughly=thoroughly)) for key, part in parts_of(source)]
    problems = [SourceProblem((*key, *one.key), one.text) for key, look in parts for one in look.problems]
    columns = None
    own: list[SourceProblem] = []
    try:
        kind = kind_of(source)
        if thoroughly:
            own = _told(source, kind, storage)
        looks = [look for _key, look in parts]
        columns = known_columns(looks, getattr(source, "source_field", "")) if parts else kind.columns(source, storage)
    except SourceInvalid as error:
        if parts or not own:
            own.append(SourceProblem(_key_of(source, str(error)), str(error)))
    return Look(columns, (*problems, *own))


def known_columns(looks: Sequence[Look], source_field: str = "") -> tuple[Column, ...] | None:
    """The columns that several sources agree on, as far as these are known. Raises ``SourceInvalid`` where they do not."""
    known = {number: look.columns for number, look in enumerate(looks) if look.columns is not None}
    return agreed_columns(known, source_field) if known else None


def _told(source: SourceOptions, kind: BuiltInKind, storage: Storage) -> list[SourceProblem]:
    """What a kind says of a source, each with its key; its columns may be known all the same."""
    try:
        told = kind.problems(source, storage)
    except SourceInvalid as error:
        told = [str(error)]
    return [SourceProblem(_key_of(source, one), one) if isinstance(one, str) else one for one in told]


def _key_of(source: SourceOptions, text: str) -> KeyPath:
    """The option whose path is not what it should be; the source as a whole where it is about something else, or files below."""
    kind: Any = type(source)
    if not _ABSENT.search(text) and not isinstance(source, SubsetSource):
        return ()
    named = {
        name: str(path)
        for name in (field.name for field in fields(kind))
        if isinstance(path := getattr(source, name), Path) and re.search(rf"{re.escape(str(path))}([ :]|$)", text)
    }
    return (max(named, key=lambda name: len(named[name])),) if named else ()


class Trial(NamedTuple):
    """What a scan on trial gives. ``whole`` is None where the scan did not come to its end.

    ``unseen``: for people, what was not looked at; its content, where nothing else.
    """

    whole: SourceIndex | None
    problems: tuple[SourceProblem, ...]
    unseen: tuple[str, ...]


class _Enough(Exception):  # noqa: N818  no error: it ends a scan
    """The scan has had its samples, or its time."""


class _Bound:
    """Ends a scan that has found ``samples_max`` samples or taken too long."""

    def __init__(self, samples_max: int, clock: Callable[[], float]) -> None:
        self.found = 0
        self._samples_max = samples_max
        self._clock = clock
        self._end_s = clock() + SECONDS_MAX

    def progress(self, found: int) -> None:
        """The scan has found so many. A report that is the last one ends nothing: there is nothing left to be spared."""
        if self.found > self._samples_max:
            raise _Enough
        self.found = found
        self.looked()

    def looked(self) -> None:
        """The scan has taken a step."""
        if self._clock() > self._end_s:
            raise _Enough


def try_source(
    source: SourceOptions,
    python_path: Sequence[Path],
    storage: Storage,
    samples_max: int = SAMPLES_MAX,
    clock: Callable[[], float] = monotonic,
) -> Trial:
    """Scan a source in which a look has found nothing wrong, each of its parts by itself."""
    parts = [(key, try_source(part, python_path, storage, samples_max, clock)) for key, part in parts_of(source)]
    problems = [SourceProblem((*key, *one.key), one.text) for key, part in parts for one in part.problems]
    if any(part.whole is None for _key, part in parts):
        unseen = [f"{path_text(key)}: {text}" for key, part in parts for text in part.unseen]
        return Trial(None, tuple(problems), tuple(unseen))
    reason = _left_alone(source)
    if reason:
        return Trial(None, (), (reason,))
    bound = _Bound(samples_max if not parts else _all_of(parts), clock)
    try:
        index = kind_of(source).scan(source, Survey(bound.progress, python_path, bound.looked, storage))
    except _Enough:
        return Trial(None, (), (f"everything behind the first {counted(bound.found, 'sample')}",))
    except SourceInvalid as error:
        return Trial(None, (SourceProblem((), str(error)),), ())
    return Trial(index, (), (_content(source, len(index)),))


def _all_of(parts: Sequence[tuple[object, Trial]]) -> int:
    """The samples of parts whose scans came to their ends: they do so once more."""
    return sum(len(part.whole) for _key, part in parts if part.whole is not None)


def _left_alone(source: SourceOptions) -> str:
    """Why a source is not scanned on trial; "" where it is."""
    if isinstance(source, PythonSource):
        return f"{source.function}, its length and its samples: check runs no code of yours"
    if isinstance(source, PluginSource):
        return f"the samples of {source.place}: the plugin finds them when the daemon starts"
    kind: Any = type(source)
    urls = [str(value) for one in fields(kind) if isinstance(value := getattr(source, one.name), Url)]
    if urls:
        return f"everything at {' and '.join(urls)} behind one object or page: servers are asked when the daemon starts"
    return ""


def _content(source: SourceOptions, samples: int) -> str:
    if isinstance(source, PushSource):
        return "what is pushed"
    if isinstance(source, GeneratorSource):
        return f"what {source.function} yields: check runs no code of yours"
    return f"the content of its {counted(samples, 'sample')}"
