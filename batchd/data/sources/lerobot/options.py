"""Sources in the layout of LeRobot. Daemon, workers and CLI; standard library only."""

from collections.abc import Mapping, Sequence
from dataclasses import field
from math import isfinite
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from batchd.data.media import CLIP_FRAMES_MAX, check_codecs, libraries_for
from batchd.data.samples.checks import Checks, Example, Range
from batchd.data.samples.columns import check_field_names
from batchd.data.samples.location import check_path
from batchd.data.sources.options import SourceOptions
from batchd.data.sources.parquet.options import ParquetSource
from batchd_wire.record import options

TASK = "task"
"""The field with the text of a frame's task."""
PADDING = "_is_pad"
"""Behind the name of a field: which of its times are outside of the episode."""
NO_URL = "download the data set (hf download REPO --repo-type dataset --local-dir DIR) and name that folder"
Normalisation = Literal["mean_std", "min_max", "quantiles"]


@options
class LeRobotSource(SourceOptions):
    """The frames of a LeRobot data set (v3, v2.1), with what was before and after them."""

    requires: ClassVar[tuple[str, ...]] = ("pyarrow", "av")
    extra: ClassVar[str] = "arrow,video"
    endings: ClassVar[tuple[str, ...]] = (".parquet",)
    shares_decoding: ClassVar[bool] = True
    outranks: ClassVar[bool] = True

    type: Literal["lerobot"] = "lerobot"
    """Kind of source."""

    root: Annotated[Path, Example("/data/pusht")]
    """The folder that has "meta/info.json"."""

    cameras: Annotated[tuple[str, ...] | None, Example(["top", "wrist"])] = None
    """The cameras to decode, which are then fields of these names: keys of "meta/info.json", with
    or without "observation.images." in front. When not set, all but depth; [] for none."""

    fields: Annotated[tuple[str, ...] | None, Example(["observation.state", "action"])] = None
    """The other features to read, by their keys, such as ["observation.state", "action"], and
    "task" for the text of a frame's task. When not set, all features that are numbers, but "index",
    which each batch has of itself."""

    times: Annotated[dict[str, tuple[float, ...]], Example({"observation.state": [-0.1, 0], "action": [0, 0.1]})] = (
        field(default_factory=dict)
    )
    """Seconds from a sample's frame at which fields and cameras have their values, such as
    { action = [0, 0.1, 0.2] }: LeRobot's delta_timestamps. Each is a multiple of 1 / fps. The field
    has a dimension for them in front. Before the first frame of an episode it has that one's value,
    after the last one the last one's, and FIELD_is_pad (bool) says where. A field without times has
    the value of the frame, and no such dimension."""

    episodes: Annotated[tuple[int, ...] | None, Example([0, 1, 5])] = None
    """The numbers of the episodes to read, in any order: samples are in that of the data set. When
    not set, all."""

    normalize: Annotated[dict[str, Normalisation], Example({"action": "mean_std"})] = field(default_factory=dict)
    """What is done to fields of numbers by the statistics of the data set, in float64, rounded to
    float32 once: "mean_std" is (x - mean) / (std + 1e-8); "min_max" is -1 for the smallest number
    and 1 for the largest; "quantiles" is the same of the quantiles 0.01 and 0.99."""

    tolerance_s: Annotated[float, Range(1e-6, 1.0)] = 1e-4
    """How far a time may be from a frame, in seconds: of the videos (a bad sample), and ``times``
    from multiples of 1 / fps (refused)."""

    allow_outside_root: bool = False
    """Whether links may lead out of the root, as those of the cache of the Hugging Face Hub do."""

    max_pixels: Annotated[int, Range(1, (1 << 31) - 1)] = 100_000_000
    """Width times height, in pixels, above which a frame is a bad sample; checked before
    decoding."""

    codecs: tuple[str, ...] = ()
    """FFmpeg's names of the decoders that videos may need, such as ["libdav1d", "h264"]; empty for
    all that docs/sources/video.md names. Where all of them are lossless, as "ffv1" is, the version
    of PyAV is not in the stream's fingerprint."""

    scan_timeout_s: Annotated[float, Range(1, 86_400.0)] = 60.0
    """Seconds without progress in a file after which the first start gives up and names the
    file."""

    def _check(self, checks: Checks) -> None:
        with checks.at("root"):
            check_path("root", self.root, NO_URL)
        with checks.at("codecs"):
            check_codecs(self.codecs)
        for key in ("cameras", "fields"):
            names = getattr(self, key) or ()
            with checks.at(key):
                check_field_names(*names)
            if len(set(names)) < len(names):
                checks.say(f"{key} names {next(name for name in names if names.count(name) > 1)} twice", key)
        if self.cameras == () and self.fields == ():
            checks.say("cameras = [] and fields = [] leave nothing to read", "fields")
        for name, seconds in self.times.items():
            if not 1 <= len(seconds) <= CLIP_FRAMES_MAX:
                text = f"times.{name} has {len(seconds)} times; 1 to {CLIP_FRAMES_MAX} are possible"
                checks.say(text, "times", name)
            if not all(isfinite(one) and abs(one) <= 1e6 for one in seconds):  # noqa: PLR2004  days
                checks.say(f"times.{name} must be seconds from -1e6 to 1e6", "times", name)
        if self.episodes is not None and (not self.episodes or min(self.episodes) < 0):
            checks.say("episodes must be numbers of episodes, from 0 on", "episodes")

    @property
    def libraries(self) -> tuple[str, ...]:
        """PyAV brings FFmpeg along."""
        return libraries_for(self.codecs)

    def pictures(self, files: Sequence[str], keys: Mapping[str, str]) -> ParquetSource:
        """The pictures in the rows of the data, as a source of Parquet files.

        ``keys``: the columns, by the names of their fields.
        """
        return ParquetSource(
            root=self.root,
            shards=tuple(files),
            fields=dict.fromkeys(keys, "image"),
            names={name: key for name, key in keys.items() if name != key},
            allow_outside_root=self.allow_outside_root,
        )

    @property
    def place(self) -> str:
        """The place of the samples, for messages."""
        return str(self.root)
