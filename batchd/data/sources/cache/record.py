"""The record of one sample in a cache: its values, or what is known of its files. Workers only.

Each value of a sample is a fact of its record, as msgpack: (name, kind, ...). The bytes of images
and arrays follow behind the facts, in this order:

    bytes     (name, 0, bytes)                    a read-only memoryview
    array     (name, 1, dtype, shape, bytes)      copied out, as steps may write into it
    scalar    (name, 2, dtype, its bytes)         of numpy
    plain     (name, 3, value)                    a text, or a number of Python
    points    (name, 4, bytes)                    the access points of the field's file
    pixels    (name, 5, header, length of the file, ((factor, shape), ...), bytes)    instead of the
              file's bytes: all of them as decoded at 1/factor, one factor after the other
    head      (name, 6, header, length of the file, bytes)    what is in front of its image data
    header    (name, 7, header)                   of the file, as its decoder has read it
    json      (name, 8, bytes)                    a list, an object or a number beyond 64 bits, in
                                                  JSON, which keeps more than msgpack
    list      (name, 9, facts, bytes)             of bytes or arrays, as a record of their own

Invariant: ``unpack`` gives the values that ``pack`` got, in type, order and content.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import msgpack
import numpy as np
from numpy.typing import NDArray

from batchd.data.samples.columns import Column
from batchd.data.samples.errors import SampleUnreadable
from batchd.data.samples.image_header import ImageHeader
from batchd.data.samples.kept_files import DecodedFile, FileHead
from batchd.data.samples.values import MediaFile, Value, array_of
from batchd_wire.views import Array

_BYTES, _ARRAY, _SCALAR, _PLAIN, _POINTS, _PIXELS, _HEAD, _HEADER, _JSON, _LIST = range(10)
WITH_VALUES = frozenset({_BYTES, _ARRAY, _POINTS, _PIXELS, _HEAD, _JSON, _LIST})
"""Kinds of facts whose last number says how many bytes they have behind the facts."""
_PLAIN_BITS = 64
"""msgpack has no whole numbers of more bits."""
HEAD_BYTES_MAX = 1 << 14
"""Longer heads of files are not kept."""
FILE_WITH_PARTS_BYTES_MIN = 1 << 18
"""Shorter files are read whole: few crops leave out enough of them."""


class Record(NamedTuple):
    """A sample as a cache keeps it."""

    facts: bytes
    values: list[memoryview | bytes]


NO_VALUES = Record(msgpack.packb([]), [])


def pack(values: Mapping[str, Value]) -> Record:
    """The record of a sample: views of bytes, and copies of arrays, which steps may write into."""
    facts: list[tuple[object, ...]] = []
    parts: list[memoryview | bytes] = []
    for name, value in values.items():
        if isinstance(value, MediaFile):
            value = value.whole()  # noqa: PLW2901  the file is closed by then
        if isinstance(value, memoryview):
            facts.append((name, _BYTES, value.nbytes))
            parts.append(value)
        elif isinstance(value, np.ndarray):
            facts.append((name, _ARRAY, value.dtype.str, value.shape, value.nbytes))
            parts.append(value.tobytes())
        elif isinstance(value, DecodedFile):
            shapes = [(factor, image.shape) for factor, image in value.pixels.items()]
            size = sum(image.nbytes for image in value.pixels.values())
            facts.append((name, _PIXELS, value.header, value.file_bytes, shapes, size))
            parts += [image.data.cast("B") for image in value.pixels.values()]
        elif isinstance(value, np.generic):
            facts.append((name, _SCALAR, value.dtype.str, value.tobytes()))
        elif isinstance(value, list) and value and isinstance(value[0], memoryview | np.ndarray):
            inner = pack({str(place): one for place, one in enumerate(value)})  # type: ignore[misc]  # each is alike
            facts.append((name, _LIST, inner.facts, sum(map(len, inner.values))))
            parts += inner.values
        elif isinstance(value, (list, dict)) or (isinstance(value, int) and value.bit_length() >= _PLAIN_BITS):
            parts.append(json.dumps(value).encode())
            facts.append((name, _JSON, len(parts[-1])))
        else:
            facts.append((name, _PLAIN, value))
    return Record(msgpack.packb(facts, unicode_errors="surrogatepass"), parts)


def with_points(record: Record, points: Mapping[str, memoryview | bytes]) -> Record:
    """The record with these access points of its files."""
    if not points:
        return record
    facts = facts_of(record.facts)
    facts += [(name, _POINTS, len(one)) for name, one in points.items()]
    return Record(msgpack.packb(facts, unicode_errors="surrogatepass"), [*record.values, *points.values()])


def with_heads(record: Record, heads: Mapping[str, FileHead]) -> Record:
    """The record with those of these heads from which parts of files are planned."""
    kept = {
        name: head
        for name, head in heads.items()
        if len(head.data) <= HEAD_BYTES_MAX and head.file_bytes >= FILE_WITH_PARTS_BYTES_MIN
    }
    if not kept:
        return record
    facts = facts_of(record.facts)
    facts += [(name, _HEAD, head.header, head.file_bytes, len(head.data)) for name, head in kept.items()]
    return Record(
        msgpack.packb(facts, unicode_errors="surrogatepass"), [*record.values, *(head.data for head in kept.values())]
    )


def with_headers(record: Record, headers: Mapping[str, ImageHeader]) -> Record:
    """The record with these headers of its files."""
    facts = facts_of(record.facts) + [(name, _HEADER, header) for name, header in headers.items()]
    return Record(msgpack.packb(facts, unicode_errors="surrogatepass"), record.values)


def header_and_points(facts: memoryview, parts: memoryview, field: str) -> tuple[ImageHeader | None, memoryview | None]:
    """The header of a field's file, None if the record has none, and its access points."""
    header: ImageHeader | None = None
    points: memoryview | None = None
    start = 0
    for name, kind, *rest in facts_of(facts):
        if kind == _HEADER and name == field:
            header = ImageHeader(*rest[0])
        elif kind in WITH_VALUES:
            if kind == _POINTS and name == field:
                points = parts[start : start + rest[-1]]
            start += rest[-1]
    return header, points


