"""Sources that pyarrow reads. Daemon, workers and CLI; standard library only."""

from dataclasses import field
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from batchd.data.samples.checks import Checks, Example
from batchd.data.samples.columns import Default, check_declared, check_defaults, check_names
from batchd.data.sources.options import ShardOptions
from batchd_wire.record import options


@options
class ParquetSource(ShardOptions):
    """The rows of Parquet files, or of Arrow files, as `save_to_disk` of `datasets` writes them."""

    requires: ClassVar[tuple[str, ...]] = ("pyarrow",)
    extra: ClassVar[str] = "arrow"
    endings: ClassVar[tuple[str, ...]] = (".parquet", ".arrow")

    type: Literal["parquet"] = "parquet"
    """Kind of source."""

    root: Annotated[Path, Example("/data")]
    """The folder of the files. Images that a file names by their paths are relative to it."""

    shards: Annotated[tuple[str, ...], Example(["train-*.parquet"])]
    """Paths of the files below the root, or patterns such as ["train-*.parquet"]. Each file that
    is named must exist."""

    fields: Annotated[dict[str, str], Example({"image": "image", "label": "int64"})]
    """The columns to read, with their types, such as { image = "image", label = "int64" }: "image"
    is the bytes of an image file, or an image as Hugging Face stores it; "text" is a string;
    "float32" is a number; "int32[?]" and "float32[128]" are lists of numbers, or binary values that
    hold them; "text[<=8]" and "image[<=8]" are lists of up to eight strings or images; "json" is
    any nested value, such as a list of messages, or a string that has JSON; "bytes" is binary, or a
    file as Hugging Face stores sound."""

    names: dict[str, str] = field(default_factory=dict)
    """The columns of fields with other names, such as { label = "class_id" }, or paths of keys into
    structs and lists, such as { stars = "meta.stars", first = "ids.0", count = "ids.#" }. Several
    columns of numbers are one field of a shape, such as { x = "pixel{0..783}" } for x =
    "float32[28,28]"."""

    defaults: dict[str, Default] = field(default_factory=dict)
    """The value of a field that is null in a row: a number for each element, a list of all
    elements, [] for none if the length may differ, a text or a list of them, such as { label = -1,
    ids = [], caption = "" }. Without a default it is a bad sample, and where a number is missing,
    the source is refused."""

    cache_bytes: int = 128 << 20
    """How many bytes of decoded row groups each worker keeps. Only values that cannot be read one
    by one need row groups; a row group that is larger than this is refused."""

    allow_outside_root: bool = False
    """Whether links may lead out of the root, and files may name images outside of it, by
    absolute paths, `..` or links."""

    def _check(self, checks: Checks) -> None:
        self.check_shards(checks, "root")
        columns = check_declared(checks, self.fields)
        check_names(checks, self.fields, self.names, defaults=self.defaults)
        check_defaults(checks, columns, self.defaults)
        self.check_joined(checks)
        for column in columns:
            if column.name in self.defaults and len(self.names_of(column)) > 1:
                text = f"defaults: {column.name} is made of several columns, and nothing stands for one of them"
                checks.say(text, "defaults", column.name)
        if self.cache_bytes < 1:
            checks.say(f"cache_bytes must be 1 or more, not {self.cache_bytes}", "cache_bytes")
