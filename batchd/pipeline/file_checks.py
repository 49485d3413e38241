"""Are the files that steps read what they should be? The daemon at its start, and ``batchd check``.

Everything that would end a stream at its first batch is found here, before any trainer waits for
one.
"""

from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from types import MappingProxyType
from typing import Any

from batchd.errors import KeyPath
from batchd.pipeline.effects import StepInvalid
from batchd.pipeline.options import StepOptions
from batchd.pipeline.step_files import file_problem
from batchd.pipeline.text.options import Lookup, RemoveStopwords, Tokenize
from batchd.pipeline.text.words import read_stop_words


def check_files(step: StepOptions) -> list[tuple[KeyPath, str]]:
    """What is wrong with the files of a step, each with its path, by the options that name them; empty where it can be run."""
    kind: Any = type(step)
    files = {option.name: path for option in fields(kind) if isinstance(path := getattr(step, option.name), Path)}
    problems: list[tuple[KeyPath, str]] = [
        ((name,), problem) for name, path in files.items() if (problem := file_problem(path)) is not None
    ]
    check = CHECKS.get(kind)
    if problems or check is None:
        return problems
    try:
        check(step)
    except StepInvalid as problem:
        named = [name for name, path in files.items() if str(path) in str(problem)]
        return [(tuple(named[:1]), str(problem))]
    return []


def _tokenizer(step: Tokenize) -> None:
    try:
        from batchd.pipeline.text.tokenizer_file import load_tokenizer  # noqa: PLC0415  needs an extra
    except ModuleNotFoundError as error:
        if error.name != "tokenizers":
            raise
        raise StepInvalid("\"tokenize\" needs tokenizers, which is not installed: pip install 'batchd[text]'") from None
    load_tokenizer(step)


def _stop_words(step: RemoveStopwords) -> None:
    read_stop_words(step.file, lower=step.case == "ignore")


def _word_table(step: Lookup) -> None:
    from batchd.pipeline.text.word_table import check_word_table  # noqa: PLC0415  needs numpy

    check_word_table(step.words, step.table)


CHECKS: Mapping[type[StepOptions], Callable[[Any], None]] = MappingProxyType(
    {Tokenize: _tokenizer, RemoveStopwords: _stop_words, Lookup: _word_table}
)