def heads_of(facts: memoryview, parts: memoryview) -> dict[str, FileHead]:
    """The heads of the files of a record."""
    heads: dict[str, FileHead] = {}
    start = 0
    for name, kind, *rest in facts_of(facts):
        if kind == _HEAD:
            header, file_bytes, size = rest
            heads[name] = FileHead(ImageHeader(*header), file_bytes, parts[start : start + size])
        start += rest[-1] if kind in WITH_VALUES else 0
    return heads


def unpack(
    facts: memoryview, parts: memoryview, file: Callable[[str], memoryview] | None = None
) -> tuple[dict[str, Value], dict[str, memoryview]]:
    """The values of a record, and the access points of its files.

    ``file`` reads the file of a field whose pixels the record has.
    """
    values: dict[str, Value] = {}
    points: dict[str, memoryview] = {}
    start = 0
    for name, kind, *rest in facts_of(facts):
        if kind in {_BYTES, _POINTS}:
            (size,) = rest
            (values if kind == _BYTES else points)[name] = parts[start : start + size]
            start += size
        elif kind == _ARRAY:
            dtype, shape, size = rest
            array: Array = np.frombuffer(parts[start : start + size], dtype)
            values[name] = array.reshape(shape).copy()
            start += size
        elif kind == _PIXELS:
            header, file_bytes, shapes, _size = rest
            assert file is not None, "the reader of samples whose pixels are kept"
            pixels = {}
            for factor, shape in shapes:
                pixels[factor] = np.ndarray(shape, np.uint8, parts, start)
                start += pixels[factor].size
            values[name] = DecodedFile(ImageHeader(*header), file_bytes, pixels, partial(file, name))
        elif kind == _HEAD:
            start += rest[-1]
        elif kind == _HEADER:
            pass  # ``header_and_points`` has it
        elif kind == _SCALAR:
            dtype, content = rest
            values[name] = np.frombuffer(content, dtype)[0]
        elif kind in {_JSON, _LIST}:
            content = parts[start : start + rest[-1]]
            values[name] = json.loads(bytes(content)) if kind == _JSON else _list_in(rest[0], content)
            start += rest[-1]
        else:
            (values[name],) = rest
    return values, points


def _list_in(facts: bytes, parts: memoryview) -> list[object]:
    return list(unpack(memoryview(facts), parts)[0].values())


class RecordForm(NamedTuple):
    """What the facts of a record say about some columns.

    ``arrays``: the first byte and the length of each array in the values. ``numbers``: all others.
    """

    arrays: Mapping[str, tuple[int, int]]
    numbers: Mapping[str, float]


