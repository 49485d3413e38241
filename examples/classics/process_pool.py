"""5. multiprocessing.Pool over a list of jobs.

Photographs are made smaller once, before any training.

Timed from start to end, starting all processes included.
"""

import multiprocessing
import subprocess
import sys
import tarfile
from pathlib import Path

import cv2
import numpy as np
from common import WORKERS, Example, deaf_to_interrupts, main, same

SHORTER_SIDE = 256
QUALITY = 90
JOBS_PER_SECOND = 500
TOLERANCE = 3.0
"""Of 255, the mean difference over an image: the same pixels, written by two JPEG encoders."""

# --- the old way ----------------------------------------------------------------------------------


def shrink(job: tuple[Path, Path]) -> None:
    """Runs in a process of the pool: one photograph."""
    source, target = job
    image = cv2.imread(str(source))
    height, width = image.shape[:2]
    shorter = min(height, width)
    size = (SHORTER_SIDE * width // shorter, SHORTER_SIDE * height // shorter)
    small = cv2.resize(image, size, interpolation=cv2.INTER_AREA if shorter >= 2 * SHORTER_SIDE else cv2.INTER_LINEAR)
    cv2.imwrite(str(target), small, [cv2.IMWRITE_JPEG_QUALITY, QUALITY])


def with_pool(files: list[Path], to: Path) -> int:
    """Split the list. There is nothing that resumes it, and a file that cannot be read ends it."""
    to.mkdir()
    jobs = [(file, to / f"{number:06}.jpg") for number, file in enumerate(files)]
    with deaf_to_interrupts():
        pool = multiprocessing.get_context("spawn").Pool(WORKERS)
    with pool:
        return sum(1 for _ in pool.imap_unordered(shrink, jobs, chunksize=16))


# --- with batchd ----------------------------------------------------------------------------------

CONFIG = """
[streams.shrink]
source = { type = "list", path = $jobs, root = $data }
batch_size = 1
pipeline = [ { op = "decode", scale = "off" }, { op = "resize", shorter_side = 256 } ]
"""


def with_batchd(config: Path, to: Path, jobs: int) -> int:
    """``batchd prepare shrink --to DIR``: resumes after Ctrl-C or a kill."""
    command = ["batchd", "prepare", "shrink", "--to", str(to), "--config", str(config), "--quality", str(QUALITY)]
    with subprocess.Popen([sys.executable, "-m", *command], stdout=subprocess.DEVNULL, process_group=0) as process:
        try:
            status = process.wait()
        finally:
            process.terminate()
            process.wait()
    if status:
        raise SystemExit(f"batchd prepare ended with exit status {status}")
    return jobs


def shards(folder: Path) -> list[np.ndarray]:
    """The photographs in the shards, in their order.

    A trainer reads them with a ``webdataset`` source.
    """
    images = []
    for shard in sorted(folder.glob("*.tar")):
        with tarfile.open(shard) as members:
            jpegs = [members.extractfile(one).read() for one in members if one.name.endswith(".jpg")]
        images += [cv2.imdecode(np.frombuffer(jpeg, np.uint8), cv2.IMREAD_COLOR) for jpeg in jpegs]
    return images


def run(example: Example) -> None:
    """Time both on the same list of jobs, with repeated photographs, then compare the results."""
    wanted = max(len(example.photographs), round(JOBS_PER_SECOND * example.seconds))
    jobs = [example.photographs[i % len(example.photographs)] for i in range(wanted)]
    listed = example.folder / "jobs.txt"
    listed.write_text("".join(f"{one.path.relative_to(example.data)} {one.label}\n" for one in jobs))
    config, files = example.config(CONFIG, jobs=str(listed)), [one.path for one in jobs]
    made: dict[str, list[Path]] = {"pool": [], "batchd": []}

    def fresh(name: str) -> Path:
        made[name].append(example.folder / f"{name}-{len(made[name])}")
        return made[name][-1]

    example.compare(
        {
            "multiprocessing.Pool": example.whole(lambda: with_pool(files, fresh("pool"))),
            "batchd prepare": example.whole(lambda: with_batchd(config, fresh("batchd"), len(jobs))),
        }
    )
    old = [cv2.imread(str(file)) for file in sorted(made["pool"][0].glob("*.jpg"))]
    new = shards(made["batchd"][0])
    same("sizes", [one.shape for one in old], [one.shape for one in new])
    differences = [np.abs(one.astype(float) - other).mean() for one, other in zip(old, new, strict=True)]
    same("pixels, by their mean difference", np.zeros(len(old)), np.array(differences), tolerance=TOLERANCE)


if __name__ == "__main__":
    sys.exit(main(__doc__, run))
