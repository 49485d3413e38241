"""Sources of pushed samples. Daemon, workers and CLI; standard library only."""

from typing import Annotated, ClassVar, Literal

from batchd.data.samples.checks import Checks, Example
from batchd.data.samples.columns import Column, check_types
from batchd.data.sources.options import DeclaredOptions
from batchd.runtime.sizes import parse_bytes
from batchd_wire.fields import FIELDS_MAX
from batchd_wire.mailbox import MAILBOX_BYTES_MAX, MailColumn, PlaceLayout
from batchd_wire.record import options

CAPACITY_MAX = 1 << 20


@options
class PushSource(DeclaredOptions):
    """Live data: programs on the daemon's host push samples with `batchd_client.push`.

    Examples are cameras, sensors and simulators.
    """

    is_live: ClassVar[bool] = True

    type: Literal["push"] = "push"
    """Kind of source."""

    fields: Annotated[dict[str, str], Example({"image": "uint8[32,32,3]", "label": "int64"})]
    """The fields of a sample, each with a type such as "float32", "uint8[480,640,3]", "int32[?]"
    for a length that differs from sample to sample, "image" for the bytes of an image file, or
    "text"."""

    capacity: int = 256
    """Maximum number of waiting samples: at least one batch; with less than two, no batch is read
    ahead."""

    sample_bytes_max: str = "4MiB"
    """Maximum size of the parts of one sample without a fixed size: "image", "text" and fields with
    a length "?". Each of the `capacity` places has so much memory. Used only with such a field."""

    when_full: Literal["block", "drop_oldest", "drop_newest"] = "block"
    """Treatment of a new sample if no place is free: "block" makes its producer wait,
    "drop_oldest" drops the oldest waiting sample, "drop_newest" drops the new one. Dropped samples
    are counted."""

    def _check(self, checks: Checks) -> None:
        with checks.at("fields"):
            if not 1 <= len(self.fields) <= FIELDS_MAX:
                raise ValueError(f"fields must name 1 to {FIELDS_MAX} fields, not {len(self.fields)}")
            none = "producers push no such values; push a text, or numbers"
            kinds = ("json", "bytes", "texts", "images", "video", "audio")
            check_types(checks, "fields", self.fields, dict.fromkeys(kinds, none))
        if not 1 <= self.capacity <= CAPACITY_MAX:
            checks.say(f"capacity must be from 1 to {CAPACITY_MAX}, not {self.capacity}", "capacity")
        with checks.at("sample_bytes_max"):
            if not 1 <= parse_bytes(self.sample_bytes_max) <= MAILBOX_BYTES_MAX:
                raise ValueError(f"sample_bytes_max must be from 1 byte to 1TiB, not {self.sample_bytes_max}")
        if not checks.found and self.mailbox_bytes > MAILBOX_BYTES_MAX:
            checks.say(f"{self.capacity} places of {self.layout.place_bytes} bytes are more than 1TiB")

    @property
    def unread(self) -> str:
        """See ``SourceOptions``."""
        return "the samples that producers push"

    @property
    def place(self) -> str:
        """The place of the samples, for messages."""
        return f"into {self.capacity} places"

    @property
    def layout(self) -> PlaceLayout:
        """The layout of a sample in its place."""
        return PlaceLayout(tuple(_mail_column(column) for column in self.columns), parse_bytes(self.sample_bytes_max))

    @property
    def mailbox_bytes(self) -> int:
        """The memory of all places."""
        return self.capacity * self.layout.place_bytes


def _mail_column(column: Column) -> MailColumn:
    if column.kind == "array":
        return MailColumn(column.name, column.dtype, column.shape)
    return MailColumn(column.name, {"encoded": "image", "text": "text"}[column.kind], (None,))
