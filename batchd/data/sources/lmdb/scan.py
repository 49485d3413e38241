"""Scans the keys of an LMDB database, in a process of its own: see ``data.sources.scan``.

    offsets   int64 [n + 1]    the part of the key of sample i is keys[offsets[i]:offsets[i + 1]]
    keys      uint8 [bytes]    the parts of the keys that identify samples, joined in their order

Of the records only the lengths are read; the digest covers the lengths and the keys.

Invariant: each sample has a record for each of its fields; no list with an entry for each sample is
made.
"""

import os
import sys
from array import array
from collections.abc import Iterator, Sequence
from hashlib import sha256
from itertools import islice
from struct import Struct

import lmdb
import numpy as np

from batchd.data.samples.errors import SampleUnreadable
from batchd.data.sources.finding import find_in_runs
from batchd.data.sources.interface import BuiltInKind
from batchd.data.sources.lmdb.environment import Environment, data_file
from batchd.data.sources.lmdb.options import FIELD_MARK, LmdbSource
from batchd.data.sources.scan import answer, isolated_scan
from batchd.data.storage.index import SourceIndex, number_array, readable
from batchd.data.storage.survey import Survey
from batchd.errors import SourceInvalid
from batchd_wire.views import Array

MODULE = "batchd.data.sources.lmdb.scan"
PROGRESS_EVERY = 4096
"""Samples between two reports of progress."""
SHOWN_KEYS = 3
"""Keys that are named where none is one of a sample."""
DATABASE_BYTES = 48
"""The bytes under a key that is the name of a database."""
_LENGTH = Struct("<Q")


def _scan(source: LmdbSource, survey: Survey) -> SourceIndex:
    """Have another process scan. Raises ``SourceInvalid``."""
    with survey.open(data_file(source.path)):
        return isolated_scan(MODULE, source, survey)


def scan(source: LmdbSource, survey: Survey) -> SourceIndex:
    """Find all samples, in the scanning process. Raises ``SourceInvalid``."""
    try:
        environment = Environment.of(source.path)
        try:
            return _index(source, environment, survey)
        finally:
            environment.close()
    except SampleUnreadable as error:
        raise SourceInvalid(f"{source.path}: {error}") from None
    except lmdb.Error as error:
        raise SourceInvalid(f"{source.path} is damaged: {error}; copy it again") from None


def _index(source: LmdbSource, environment: Environment, survey: Survey) -> SourceIndex:
    keys, offsets, lengths = bytearray(), array("q", [0]), sha256()
    first, *others = [source.key_of(field) for field in (source.fields if FIELD_MARK in source.key else ["*"])]
    for part, value in _records(environment, *first):
        if value.nbytes == DATABASE_BYTES and environment.is_database(name := first[0] + part + first[1]):
            raise SourceInvalid(
                f"{source.path} has databases with names in it, such as {readable(name)!r}, and batchd reads the one without "
                "a name; copy the records into a database of their own"
            )
        lengths.update(_LENGTH.pack(value.nbytes))
        for before, behind in others:
            other = environment.get(before + part + behind)
            if other is None:
                key, missing = readable(first[0] + part + first[1]), readable(before + part + behind)
                raise SourceInvalid(
                    f"{source.path} has the key {key!r} and no {missing!r}, which would be the same sample"
                )
            lengths.update(_LENGTH.pack(other.nbytes))
        keys += part
        offsets.append(len(keys))
        if len(offsets) % PROGRESS_EVERY == 0:
            survey.progress(len(offsets) - 1)
    survey.progress(len(offsets) - 1)
    skipped = environment.transaction.stat()["entries"] - (len(offsets) - 1) * (1 + len(others))
    if len(offsets) > 1 and skipped:
        other_key = readable(_other_key(environment, [first, *others]))
        survey.note(
            "keys that do not look like key, which no sample has", f"{source.path}: {other_key!r}", count=skipped
        )
    if len(offsets) == 1:
        raise SourceInvalid(_nothing(source, environment, *first))
    facts = {
        "fields": dict(source.fields),
        "names": dict(source.names),
        "key": source.key,
        "format": source.format,
        "lengths": lengths.hexdigest(),
    }
    arrays: dict[str, Array] = {
        "offsets": number_array(offsets),
        "keys": np.frombuffer(keys, np.uint8),
    }
    return SourceIndex.build(len(offsets) - 1, facts, arrays, {"path": str(source.path.absolute()), **survey.place()})


def _records(environment: Environment, before: bytes, behind: bytes) -> Iterator[tuple[bytes, memoryview]]:
    """The parts of the keys that fit, which tell samples apart, and the records under them."""
    cursor = environment.transaction.cursor()
    if not (cursor.set_range(before) if before else cursor.first()):
        return
    for found, value in cursor:
        key = bytes(found)
        if not key.startswith(before):
            return
        if _fits(key, before, behind):
            yield key[len(before) : len(key) - len(behind)], value


def _other_key(environment: Environment, parts: Sequence[tuple[bytes, bytes]]) -> bytes:
    """The first key that fits none of some parts; b"" if each fits one."""
    keys = map(bytes, environment.transaction.cursor().iternext(values=False))
    return next((key for key in keys if not any(_fits(key, *around) for around in parts)), b"")


def _fits(key: bytes, before: bytes, behind: bytes) -> bool:
    return key.startswith(before) and key.endswith(behind) and len(key) > len(before) + len(behind)


def _nothing(source: LmdbSource, environment: Environment, before: bytes, behind: bytes) -> str:
    entries = environment.transaction.stat()["entries"]
    if not entries:
        return f"{source.path} holds no record"
    cursor = environment.transaction.cursor()
    some = [repr(readable(bytes(key))) for key in islice(cursor.iternext(values=False), SHOWN_KEYS)]
    wanted = readable(before + b"*" + behind)
    return f"{source.path}: no key looks like {wanted}; there are {entries}, such as {', '.join(some)}"


KINDS = {
    LmdbSource: BuiltInKind(
        problems=lambda source, storage: storage.at(source.path).file_problems(data_file(source.path), "the database"),
        scan=_scan,
        find=lambda _source, index, pattern: find_in_runs(
            pattern, [os.fsencode(index.place["path"])], np.zeros(1, np.int64), len(index)
        ),
    )
}


if __name__ == "__main__":
    sys.exit(answer(scan))
