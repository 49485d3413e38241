"""Scans a LeRobot data set, in a process of its own: see ``data.sources.scan``.

    meta/info.json, episodes   the chosen episodes, their files and first seconds
    data/*.parquet             numbers of all frames are read, and kept in the index
    videos/**/*.mp4            packets of each file that an episode is in; none is decoded

    episodes       int64 [e]            their numbers, ascending
    firsts         int64 [e + 1]        the first sample of each, and where the last one ends
    seconds        float64 [n]          when a sample is in its episode
    task_index     int64 [n]            which task it is of
    numbers.KEY    dtype [n, ...]       fields of numbers
    scale.KEY      float64 [3, ...]     (a, b, c) of (x - a) / b - c, where they are normalised
    tasks          uint8 [bytes]        texts, a NUL after each
    places         int32 [e, cameras]   the file in which an episode's video is
    starts         float64 [e, cameras] the second of it at which the episode begins
    frames         int32 [n, cameras]   the frame of that file that is shown then; -1 for none
    ends           int64 [3, files + 1] of the arrays of ``media.indexed``
    rows           int64 [n]            the rows of the images, of which 0/... is a Parquet index

A frame is the one nearest to start + second, and less than ``tolerance_s`` away from it, as LeRobot
has it. A sample without one is bad, and says which time has none.

Invariants: an episode's rows are together in one file, and as many as the episodes' table says. No
decoder runs. What is read is no larger than what the files hold.
"""

import os
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from batchd.data.media.indexed import GrowingFrames
from batchd.data.media.packets import FileFrames
from batchd.data.samples.columns import Column
from batchd.data.samples.values import Unfitting, converted
from batchd.data.sources.finding import find_in_runs
from batchd.data.sources.interface import BuiltInKind
from batchd.data.sources.lerobot.episodes import Episode, read_episodes, read_tasks, statistics
from batchd.data.sources.lerobot.info import (
    INFO,
    Feature,
    Fields,
    Info,
    any_file,
    columns_of,
    fields_of,
    read_info,
    read_json,
    without_normalisation,
)
from batchd.data.sources.lerobot.options import LeRobotSource
from batchd.data.sources.neighbours import in_files
from batchd.data.sources.parquet import row_groups
from batchd.data.sources.parquet.scan import NUMBERS_BYTES_MAX, ROWS_MAX
from batchd.data.sources.parquet.scan import scan as scan_parquet
from batchd.data.sources.scan import answer, isolated_scan
from batchd.data.storage.access import Storage
from batchd.data.storage.index import SourceIndex, blob, number_array, readable
from batchd.data.storage.paths import bound_of, check_bound
from batchd.data.storage.patterns import Pattern, first_file
from batchd.data.storage.survey import Survey, quick_look
from batchd.errors import SourceInvalid
from batchd.runtime import failpoints
from batchd_wire.views import Array
from batchd_wire.wording import counted

MODULE = "batchd.data.sources.lerobot.scan"
_OWN = ("episode_index", "frame_index", "timestamp", "task_index")
"""Columns of the data that are always read; LeRobot writes them for each frame."""


def scan(source: LeRobotSource, survey: Survey) -> SourceIndex:
    """Find all frames, by episode, in the scanning process. Raises ``SourceInvalid``."""
    row_groups.use_one_thread()
    info = read_info(source, survey)
    fields = fields_of(source, info)
    for key in fields.left_out:
        survey.note("features that are not read", key)
    videos = [camera.feature for camera in fields.videos]
    episodes = read_episodes(source, info, videos, survey)
    data = _Data(source, info, fields, episodes)
    data.read(survey)
    arrays = data.arrays()
    unreadable = _add_videos(source, videos, list(episodes.values()), arrays, survey)
    if fields.has_task:
        arrays["tasks"] = blob(read_tasks(source, info, survey))
    if source.normalize:
        stats = read_json(source, "meta/stats.json", survey)
        for field in fields.numbers:
            if field.name in source.normalize:
                arrays[f"scale.{field.name}"] = statistics(source, stats, field.feature)
    place: dict[str, object] = {"root": str(source.root.absolute())}
    facts: dict[str, object] = {
        "fps": info.fps,
        "numbers": [[one.name, one.steps] for one in fields.numbers],
        "videos": [[one.name, one.steps, one.feature.shape] for one in fields.videos],
        "images": [[one.name, one.feature.key, one.steps] for one in fields.images],
        "task": fields.has_task,
        "unreadable": {str(file): reason for file, reason in unreadable.items()},
    }
    if fields.images:
        keys = {one.name: one.feature.key for one in fields.images}
        part = scan_parquet(source.pictures(data.files, keys), survey)
        arrays |= {f"0/{name}": array for name, array in part.arrays.items()}
        facts["parts"], place["parts"] = [[len(part), part.facts]], [part.place]
        facts["files"] = data.files
    return SourceIndex.build(data.samples, facts, arrays, {**place, **survey.place()})


