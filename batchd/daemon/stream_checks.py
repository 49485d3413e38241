"""Problems of a configuration's streams, each at its key. Daemon, and ``batchd check``.

    source      at its own key, or that of one of its parts      streams.a.source.sources[1].path
    functions   at the key that names them                       streams.a.pipeline[2].function
    steps       at the step, or at the option that is wrong      streams.a.pipeline[1].field
    the whole   if the steps leave no valid fields               streams.a.pipeline

Invariant: a stream without problems has columns.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from batchd.config.draft import StreamDraft
from batchd.config.functions import code_problems
from batchd.config.schema import meaning_of
from batchd.errors import KeyPath, Problem, SourceInvalid, path_text
from batchd.pipeline.sample_fields import StepCheck, reserved_names
from batchd.samples.columns import Column
from batchd.sources.source_checks import check_source, known_columns
from batchd.storage.access import Storage


class Findings(NamedTuple):
    """Result of the checks of one stream. Problems have no lines yet.

    ``columns``: of its source; None if they are unknown, or if the steps make no fields of them.
    """

    columns: tuple[Column, ...] | None
    problems: list[Problem]


def look_at_stream(
    name: str, draft: StreamDraft, python_path: Sequence[Path] | None, storage: Storage, *, thoroughly: bool = True
) -> Findings:
    """Check the source, the functions and the steps of a stream, without a scan.

    ``python_path`` is None if it is unknown; then no functions are looked up. Not ``thoroughly``:
    check only the source's columns, because it will be scanned.
    """
    looks = [(key, check_source(source, storage, thoroughly=thoroughly)) for key, source in draft.sources]
    found: list[tuple[KeyPath, str]] = [
        (("source", *key, *one.key), one.text) for key, look in looks for one in look.problems
    ]
    try:
        columns = known_columns([look for _key, look in looks])
    except SourceInvalid:  # the options of the whole are wrong anyhow
        columns = None
    if columns is not None:
        columns = (*columns, *(Column(name, dtype="int64") for name in draft.source_fields))
    wrong_names = reserved_names(columns or ())
    found += [(("source",), text) for text in wrong_names]
    if python_path is not None:
        found += code_problems(draft.sources, draft.steps, python_path)
    check = StepCheck(columns)
    for place in range(len(draft.steps) + len(draft.gaps)):
        if place in draft.steps:
            check.check_step(place, draft.steps[place])
        else:
            check.skip_step(place, *draft.gaps[place])
    wrong_steps = check.finish()
    found += [(("pipeline", *one.key), one.text) for one in wrong_steps]
    data = {"streams": {name: draft.data}}
    problems = [
        Problem(path_text(path), text, meaning_of(path, data))
        for key, text in found
        for path in [("streams", name, *key)]
    ]
    return Findings(None if wrong_names or wrong_steps else columns, problems)
