"""Sources of files that belong together by their names. Daemon, workers and CLI.

Standard library only.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from batchd.data.samples.checks import Checks, Example, Range
from batchd.data.samples.columns import Column, check_declared, check_known, parse_column
from batchd.data.sources.options import DeclaredOptions, Patterns, SourceOptions, check_chosen
from batchd.data.storage.patterns import Pattern, resolve_braces
from batchd_wire.record import options

IMAGE_ENDINGS = "{jpg,jpeg,png,bmp,webp,JPG,JPEG,PNG}"
ANY = re.compile(r"\*\*/|\*")
"""What stands in each pattern for the same text: any folders, or any part of a name."""
_OTHERS = re.compile(r"[?\[]")
VOC_CLASSES = (
    *("aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow"),
    *("diningtable", "dog", "horse", "motorbike", "person", "pottedplant", "sheep", "sofa", "train", "tvmonitor"),
)


class PairedOptions(SourceOptions):
    """Base of these sources: files below ``root``, a pattern for each field."""

    __slots__ = ()
    root: Path
    allow_outside_root: bool
    may_miss: ClassVar[frozenset[str]] = frozenset()
    """Fields whose file an image may lack."""

    @property
    def patterns(self) -> Mapping[str, str]:
        """The pattern of each file of a sample, by field; the first one's files are the samples."""
        raise NotImplementedError

    @property
    def columns(self) -> tuple[Column, ...]:
        """The fields of a sample, in their order."""
        raise NotImplementedError

    @property
    def place(self) -> str:
        """See ``SourceOptions``."""
        return f"{self.root}: {next(iter(self.patterns.values()), '')}"

    def patterns_of(self, field: str) -> Patterns:
        """The pattern of a field, for a search."""
        return Patterns(self.root, [self.patterns[field]], f"files.{field}", self.allow_outside_root)


class ObjectsOptions(PairedOptions):
    """Base of those with a text or an XML of the objects of each image."""

    __slots__ = ()
    outranks: ClassVar[bool] = True
    types: ClassVar[Mapping[str, str]]
    """The fields that a sample may have."""
    fields: tuple[str, ...]
    names: tuple[str, ...]

    @property
    def columns(self) -> tuple[Column, ...]:
        """See ``PairedOptions``."""
        return tuple(parse_column(name, self.types[name]) for name in self.fields)


def labels_of(image: str) -> str:
    """The text with the objects of an image, or the pattern of those of a pattern."""
    *folders, name = image.split("/")
    if "images" in folders:
        last = len(folders) - 1 - folders[::-1].index("images")
        folders[last] = "labels"
    return "/".join([*folders, f"{name.rpartition('.')[0]}.txt"])


def check_pattern(text: str) -> int:
    """The number of its ``*`` and ``**``. Raises ``ValueError`` for one that pairs nothing."""
    counts = {len(ANY.findall(plain)) for plain in resolve_braces(text)}
    for plain in resolve_braces(text):
        Pattern(plain)
        if _OTHERS.search(plain):
            raise ValueError(f"{text!r}: files are paired by what * and ** stand for; ? and [] are not possible")
    if len(counts) > 1 or counts == {0}:
        raise ValueError(f"{text!r} needs a * that stands for what is the same in the names of a sample's files")
    return counts.pop()


@options
class PairsSource(DeclaredOptions, PairedOptions):
    """Files that belong together by their names, such as images and masks in two trees."""

    type: Literal["pairs"] = "pairs"
    """Kind of source."""

    root: Annotated[Path, Example("/data/cityscapes")]
    """The folder that all files are below."""

    fields: Annotated[dict[str, str] | None, Example({"image": "image", "mask": "image"})]
    """The fields of a sample, with their types: "image" for an image file, "text" for one in UTF-8,
    a dtype with its shape for a `.npy` file."""

    files: Annotated[dict[str, str], Example({"image": "images/*.jpg", "mask": "masks/*.png"})]
    """The pattern of the file of each field, such as { image = "images/**/*.jpg", mask =
    "masks/**/*_ids.png" }. What the first `*` or `**` stands for is the same in all of them, and
    so on; braces as in {jpg,png} stand for either."""

    allow_outside_root: bool = False
    """Whether links may lead out of the root."""

    @property
    def patterns(self) -> Mapping[str, str]:
        """See ``PairedOptions``."""
        return {name: self.files[name] for name in self.fields or {}}

    def _check(self, checks: Checks) -> None:
        with checks.at():
            self.settle_paths()
        why = "a source of files that belong together has images, texts and arrays; csv and jsonl name others"
        lacks = dict.fromkeys(("video", "audio"), why)
        check_declared(checks, self.fields or {}, with_shapes=True, lacks=lacks)
        check_known(checks, self.fields or {}, files=self.files)
        counts: dict[str, int] = {}
        for name in self.fields or {}:
            with checks.at("files", name):
                if name not in self.files:
                    raise ValueError(f"files has no pattern for the field {name}")
                counts[name] = check_pattern(self.files[name])
        if len(set(counts.values())) > 1:
            checks.say("its patterns need as many * and ** as each other, for what is the same in names", "files")


