"""Records of TFRecord files become samples. Workers only.

Invariant: the data of a record is looked at only after its checksum was found to be the one that the index has.
"""

import os
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from batchd.config.columns import Column
from batchd.config.tfrecord_sources import TFRecordSource
from batchd.config.values import Value
from batchd.samples.errors import SampleUnreadable
from batchd.sources.conversion import default_value
from batchd.sources.example_messages import SequenceExample
from batchd.sources.features import FeatureMisfits, value_of, value_of_steps
from batchd.sources.tfrecord_frames import FOOTER, HEADER, masked_crc
from batchd.storage.access import Storage
from batchd.storage.index import IndexMalformed, SourceIndex, readable
from batchd.storage.reader import BytesReader
from batchd.storage.remote_reader import Extent, RemoteBytes


@dataclass(frozen=True, slots=True)
class FeatureField:
    """A field of a sample: the column, the feature that it is made of, and what stands for a missing one."""

    column: Column
    feature: str
    default: Value | None

    @property
    def fact(self) -> list[str | None]:
        """What decides bytes, however it was written."""
        default = self.default.tobytes().hex() if isinstance(self.default, np.ndarray) else self.default
        assert default is None or isinstance(default, str)
        return [self.column.text, self.feature, default]


def parts_of(source: TFRecordSource) -> tuple[FeatureField, ...]:
    """The fields of a source, in their order."""
    return tuple(
        FeatureField(
            column,
            source.names.get(column.name, column.name),
            default_value(column, source.defaults[column.name]) if column.name in source.defaults else None,
        )
        for column in source.columns
    )


class _Record(NamedTuple):
    """Where a sample is."""

    shard: int
    number: int
    start: int
    size: int


class TFRecordReader:
    """Reads any record with one ``pread``; see ``kinds.Reader``. Examples are read as ``SequenceExample`` without lists."""

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
        """See ``kinds.Reader``."""
        record = self._record(sample)
        try:  # nobody keeps the data: values are made in its memory, which is in the caches
            example = SequenceExample.FromString(self._data(record, int(self._checksums[sample])))
        except DecodeError:
            raise SampleUnreadable(f"is no tf.train.{self._message}") from None
        return {part.column.name: self._value(part, example) for part in self._parts}

    def prefetch(self, samples: Sequence[int]) -> None:
        """Ask servers for all these records at once."""
        records = map(self._record, samples)
        self._bytes.prefetch(Extent(self._files[one.shard], one.start + HEADER.size, one.size) for one in records)

    def known(self, sample: int) -> Mapping[str, Value]:
        """Nothing stands in the index but where the record is."""
        self._index.checked(sample)
        return {}

    def name(self, sample: int) -> str:
        """See ``kinds.Reader``."""
        record = self._record(sample)
        return f"{readable(self._files[record.shard])}: record {record.number} (byte {record.start})"

    @property
    def _message(self) -> str:
        return "SequenceExample" if self._sequence else "Example"

    def _record(self, sample: int) -> _Record:
        sample = self._index.checked(sample)
        shard = bisect_right(self._firsts, sample) - 1
        start = int(self._starts[sample])
        is_last = sample + 1 == self._firsts[shard + 1]
        end = int(self._sizes[shard] if is_last else self._starts[sample + 1])
        return _Record(shard, sample - self._firsts[shard], start, end - start - HEADER.size - FOOTER.size)

    def _data(self, record: _Record, checksum: int) -> bytes:
        """The data of a record, which is what it was when it was found."""
        if record.size > self._max_bytes:
            raise SampleUnreadable(f"has {record.size} bytes, more than max_bytes = {self._max_bytes}")
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

    def _found(self, part: FeatureField, features: Any, lists: Any) -> Value:
        """The value of a field. Where there are a feature and a feature list of the same name, a length of ? means the list."""
        name, column = part.feature, part.column
        is_feature = name in features and features[name].WhichOneof("kind") is not None  # as TensorFlow sees it
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
