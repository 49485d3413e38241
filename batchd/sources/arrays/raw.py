"""Files of records that are all alike. Daemon.

    | offset bytes | label, image | label, image | ... |      size = offset + samples * record

Invariant: a file that is not made of whole records is refused, so a wrong record or offset is found
before it does harm.
"""

from math import prod
from pathlib import Path

import numpy as np

from batchd.errors import SourceInvalid
from batchd.sources.arrays.index import ArrayField, Run, SampleRuns, build_index, fingerprint
from batchd.sources.arrays.options import RawSource
from batchd.sources.arrays.reader import ArrayReader
from batchd.sources.files.walk import files_of, files_problems
from batchd.sources.interface import BuiltInKind
from batchd.storage.access import Storage
from batchd.storage.index import SourceIndex
from batchd.storage.paths import size_of
from batchd.storage.survey import Survey


def _scan(source: RawSource, survey: Survey) -> SourceIndex:
    """Count the records of all files. Raises ``SourceInvalid``."""
    parts, contents, samples = [], [], 0
    files = files_of(source, survey)
    for number, path in enumerate(files):
        with survey.open(path) as stream:
            size = size_of(stream)
            count = _records(source, path, size)
            contents.append(fingerprint(stream, size))
        parts.append(SampleRuns(count, (Run(number, source.offset, source.record_bytes, source.record_bytes),)))
        samples += count
        survey.progress(samples)
    return build_index(parts, _fields(source), files, contents, survey)


def _records(source: RawSource, path: Path, size: int) -> int:
    """How many records a file of so many bytes holds. Raises ``SourceInvalid`` where they are not whole ones."""
    count, rest = divmod(size - source.offset, source.record_bytes)
    if count <= 0:
        raise SourceInvalid(
            f"{path}: {size} bytes hold no record of {source.record_bytes} bytes behind the first {source.offset}"
        )
    if rest:
        raise SourceInvalid(
            f"{path}: {size} bytes are not {source.offset} and whole records of {source.record_bytes} bytes each; "
            f"{rest} are left"
        )
    return count


def _fields(source: RawSource) -> list[ArrayField]:
    fields, offset = [], 0
    for column in source.parsed_record():
        dtype = np.dtype(column.dtype).newbyteorder("<" if source.byte_order == "little" else ">")
        fields.append(ArrayField(column.name, 0, offset, dtype.str, column.fixed_shape))
        offset += dtype.itemsize * prod(column.fixed_shape)
    return fields


def _problems(source: RawSource, storage: Storage) -> list[str]:
    problems = files_problems(source.path, source.root, source.files, "the file", storage)
    if not problems and source.path is not None:
        size = storage.at(source.path).known_size(source.path)
        if size is not None:
            _records(source, source.path, size)
    return problems


def _samples(source: RawSource, storage: Storage) -> int | None:
    """Of one file of this machine; several would have to be looked for."""
    size = None if source.path is None else storage.at(source.path).known_size(source.path)
    return None if size is None else (size - source.offset) // source.record_bytes


KIND = BuiltInKind(
    problems=_problems,
    columns=lambda source, _storage: source.parsed_record(),
    scan=_scan,
    open=ArrayReader,
    samples=_samples,
)
