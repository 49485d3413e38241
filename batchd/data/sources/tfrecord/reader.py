"""Reads samples from records of TFRecord files. Workers only.

TensorFlow's messages for samples are declared here, without TensorFlow. They have a pool of their
own, so they do not disturb TensorFlow's in the same process. Names and numbers are TensorFlow's. An
``Example`` can be read as a ``SequenceExample``: its features are the context.

A feature of an example becomes the value of a column, or ``FeatureMisfits`` says why it cannot:

    bytes_list  of one     -> "image", "text", uint8 [n] or [?]: the bytes as numbers
    int64_list             -> any whole number, bool
    float_list             -> float16, float32, float64
    feature list of steps  -> [?] or [?, k]: a row for each step

A length that differs is computed from the number of values: 12 of them are a [?, 4] of three rows.

Invariants: the data of a record is parsed only if its checksum is the one of the index. A value has
the dtype and shape of its column; nothing is stretched, cut or wrapped around.
"""

import os
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto, FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass
from numpy.typing import NDArray

from batchd.data.samples.columns import Column
from batchd.data.samples.errors import SampleUnreadable, check_bytes
from batchd.data.samples.values import Value, images_from, in_json, nested
from batchd.data.sources.interface import PlainReader
from batchd.data.sources.tfrecord.frames import FOOTER, HEADER, FeatureField, masked_crc, parts_of
from batchd.data.sources.tfrecord.options import TFRecordSource
from batchd.data.storage.access import Storage
from batchd.data.storage.index import IndexMalformed, SourceIndex, readable
from batchd.data.storage.reader import BytesReader, Extent, RemoteBytes
from batchd_wire.views import Array

_PACKAGE = "tensorflow"
_MESSAGES = {
    "BytesList": ["repeated bytes value"],
    "FloatList": ["repeated float value"],
    "Int64List": ["repeated int64 value"],
    "Feature": ["oneof BytesList bytes_list", "oneof FloatList float_list", "oneof Int64List int64_list"],
    "Features": ["map Feature feature"],
    "FeatureList": ["repeated Feature feature"],
    "FeatureLists": ["map FeatureList feature_list"],
    "Example": ["optional Features features"],
    "SequenceExample": ["optional Features context", "optional FeatureLists feature_lists"],
}
"""The fields of each message, numbered from 1. A map is from strings."""
_SCALARS = {
    "bytes": FieldDescriptorProto.TYPE_BYTES,
    "float": FieldDescriptorProto.TYPE_FLOAT,
    "int64": FieldDescriptorProto.TYPE_INT64,
    "string": FieldDescriptorProto.TYPE_STRING,
}


def _described_messages() -> FileDescriptorProto:
    file = FileDescriptorProto(name="batchd/example.proto", package=_PACKAGE, syntax="proto3")
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for number, text in enumerate(fields, start=1):
            _add_field(message, number, *text.split())
    return file


def _add_field(message: DescriptorProto, number: int, rule: str, kind: str, name: str) -> None:
    if rule == "map":  # in a descriptor, a list of entries
        entry = message.nested_type.add(name=name.title().replace("_", "") + "Entry")
        entry.options.map_entry = True
        _add_field(entry, 1, "optional", "string", "key")
        _add_field(entry, 2, "optional", kind, "value")
        rule, kind = "repeated", f"{message.name}.{entry.name}"
    is_repeated = rule == "repeated"
    label = FieldDescriptorProto.LABEL_REPEATED if is_repeated else FieldDescriptorProto.LABEL_OPTIONAL
    field = message.field.add(name=name, number=number, label=label)
    if kind in _SCALARS:
        field.type = _SCALARS[kind]
    else:
        field.type, field.type_name = FieldDescriptorProto.TYPE_MESSAGE, f".{_PACKAGE}.{kind}"
    if rule == "oneof":
        field.oneof_index = 0
        if number == 1:
            message.oneof_decl.add(name="kind")


_POOL = DescriptorPool()
_POOL.Add(_described_messages())
Example: Any = GetMessageClass(_POOL.FindMessageTypeByName(f"{_PACKAGE}.Example"))
"""``tf.train.Example``."""
SequenceExample: Any = GetMessageClass(_POOL.FindMessageTypeByName(f"{_PACKAGE}.SequenceExample"))
"""``tf.train.SequenceExample``."""


