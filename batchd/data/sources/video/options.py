"""Sources whose samples are frames of videos. Daemon, workers and CLI; standard library only."""

from pathlib import Path
from typing import Annotated, ClassVar, Literal

from batchd.data.media import CLIP_FRAMES_MAX, SAMPLE_BYTES_MAX
from batchd.data.samples.checks import Example, Range
from batchd.data.samples.location import check_path
from batchd.data.sources.files.options import VIDEO_ENDINGS, check_classes
from batchd.data.sources.options import PatternOptions, check_path_bytes
from batchd_wire.record import options

NO_URL = "copy the videos to this machine, or mount their bucket (rclone, mount-s3, gcsfuse) and name the folder"
SIDE_MAX = 16_384
"""Pixels that a side may have which frames are scaled to."""
SCAN_TIMEOUT_MAX_S = 86_400.0


@options
class VideoSource(PatternOptions):
    """The frames of video files, in display order; a sample is one frame, or a clip of several."""

    requires: ClassVar[tuple[str, ...]] = ("av",)
    extra: ClassVar[str] = "video"
    endings: ClassVar[tuple[str, ...]] = VIDEO_ENDINGS

    shares_decoding: ClassVar[bool] = True

    type: Literal["video"] = "video"
    """Kind of source."""

    root: Annotated[Path, Example("/data")]
    """The folder of the files."""

    files: Annotated[tuple[str, ...], Example(["train/**/*.mp4"])]
    """Paths of the files below the root, or patterns such as ["train/**/*.{mp4,mkv}"]. Each file
    that is named must exist."""

    allow_outside_root: bool = False
    """Whether links may lead out of the root."""

    every: int = 1
    """Every n-th frame of a file begins a sample: 1 for every frame."""

    frames: int = 1
    """Frames in a sample. With more than 1, the first dimension of the image counts them; all
    are of the same file."""

    stride: int = 1
    """Distance between the frames of a clip, in frames: 1 for consecutive frames."""

    size: Annotated[tuple[int, int] | None, Example([224, 224])] = None
    """Height and width that frames are scaled to, in pixels; proportions are not kept. Without
    it each frame keeps the size that it has in its file."""

    interpolation: Literal["bilinear", "bicubic", "area"] = "bilinear"
    """How frames are scaled if there is a size. Each method uses all source pixels when a frame
    shrinks."""

    color: Literal["rgb", "bgr", "gray"] = "rgb"
    """Order of the channels: "rgb" and "bgr" give three, "gray" gives one."""

    rotation: Literal["apply", "ignore"] = "apply"
    """Whether the display matrix of a file turns its frames upright ("apply") or is ignored
    ("ignore")."""

    classes: Literal["none", "folder"] | tuple[str, ...] = "none"
    """Source of the labels: "folder" numbers the folders of the files in the order of their
    names; a list has their paths below the root in the order of their numbers; "none" makes all
    0."""

    path_bytes: int = 0
    """Length in bytes of the field `path`: the path of each sample's file, relative to the root,
    as UTF-8 and zeros; 0 leaves the field out. `batchd_client.text(batch["path"])` gives
    strings."""

    max_pixels: int = 100_000_000
    """Width times height, in pixels, above which a frame is a bad sample; checked before
    decoding."""

    scan_timeout_s: Annotated[float, Range(1, SCAN_TIMEOUT_MAX_S)] = 60.0
    """Seconds without progress in a file after which the first start gives up and names the
    file."""

    def __post_init__(self) -> None:
        check_path("root", self.root, NO_URL)
        check_path_bytes(self.path_bytes)
        check_classes(self.classes)
        if not self.files or not all(self.files):
            raise ValueError("files must not be empty")
        for name in ("every", "stride", "max_pixels"):
            if not 1 <= getattr(self, name) < 1 << 31:
                raise ValueError(f"{name} must be 1 or more, not {getattr(self, name)}")
        if not 1 <= self.frames <= CLIP_FRAMES_MAX:
            raise ValueError(f"frames must be from 1 to {CLIP_FRAMES_MAX}, not {self.frames}")
        if self.size is None:
            return
        if not all(1 <= side <= SIDE_MAX for side in self.size):
            raise ValueError(f"size must be two lengths from 1 to {SIDE_MAX}, not {list(self.size)}")
        if self.sample_bytes(*self.size) > SAMPLE_BYTES_MAX:
            raise ValueError(
                f"{self.frames} frames of {list(self.size)} are {self.sample_bytes(*self.size)} bytes, and a sample may have "
                f"{SAMPLE_BYTES_MAX}"
            )

    @property
    def channels(self) -> int:
        """How many numbers a pixel has."""
        return 1 if self.color == "gray" else 3

    @property
    def span(self) -> int:
        """How many frames of a file a sample reaches over."""
        return (self.frames - 1) * self.stride + 1

    def sample_bytes(self, height: int, width: int) -> int:
        """The size in bytes of a sample whose frames have this height and width."""
        return self.frames * height * width * self.channels
