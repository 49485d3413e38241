"""Sources in key-value databases. Daemon, workers and CLI; standard library only."""

from dataclasses import field
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from batchd.data.samples.checks import Checks, Example
from batchd.data.samples.columns import Column, check_declared, check_names
from batchd.data.samples.location import check_path
from batchd.data.sources.options import DeclaredOptions
from batchd_wire.record import options

FIELD_MARK, SAMPLE_MARK = "{field}", "*"
"""Placeholders in ``key``: for the name of a field, and for the part that identifies a sample."""

NO_URL = "the library maps the file into memory; copy the database to this machine"


@options
class LmdbSource(DeclaredOptions):
    """The records of an LMDB database, in the order of their keys.

    Do not write to it while it is served.
    """

    requires: ClassVar[tuple[str, ...]] = ("lmdb",)
    extra: ClassVar[str] = "lmdb"
    endings: ClassVar[tuple[str, ...]] = (".mdb", ".lmdb")

    type: Literal["lmdb"] = "lmdb"
    """Kind of source."""

    path: Annotated[Path, Example("/data/photos.lmdb")]
    """The database: the folder of a `data.mdb`, or the file itself."""

    fields: Annotated[dict[str, str], Example({"image": "image"})]
    """The fields of a sample, such as { image = "image", label = "text" }: "image" is the bytes of
    an image file, "text" is UTF-8, "float32" is a number, "int32[?]" and "uint8[28,28]" are
    several."""

    names: dict[str, str] = field(default_factory=dict)
    """The names of fields in the keys, or in the maps of the records, if they differ, such as {
    image = "img" }."""

    key: str = SAMPLE_MARK
    """Pattern of the keys of samples: `*` is the part that differs between samples. With
    `{field}` in it, each field of a sample has a record of its own, so "{field}-*" takes
    `image-0001` and `label-0001` as one sample. Other keys are skipped."""

    format: Literal["bytes", "text", "msgpack"] = "bytes"
    """Content of a record: "bytes", one field, whose numbers are little-endian; "text", the
    same, but a number is written in digits; "msgpack", a map of all fields."""

    def _check(self, checks: Checks) -> None:
        with checks.at("path"):
            check_path("path", self.path, NO_URL)
        no_lists = {"images": 'a record is one image; lists of them are in records of format = "msgpack"'}
        columns = check_declared(checks, self.fields, lacks={} if self.format == "msgpack" else no_lists)
        check_names(checks, self.fields, self.names)
        with checks.at():
            self._check_records(columns)

    def _check_records(self, columns: tuple[Column, ...]) -> None:
        if self.key.count(SAMPLE_MARK) != 1 or self.key.count(FIELD_MARK) > 1:
            raise ValueError('key must have one * in it, and {field} at most once, as in "{field}-*"')
        if self.format == "msgpack" and FIELD_MARK in self.key:
            raise ValueError('format = "msgpack" has all fields in one record, so key must not have {field} in it')
        if self.format != "msgpack" and FIELD_MARK not in self.key and len(self.fields) > 1:
            raise ValueError(
                'a record is one field; write key = "{field}-*" for one record for each, or format = "msgpack"'
            )
        lists = [column.name for column in columns if column.kind == "array" and column.shape]
        if self.format == "text" and lists:
            raise ValueError(f'format = "text" has no lists of numbers, and fields.{lists[0]} is one')

    def key_of(self, field: str) -> tuple[bytes, bytes]:
        """The parts of a field's key before and behind the part that identifies a sample."""
        parts = self.key.partition(SAMPLE_MARK)
        before, _, behind = (part.replace(FIELD_MARK, self.name_of(field)) for part in parts)
        return before.encode(), behind.encode()
