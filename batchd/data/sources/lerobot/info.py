"""What ``meta/info.json`` says of a data set, and the columns that a source makes of it. Daemon.

    features   "action":                {"dtype": "float32", "shape": [14]}        a field
               "observation.images.top": {"dtype": "video", "shape": [480, 640, 3]} a camera
    fps        frames of an episode in a second
    paths      "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"

A shape of [1] is one number, as in LeRobot. Numbers of the file are limits to check, not to trust.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from math import prod
from typing import NamedTuple, Self

from batchd.data.media import SAMPLE_BYTES_MAX
from batchd.data.samples.columns import Column, check_field_names
from batchd.data.samples.errors import SampleUnreadable
from batchd.data.samples.values import json_value
from batchd.data.sources.lerobot.options import PADDING, TASK, LeRobotSource
from batchd.data.storage.paths import check_inside
from batchd.data.storage.survey import Survey
from batchd.errors import SourceInvalid
from batchd.runtime.suggestions import suggestion
from batchd_wire.fields import DIMENSIONS_MAX, ITEM_BYTES

INFO = "meta/info.json"
JSON_BYTES_MAX = 256 << 20
FEATURES_MAX = 1024
OF_BATCHES = frozenset({"index", "valid"})
"""Fields that each batch has of itself, as the number of a sample."""
SIDE_MAX = 1 << 15
CHANNELS = 3
VERSIONS = ("v3.", "v2.")
"""Beginnings of ``codebase_version``."""
PREFIX = "observation.images."
"""In front of most cameras' names."""
_PART = re.compile(r"\{(\w+)(?::0?(\d?)d)?\}")


class Feature(NamedTuple):
    """A feature that is numbers, or a camera."""

    key: str
    dtype: str
    """Of numbers that a field can have, "video" or "image", or "" for all others."""
    shape: tuple[int, ...]
    is_depth: bool

    @property
    def is_camera(self) -> bool:
        """Whether its values are pictures."""
        return self.dtype in ("video", "image")

    @classmethod
    def read(cls, key: str, said: object) -> Self:
        """A feature as the file has it. Raises ``ValueError``."""
        told = said if isinstance(said, dict) else {}
        dtype, sides = told.get("dtype"), told.get("shape")
        shape = sides if isinstance(sides, list) else []
        is_shape = 0 < len(shape) < DIMENSIONS_MAX and all(type(one) is int and 0 < one < 1 << 32 for one in shape)
        if isinstance(dtype, str) and dtype not in ITEM_BYTES and dtype not in ("video", "image"):
            return cls(key, "", (), is_depth=False)
        if not isinstance(dtype, str) or not is_shape:
            raise ValueError(f"the feature {key!r} has no dtype, or no shape of 1 to {DIMENSIONS_MAX - 1} lengths")
        if dtype in ITEM_BYTES:
            return cls(key, dtype, () if shape == [1] else tuple(shape), is_depth=False)
        about = [one for one in (told.get("info"), told.get("video_info")) if isinstance(one, dict)]
        is_depth = any(one.get("is_depth_map") or one.get("video.is_depth_map") for one in about)
        if len(shape) != CHANNELS:
            raise ValueError(f"the camera {key!r} has the shape {shape}, not [height, width, channels]")
        names = told.get("names")
        is_first = isinstance(names, list) and bool(names) and str(names[0]).startswith("channel")
        height, width = shape[1:] if is_first or shape[-1] not in (1, CHANNELS) else shape[:2]
        if not max(height, width) <= SIDE_MAX:
            raise ValueError(f"the camera {key!r} has {height} x {width} pixels; {SIDE_MAX} are the most of a side")
        return cls(key, dtype, (height, width, CHANNELS), is_depth=is_depth)


class Info(NamedTuple):
    """What the file says. Paths are patterns below the root."""

    version: str
    fps: float
    features: Mapping[str, Feature]
    data_path: str
    video_path: str
    frames: int | None
    chunks: int
    """Episodes in a folder, in v2."""

    @property
    def is_v3(self) -> bool:
        """Whether a file has several episodes."""
        return self.version.startswith(VERSIONS[0])


def read_json(source: LeRobotSource, name: str, survey: Survey) -> object:
    """A file of JSON below the root. Raises ``SourceInvalid``."""
    path = source.root / name
    with survey.open(path) as stream:
        data = stream.read(JSON_BYTES_MAX + 1)
    if len(data) > JSON_BYTES_MAX:
        raise SourceInvalid(f"{path} has more than {JSON_BYTES_MAX} bytes")
    try:
        return json_value(data)
    except SampleUnreadable as error:
        raise SourceInvalid(f"{path} {error}") from None


