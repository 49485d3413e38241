"""Sources whose samples are TensorFlow's examples. Daemon, workers and CLI; standard library only.

Invariant: in a source that exists, every default fits into its field.
"""

from dataclasses import field
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from batchd.data.samples.checks import Checks, Example
from batchd.data.samples.columns import Default, check_defaults, check_names, check_types
from batchd.data.sources.options import ShardOptions
from batchd_wire.record import options


@options
class TFRecordSource(ShardOptions):
    """TFRecord files; each record is a `tf.train.Example` or a `tf.train.SequenceExample`."""

    requires: ClassVar[tuple[str, ...]] = ("google_crc32c", "google.protobuf")
    extra: ClassVar[str] = "tfrecord"
    endings: ClassVar[tuple[str, ...]] = (".tfrecord", ".tfrecords", ".tfrec", "-00000-of-00001")

    type: Literal["tfrecord"] = "tfrecord"
    """Kind of source."""

    root: Annotated[Path, Example("/data")]
    """The folder of the files."""

    shards: Annotated[tuple[str, ...], Example(["train-*.tfrecord"])]
    """Paths of the files below the root, or patterns such as ["train-{00000..00015}-of-00016"]
    or ["train-*"]. Each file that is named must exist. The files must not be compressed."""

    allow_outside_root: bool = False
    """Whether links may lead out of the root."""

    fields: Annotated[dict[str, str], Example({"image": "image", "label": "int64"})]
    """The fields of a sample, with their types: "image" for the bytes of an image file, "text", a
    dtype such as "int64", with its shape ("float32[4]"), in which ? is a length that differs from
    sample to sample ("int64[?]")."""

    names: dict[str, str] = field(default_factory=dict)
    """The features of fields with other names, such as { image = "image/encoded", label =
    "image/class/label" }."""

    defaults: dict[str, Default] = field(default_factory=dict)
    """The value of a field whose feature is missing: a number for each element, a list of all
    elements, [] for none if the length may differ, or a text, such as { label = -1, ids = [],
    caption = "" }. Without a default it is a bad sample."""

    sequence: bool = False
    """Whether records are SequenceExamples, so that a field may be a feature list: "int64[?]" of
    one number in each step, "float32[?,8]" of eight."""

    def _check(self, checks: Checks) -> None:
        self.check_shards(checks)
        if not self.fields:
            text = 'fields must say what a sample consists of, as in fields = { image = "image", label = "int64" }'
            checks.say(text, "fields")
        check_names(checks, self.fields, self.names, defaults=self.defaults)
        columns = check_types(checks, "fields", self.fields)
        rows = [column for column in columns if column.shape.count(None) <= 1]
        for column in columns:
            if column not in rows:
                text = f'{column.name} = "{column.text}": one length may be ?, as a feature is a row of values'
                checks.say(text, "fields", column.name)
        check_defaults(checks, rows, self.defaults)
