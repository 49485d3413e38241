"""The episodes of a data set: which files have them, and from which second on. Scans.

v3    meta/episodes/chunk-000/file-000.parquet   a row for each: its length, its file of data, and
                                                 of each camera the file and its first second
v2.1  meta/episodes.jsonl                        a line for each; each has files of its own
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from batchd.data.samples.errors import SampleUnreadable
from batchd.data.samples.values import json_value
from batchd.data.sources.files.walk import matching
from batchd.data.sources.lerobot.info import JSON_BYTES_MAX, Feature, Info, file_at
from batchd.data.sources.lerobot.options import LeRobotSource
from batchd.data.sources.options import Patterns
from batchd.data.sources.parquet import row_groups
from batchd.data.storage.index import readable
from batchd.data.storage.survey import Survey
from batchd.errors import SourceInvalid

META_BYTES_MAX = 256 << 20
"""Of one column of a file about episodes or tasks."""
LENGTH_MAX = 1 << 40


class Episode(NamedTuple):
    """One episode. Paths are below the root; ``videos`` and ``starts_s`` are of each camera."""

    number: int
    length: int
    data: str
    videos: tuple[str, ...]
    starts_s: tuple[float, ...]


def read_episodes(source: LeRobotSource, info: Info, cameras: Sequence[Feature], survey: Survey) -> dict[int, Episode]:
    """The chosen episodes, by ascending number. Raises ``SourceInvalid``."""
    found: dict[int, Episode] = {}
    rows = _v3(source, cameras, survey) if info.is_v3 else json_lines(source, "meta/episodes.jsonl", survey)
    wanted = None if source.episodes is None else frozenset(source.episodes)
    for where, row in rows:
        try:
            number, length = _whole(row, "episode_index"), _whole(row, "length")
            if number in found:
                raise ValueError(f"it has episode {number} a second time")
            if wanted is None or number in wanted:
                found[number] = _episode(info, cameras, row, number, length)
        except ValueError as error:
            raise SourceInvalid(f"{where}: {error}") from None
    absent = sorted((wanted or frozenset()) - found.keys())
    if absent or not found:
        text = f"has no episode {absent[0]} (episodes)" if absent else "has no episodes"
        raise SourceInvalid(f"{source.root}/meta {text}")
    return dict(sorted(found.items()))


def _episode(info: Info, cameras: Sequence[Feature], row: Mapping[str, object], number: int, length: int) -> Episode:
    if not info.is_v3:
        parts = {"episode_chunk": number // info.chunks, "episode_index": number}
        videos = tuple(file_at(info.video_path, video_key=one.key, **parts) for one in cameras)
        return Episode(number, length, file_at(info.data_path, **parts), videos, (0.0,) * len(videos))
    data = file_at(info.data_path, **_file(row, "data"))
    paths, starts = [], []
    for camera in cameras:
        before = f"videos/{camera.key}"
        paths.append(file_at(info.video_path, video_key=camera.key, **_file(row, before)))
        start = row[f"{before}/from_timestamp"]
        if not isinstance(start, int | float) or not 0 <= start < 1e9:  # noqa: PLR2004  seconds
            raise ValueError(f"episode {number} begins at {start!r} s of its video of {camera.key}")
        starts.append(float(start))
    return Episode(number, length, data, tuple(paths), tuple(starts))


def _file(row: Mapping[str, object], before: str) -> dict[str, int]:
    return {name: _whole(row, f"{before}/{name}") for name in ("chunk_index", "file_index")}


def _whole(row: Mapping[str, object], name: str) -> int:
    number = row.get(name)
    if type(number) is not int or not 0 <= number < LENGTH_MAX:
        raise ValueError(f"{name} is {number!r} in a row, and no whole number from 0 on")
    return number


def _v3(
    source: LeRobotSource, cameras: Sequence[Feature], survey: Survey
) -> Iterator[tuple[str, Mapping[str, object]]]:
    titles = ["episode_index", "length", "data/chunk_index", "data/file_index"]
    for camera in cameras:
        titles += [f"videos/{camera.key}/{name}" for name in ("chunk_index", "file_index", "from_timestamp")]
    patterns = Patterns(source.root, ["meta/episodes/**/*.parquet"], "root", source.allow_outside_root)
    for folder, names in matching(patterns, survey):
        for name in names:
            path = readable(folder + b"/" + name)
            for row in table_rows(source, path, titles, survey):
                yield f"{source.root / path}", row


def table_rows(
    source: LeRobotSource, name: str, titles: Sequence[str], survey: Survey
) -> Iterator[Mapping[str, object]]:
    """The rows of a Parquet file about the data set. Raises ``SourceInvalid``."""
    path = source.root / name
    with survey.open(path) as stream:
        try:
            file = row_groups.ParquetFile(stream)
            for group, rows in enumerate(file.rows):
                columns = [file.read(group, title, META_BYTES_MAX).to_pylist() for title in titles if rows]
                survey.looked()
                yield from (dict(zip(titles, row, strict=True)) for row in zip(*columns, strict=True))
        except row_groups.Unreadable as error:
            raise SourceInvalid(f"{path} {error}") from None


def json_lines(source: LeRobotSource, name: str, survey: Survey) -> Iterator[tuple[str, Mapping[str, object]]]:
    """The objects of a file with one in each line. Raises ``SourceInvalid``."""
    path = source.root / name
    with survey.open(path) as stream:
        for number, line in enumerate(iter(lambda: stream.readline(JSON_BYTES_MAX), b""), 1):
            try:
                value = json_value(line)
            except SampleUnreadable as error:
                raise SourceInvalid(f"{path}, line {number}: {error}") from None
            yield f"{path}, line {number}", value if isinstance(value, dict) else {}


def read_tasks(source: LeRobotSource, info: Info, survey: Survey) -> list[bytes]:
    """The texts of the tasks, by their numbers, in UTF-8. Raises ``SourceInvalid``."""
    name = "meta/tasks.parquet" if info.is_v3 else "meta/tasks.jsonl"
    rows: list[Mapping[str, object]] = []
    if info.is_v3:
        with survey.open(source.root / name) as stream:
            try:
                titles = row_groups.ParquetFile(stream).schema.names
            except row_groups.Unreadable as error:
                raise SourceInvalid(f"{source.root / name} {error}") from None
        text = next((title for title in ("task", "__index_level_0__") if title in titles), "task")
        rows += [
            {"task": row[text], "task_index": row["task_index"]}
            for row in table_rows(source, name, [text, "task_index"], survey)
        ]
    else:
        rows += [row for _where, row in json_lines(source, name, survey)]
    found: dict[int, bytes] = {}
    for row in rows:
        try:
            number = _whole(row, "task_index")
        except ValueError as error:
            raise SourceInvalid(f"{source.root / name}: {error}") from None
        if number >= len(rows) or not isinstance(row.get("task"), str):
            raise SourceInvalid(f"{source.root / name}: task {number} of {len(rows)} has no text, or no such number")
        found[number] = str(row["task"]).replace("\0", "").encode("utf-8", "replace")
    return [found.get(number, b"") for number in range(len(rows))]


def statistics(
    source: LeRobotSource, stats: object, feature: Feature
) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    """(a, b, c) of (x - a) / b - c, float64 ``[3, *shape]``. Raises ``SourceInvalid``."""
    kind = source.normalize[feature.key]
    of = stats.get(feature.key) if isinstance(stats, dict) else None
    names = {"mean_std": ("mean", "std"), "min_max": ("min", "max"), "quantiles": ("q01", "q99")}[kind]
    parts = []
    for name in names:
        try:
            part = np.asarray((of or {}).get(name), np.float64).reshape(feature.shape)
            if not np.isfinite(part).all():
                raise ValueError
        except (TypeError, ValueError, AttributeError):
            raise SourceInvalid(
                f'{source.root}/meta/stats.json has no "{name}" of {feature.key!r} with its shape {list(feature.shape)}'
            ) from None
        parts.append(part)
    first, second = parts
    if kind == "mean_std":
        return np.stack([first, second + EPSILON, np.zeros_like(first)])
    width = second - first
    return np.stack([first, np.where(width == 0, EPSILON, width) / 2, np.ones_like(first)])


EPSILON = 1e-8
"""LeRobot's, so that what never changes is not divided by 0."""
