"""Sources of images with objects in one JSON. Daemon, workers and CLI; standard library only."""

from pathlib import Path
from types import MappingProxyType
from typing import Annotated, ClassVar, Literal

from batchd.data.samples.checks import Checks, Example, Range
from batchd.data.samples.columns import Column, parse_column
from batchd.data.sources.options import SourceOptions, check_chosen
from batchd_wire.record import options

IMAGE, SEGMENTS, MASKS, KEYPOINTS, CAPTIONS = "image", "segments", "masks", "keypoints", "captions"
IMAGE_ID = "image_id"
NO_ID = -1
"""In the index, of an annotation that has no id."""
TYPES = MappingProxyType(
    {
        IMAGE: "image",
        "boxes": "float32[?,4]",
        "classes": "int64[?]",
        MASKS: "uint8[?,?,?]",
        KEYPOINTS: "float32[?,{keypoints},3]",
        SEGMENTS: "image",
        CAPTIONS: "text[<=8]",
        "crowd": "uint8[?]",
        "areas": "float32[?]",
        "ids": "int64[?]",
        IMAGE_ID: "int64",
    }
)
"""The fields that a sample may have."""


@options
class CocoSource(SourceOptions):
    """Images and the objects in them, in the form of COCO: one JSON, and the image files."""

    endings: ClassVar[tuple[str, ...]] = (".json",)
    outranks: ClassVar[bool] = True

    type: Literal["coco"] = "coco"
    """Kind of source."""

    path: Annotated[Path, Example("/data/coco/annotations/instances_train2017.json")]
    """The JSON, with lists "images", "annotations" and "categories"."""

    images: Annotated[Path, Example("/data/coco/train2017")]
    """The folder or URL that each "file_name" is relative to."""

    fields: Annotated[tuple[str, ...], Example(["image", "boxes", "classes"])] = (IMAGE, "boxes", "classes")
    """The fields of a sample: "image"; with a row for each object "boxes" (float32[?,4]: left, top,
    right, bottom), "classes" (int64), "masks" (uint8[?,height,width], of polygons and run lengths),
    "keypoints" (float32[?,17,3]: x, y, visibility), "crowd" (uint8), "areas" (float32) and "ids"
    (int64, of annotations); "segments", the PNG of a panoptic annotation, whose colours are the
    "ids" of its segments; "captions" (text[<=8]); and "image_id"."""

    segments: Path | None = None
    """The folder or URL of the PNGs of panoptic annotations, for the field "segments"."""

    class_numbers: Literal["order", "ids"] = "order"
    """What "classes" has: 0, 1, … in the order of the ids of categories, or these ids."""

    crowds: bool = False
    """Whether objects stay that stand for a crowd ("iscrowd"). The field "crowd" says which."""

    empty: bool = True
    """Whether images without an object stay."""

    keypoints: Annotated[int, Range(1, 1024)] = 17
    """How many points the "keypoints" of an object are."""

    allow_outside_root: bool = False
    """Whether images may be outside of their folder: absolute paths, paths with `..`, and links
    that lead out of it."""

    def _check(self, checks: Checks) -> None:
        with checks.at():
            self.settle_paths()
        check_chosen(checks, self.fields, TYPES)
        if (SEGMENTS in self.fields) != (self.segments is not None):
            checks.say('segments = "FOLDER" and the field "segments" belong together', "segments")

    @property
    def needs_objects(self) -> bool:
        """True if a field is of the annotations of an image."""
        return bool(set(self.fields) - {IMAGE, IMAGE_ID})

    @property
    def columns(self) -> tuple[Column, ...]:
        """The fields of a sample, in their order."""
        return tuple(parse_column(name, TYPES[name].format(keypoints=self.keypoints)) for name in self.fields)