def read_info(source: LeRobotSource, survey: Survey) -> Info:
    """The file of a source. Raises ``SourceInvalid``."""
    said = read_json(source, INFO, survey)
    try:
        return _info(said if isinstance(said, dict) else {})
    except ValueError as error:
        raise SourceInvalid(f"{source.root / INFO}: {error}") from None


def _info(said: Mapping[str, object]) -> Info:
    version, fps, features = said.get("codebase_version"), said.get("fps"), said.get("features")
    if not isinstance(version, str) or not version.startswith(VERSIONS):
        raise ValueError(
            f"its codebase_version is {version!r}, and batchd reads v3 and v2.1; LeRobot converts older ones"
        )
    if not isinstance(fps, int | float) or not 0 < fps <= 1e6:  # noqa: PLR2004  frames per second
        raise ValueError(f"its fps are {fps!r}, and no rate")
    if not isinstance(features, dict) or not 0 < len(features) <= FEATURES_MAX:
        raise ValueError(f"it has no features, or more than {FEATURES_MAX}")
    frames, chunks = said.get("total_frames"), said.get("chunks_size")
    return Info(
        version,
        float(fps),
        {key: Feature.read(key, one) for key, one in features.items()},
        str(said.get("data_path")),
        str(said.get("video_path")),
        frames if type(frames) is int else None,
        chunks if type(chunks) is int and chunks > 0 else 1000,
    )


def file_at(pattern: str, **parts: str | int) -> str:
    """A path of ``info.json`` with its braces filled. Raises ``ValueError``, also if it leads out.

    Not ``str.format``, which looks into its arguments and makes texts of any length.
    """

    def fill(found: re.Match[str]) -> str:
        if found[1] not in parts:
            raise ValueError(f"the path {pattern!r} has {found[0]!r}, and only {', '.join(parts)} are known")
        return str(parts[found[1]]).zfill(int(found[2] or 0))

    path = _PART.sub(fill, pattern)
    if "{" in path or "\0" in path or not path:
        raise ValueError(f"{pattern!r} is no path of files")
    check_inside(path.encode())
    return path


def any_file(pattern: str, key: str) -> str:
    """A pattern of the files of a camera."""
    return _PART.sub("*", pattern.replace("{video_key}", key))


class RobotField(NamedTuple):
    """A field of a sample. ``steps``: its times in frames; None for the sample's own frame."""

    name: str
    feature: Feature
    steps: tuple[int, ...] | None

    @property
    def padding(self) -> str:
        """The name of the field that says which of its times are outside of the episode."""
        return self.name + PADDING


class Fields(NamedTuple):
    """The fields of a source's samples."""

    numbers: tuple[RobotField, ...]
    cameras: tuple[RobotField, ...]
    has_task: bool
    left_out: tuple[str, ...]
    """Features that are not read although nothing was chosen."""

    @property
    def videos(self) -> tuple[RobotField, ...]:
        """Cameras with videos."""
        return tuple(camera for camera in self.cameras if camera.feature.dtype == "video")

    @property
    def images(self) -> tuple[RobotField, ...]:
        """Cameras with a picture in each row."""
        return tuple(camera for camera in self.cameras if camera.feature.dtype == "image")


def fields_of(source: LeRobotSource, info: Info) -> Fields:
    """The fields that a source has by its options. Raises ``SourceInvalid``."""
    cameras, left_out = _cameras(source, info)
    numbers = [one for one in info.features.values() if one.dtype in ITEM_BYTES and _is_name(one.key)]
    if source.fields is not None:
        wanted = [key for key in source.fields if key != TASK]
        known = {one.key: one for one in numbers}
        for key in wanted:
            if key not in known:
                why = "it is a camera" if key in info.features and info.features[key].is_camera else ""
                raise SourceInvalid(f"fields: {INFO} has no numbers {key!r}; {why or suggestion(key, [*known, TASK])}")
        numbers = [known[key] for key in wanted]
    else:
        numbers = [one for one in numbers if one.key not in OF_BATCHES]
        left_out += [one.key for one in info.features.values() if not one.is_camera and one not in numbers]
    steps = _steps(source, info, {one.key: one.key for one in numbers} | {one.key: name for name, one in cameras})
    fields = Fields(
        tuple(RobotField(one.key, one, steps.get(one.key)) for one in numbers),
        tuple(RobotField(name, one, steps.get(one.key)) for name, one in cameras),
        has_task=source.fields is not None and TASK in source.fields,
        left_out=tuple(left_out),
    )
    names = [column.name for column in columns_of(source, fields)]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise SourceInvalid(f"two fields would be called {twice!r}: name the cameras by their whole keys")
    for key in source.normalize:
        if key not in {one.key for one in numbers}:
            text = suggestion(key, [one.key for one in numbers])
            if key in dict(cameras) or key in {one.key for _name, one in cameras}:
                text = "it is a camera: use the step normalize, with numbers of meta/stats.json"
            raise SourceInvalid(f"normalize: {key!r} is no field of numbers; {text}")
    return fields


