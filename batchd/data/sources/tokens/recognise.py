"""Recognise files of tokens: Megatron's by their indexes, flat ones by their first numbers. CLI.

A flat file says nothing about itself, except one with the header of llm.c. So its first numbers
decide: they are tokens if all are small enough for a vocabulary, and a byte is 0, as in no text.
"""

import os
from pathlib import Path
from typing import NamedTuple, get_args

import numpy as np

from batchd.data.sources.interface import FoundFiles, Recognised
from batchd.data.sources.recognise import ending_of, of_kind, patterns_of, training_part
from batchd.data.sources.tokens.options import TokenFormat, TokensSource, TokenType
from batchd.data.sources.tokens.scan import DTYPES, HEADER, MAGIC, index_file
from batchd.data.storage.index import readable
from batchd.data.storage.paths import size_of
from batchd.data.storage.survey import Survey
from batchd.errors import SourceInvalid
from batchd_wire.fields import ITEM_BYTES

LENGTH = 1024
LOOKED_AT_BYTES = 1 << 20
GPT2_TOKENS = 50257
"""Tokens of GPT-2's vocabulary, the usual one of files of uint16."""
TOKENS_MAX = 1 << 18
"""More than any usual vocabulary has."""
LLM_C: dict[int, TokenType] = {20240520: "uint16", 20240801: "uint32"}
"""The first number, int32, of files of llm.c, and the type of their tokens."""
LLM_C_BYTES = 1024


class _Format(NamedTuple):
    """The options of a file."""

    format: TokenFormat
    dtype: TokenType
    offset: int = 0


def _recognise(files: FoundFiles, survey: Survey) -> Recognised:
    names = of_kind(files, TokensSource)
    bins, others = training_part([name for name in names if ending_of(name) == ".bin"], files.part)
    known = set(names)
    indexed = [name for name in bins if _index_name(name) in known or _has_index_beside(files, name, survey)]
    bins = indexed or bins
    if not bins:
        raise SourceInvalid(f"{files.root / readable(names[0])} is an index; name the file .bin beside it")
    path = files.root / os.fsdecode(bins[0])
    found = (_megatron if indexed else _flat)(path, survey)
    with survey.open(path) as stream:
        tokens = (size_of(stream) - found.offset) // ITEM_BYTES[found.dtype]
    length = min(LENGTH, tokens - 1)
    if length < 1:
        raise SourceInvalid(f"{path} has no two tokens")
    is_one = len(bins) == 1
    source = TokensSource(
        path=path if is_one else None,
        root=None if is_one else files.root,
        files=() if is_one else patterns_of(files, bins),
        format=found.format,
        dtype=found.dtype,
        length=length + 1,
        overlap=1,
        offset=found.offset,
    )
    documents = "; without length, each document is a sample" if indexed else ""
    notes = (f"windows of {length:,} tokens and the one behind them, as {found.dtype}{documents}",)
    read = {*bins, *map(_index_name, indexed)}
    return Recognised(source, [name for name in names if name in read], notes, others=others)


def _index_name(name: bytes) -> bytes:
    return os.fsencode(index_file(Path(os.fsdecode(name))))


def _has_index_beside(files: FoundFiles, name: bytes, survey: Survey) -> bool:
    """True if the user named a file alone, and its index is beside it."""
    index = index_file(files.root / os.fsdecode(name))
    return bool(files.patterns) and not survey.storage.at(index).file_problems(index, "the index")


def _megatron(path: Path, survey: Survey) -> _Format:
    where = index_file(path)
    with survey.open(where) as stream:
        data = stream.read(HEADER.size)
    if not data.startswith(MAGIC) or len(data) < HEADER.size:
        raise SourceInvalid(f"{where} is no index of Megatron: it begins with {data[:9]!r}")
    code = HEADER.unpack(data)[2]
    named = DTYPES.get(code, f"number {code}")
    dtype: TokenType | None = next((one for one in get_args(TokenType) if one == named), None)
    if dtype is None:
        raise SourceInvalid(f"{where} says that a token is {named}, which is no whole number")
    return _Format("megatron", dtype)


def _flat(path: Path, survey: Survey) -> _Format:
    with survey.open(path) as stream:
        size = size_of(stream)
        data = stream.read(LOOKED_AT_BYTES)
    first = int.from_bytes(data[:4], "little")
    if first in LLM_C:
        return _Format("flat", LLM_C[first], LLM_C_BYTES)
    usual: list[tuple[TokenType, int]] = [("uint32", TOKENS_MAX), ("uint16", GPT2_TOKENS)]
    for dtype, tokens in usual:
        item = ITEM_BYTES[dtype]
        numbers = np.frombuffer(data[: len(data) // item * item], np.dtype(dtype).newbyteorder("<"))
        if b"\0" in data and size % item == 0 and numbers.max() < tokens:
            return _Format("flat", dtype)
    raise SourceInvalid(
        f"{path} may hold tokens or other records, and does not say what; name their type: "
        '{ type = "tokens", path = "FILE.bin", dtype = "uint16", length = 1024 }, or a source of type raw'
    )


RECOGNISE = {TokensSource: _recognise}
