"""A data set that LeRobot has written, beside its own loader: the same frames, numbers and padding.

LeRobot runs in the environment that ``make test-moving`` makes, as it wants an old PyAV.
"""

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import av
import cv2
import numpy as np
import pytest
from av.video.reformatter import Interpolation

from batchd.data.sources.lerobot.options import LeRobotSource
from support.samples import read_samples

PYTHON = Path(__file__).parents[2] / "build" / "peers" / "lerobot" / "bin" / "python"
FPS, LENGTHS, CAMERAS = 30, (20, 15), ("top", "wrist")
TIMES = {"observation.images.top": (-0.1, 0.0), "observation.state": (-0.1, 0.0), "action": (0.0, 1 / 30, 2 / 30)}
PROGRAM = """
import json, sys
import numpy as np
from lerobot.datasets.lerobot_dataset import LeRobotDataset

root, kind, out, said = sys.argv[1:]
fps, lengths, cameras, times = json.loads(said)
numbers = {"dtype": "float32", "shape": (7,), "names": None}
picture = {"dtype": kind, "shape": (96, 128, 3), "names": ["height", "width", "channels"]}
features = {"observation.state": numbers, "action": numbers}
features |= {f"observation.images.{camera}": picture for camera in cameras}
made = LeRobotDataset.create("robot/test", fps, features, root=root, use_videos=kind == "video")
random = np.random.default_rng(0)
still = random.integers(0, 256, (96, 128, 3), np.uint8) // 4 + 100
for episode, length in enumerate(lengths):
    for number in range(length):
        frame = {"observation.state": random.random(7, np.float32), "action": random.random(7, np.float32)}
        for camera in cameras:
            frame[f"observation.images.{camera}"] = np.roll(still, 5 * number + 50 * episode, 1)
        made.add_frame({**frame, "task": f"task {episode}"})
    made.save_episode()
made.finalize()
samples = LeRobotDataset("robot/test", root=root, delta_timestamps=times)
found = {
    f"{number}/{key}": np.asarray(value) for number in range(len(samples)) for key, value in samples[number].items()
}
np.savez(out, **found)
"""
NUMBERS = ("observation.state", "action", "timestamp", "frame_index", "episode_index", "index", "task_index")
PADDING = ("observation.state_is_pad", "action_is_pad")


@pytest.mark.skipif(not PYTHON.exists(), reason="LeRobot is not installed: make test-moving")
@pytest.mark.parametrize("kind", ["video", "image"])
def test_samples_are_those_of_the_library(kind: str, tmp_path: Path) -> None:
    """Numbers and padding are equal; frames are the same ones, with colours made otherwise."""
    root, out = tmp_path / "robot", tmp_path / "samples.npz"
    said = json.dumps([FPS, LENGTHS, CAMERAS, TIMES])
    subprocess.run([str(PYTHON), "-c", PROGRAM, str(root), kind, str(out), said], check=True, timeout=600)
    theirs = np.load(out)
    source = LeRobotSource(
        root=root, fields=(*NUMBERS, "task"), times={"top" if "top" in k else k: v for k, v in TIMES.items()}
    )
    samples = read_samples(source)

    assert len(samples) == sum(LENGTHS)
    shown = {} if kind == "image" else {camera: frames_of(root, camera) for camera in CAMERAS}
    for number, values in enumerate(samples):
        for key in (*NUMBERS, *PADDING):
            np.testing.assert_array_equal(values[key], theirs[f"{number}/{key}"], err_msg=f"{number} {key}")
        assert values["task"] == str(theirs[f"{number}/task"])
        np.testing.assert_array_equal(values["top_is_pad"], theirs[f"{number}/observation.images.top_is_pad"])
        for camera in CAMERAS:
            same_pictures(values, camera, theirs[f"{number}/observation.images.{camera}"], shown.get(camera))


def frames_of(root: Path, camera: str) -> list[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]]:
    """Each frame of a video, in colours by the usual mode of FFmpeg, and by its exact one."""
    (file,) = (root / "videos" / f"observation.images.{camera}").rglob("*.mp4")
    usual, exact = Interpolation.BILINEAR, Interpolation.BILINEAR | Interpolation.ACCURATE_RND | Interpolation.BITEXACT
    with av.open(file) as container:
        return [
            (
                frame.reformat(format="rgb24", interpolation=usual).to_ndarray(),
                frame.reformat(format="rgb24", interpolation=exact).to_ndarray(),
            )
            for frame in container.decode(video=0)
        ]


def same_pictures(values: Mapping[str, Any], camera: str, theirs: np.ndarray[Any, Any], shown: Any) -> None:
    """Compare the pictures of a camera: both loaders' are of the same frames of the file."""
    theirs = np.moveaxis(np.round(theirs * 255).astype(np.uint8), -3, -1).reshape(-1, 96, 128, 3)
    if shown is None:
        files = values[camera] if isinstance(values[camera], list) else [values[camera]]
        ours = [cv2.imdecode(np.frombuffer(file, np.uint8), cv2.IMREAD_COLOR_RGB) for file in files]
        np.testing.assert_array_equal(np.stack(ours), theirs)
        return
    for ours, one in zip(values[camera].reshape(theirs.shape), theirs, strict=True):
        place = next(place for place, (usual, _exact) in enumerate(shown) if (usual == one).all())
        np.testing.assert_array_equal(ours, shown[place][1])