@options
class YoloSource(ObjectsOptions):
    """Images, and a text for each with a line of numbers for each object, as YOLO has them."""

    endings: ClassVar[tuple[str, ...]] = (".txt",)
    may_miss: ClassVar[frozenset[str]] = frozenset({"objects"})
    box_form: ClassVar[Mapping[str, object]] = {"form": "cxcywh", "relative": True}
    types: ClassVar[Mapping[str, str]] = {
        "image": "image",
        "boxes": "float32[?,4]",
        "classes": "int64[?]",
        "keypoints": "float32[?,{keypoints},3]",
    }

    type: Literal["yolo"] = "yolo"
    """Kind of source."""

    root: Annotated[Path, Example("/data/coco128")]
    """The folder around images and labels."""

    images: Annotated[str, Example("images/train2017/*.jpg")]
    """The pattern of the images. Their labels are the texts of the same names, in `labels` in the
    place of the last `images` of the pattern, or beside them if it has none. An image without a
    text has no objects."""

    fields: Annotated[tuple[str, ...], Example(["image", "boxes", "classes"])] = ("image", "boxes", "classes")
    """The fields of a sample: "image", and with a row for each object "boxes" (float32[?,4]: the
    middle, width and height as fractions of the image), "classes" (int64) and "keypoints"
    (float32[?,17,3]: x, y as fractions, visibility). A polygon becomes the box around it."""

    keypoints: Annotated[int, Range(0, 1024)] = 0
    """How many points follow the box of each object, of two numbers or of three; 0 where there are
    none."""

    names: tuple[str, ...] = ()
    """The names of the classes in the order of their numbers, if batchd shall show them; then a
    larger number is a bad sample."""

    allow_outside_root: bool = False
    """Whether links may lead out of the root."""

    @property
    def patterns(self) -> Mapping[str, str]:
        """See ``PairedOptions``."""
        return {"image": self.images, "objects": labels_of(self.images)}

    @property
    def columns(self) -> tuple[Column, ...]:
        """See ``PairedOptions``."""
        return tuple(parse_column(name, self.types[name].format(keypoints=self.keypoints)) for name in self.fields)

    def _check(self, checks: Checks) -> None:
        with checks.at():
            self.settle_paths()
        with checks.at("images"):
            check_pattern(self.images)
        check_chosen(checks, self.fields, self.types)
        if "keypoints" in self.fields and not self.keypoints:
            checks.say("keypoints must say how many points an object has", "keypoints")


@options
class VocSource(ObjectsOptions):
    """Images, and an XML for each with its objects, as Pascal VOC has them."""

    endings: ClassVar[tuple[str, ...]] = (".xml",)
    types: ClassVar[Mapping[str, str]] = {
        "image": "image",
        "boxes": "float32[?,4]",
        "classes": "int64[?]",
        "difficult": "uint8[?]",
        "truncated": "uint8[?]",
    }

    type: Literal["voc"] = "voc"
    """Kind of source."""

    root: Annotated[Path, Example("/data/VOCdevkit/VOC2012")]
    """The folder around images and annotations."""

    images: str = "JPEGImages/*.jpg"
    """The pattern of the images."""

    annotations: str = "Annotations/*.xml"
    """The pattern of their XML."""

    part: Annotated[str | None, Example("ImageSets/Main/train.txt")] = None
    """A text below the root with the names of the images of a part, one in each line, without
    ending; when not set, all images that have an XML."""

    fields: Annotated[tuple[str, ...], Example(["image", "boxes", "classes"])] = ("image", "boxes", "classes")
    """The fields of a sample: "image", and with a row for each object "boxes" (float32[?,4]: left,
    top, right, bottom in pixels), "classes" (int64), "difficult" and "truncated" (uint8)."""

    names: tuple[str, ...] = VOC_CLASSES
    """The names of the classes in the order of their numbers; an object of another one makes a bad
    sample."""

    allow_outside_root: bool = False
    """Whether links may lead out of the root."""

    @property
    def patterns(self) -> Mapping[str, str]:
        """See ``PairedOptions``."""
        return {"image": self.images, "objects": self.annotations}

    def _check(self, checks: Checks) -> None:
        with checks.at():
            self.settle_paths()
        counts = set()
        for key in ("images", "annotations"):
            with checks.at(key):
                counts.add(check_pattern(getattr(self, key)))
        if len(counts) > 1:
            checks.say("it needs as many * and ** as images", "annotations")
        if self.part is not None and (Path(self.part).is_absolute() or ".." in Path(self.part).parts):
            checks.say(f"{self.part!r} leads out of the root", "part")
        check_chosen(checks, self.fields, self.types)
        if len(set(self.names)) < len(self.names):
            checks.say("names must have each name once", "names")
