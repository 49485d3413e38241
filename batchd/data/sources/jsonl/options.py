"""Sources of lines of JSON. Daemon, workers and CLI; standard library only.

Invariant: in a source that exists, every default fits into its field.
"""

from dataclasses import field
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from batchd.data.samples.checks import Checks, Example
from batchd.data.samples.columns import Column, Default, check_declared, check_defaults, check_names
from batchd.data.sources.options import ShardOptions
from batchd_wire.record import options


@options
class JsonlSource(ShardOptions):
    """JSON Lines, in UTF-8: each line is a JSON object, which is one sample."""

    endings: ClassVar[tuple[str, ...]] = (".jsonl", ".ndjson")

    type: Literal["jsonl"] = "jsonl"
    """Kind of source."""

    root: Annotated[Path, Example("/data")]
    """The folder of the files."""

    shards: Annotated[tuple[str, ...], Example(["train-*.jsonl"])]
    """Paths of the files below the root, or patterns such as ["train-*.jsonl"]. Each file that is
    named must exist. The files must not be compressed."""

    allow_outside_root: bool = False
    """Whether images may be outside of their folder, and files outside of the root: absolute
    paths, paths with `..`, and links that lead out of it."""

    fields: Annotated[dict[str, str], Example({"text": "text"})]
    """The fields of a sample, with their types: "text" for a string, a dtype such as "int64", with
    its shape ("float32[4]"), in which ? is a length that differs from sample to sample, "image",
    "video" or "audio" for a string that is the path or URL of such a file, "text[<=8]" for a list
    of up to eight strings, "image[<=8]" for one of up to eight paths of images, or a path alone,
    and "json" for any value, such as a list of messages."""

    names: dict[str, str] = field(default_factory=dict)
    """The keys of fields with other names, such as { label = "meta.label", second = "images.1" }.
    Behind a dot is a key of the object, the number of an element of the list, or # for the length
    of the list. Several keys of numbers are one field of a shape: { x = "pixel{0..783}" }."""

    defaults: dict[str, Default] = field(default_factory=dict)
    """The value of a field whose key is missing or null: a number for each element, a list of all
    elements, [] for none if the length may differ, a text or a list of them, or the path of an
    image, such as { label = -1, ids = [], caption = "", second = "blank.png" }. Without a default
    it is a bad sample."""

    image_root: Path | None = None
    """The folder or URL that the paths of images are relative to; when not set, the folder of the
    file that names them."""

    def _check(self, checks: Checks) -> None:
        self.check_shards(checks)
        check_names(checks, self.fields, self.names, defaults=self.defaults)
        lacks = {"bytes": "JSON has no bytes; it has text, and json"}
        columns = check_declared(checks, self.fields, with_shapes=True, lacks=lacks)
        check_defaults(checks, [column for column in columns if not column.is_file], self.defaults)
        for column in columns:
            default = self.defaults.get(column.name)
            if column.is_file and default is not None and (not isinstance(default, str) or not default):
                what = {"encoded": "an image", "video": "a video"}.get(column.kind, "a sound")
                text = f"defaults: {column.name} is {what}, so its default is the path of {what} file"
                checks.say(text, "defaults", column.name)
        self.check_joined(checks)

    @property
    def images(self) -> tuple[Column, ...]:
        """The fields that are images."""
        return tuple(column for column in self.columns if column.is_file or column.kind == "images")