class _Data:
    """The rows of the chosen episodes."""

    def __init__(self, source: LeRobotSource, info: Info, fields: Fields, episodes: Mapping[int, Episode]) -> None:
        self._source = source
        self._info = info
        self._episodes = episodes
        own = [one for key in _OWN if (one := info.features.get(key)) is not None]
        if len(own) < len(_OWN):
            raise SourceInvalid(f"{source.root / INFO} lacks one of the features {', '.join(_OWN)}")
        self._features = {one.key: one for one in (*own, *(field.feature for field in fields.numbers))}
        self._fields = fields
        self.files = sorted({episode.data for episode in episodes.values()})
        self._pieces: dict[int, dict[str, Array]] = {}
        self.samples = 0

    def read(self, survey: Survey) -> None:
        """Read all files. Raises ``SourceInvalid``."""
        before = 0
        bound = bound_of(self._source.root, allow_outside_root=self._source.allow_outside_root)
        for name in self.files:
            path = self._source.root / name
            check_bound(os.fsencode(path), bound)
            with survey.open(path) as stream:
                failpoints.passing("scan.lerobot.opening")
                try:
                    before += self._read_file(name, path, stream, before, survey)
                except row_groups.Unreadable as error:
                    raise SourceInvalid(f"{path} {error}") from None

    def _read_file(self, name: str, path: Path, stream: BinaryIO, before: int, survey: Survey) -> int:
        file = row_groups.ParquetFile(stream)
        if (most := max(file.rows, default=0)) > ROWS_MAX:
            raise SourceInvalid(f"{path}: a row group says that it has {most} rows; {ROWS_MAX} are the most")
        columns = {}
        for key, feature in self._features.items():
            if key not in file.schema.names:
                raise SourceInvalid(f"{path} has no column {key!r}, which {INFO} names")
            columns[key] = _column(file, path, feature, survey.looked)
        ids: NDArray[np.int64] = columns["episode_index"].astype(np.int64)
        begins = np.flatnonzero(np.diff(ids, prepend=ids[:1] - 1))
        ends = np.append(begins[1:], len(ids))
        runs: dict[int, tuple[int, int]] = {}
        for begin, end in zip(begins.tolist(), ends.tolist(), strict=True):
            if runs.setdefault(int(ids[begin]), (begin, end)) != (begin, end):
                raise SourceInvalid(f"{path}: the rows of episode {ids[begin]} are not together")
        for number, episode in self._episodes.items():
            if episode.data != name:
                continue
            begin, end = runs.get(number, (0, 0))
            if end - begin != episode.length or not episode.length:
                raise SourceInvalid(
                    f"{path} has {counted(end - begin, 'row')} of episode {number}, and meta says {episode.length}: "
                    "copy the data set again, or leave this episode out (episodes)"
                )
            self._pieces[number] = {key: values[begin:end] for key, values in columns.items()}
            self._pieces[number]["rows"] = np.arange(before + begin, before + end)
            self.samples += episode.length
            survey.progress(self.samples)
        return len(ids)

    def arrays(self) -> dict[str, Array]:
        """The arrays of the index with a number for each sample, or several."""
        pieces = [self._pieces[number] for number in self._episodes]
        self._pieces.clear()
        whole = {key: np.concatenate([piece[key] for piece in pieces]) for key in pieces[0]}
        firsts = np.cumsum([0, *(episode.length for episode in self._episodes.values())])
        arrays: dict[str, Array] = {
            "episodes": number_array(np.array(list(self._episodes), np.int64)),
            "firsts": number_array(firsts.astype(np.int64)),
            "seconds": _seconds(whole["frame_index"], whole["timestamp"], self._info.fps),
            "task_index": number_array(whole["task_index"].astype(np.int64)),
        }
        arrays |= {f"numbers.{one.name}": number_array(whole[one.feature.key]) for one in self._fields.numbers}
        if self._fields.images:
            arrays["rows"] = number_array(whole["rows"].astype(np.int64))
        return arrays