Feature: TypeAlias = Any
"""A ``tf.train.Feature``: protobuf makes its classes at run time."""
_FLOATS = frozenset({"float16", "float32", "float64"})


class FeatureMisfits(ValueError):  # noqa: N818  names what is wrong
    """A feature is not what its field declares; the text says what it is."""


def value_of(column: Column, feature: Feature) -> Value:
    """The value of a column that is one ``Feature``. Raises ``FeatureMisfits``."""
    if column.kind == "array":
        return _shaped(_flat(column.dtype, feature), column.shape)
    if column.kind in ("texts", "images"):
        kind = feature.WhichOneof("kind")
        # an empty one has no kind
        if kind != "bytes_list" and (kind is None or getattr(feature, kind).value):
            raise FeatureMisfits(_described(feature))
        values = list(feature.bytes_list.value)
        return images_from(column, values) if column.kind == "images" else nested(column, list(map(_text, values)))
    data = _only_bytes(feature)
    if column.is_file or column.kind == "bytes":
        if not data and column.is_file:
            raise FeatureMisfits("is empty")
        return memoryview(data)
    return _text(data) if column.kind == "text" else in_json(column, _text(data))


def _text(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise FeatureMisfits(f"is not UTF-8 at its byte {error.start}") from None


def value_of_steps(column: Column, steps: Sequence[Feature]) -> Value:
    """A column from a ``FeatureList``: one row for each step. Raises ``FeatureMisfits``."""
    if column.kind != "array" or column.shape[:1] not in ((None,), (len(steps),)):
        raise FeatureMisfits(f"is a feature list of {len(steps)}")
    rows = []
    for number, step in enumerate(steps):
        try:
            rows.append(_shaped(_flat(column.dtype, step), column.shape[1:]))
        except FeatureMisfits as misfit:
            raise FeatureMisfits(f"in step {number} {misfit}") from None
        if rows[-1].shape != rows[0].shape:
            raise FeatureMisfits(f"in step {number} has {rows[-1].size} values, and {rows[0].size} in step 0")
    if not rows:
        return np.zeros([length or 0 for length in column.shape], column.dtype)
    return np.stack(rows)


def _flat(dtype: str, feature: Feature) -> Array:
    kind = feature.WhichOneof("kind")
    if kind == "int64_list" and dtype not in _FLOATS:
        whole = np.asarray(feature.int64_list.value, np.int64)
        if dtype != "int64" and whole.size:
            low, high = (0, 1) if dtype == "bool" else (int(np.iinfo(dtype).min), int(np.iinfo(dtype).max))
            for value in (int(whole.min()), int(whole.max())):
                if not low <= value <= high:
                    raise FeatureMisfits(f"has {value} in it")
        return whole.astype(dtype, copy=False)
    if kind == "float_list" and dtype in _FLOATS:
        floats = np.asarray(feature.float_list.value, np.float32)
        with np.errstate(over="ignore"):
            converted = floats.astype(dtype, copy=False)
        if dtype == "float16" and (lost := np.isinf(converted) & ~np.isinf(floats)).any():
            raise FeatureMisfits(f"has {floats[lost][0]:g} in it")
        return converted
    if kind == "bytes_list" and dtype == "uint8":
        return np.frombuffer(_only_bytes(feature), np.uint8)
    raise FeatureMisfits(_described(feature))


def _shaped(values: Array, shape: tuple[int | None, ...]) -> Array:
    """Values in a shape in which at most one length is unknown. Raises ``FeatureMisfits``."""
    known = prod(length for length in shape if length is not None)
    rest = values.size % known if None in shape else values.size - known
    if rest:
        raise FeatureMisfits(f"has {values.size} values")
    return values.reshape([values.size // known if length is None else length for length in shape])


def _only_bytes(feature: Feature) -> bytes:
    if feature.WhichOneof("kind") != "bytes_list" or len(feature.bytes_list.value) != 1:
        raise FeatureMisfits(_described(feature))
    data: bytes = feature.bytes_list.value[0]
    return data


def _described(feature: Feature) -> str:
    kind = feature.WhichOneof("kind")
    return f"is of kind {kind}, {len(getattr(feature, kind).value)} long" if kind else "is of no kind"


class _Record(NamedTuple):
    """The place of a sample."""

    shard: int
    number: int
    start: int
    size: int


class TFRecordReader(PlainReader):
    """Reads any record with one ``pread``; an example is a ``SequenceExample`` without lists."""

    def __init__(self, source: TFRecordSource, index: SourceIndex, max_bytes: int, storage: Storage) -> None:
        self._index = index
        self._max_bytes = max_bytes
        self._parts = parts_of(source)
        self._sequence = source.sequence
        self._firsts: list[int] = index.arrays["firsts"].tolist()
        self._sizes: NDArray[np.int64] = index.arrays["sizes"]
        self._starts: NDArray[np.int64] = index.arrays["starts"]
        self._checksums: NDArray[np.uint32] = index.arrays["checksums"]
        root = os.fsencode(index.place["root"])
        self._files = [os.path.join(root, name) for name in index.names("shards")]  # noqa: PTH118  bytes
        if not len(self._starts) == len(self._checksums) == len(index) or not (
            len(self._firsts) - 1 == len(self._sizes) == len(self._files)
        ):
            raise IndexMalformed(f"{len(self._starts)} records of {len(index)}, in {len(self._files)} files")
        self._bytes = BytesReader(RemoteBytes(storage, root, index.place), max_bytes)
        self.close = self._bytes.close

    def read(self, sample: int) -> Mapping[str, Value]:
        """See ``interface.Reader``."""
        record = self._record(sample)
        try:  # no code keeps the data: values are made in its memory, which is in the CPU caches
            example = SequenceExample.FromString(self._data(record, int(self._checksums[sample])))
        except DecodeError:
            message = "SequenceExample" if self._sequence else "Example"
            raise SampleUnreadable(f"is not a tf.train.{message}") from None
        return {part.column.name: self._value(part, example) for part in self._parts}

    def prefetch(self, samples: Sequence[int]) -> None:
        """Ask servers for all these records at once."""
        records = map(self._record, samples)
        self._bytes.prefetch(Extent(self._files[one.shard], one.start + HEADER.size, one.size) for one in records)

    def name(self, sample: int) -> str:
        """See ``interface.Reader``."""
        record = self._record(sample)
        return f"{readable(self._files[record.shard])}: record {record.number} (byte {record.start})"

    def _record(self, sample: int) -> _Record:
        sample = self._index.checked(sample)
        shard = bisect_right(self._firsts, sample) - 1
        start = int(self._starts[sample])
        is_last = sample + 1 == self._firsts[shard + 1]
        end = int(self._sizes[shard] if is_last else self._starts[sample + 1])
        return _Record(shard, sample - self._firsts[shard], start, end - start - HEADER.size - FOOTER.size)

    def _data(self, record: _Record, checksum: int) -> bytes:
        check_bytes(record.size, self._max_bytes)
        first = record.start + HEADER.size
        file = self._files[record.shard]
        data = self._bytes.read_up_to(file, first, record.size)
        if len(data) < record.size:
            raise SampleUnreadable(f"is cut: the file ends at byte {self._bytes.end_of(file, first + len(data))}")
        if masked_crc(data) != checksum:
            footer = self._bytes.read_up_to(file, first + record.size, FOOTER.size)
            raise SampleUnreadable(
                "has changed since the source was scanned"
                if footer != FOOTER.pack(checksum)
                else "does not match its checksum: its data is damaged"
            )
        return data

    def _value(self, part: FeatureField, example: Any) -> Value:
        try:
            return self._found(part, example.context.feature, example.feature_lists.feature_list)
        except FeatureMisfits as misfit:
            raise SampleUnreadable(f"{part.feature!r} is declared as {part.column.text}, and {misfit}") from None

    def _found(self, part: FeatureField, features: Mapping[str, Feature], lists: Mapping[str, Feature]) -> Value:
        """The value of a field. With both of one name, a length of ? means the feature list."""
        name, column = part.feature, part.column
        # as TensorFlow sees it
        is_feature = name in features and features[name].WhichOneof("kind") is not None
        if self._sequence and name in lists and not (is_feature and column.shape[:1] != (None,)):
            return value_of_steps(column, lists[name].feature)
        if is_feature:
            return value_of(column, features[name])
        if part.default is not None:
            return part.default
        if name in features:
            raise FeatureMisfits("is of no kind")
        if name in lists:
            raise FeatureMisfits("is a feature list: set sequence = true")
        raise FeatureMisfits(f"is missing; there are {', '.join(map(repr, sorted([*features, *lists]))) or 'none'}")


READERS = {TFRecordSource: TFRecordReader}
