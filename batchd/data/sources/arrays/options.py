"""Sources of rows of arrays in files. Daemon, workers and CLI; standard library only."""

from dataclasses import field as option
from math import prod
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from batchd.data.samples.checks import Checks, Example
from batchd.data.samples.columns import Column, check_field_names, check_types, parse_column
from batchd.data.samples.location import check_path
from batchd.data.sources.options import FilesOptions, SourceOptions
from batchd_wire.fields import ITEM_BYTES
from batchd_wire.record import options


@options
class NpySource(SourceOptions):
    """Arrays in numpy's .npy files, whose first dimension counts the samples.

    They are never loaded whole.
    """

    endings: ClassVar[tuple[str, ...]] = (".npy",)

    type: Literal["npy"] = "npy"
    """Kind of source."""

    path: Annotated[Path | None, Example("/data/images.npy")] = None
    """The file, if it is one."""

    field: str = "image"
    """Name of the array of `path` in a batch."""

    root: Path | None = None
    """The folder of the files, where they are several."""

    arrays: dict[str, str] = option(default_factory=dict)
    """The fields, and the file below the root that each comes from, such as { image = "x.npy",
    label = "y.npy" }. All have as many samples."""

    def __post_init__(self) -> None:
        self.settle_paths()
        if (self.path is None) == (not self.arrays) or (self.root is None) != (not self.arrays):
            raise ValueError("set either path, or root and arrays")
        if self.arrays and self.field != "image":
            raise ValueError("field counts only with path; the keys of arrays are the names of its fields")
        check_field_names(self.field, *self.arrays)
        for name, text in self.arrays.items():
            check_path(f"arrays: {name}", Path(text))
            if Path(text).is_absolute() or ".." in Path(text).parts:
                raise ValueError(f"arrays: {name} = {text!r} leads out of the root")

    def paths(self) -> dict[str, Path]:
        """The file of each field."""
        if self.path is not None:
            return {self.field: self.path}
        assert self.root is not None, "there are arrays"
        return {name: self.root / text for name, text in self.arrays.items()}

    @property
    def place(self) -> str:
        """The place of the samples, for messages."""
        return str(self.path) if self.path else f"{self.root}: {' '.join(self.arrays.values())}"


@options
class NpzSource(SourceOptions):
    """Arrays in one of numpy's .npz files, as `numpy.savez` writes them.

    They are never loaded whole.
    """

    endings: ClassVar[tuple[str, ...]] = (".npz",)

    type: Literal["npz"] = "npz"
    """Kind of source."""

    path: Annotated[Path, Example("/data/mnist.npz")]
    """The file."""

    arrays: dict[str, str] = option(default_factory=dict)
    """The fields, and the array that each comes from, such as { image = "x_train", label =
    "y_train" }; when not set, every array is a field of the same name. All have as many samples."""

    def __post_init__(self) -> None:
        self.settle_paths()
        check_field_names(*self.arrays)


@options
class RawSource(FilesOptions):
    """Files of records that are all alike: the bytes of numbers, one after the other."""

    type: Literal["raw"] = "raw"
    """Kind of source."""

    path: Annotated[Path | None, Example("/data/data_batch_1.bin")] = None
    """The file, if it is one."""

    root: Path | None = None
    """The folder of the files, where they are several."""

    files: tuple[str, ...] = ()
    """The paths of the files below the root, or patterns of them, such as
    ["data_batch_{1..5}.bin"]."""

    allow_outside_root: bool = False
    """Whether links may lead out of the root."""

    record: Annotated[dict[str, str], Example({"label": "uint8", "image": "uint8[3,32,32]"})]
    """The fields of a record with their types, in the order of their bytes, such as { label =
    "uint8", image = "uint8[3,32,32]" }."""

    offset: int = 0
    """Bytes before the first record in each file, such as 16 in the images of MNIST."""

    byte_order: Literal["little", "big"] = "little"
    """Whether the "little" or the "big" end of a number is its first byte in the file."""

    def _check(self, checks: Checks) -> None:
        with checks.at():
            self.settle_paths()
            self.check_files()
        if not self.record:
            checks.say('record must name a field, as in { image = "uint8[28,28]" }', "record")
        for column in check_types(checks, "record", self.record):
            if not column.is_fixed:
                text = f"{column.name}: {column.text} has no fixed number of bytes, which all of a record need"
                checks.say(text, "record", column.name)
        if self.offset < 0:
            checks.say(f"offset must not be negative: {self.offset}", "offset")

    @property
    def columns(self) -> tuple[Column, ...]:
        """The fields of a record, in their order."""
        return tuple(parse_column(name, text) for name, text in self.record.items())

    @property
    def record_bytes(self) -> int:
        """The length of a record."""
        return sum(ITEM_BYTES[column.dtype] * prod(column.fixed_shape) for column in self.columns)
