"""The steps that give samples of different shapes a place in a batch, as plain data.

Daemon, workers and CLI; standard library only.
"""

from math import prod
from typing import Annotated, ClassVar, Literal, TypeAlias

from batchd.data.pipeline.options import FieldStep, StepOptions
from batchd.data.samples.checks import Example, Range
from batchd.data.samples.columns import LENGTH_MAX
from batchd_wire.fields import DIMENSIONS_MAX, SIZE_MAX, Field, Varying, sizes_field
from batchd_wire.record import options

FILL_MAX = 1 << 53
PATCH_SIZE_MAX = 1024
WINDOW = 4096
DOCUMENTS_MAX = 1 << 16
ELEMENTS_OF_A_DOCUMENT = 16
"""Of a pack with as many documents as it may have by default."""

MaxShape: TypeAlias = tuple[Annotated[int, Range(1, SIZE_MAX)], ...]


@options
class RoomStep(FieldStep):
    """Base of the steps that give each sample of a field room for the largest."""

    is_cacheable: ClassVar[bool] = False
    op: str
    field: str = "image"
    max_shape: Annotated[MaxShape, Example([512, 512, 3])]
    """The largest shape of a sample, one length for each dimension; those that do not vary stay as
    they are. A batch takes memory for batch_size of these, or for the budget of its buckets."""
    too_large: Literal["bad", "crop"] = "bad"
    """The treatment of a larger sample: a bad sample, or cut at its ends in the dimensions that are
    too long."""

    def __post_init__(self) -> None:
        shape = self.max_shape
        if not 0 < len(shape) <= DIMENSIONS_MAX or prod(shape) > LENGTH_MAX:
            raise ValueError(
                f"max_shape = {list(shape)}: it has 1 to {DIMENSIONS_MAX} lengths, {LENGTH_MAX} elements together at most"
            )

    @property
    def touches(self) -> frozenset[str]:
        """Its field, and those that have the sizes, of one dimension that varies or of several."""
        made = [sizes_field(Field(self.field, "uint8", (1, 1), Varying("padded", axes))) for axes in ((0,), (0, 1))]
        return frozenset({self.field, *(sizes.name for sizes in made if sizes)})


@options
class PadBatch(RoomStep):
    """Give samples of different shapes room for the largest; ``fill`` is after a smaller sample.

    Trainers get the batch cut to its largest sample, and how large each is in a field FIELD_length,
    or FIELD_shape where several dimensions vary. The last step on its field.
    """

    op: Literal["pad_batch"] = "pad_batch"
    fill: Annotated[float, Range(-FILL_MAX, FILL_MAX)] = 0.0
    """The value in the room after a sample."""


@options
class Ragged(RoomStep):
    """Give samples of different shapes room for the largest, with contiguous values.

    Trainers get a list of arrays, each in its own shape, or all values with the row offsets, and
    how large each sample is in a field FIELD_length, or FIELD_shape where several dimensions vary.
    The last step on its field.
    """

    op: Literal["ragged"] = "ragged"


@options
class Patches(FieldStep):
    """Cut an image of any size into square patches, row by row.

    They are numbers [patches, size * size * channels]. ``FIELD_grid`` has how many rows and columns
    of them there are. What is left at the right and at the bottom, less than a patch, is cut off. A
    patch has its pixels row by row. With ``pack``, a batch has as many images as a budget of
    patches holds.
    """

    is_cacheable: ClassVar[bool] = False
    op: Literal["patches"] = "patches"
    field: str = "image"
    size: Annotated[int, Range(1, PATCH_SIZE_MAX), Example(14)]
    """Height and width of a patch, in pixels; 1 makes a list of the pixels."""

    @property
    def grid(self) -> str:
        """The field that has the rows and columns of patches."""
        return f"{self.field}_grid"

    @property
    def touches(self) -> frozenset[str]:
        """The image, and its grid."""
        return frozenset({self.field, self.grid})


MERGE_MAX = 64


