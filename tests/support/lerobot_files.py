"""Data sets in the layout of LeRobot, without the library.

The frames of a camera show the number of their row (``videos.picture``), those of the second camera
1000 more; state and action are made of it, too.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pyarrow as pa
from pyarrow import parquet

from support.videos import HEIGHT, WIDTH, Coding, picture, write_video

FPS = 10
CODING = Coding(units=FPS, gop=2, b_frames=0)
TASKS = ("pick the cube", "place it")


@dataclass(frozen=True)
class Layout:
    """A data set. ``files``: the episodes of each file of data and of videos."""

    lengths: Sequence[int] = (6, 4, 5)
    files: Sequence[Sequence[int]] = ((0, 1), (2,))
    videos: Sequence[str] = ("observation.images.top", "observation.images.wrist")
    images: Sequence[str] = ()
    version: str = "v3.0"
    first: int = 0
    """Added to all that is made of a row."""
    coding: Coding = CODING
    ending: str = "mp4"

    def rows(self, episode: int) -> range:
        """The rows of an episode in the whole data set."""
        end = sum(self.lengths[: episode + 1])
        return range(end - self.lengths[episode], end)


def state(row: int) -> list[float]:
    """``observation.state`` of a row."""
    return [row, row / 8]


def action(row: int) -> list[float]:
    """``action`` of a row."""
    return [row, -row, 2 * row]


def png(number: int) -> bytes:
    """A picture of this number as a PNG."""
    return cv2.imencode(".png", picture(number)[:, :, ::-1])[1].tobytes()


def write_lerobot(root: Path, layout: Layout = Layout()) -> Path:
    """Write a data set into a folder that may not be there."""
    is_v3 = layout.version.startswith("v3")
    files = layout.files if is_v3 else [[episode] for episode in range(len(layout.lengths))]
    episodes: list[dict[str, Any]] = []
    for number, those in enumerate(files):
        data = f"file-{number:03d}" if is_v3 else f"episode_{number:06d}"
        write_rows(root / f"data/chunk-000/{data}.parquet", layout, those)
        starts = [0, *accumulate(layout.lengths[episode] / FPS for episode in those)]
        for start, episode in zip(starts, those, strict=False):
            about: dict[str, Any] = {"episode_index": episode, "tasks": [TASKS[episode % 2]]}
            about |= {"length": layout.lengths[episode], "data/chunk_index": 0, "data/file_index": number}
            for camera in layout.videos:
                about |= {f"videos/{camera}/chunk_index": 0, f"videos/{camera}/file_index": number}
                about |= {f"videos/{camera}/from_timestamp": float(start)}
                about |= {f"videos/{camera}/to_timestamp": start + layout.lengths[episode] / FPS}
            episodes.append(about)
        for at, camera in enumerate(layout.videos):
            path = root / f"videos/{camera}/chunk-000/file-{number:03d}.{layout.ending}"
            path = path if is_v3 else root / f"videos/chunk-000/{camera}/episode_{number:06d}.{layout.ending}"
            rows = [row for episode in those for row in layout.rows(episode)]
            write_video(path, len(rows), layout.coding, layout.first + rows[0] + 1000 * at)
    _write_meta(root, layout, episodes, is_v3=is_v3)
    return root


def write_rows(path: Path, layout: Layout, episodes: Sequence[int]) -> None:
    """Write a file of data: a row group for each episode."""
    path.parent.mkdir(parents=True, exist_ok=True)
    tables = []
    for episode in episodes:
        rows = layout.rows(episode)
        frames = np.arange(len(rows))
        columns: dict[str, Any] = {
            "observation.state": pa.array([state(layout.first + row) for row in rows], pa.list_(pa.float32(), 2)),
            "action": pa.array([action(row) for row in rows], pa.list_(pa.float32())),
            "next.done": pa.array((frames == len(rows) - 1).tolist(), pa.bool_()),
            "timestamp": pa.array(frames / FPS, pa.float32()),
            "frame_index": pa.array(frames, pa.int64()),
            "episode_index": pa.array([episode] * len(rows), pa.int64()),
            "index": pa.array(list(rows), pa.int64()),
            "task_index": pa.array([episode % 2] * len(rows), pa.int64()),
        }
        for camera in layout.images:
            columns[camera] = pa.array([{"bytes": png(layout.first + row), "path": f"{row}.png"} for row in rows])
        tables.append(pa.table(columns))
    with parquet.ParquetWriter(path, tables[0].schema) as writer:
        for table in tables:
            writer.write_table(table)


def info_of(layout: Layout) -> dict[str, Any]:
    """The content of ``meta/info.json``."""
    is_v3 = layout.version.startswith("v3")
    numbers = {"timestamp": "float32", "frame_index": "int64", "episode_index": "int64", "index": "int64"}
    features: dict[str, Any] = {
        "observation.state": {"dtype": "float32", "shape": [2], "names": ["x", "y"]},
        "action": {"dtype": "float32", "shape": [3], "names": None},
        "next.done": {"dtype": "bool", "shape": [1], "names": None},
        **{key: {"dtype": dtype, "shape": [1], "names": None} for key, dtype in numbers.items()},
        "task_index": {"dtype": "int64", "shape": [1], "names": None},
    }
    for kind, cameras in (("video", layout.videos), ("image", layout.images)):
        for camera in cameras:
            names = ["height", "width", "channels"]
            features[camera] = {"dtype": kind, "shape": [HEIGHT, WIDTH, 3], "names": names}
    file = "chunk-{chunk_index:03d}/file-{file_index:03d}"
    old = "chunk-{episode_chunk:03d}"
    return {
        "codebase_version": layout.version,
        "fps": FPS,
        "total_episodes": len(layout.lengths),
        "total_frames": sum(layout.lengths),
        "chunks_size": 1000,
        "data_path": f"data/{file}.parquet" if is_v3 else f"data/{old}/episode_{{episode_index:06d}}.parquet",
        "video_path": f"videos/{{video_key}}/{file}.{layout.ending}"
        if is_v3
        else f"videos/{old}/{{video_key}}/episode_{{episode_index:06d}}.{layout.ending}",
        "features": features,
    }


def _write_meta(root: Path, layout: Layout, episodes: list[dict[str, Any]], *, is_v3: bool) -> None:
    meta = root / "meta"
    meta.mkdir(parents=True, exist_ok=True)
    (meta / "info.json").write_text(json.dumps(info_of(layout)))
    rows = np.array([state(row) for row in range(sum(layout.lengths))])
    actions = np.array([action(row) for row in range(sum(layout.lengths))])
    said = {
        key: {"mean": of.mean(0), "std": of.std(0), "min": of.min(0), "max": of.max(0)}
        for key, of in (("observation.state", rows), ("action", actions))
    }
    said = {key: {name: value.tolist() for name, value in of.items()} for key, of in said.items()}
    (meta / "stats.json").write_text(json.dumps(said))
    if is_v3:
        path = meta / "episodes/chunk-000/file-000.parquet"
        path.parent.mkdir(parents=True)
        parquet.write_table(pa.Table.from_pylist(episodes), path)
        tasks = pa.table({"task_index": list(range(len(TASKS))), "__index_level_0__": list(TASKS)})
        parquet.write_table(tasks, meta / "tasks.parquet")
        return
    lines = [{key: one[key] for key in ("episode_index", "tasks", "length")} for one in episodes]
    (meta / "episodes.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    lines = [{"task_index": number, "task": task} for number, task in enumerate(TASKS)]
    (meta / "tasks.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