def _seconds(frames: Array, timestamps: Array, fps: float) -> NDArray[np.float64]:
    """When each row is in its episode: LeRobot's float32 of frame / fps is that in float64."""
    exact: NDArray[np.float64] = frames.astype(np.float64) / fps
    return np.where(exact.astype(timestamps.dtype) == timestamps, exact, timestamps.astype(np.float64))


def _column(file: row_groups.ParquetFile, path: Path, feature: Feature, looked: Callable[[], None]) -> Array:
    """All values of a column of numbers, ``[rows, *shape]``. Raises ``SourceInvalid``."""
    column = without_normalisation(Column(feature.key), feature)
    parts = [np.zeros((0, *feature.shape), feature.dtype)]
    for group, rows in enumerate(file.rows):
        if not rows:
            continue
        looked()
        file.check_rows(group, feature.key)
        for piece in file.read(group, feature.key, NUMBERS_BYTES_MAX).chunks:
            try:
                parts.append(_numbers(piece, column))
            except Unfitting as error:
                raise SourceInvalid(f"{path}: row group {group}, column {feature.key!r}: {error}") from None
    return np.concatenate(parts)


def _numbers(values: pa.Array, column: Column) -> Array:
    """Numbers, or lists of lists of them, each as long as the shape says. Raises ``Unfitting``."""
    rows = len(values)
    for level, length in enumerate(column.fixed_shape or (1,)):
        if isinstance(values, pa.ExtensionArray):
            values = values.storage
        if not column.shape and not row_groups.is_list(values.type):
            break
        if not row_groups.is_list(values.type):
            raise Unfitting(f"{column.name} is {values.type}, and {INFO} says {column.text}")
        lengths = pc.min_max(pc.list_value_length(values)).as_py()
        if values.null_count or lengths != {"min": length, "max": length}:
            raise Unfitting(f"{column.name} is no {column.text} in a row: dimension {level} has {lengths['max']}")
        values = values.flatten()
    if not row_groups.is_number(values.type):
        raise Unfitting(f"{column.name} is {values.type}, and {INFO} says {column.text}")
    if values.null_count:
        raise Unfitting(f"{column.name} lacks {counted(values.null_count, 'number')}")
    return converted(column, values.to_numpy(zero_copy_only=False)).reshape(rows, *column.fixed_shape)


