"""The records of an LMDB database: any sample by its key. Workers only.

    format      a record is
    bytes       one field: an image's bytes, UTF-8, or little-endian numbers
    text        the same, but a number is written in digits
    msgpack     a map of all fields

Values are views of the library's own memory, valid while the database is open: an image is decoded
directly from the page cache.

Invariant: no part of a record is ever executed: pickles are recognised and refused.
"""

from collections.abc import Mapping
from pathlib import Path

import msgpack

from batchd.data.samples import values
from batchd.data.samples.columns import Column
from batchd.data.samples.errors import SampleUnreadable, check_bytes
from batchd.data.sources.interface import PlainReader
from batchd.data.sources.lmdb.environment import Environment
from batchd.data.sources.lmdb.options import LmdbSource
from batchd.data.storage.index import SourceIndex, readable
from batchd.data.storage.paths import blaming_the_sample

PICKLES = (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")
"""How pickles begin."""
NUMBER_BYTES_MAX = 64
"""Digits that a number may have."""


class LmdbReader(PlainReader):
    """Reads the fields of any sample. Belongs to one worker and one stream."""

    def __init__(self, source: LmdbSource, index: SourceIndex, max_bytes: int) -> None:
        self._source = source
        self._index = index
        self._columns = source.columns
        self._parts = [source.key_of(column.name) for column in self._columns]
        self._offsets = index.arrays["offsets"]
        self._keys = index.arrays["keys"]
        self._path = Path(index.place["path"])
        self._max_bytes = max_bytes
        self._environment: Environment | None = None

    def read(self, sample: int) -> Mapping[str, values.Value]:
        """See ``interface.Reader``."""
        part = self._part(sample)
        if self._source.format == "msgpack":
            record = unpacked(self._record(part, *self._parts[0]), self._max_bytes)
            return {
                column.name: _from_msgpack(column, record, self._source.name_of(column.name), self._max_bytes)
                for column in self._columns
            }
        return {
            column.name: self._from_record(column, self._record(part, *around))
            for column, around in zip(self._columns, self._parts, strict=True)
        }

    def name(self, sample: int) -> str:
        """The database, and the key of the sample's first field."""
        before, behind = self._parts[0]
        return f"{self._path}: {readable(before + self._part(sample) + behind)}"

    def close(self) -> None:
        """See ``interface.Reader``."""
        if self._environment is not None:
            self._environment.close()
            self._environment = None

    def _part(self, sample: int) -> bytes:
        start, end = self._offsets[self._index.checked(sample) : sample + 2].tolist()
        return self._keys[start:end].tobytes()

    def _record(self, part: bytes, before: bytes, behind: bytes) -> memoryview:
        key = before + part + behind
        value = self._opened().get(key)
        if value is None:
            raise SampleUnreadable(f"there is no key {readable(key)!r} any more")
        return value

    def _opened(self) -> Environment:
        """The database, opened when the first sample is read, so never before a fork."""
        if self._environment is None:
            with blaming_the_sample():
                self._environment = Environment.of(self._path)
        return self._environment

    def _from_record(self, column: Column, raw: memoryview) -> values.Value:
        if self._source.format == "text" and column.kind == "array":
            return _number(column, bytes(raw[: NUMBER_BYTES_MAX + 1]))
        return values.from_bytes(column, raw, self._max_bytes)


def _number(column: Column, digits: bytes) -> values.Value:
    text = digits.decode("utf-8", "replace").strip()
    number = values.real_number(text) if column.dtype.startswith("float") else values.whole_number(text)
    if number is None or len(digits) > NUMBER_BYTES_MAX:
        raise SampleUnreadable(f"{column.name} is {readable(digits)!r}, which is not {column.dtype}")
    return values.from_plain(column, number)


def unpacked(raw: memoryview, max_bytes: int) -> dict[str | bytes, object]:
    """A record in msgpack, of nothing but its own types. Raises ``SampleUnreadable``."""
    check_bytes(raw.nbytes, max_bytes)
    try:
        record = msgpack.unpackb(raw, raw=False, strict_map_key=True, ext_hook=_refuse_extension)
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        if raw[:2] in PICKLES:
            raise SampleUnreadable(
                "looks like a pickle, which batchd never reads: write msgpack, or one record for each field"
            ) from None
        raise SampleUnreadable(f"is not msgpack: {type(error).__name__} {error}") from None
    if type(record) is not dict:
        raise SampleUnreadable(f"is {type(record).__name__} in msgpack, not a map")
    return record


def _refuse_extension(number: int, _data: bytes) -> None:
    raise ValueError(f"extension {number}")


def _from_msgpack(column: Column, record: dict[str | bytes, object], name: str, max_bytes: int) -> values.Value:
    if name not in record:
        raise SampleUnreadable(f"has no {name!r}; there are {', '.join(map(repr, list(record)[:20]))}")
    value = record[name]
    if isinstance(value, bytes) and column.kind != "images" and (column.kind != "array" or column.shape):
        return values.from_bytes(column, value, max_bytes)
    if column.kind == "text" and isinstance(value, str):
        return value
    if column.kind in ("json", "texts") and value is not None:
        return values.nested(column, value)
    if column.kind == "images" and isinstance(value, list):
        return values.images_from(column, value, max_bytes)
    if column.kind == "array" and (isinstance(value, list) if column.shape else type(value) in (int, float, bool)):
        numbers = values.from_plain(column, value)
        return values.shaped(column, numbers.reshape(-1)) if column.shape else numbers
    raise SampleUnreadable(f'{column.name} is {type(value).__name__} in msgpack, not "{column.text}"')


READERS = {LmdbSource: lambda source, index, max_bytes, _storage: LmdbReader(source, index, max_bytes)}