@options
class Interleave(FieldStep):
    """Put the patches of images between the tokens of their text.

    Each ``image_token`` stands for the next image of the list, and becomes as many as its patches
    make: one for each ``merge`` x ``merge`` of them. The images become their patches, one image
    after the other, uint8 [patches, size * size * channels], each with its pixels row by row.
    ``IMAGES_positions``, int32 [patches, 2], has the row and the column of each in its image, and
    ``IMAGES_segments``, int32 [patches], the number of the image, from 1. Patches that become one
    token follow each other. What is left of an image at the right and at the bottom is cut off. A
    text with another number of places than images is a bad sample.
    """

    is_cacheable: ClassVar[bool] = False
    op: Literal["interleave"] = "interleave"
    field: str = "tokens"
    """The tokens, int32[?]."""
    images: str = "images"
    """The images: a list, in any sizes, or one image."""
    image_token: Annotated[int, Range(0, (1 << 31) - 1), Example(151655)]
    """The number of the token that stands for an image."""
    size: Annotated[int, Range(1, PATCH_SIZE_MAX), Example(14)]
    """Height and width of a patch, in pixels."""
    also: Annotated[tuple[str, ...], Example(["loss_mask"])] = ()
    """Fields with a number for each token; they get 0 at images."""
    merge: Annotated[int, Range(1, MERGE_MAX)] = 1
    """So many rows and columns of patches make one token: 2 for Qwen2-VL, 1 for LLaVA."""

    @property
    def positions(self) -> str:
        """The field that has the row and column of each patch."""
        return f"{self.images}_positions"

    @property
    def segments(self) -> str:
        """The field that has the number of the image of each patch."""
        return f"{self.images}_segments"

    @property
    def touches(self) -> frozenset[str]:
        """The tokens and those beside them, the images, and the fields of their patches."""
        return frozenset({self.field, *self.also, self.images, self.positions, self.segments})


@options
class Pack(StepOptions):
    """Fill each row of a batch with several samples, whole documents one after the other.

    A batch has batch_size rows of ``length`` elements. Other fields whose first dimension varies
    are packed with this one, and have its length in every sample. Each field with one shape gets
    one value for each document, as ``index`` does (-1: there is no further one). ``segment_ids``
    has the number of the document at each element, from 1 (0: none), ``position_ids`` the place in
    it, and ``lengths`` the length of each document. All rows of an epoch are planned before the
    first batch: for that, each sample is made once. The last step.
    """

    is_cacheable: ClassVar[bool] = False
    later: ClassVar[frozenset[str]] = frozenset({"ids", "method", "patches"})
    op: Literal["pack"] = "pack"
    field: Annotated[str, Example("tokens")]
    """The field that is packed: one dimension varies, the first."""
    length: Annotated[int, Range(1, SIZE_MAX), Example(4096)]
    """Elements of a row, for example tokens."""
    too_long: Literal["split", "crop", "drop"] = "split"
    """The treatment of a sample of more than ``length`` elements: cut into parts, each a document
    of its own; only its first ``length`` elements; or left out."""
    documents: Annotated[Annotated[int, Range(1, DOCUMENTS_MAX)] | None, Example(64)] = None
    """The most documents in a row. When not set, one for each 16 elements, at least 1."""
    window: Annotated[int, Range(1, 1 << 24)] = WINDOW
    """The number of samples among which those of a row are chosen. A larger window leaves less room
    empty; about half a percent with 1,000, a tenth of that with 16,000."""
    fill: Annotated[float, Range(-FILL_MAX, FILL_MAX)] = 0.0
    """The value in the room after the last document."""
    ids: bool = True
    """Whether a row has ``segment_ids`` and ``position_ids``, 8 bytes for each element. Attention
    with ``cu_seqlens`` needs neither."""
    patches: Annotated[int, Range(1, SIZE_MAX)] | None = None
    """The most patches of images in a row, of "interleave". When not set, as many as the images of
    a row can have at most: length * merge * merge."""
    method: Literal["best-fit", "concat-split"] = "best-fit"
    """The way in which rows are filled. "best-fit": whole documents that fit; "concat-split": all
    documents as one sequence, cut every ``length`` elements, so no room is empty and a document
    may continue in another row."""

    def __post_init__(self) -> None:
        if self.method == "concat-split" and (self.too_long, self.window) != ("split", WINDOW):
            raise ValueError('too_long and window count only with method = "best-fit"')
        if not self.ids and self.documents_max >= self.length:
            raise ValueError(f"ids = false needs documents below length = {self.length}")

    @property
    def documents_max(self) -> int:
        """The most documents in a row."""
        documents = self.documents or min(DOCUMENTS_MAX, self.length // ELEMENTS_OF_A_DOCUMENT)
        return max(1, min(documents, self.length))


LAST_STEPS = (RoomStep, Pack)
"""The steps that give a sample its place in a batch: without a batch they have nothing to do."""