def _add_videos(
    source: LeRobotSource, cameras: list[Feature], episodes: list[Episode], arrays: dict[str, Array], survey: Survey
) -> dict[int, str]:
    """Add the arrays of videos; returns why files cannot be read, by their numbers."""
    bound = bound_of(source.root, allow_outside_root=source.allow_outside_root)
    growing, unreadable = GrowingFrames(), dict[int, str]()
    numbers: dict[str, int] = {}
    known: dict[int, NDArray[np.float64]] = {}
    """Of each file, when it shows its frames."""
    places = np.zeros((len(episodes), len(cameras)), np.int32)
    frames = np.zeros((len(arrays["seconds"]), len(cameras)), np.int32)
    firsts, seconds = arrays["firsts"].tolist(), arrays["seconds"]
    for at, camera in enumerate(cameras):
        for row, episode in enumerate(episodes):
            name = episode.videos[at]
            if name not in numbers:
                numbers[name] = number = len(growing)
                path = source.root / name
                check_bound(os.fsencode(path), bound)
                with ExitStack() as until_read:
                    try:
                        file = until_read.enter_context(survey.open(path))
                    except SourceInvalid as error:
                        advice = f"leave out the camera {camera.key} or episode {episode.number}, or download the file"
                        raise SourceInvalid(f"{error}: {advice}") from None
                    failpoints.passing("scan.lerobot.opening")
                    found, reason = growing.add(os.fsencode(name), file, partial(survey.progress, firsts[row]))
                known[number] = _shown(found)
                if reason:
                    unreadable[number] = reason
                    survey.note(
                        "videos that cannot be read, whose samples are bad", f"{readable(os.fsencode(path))} {reason}"
                    )
            number = places[row, at] = numbers[name]
            part = slice(firsts[row], firsts[row + 1])
            frames[part, at] = nearest(known[number], episode.starts_s[at] + seconds[part], source.tolerance_s)
    if cameras and len(unreadable) == len(growing):
        raise SourceInvalid(f"{source.root / next(iter(numbers))} {unreadable[0]}, and no other video can be read")
    arrays["places"], arrays["frames"] = places, frames
    arrays["starts"] = np.array([episode.starts_s for episode in episodes], np.float64).reshape(places.shape)
    arrays |= {"ends": growing.ends, **growing.arrays()}
    return unreadable


def _shown(frames: FileFrames) -> NDArray[np.float64]:
    numerator, denominator = frames.unit
    return np.multiply(frames.times[frames.order], numerator / denominator, dtype=np.float64)


def nearest(shown: NDArray[np.float64], wanted: NDArray[np.float64], tolerance_s: float) -> NDArray[np.int32]:
    """The frame nearest to each time; of two, the first one; -1 where none is within tolerance.

    ``shown``: when each frame is shown, in ascending seconds.
    """
    if not len(shown):
        return np.full(len(wanted), -1, np.int32)
    after = np.clip(np.searchsorted(shown, wanted), 1, max(1, len(shown) - 1))
    before = after - 1
    after = np.minimum(after, len(shown) - 1)
    found = np.where(np.abs(shown[after] - wanted) < np.abs(shown[before] - wanted), after, before)
    is_near = np.abs(shown[found] - wanted) < tolerance_s
    return np.where(is_near, found, -1).astype(np.int32)


def _columns(source: LeRobotSource, storage: Storage) -> tuple[Column, ...]:
    info = read_info(source, quick_look(storage))
    return columns_of(source, fields_of(source, info))


def _problems(source: LeRobotSource, storage: Storage) -> list[str]:
    files = storage.at(source.root)
    problems = files.folder_problems(source.root) or files.file_problems(source.root / INFO, "meta/info.json")
    if problems:
        return problems
    info = read_info(source, quick_look(storage))
    for camera in fields_of(source, info).videos:
        pattern = any_file(info.video_path, camera.feature.key)
        if first_file(source.root, [Pattern(pattern)]) is None:
            problems.append(f"{source.root} has no video of {camera.name!r}, {pattern}: leave it out (cameras)")
    return problems


def _samples(source: LeRobotSource, storage: Storage) -> int | None:
    info = read_info(source, quick_look(storage))
    return info.frames if source.episodes is None else None


def _scan(source: LeRobotSource, survey: Survey) -> SourceIndex:
    return isolated_scan(MODULE, source, survey, source.scan_timeout_s)


def _labels(_source: LeRobotSource, index: SourceIndex) -> NDArray[np.int64]:
    return index.arrays["task_index"]


KINDS = {
    LeRobotSource: BuiltInKind(
        problems=_problems,
        columns=_columns,
        scan=_scan,
        neighbours=lambda _source, index: in_files(
            index.arrays["firsts"][:-1], len(index), why_no_bytes="frames have no sizes of their own"
        ),
        labels=_labels,
        find=lambda source, index, pattern: find_in_runs(
            pattern, [os.fsencode(source.root)], np.zeros(1, np.int64), len(index)
        ),
    )
}


if __name__ == "__main__":
    sys.exit(answer(scan))