def _cameras(source: LeRobotSource, info: Info) -> tuple[list[tuple[str, Feature]], list[str]]:
    """The cameras by the names of their fields, and the keys of those that are left out."""
    found = {one.key: one for one in info.features.values() if one.is_camera}
    short = {key.removeprefix(PREFIX): one for key, one in found.items()}
    if source.cameras is None:
        named = [(name, one) for name, one in short.items() if not one.is_depth and _is_name(name)]
        return named, [one.key for one in found.values() if one not in dict(named).values()]
    chosen = []
    for name in source.cameras:
        camera = found.get(name) or short.get(name)
        if camera is None:
            raise SourceInvalid(f"cameras: {INFO} has no camera {name!r}; {suggestion(name, [*short])}")
        if camera.is_depth:
            raise SourceInvalid(f"cameras: {name!r} is depth in a coding of LeRobot's own, which batchd does not read")
        chosen.append((name, camera))
    return chosen, []


def _steps(source: LeRobotSource, info: Info, names: Mapping[str, str]) -> dict[str, tuple[int, ...]]:
    """``times`` in frames, by the keys of features. ``names``: of fields by these keys."""
    keys = {name: key for key, name in names.items()} | {key: key for key in names}
    found: dict[str, tuple[int, ...]] = {}
    for name, seconds in source.times.items():
        if name not in keys:
            raise SourceInvalid(f"times: there is no field {name!r}; {suggestion(name, [*names.values()])}")
        if keys[name] in found:
            raise SourceInvalid(f"times has {name!r} twice, as {names[keys[name]]!r} is the same")
        steps = tuple(round(second * info.fps) for second in seconds)
        for second, step in zip(seconds, steps, strict=True):
            if abs(second * info.fps - step) / info.fps > source.tolerance_s:
                raise SourceInvalid(
                    f"times.{name} has {second:g} s, which is no multiple of a frame at {info.fps:g} fps: "
                    f"{step / info.fps:.6g} s is, and tolerance_s is {source.tolerance_s:g}"
                )
        found[keys[name]] = steps
    return found


def columns_of(source: LeRobotSource, fields: Fields) -> tuple[Column, ...]:
    """The columns of a sample. Raises ``SourceInvalid`` if it would be too large."""
    columns: list[Column] = []
    for one in (*fields.cameras, *fields.numbers):
        front = () if one.steps is None else (len(one.steps),)
        shape = (*front, *one.feature.shape)
        if one.feature.dtype == "image":
            image = Column(one.name, "encoded")
            columns.append(image if one.steps is None else image.in_list(len(one.steps)))
        else:
            dtype = "uint8" if one.feature.dtype == "video" else one.feature.dtype
            dtype = "float32" if one.name in source.normalize else dtype
            columns.append(Column(one.name, dtype=dtype, shape=shape))
            if prod(shape) * ITEM_BYTES[dtype] > SAMPLE_BYTES_MAX:
                text = f"{one.name} would be {columns[-1].text}, and a sample may have {SAMPLE_BYTES_MAX} bytes"
                raise SourceInvalid(f"{source.root}: {text}")
    columns += [
        Column(one.padding, dtype="bool", shape=(len(one.steps),))
        for one in (*fields.cameras, *fields.numbers)
        if one.steps is not None
    ]
    columns += [Column(TASK, "text")] if fields.has_task else []
    for column in columns:
        if not _is_name(column.name):
            raise SourceInvalid(f"{source.root}: {column.name!r} is too long for the name of a field")
    return tuple(columns)


def without_normalisation(column: Column, feature: Feature) -> Column:
    """The column of a feature's stored numbers, for one frame."""
    return replace(column, dtype=feature.dtype, shape=feature.shape)


def _is_name(key: str) -> bool:
    try:
        check_field_names(key)
    except ValueError:
        return False
    return True