def record_form(facts: bytes, rows: Mapping[str, Array]) -> RecordForm:
    """The form of a record, for the columns of ``rows``, ``[samples, *shape]`` of its dtype each.

    Raises ``SampleUnreadable`` or ``SampleUndecodable`` if a column is not one of these numbers.
    """
    arrays: dict[str, tuple[int, int]] = {}
    numbers: dict[str, float] = {}
    start = 0
    for name, kind, *rest in facts_of(facts):
        if name in rows:
            dtype, shape = rows[name].dtype, rows[name].shape[1:]
            if kind == _ARRAY and (np.dtype(rest[0]), tuple(rest[1])) == (dtype, shape):
                arrays[name] = start, rest[2]
            elif kind in {_SCALAR, _PLAIN}:
                value = rest[0] if kind == _PLAIN else np.frombuffer(rest[1], rest[0])[0]
                numbers[name] = array_of(Column(name, dtype=dtype.name, shape=shape), value).item()
        start += rest[-1] if kind in WITH_VALUES else 0
    missing = rows.keys() - arrays.keys() - numbers.keys()
    if missing:
        raise SampleUnreadable(f"{min(missing)!r} has another shape in the cache")
    return RecordForm(arrays, numbers)


def has_values(facts: memoryview) -> bool:
    """True if a record has values of its sample, and not only access points of files."""
    return any(kind not in {_POINTS, _HEAD, _HEADER} for _name, kind, *_rest in facts_of(facts))


def facts_of(facts: memoryview | bytes) -> list[Any]:
    """All facts of a record."""
    made: list[Any] = msgpack.unpackb(facts, unicode_errors="surrogatepass")
    return made


Heads: TypeAlias = NDArray[np.void]
Starts: TypeAlias = NDArray[np.int64]
Bytes: TypeAlias = NDArray[np.uint8]
FindRows: TypeAlias = Callable[[int], Bytes]
"""Finds the memory ``[samples, length]`` for values of so many bytes each."""


class CacheRows(ABC):
    """Base of the caches: their index, and the records of many samples at once.

        index[samples] -> heads -> values, straight into the rows of a batch
                                -> facts

    All of it is done with arrays, not sample by sample. If anything is not as expected, nothing is
    found, and the caller reads the samples one by one.

    Invariant: what is found is what ``find`` gives for each of the samples.
    """

    _index: memoryview
    """The first byte of each sample's record, 0 if it is absent: uint64 ``[samples]``."""
    _entries: NDArray[np.uint64]
    """The same memory."""
    _head: np.dtype[np.void]
    """What a record begins with: ``sample``, ``facts_bytes``, ``values_bytes``, and more."""

    def __len__(self) -> int:
        """The number of samples of the source."""
        return len(self._index)

    def __contains__(self, sample: int) -> bool:
        return self._index[sample] != 0

    def has_all(self, samples: NDArray[np.int64]) -> bool:
        """True if all samples are in the cache, as far as the index tells."""
        return bool(self._entries[samples].all())

    def read_rows(self, samples: NDArray[np.int64], rows: FindRows) -> list[bytes] | None:
        """Copy the values of samples into ``rows(length)``; return the facts of each.

        None if a sample is absent or damaged, or values differ in length; rows are undefined then.
        """
        starts = self._entries[samples].astype(np.int64)
        heads = np.empty(len(starts), self._head)
        if not starts.all() or not self._copy(starts, heads.view(np.uint8).reshape(len(starts), -1)):
            return None
        length = int(heads["values_bytes"][0])
        is_expected = (heads["sample"] == samples) & (heads["values_bytes"] == length)
        if not is_expected.all() or not self._are_heads_whole(heads):
            return None
        starts += self._head.itemsize
        sizes = heads["facts_bytes"].astype(np.int64)
        values, facts = rows(length), self._facts(starts, sizes)
        if facts is None or not self._copy(starts + sizes, values) or not self._are_whole(heads, facts, values):
            return None
        return facts

    def _facts(self, starts: Starts, sizes: NDArray[np.int64]) -> list[bytes] | None:
        facts = np.empty(len(starts), object)
        for size in np.unique(sizes).tolist():
            places = np.flatnonzero(sizes == size)
            copied = np.empty((len(places), size), np.uint8)
            if not self._copy(starts[places], copied):
                return None
            facts[places] = copied.view(f"V{size}")[:, 0]
        found: list[bytes] = facts.tolist()
        return found

    @abstractmethod
    def _copy(self, starts: Starts, rows: Bytes) -> bool:
        """Copy as many bytes as a row has from each start; False if that cannot be."""

    def _are_heads_whole(self, _heads: Heads) -> bool:
        """True if heads are as they were written: memory keeps them so."""
        return True

    def _are_whole(self, _heads: Heads, _facts: list[bytes], _values: Bytes) -> bool:
        """True if facts and values are as they were written: memory keeps them so."""
        return True
