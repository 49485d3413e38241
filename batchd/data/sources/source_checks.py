"""Check a source: quickly at the daemon's start; with a trial scan in ``batchd check``.

Each problem is reported once, at its own key: a part with unknown columns does not hide those of
others, and what follows from it is not reported. A trial finds what the daemon would refuse at its
start, in the same words:

    small source      the scan runs to its end
    large source      the scan ends after some 100,000 samples, or after ``SECONDS_MAX``
    server, plugin    not scanned: ``check`` waits for no server
    own object        its length is asked in a process of its own

Invariants: a source without problems has columns; a trial names the parts it did not check.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import fields
from math import inf
from pathlib import Path
from time import monotonic
from typing import NamedTuple

from batchd.data.samples.columns import Column
from batchd.data.samples.location import Url
from batchd.data.sources.composed.options import SubsetSource, parts_of
from batchd.data.sources.composed.scan import agreed_columns
from batchd.data.sources.interface import SourceProblem, kind_of
from batchd.data.sources.options import SourceOptions
from batchd.data.storage.access import Storage
from batchd.data.storage.index import SourceIndex
from batchd.data.storage.survey import Survey
from batchd.errors import KeyPath, SourceInvalid, path_text
from batchd_wire.wording import counted

SAMPLES_MAX = 100_000
"""A scan that has found more ends at its next report."""
SECONDS_MAX = 2.0
_ABSENT = re.compile(r"^there is no (file|folder) | is no (file|folder|regular file)$| is not readable for this user$")


class SourceCheck(NamedTuple):
    """The result of a quick look; ``columns`` is None if they cannot be known."""

    columns: tuple[Column, ...] | None
    problems: tuple[SourceProblem, ...]


def check_source(source: SourceOptions, storage: Storage, *, thoroughly: bool = True) -> SourceCheck:
    """Check a source without a scan; without ``thoroughly``, only what its columns depend on."""
    parts = [(key, check_source(part, storage, thoroughly=thoroughly)) for key, part in parts_of(source)]
    problems = [SourceProblem((*key, *one.key), one.text) for key, check in parts for one in check.problems]
    columns = None
    own: list[SourceProblem] = []
    try:
        kind = kind_of(source)
        if thoroughly:
            try:
                reported = kind.problems(source, storage)
            except SourceInvalid as error:
                reported = [str(error)]
            own = [SourceProblem(_key_of(source, one), one) if isinstance(one, str) else one for one in reported]
        checks = [check for _key, check in parts]
        columns = known_columns(checks, getattr(source, "source_field", "")) if parts else kind.columns(source, storage)
    except SourceInvalid as error:
        if parts or not own:
            own.append(SourceProblem(_key_of(source, str(error)), str(error)))
    return SourceCheck(columns, (*problems, *own))


def known_columns(checks: Sequence[SourceCheck], source_field: str = "") -> tuple[Column, ...] | None:
    """The columns that several sources agree on, as far as known. Raises ``SourceInvalid``."""
    known = {number: check.columns for number, check in enumerate(checks) if check.columns is not None}
    return agreed_columns(known, source_field) if known else None


def _key_of(source: SourceOptions, text: str) -> KeyPath:
    """The key of the path in a problem's text; () if it is about something else."""
    if not _ABSENT.search(text) and not isinstance(source, SubsetSource):
        return ()
    named = {
        name: str(path)
        for name, path in _paths_of(source).items()
        if re.search(rf"{re.escape(str(path))}([ :]|$)", text)
    }
    return (max(named, key=lambda name: len(named[name])),) if named else ()


def _paths_of(source: SourceOptions) -> dict[str, Path]:
    values = {field.name: getattr(source, field.name) for field in fields(source)}
    return {name: value for name, value in values.items() if isinstance(value, Path)}


class Trial(NamedTuple):
    """The result of a trial scan. ``whole`` is None if the scan did not reach its end."""

    whole: SourceIndex | None
    problems: tuple[SourceProblem, ...]
    unseen: tuple[str, ...]
    """The parts that were not checked, for messages; at least the content of the samples."""
    notes: tuple[str, ...] = ()
    """What the scan leaves out, and what it takes for granted."""


class _Enough(Exception):  # noqa: N818  no error: it ends a scan
    """The scan has used up its samples, or its time."""


class _Bound:
    """Ends a scan after ``samples_max`` samples or ``SECONDS_MAX``, from its first report on.

    The start of the process in which it may run does not count.
    """

    def __init__(self, samples_max: int, clock: Callable[[], float]) -> None:
        self.found = 0
        self._samples_max = samples_max
        self._clock = clock
        self._end_s = inf

    def progress(self, found: int) -> None:
        """Report the samples found so far. The last report ends nothing."""
        if self.found > self._samples_max:
            raise _Enough
        self.found = found
        self.looked()

    def looked(self) -> None:
        """Report a step of the scan."""
        now_s = self._clock()
        if now_s > self._end_s:
            raise _Enough
        self._end_s = min(self._end_s, now_s + SECONDS_MAX)


def try_source(
    source: SourceOptions,
    python_path: Sequence[Path],
    storage: Storage,
    samples_max: int = SAMPLES_MAX,
    clock: Callable[[], float] = monotonic,
) -> Trial:
    """Scan a source without known problems, each of its parts by itself."""
    storage.begin_scan()
    parts = [(key, try_source(part, python_path, storage, samples_max, clock)) for key, part in parts_of(source)]
    problems = [SourceProblem((*key, *one.key), one.text) for key, part in parts for one in part.problems]
    if any(part.whole is None for _key, part in parts):
        unseen = [f"{path_text(key)}: {text}" for key, part in parts for text in part.unseen]
        return Trial(None, tuple(problems), tuple(unseen), tuple(text for _key, part in parts for text in part.notes))
    if reason := _left_alone(source):
        return Trial(None, (), (reason,))
    if parts:  # the scans of all of them reached their ends, and will do so again
        samples_max = sum(len(part.whole or ()) for _key, part in parts)
    bound = _Bound(samples_max, clock)
    survey = Survey(bound.progress, python_path, bound.looked, storage)
    try:
        index = kind_of(source).scan(source, survey)
    except _Enough:
        rest = f"everything behind the first {counted(bound.found, 'sample')}"
        return Trial(None, (), (rest,), tuple(survey.notes))
    except SourceInvalid as error:
        return Trial(None, (SourceProblem((), str(error)),), ())
    unread = source.unread or f"the content of its {counted(len(index), 'sample')}"
    return Trial(index, (), (unread,), index.notes)


def _left_alone(source: SourceOptions) -> str:
    """The reason why a source is not scanned on trial; "" if it is."""
    if source.unscanned:
        return source.unscanned
    if urls := [str(path) for path in _paths_of(source).values() if isinstance(path, Url)]:
        return f"everything at {' and '.join(urls)} behind one object or page: servers are asked when the daemon starts"
    return ""
