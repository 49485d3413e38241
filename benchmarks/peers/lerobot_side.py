"""Frames of robots' episodes, four cameras with two frames each: batchd, or LeRobot's own loader.

    lerobot_side.py write FOLDER      write the data set, with LeRobot's own writer (AV1)
    lerobot_side.py --data FOLDER ..  be a side: see ``common``

Each side has two workers, takes samples in random order, and yields the frames of a camera. LeRobot
decodes by torchcodec, and makes float32 of what batchd delivers as uint8.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import common
import numpy as np

CAMERAS, FPS, HEIGHT, WIDTH = ("top", "wrist", "left", "right"), 30, 480, 640
EPISODES, FRAMES = 4, 90
TIMES, WORKERS = [-0.1, 0.0], 2
DAEMON = """
[daemon]
workers = {workers}
[streams.robot]
source = {{ type = "lerobot", root = "{data}", times = {{ {times} }} }}
batch_size = {batch}
cache = "off"
"""


def write(folder: Path) -> None:
    """Scenes that move, with the grain of a camera."""
    from lerobot.datasets.lerobot_dataset import LeRobotDataset  # noqa: PLC0415  not in batchd's environment

    numbers = {"dtype": "float32", "shape": (7,), "names": None}
    picture = {"dtype": "video", "shape": (HEIGHT, WIDTH, 3), "names": ["height", "width", "channels"]}
    features = {"observation.state": numbers, "action": numbers}
    features |= {f"observation.images.{camera}": picture for camera in CAMERAS}
    made = LeRobotDataset.create("robot/benchmark", FPS, features, root=folder)
    random = np.random.default_rng(0)
    still = {camera: _scene(random) for camera in CAMERAS}
    for episode in range(EPISODES):
        for number in range(FRAMES):
            frame: dict[str, Any] = {"observation.state": random.random(7, np.float32)}
            frame["action"] = random.random(7, np.float32)
            for camera in CAMERAS:
                moved = np.roll(still[camera], (2 * number, 3 * number + 40 * episode), (0, 1)).astype(np.int16)
                grain = random.integers(-4, 5, moved.shape, np.int16)
                frame[f"observation.images.{camera}"] = np.clip(moved + grain, 0, 255).astype(np.uint8)
            made.add_frame({**frame, "task": "move"})
        made.save_episode()
    made.finalize()


def _scene(random: np.random.Generator) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Patches of 16 colours a side, and their edges."""
    patches = random.integers(0, 256, (HEIGHT // 32, WIDTH // 32, 3), np.uint8)
    return patches.repeat(32, 0).repeat(32, 1)


def by_batchd(options: common.Options) -> Iterator[Any]:
    """Batches of a daemon of its own."""
    times = ", ".join(f"{camera} = {TIMES}" for camera in CAMERAS)
    ours = DAEMON.format(workers=options.workers, data=options.data, times=times, batch=options.batch)
    with common.served(ours) as address:
        yield from common.read(address, "robot", "top")


def by_lerobot(options: common.Options) -> Iterator[Any]:
    """Batches of its data set in a DataLoader."""
    import torch  # noqa: PLC0415  this variant alone has it
    from lerobot.datasets.lerobot_dataset import LeRobotDataset  # noqa: PLC0415

    times = {f"observation.images.{camera}": TIMES for camera in CAMERAS}
    data = LeRobotDataset("robot/benchmark", root=options.data, delta_timestamps=times)
    loader = torch.utils.data.DataLoader(
        data, options.batch, shuffle=True, num_workers=options.workers, persistent_workers=True, drop_last=True
    )
    while True:
        for batch in loader:
            yield [batch["observation.images.top"].numpy().view(np.uint8)]


def batches(options: common.Options) -> Iterator[Any]:
    """One of these."""
    made = by_batchd if options.variant == "batchd" else by_lerobot
    return made(options._replace(workers=WORKERS))


if __name__ == "__main__":
    if sys.argv[1] == "write":
        write(Path(sys.argv[2]))
    else:
        common.play(batches)
