"""Sources whose samples are files. Daemon, workers and CLI; standard library only."""

from pathlib import Path
from typing import Annotated, ClassVar, Literal

from batchd.data.samples.checks import Example
from batchd.data.samples.columns import MediaWord
from batchd.data.sources.options import PatternOptions, SourceOptions, check_path_bytes
from batchd_wire.record import options

IMAGE_ENDINGS = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".webp")
VIDEO_ENDINGS = (".mp4", ".mov", ".mkv", ".webm", ".avi")
SOUND_ENDINGS = (".aac", ".aif", ".aiff", ".flac", ".m4a", ".mp3", ".oga", ".ogg", ".opus", ".wav")


@options
class FolderSource(SourceOptions):
    """A folder of images or videos: one sub-folder for each class, or flat without classes."""

    endings: ClassVar[tuple[str, ...]] = (*IMAGE_ENDINGS, *SOUND_ENDINGS)

    type: Literal["folder"] = "folder"
    """Kind of source."""

    path: Annotated[Path, Example("/data/photos")]
    """The folder. Each sub-folder is a class; classes are numbered in the order of their names,
    also those without an image. Hidden files are skipped."""

    classes: Annotated[tuple[str, ...] | str, Example(["cat", "dog", "owl"])] = ()
    """The names of the sub-folders in the order of their numbers, such as ["cat", "dog"]; or the
    name of another stream, such as "train", whose source is a folder: then classes have the numbers
    that they have there. A class without a sub-folder keeps its number."""

    media: MediaWord = "image"
    """What the files are, which is also the name of the field: "video" for what "decode_video"
    reads, "audio" for what "decode_audio" does."""

    allow_outside_root: bool = False
    """Whether links may lead out of the folder."""

    path_bytes: int = 0
    """Length of the field `path`, in which a batch carries the path of each sample, relative to the
    folder, as UTF-8 and zeros; 0 leaves the field out. `batchd_client.text(batch["path"])` gives
    strings."""

    @property
    def file_endings(self) -> tuple[str, ...]:
        """The endings of the files that it takes."""
        return {"image": IMAGE_ENDINGS, "video": VIDEO_ENDINGS, "audio": SOUND_ENDINGS}[self.media]

    def __post_init__(self) -> None:
        self.settle_paths()
        check_path_bytes(self.path_bytes)
        check_classes(self.classes)


@options
class ListSource(SourceOptions):
    """A text file with one sample on each line: path, white space, label (a whole number)."""

    endings: ClassVar[tuple[str, ...]] = (".txt", ".lst")

    type: Literal["list"] = "list"
    """Kind of source."""

    path: Annotated[Path, Example("/data/train.txt")]
    """The text file of `path label` lines. Paths may hold spaces; blank lines and lines that start
    with # are skipped."""

    root: Annotated[Path | None, Example("/data")] = None
    """The folder that the paths in the list are relative to; when not set, the folder of the
    list."""

    media: MediaWord = "image"
    """What the files are, which is also the name of the field: "video" for what "decode_video"
    reads, "audio" for what "decode_audio" does."""

    allow_outside_root: bool = False
    """Whether files may be outside of the root: absolute paths, paths with `..`, and links that
    lead out of it."""

    path_bytes: int = 0
    """Length of the field `path`, in which a batch carries the path of each sample, as in the list,
    as UTF-8 and zeros; 0 leaves the field out. `batchd_client.text(batch["path"])` gives
    strings."""

    def __post_init__(self) -> None:
        self.settle_paths()
        check_path_bytes(self.path_bytes)


@options
class GlobSource(PatternOptions):
    """The files below a folder whose paths match patterns, each once, ordered by path."""

    patterns_key: ClassVar[str] = "patterns"

    type: Literal["glob"] = "glob"
    """Kind of source."""

    root: Annotated[Path, Example("/data")]
    """The folder where the search begins. Links to folders are followed."""

    patterns: Annotated[tuple[str, ...], Example(["train/**/*.{jpg,png}", "more/*.jpg"])]
    """Patterns of the paths below the root, such as ["train/**/*.{jpg,png}", "more/*.jpg"]: `*` and
    `?` match within a name, `[abc]` one of some characters, `**` any folders, `{a,b}` one or the
    other."""

    media: MediaWord = "image"
    """What the files are, which is also the name of the field: "video" for what "decode_video"
    reads, "audio" for what "decode_audio" does."""

    allow_outside_root: bool = False
    """Whether links may lead out of the root."""

    classes: Literal["none", "folder"] | tuple[str, ...] = "none"
    """Origin of the labels: "folder" numbers the names of the folders that files lie in, in their
    order; a list such as ["train/cat", "train/dog"] has their paths below the root in the order of
    their numbers; "none" makes all 0."""

    path_bytes: int = 0
    """Length of the field `path`, in which a batch carries the path of each sample, relative to the
    root, as UTF-8 and zeros; 0 leaves the field out. `batchd_client.text(batch["path"])` gives
    strings."""

    def __post_init__(self) -> None:
        self.settle_paths()
        check_path_bytes(self.path_bytes)
        if not self.patterns:
            raise ValueError("patterns must not be empty")
        check_classes(self.classes)


def check_classes(classes: tuple[str, ...] | str) -> None:
    """Raise ``ValueError`` for names that no folder has, or that come back."""
    if isinstance(classes, tuple) and not all(name and "\0" not in name for name in classes):
        raise ValueError("classes must not hold an empty name")
    if isinstance(classes, tuple) and len(set(classes)) < len(classes):
        twice = next(name for name in classes if classes.count(name) > 1)
        raise ValueError(f"classes has {twice!r} more than once, so its number is unclear")
