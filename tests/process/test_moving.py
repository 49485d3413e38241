"""The programs of docs/moving: batchd's program runs, and equals the other loader's if installed.

On a page the first program is the other loader's and the last one is batchd's. Other loaders run in
a process of their own, without shuffling.
"""

import os
import re
import subprocess
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.images import jpeg, photo
from support.parquet_files import class_labels, hugging_face, write_arrow, write_parquet
from support.shards import photo_shards
from support.tfrecords import example, write_records

FOLDER = Path(__file__).parents[2] / "docs" / "moving"
PAGES = sorted(path.stem for path in FOLDER.glob("*.md"))
CLASSES = ("cat", "dog", "owl")
LIBRARIES = {"dataloader": "torchvision", "huggingface": "datasets", "tfdata": "tensorflow"}
NOT_RUN = {"ffcv", "dali"}
"""Pages that make no comparison."""
WITHOUT_SHUFFLING = {
    "shuffle=True": "shuffle=False",
    "shardshuffle=100": "shardshuffle=False",
    ".shuffle(1000)": "",
    ".shuffle(seed=1)": "",
    "num_workers=8": "num_workers=0",
}
IMAGES, IMAGE_MEAN, IMAGE_STD = 40, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
DIFFERENCE_MAX = 2
"""Tolerance of the mean channel of all pixels, of 255, as the pages say."""
SAVE = """
import numpy as np
np.savez(SEEN_FILE, images=np.concatenate(SEEN[0]), labels=np.concatenate(SEEN[1]))
"""


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """Make the same photographs in all the forms that the pages serve."""
    root = tmp_path_factory.mktemp("data")
    for number in range(IMAGES):
        name = CLASSES[number * len(CLASSES) // IMAGES]
        file = root / "photos" / name / f"{number:03}.jpg"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(jpeg(photo(300, 400, seed=number)))
    files = sorted((root / "photos").glob("*/*.jpg"))
    images = [file.read_bytes() for file in files]
    labels = [CLASSES.index(file.parent.name) for file in files]
    photo_shards(root / "photos", root / "shards")
    records = [example(image=[image], label=[label]) for image, label in zip(images, labels, strict=True)]
    for part in range(2):
        file = root / "records" / f"train-{part}"
        file.parent.mkdir(exist_ok=True)
        write_records(file, records[part * 20 :][:20])
    write_parquet(root / "mds" / "train.parquet", {"image": images, "label": labels}, compression="none")
    columns, names = {"image": hugging_face(images), "label": labels}, class_labels(label=list(CLASSES))
    write_arrow(root / "saved" / "data-00000-of-00001.arrow", columns, names)
    write_parquet(root / "hub" / "train.parquet", columns, names)
    return root


def blocks(page: str, language: str) -> list[str]:
    """Return the blocks of a page, in order."""
    text = (FOLDER / f"{page}.md").read_text()
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def program(text: str, data: Path) -> str:
    """Return a program of a page that reads the test's data and keeps what its loop sees."""
    for old, new in {**WITHOUT_SHUFFLING, '"/data/': f'"{data}/'}.items():
        text = text.replace(old, new)
    return re.sub(r"^    \.\.\. .*$", "    see(images, labels)", text, flags=re.MULTILINE)


def run_python(text: str, home: Path) -> None:
    """Run a program of another loader, which may write files in a folder and asks no server."""
    text += "\nimport os\nos._exit(0)\n"  # some loaders' threads never end
    environment = {**os.environ, "HOME": str(home), "HF_HUB_OFFLINE": "1", "TMPDIR": str(home)}
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr


WRITE = {
    "huggingface": """
import shutil
from datasets import load_dataset, load_from_disk
made = load_dataset("imagefolder", data_dir="/data/photos", split="train")
shutil.rmtree("/data/saved"); shutil.rmtree("/data/hub")
made.save_to_disk("/data/saved"); load_from_disk("/data/saved").to_parquet("/data/hub/train.parquet")
""",
    "streaming": """
from pathlib import Path
from streaming import MDSWriter
files = sorted(Path("/data/photos").glob("*/*.jpg"))
classes = sorted({file.parent.name for file in files})
Path("/data/mds/train.parquet").unlink()
with MDSWriter(out="/data/mds", columns={"image": "bytes", "label": "int"}, exist_ok=True) as writer:
    for file in files:
        writer.write({"image": file.read_bytes(), "label": classes.index(file.parent.name)})
""",
}
"""Programs that write a page's data with its own library, in place of the test's."""


@pytest.fixture(scope="module")
def written(data: Path) -> set[str]:
    """Make the data of the pages whose libraries write it."""
    pages = {page for page in WRITE if find_spec(LIBRARIES.get(page, page))}
    for page in pages:
        texts = [WRITE[page], *blocks(page, "python")[1:-1]]
        text = "".join(texts).replace('"/data/', f'"{data}/')
        run_python(text, data)
    return pages


@pytest.fixture(scope="module")
def address(start_shared_daemon, data: Path, written: set[str]) -> str:  # noqa: ARG001  data first
    """Serve the streams of all pages, in the order of the files; return the address."""
    text = "".join(text for page in PAGES for text in blocks(page, "toml")).replace('"/data/', f'"{data}/')
    streams = tomllib.loads(text)["streams"]
    assert set(PAGES) - {"huggingface"} <= set(streams)
    small = {"shuffle": False, "window": 2, "memory": "16MiB"}
    return start_shared_daemon({name: {**stream, **small} for name, stream in streams.items()}, memory="256MiB").address


def in_range(images: np.ndarray) -> np.ndarray:
    """Return images as uint8 numbers, with the channels last."""
    images = np.asarray(images, np.float32)
    if images.shape[1] == 3:
        images = images.transpose(0, 2, 3, 1)
    return (images * IMAGE_STD + IMAGE_MEAN) * 255 if images.min() < 0 else images


def run_batchd(text: str, data: Path) -> tuple[np.ndarray, np.ndarray]:
    """Return what batchd's program on a page sees in an epoch."""
    seen: tuple[list, list] = ([], [])

    def see(images: Any, labels: Any) -> None:
        seen[0].append(np.asarray(images).copy())
        seen[1].append(np.asarray(labels).copy())

    names = {"see": see}
    exec(compile(program(text, data), "page", "exec"), names)
    if "loader" in names:
        names["loader"].close()
    return in_range(np.concatenate(seen[0])), np.concatenate(seen[1])


def run_other(page: str, texts: list[str], data: Path, tmp_path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Return what the other loader's program sees."""
    file = tmp_path / "seen.npz"
    first = f"SEEN, SEEN_FILE = ([], []), {str(file)!r}\n"
    if page == "streaming":
        first += "def see(images, labels): SEEN[0][:], SEEN[1][:] = [np.stack(images)], [np.array(labels)]\n"
    else:
        first += "def see(images, labels): SEEN[0].append(images); SEEN[1].append(labels)\n"
    text = first + "\n".join(program(one, data) for one in texts) + SAVE
    run_python(text, tmp_path)
    with np.load(file) as arrays:
        return in_range(arrays["images"]), arrays["labels"]


@pytest.mark.parametrize("page", PAGES)
def test_both_programs_of_a_page_give_the_same_labels_and_like_pixels(
    page, data, address, tmp_path, monkeypatch
) -> None:
    """The samples come in the order of the files: all labels are equal, whatever the batch size."""
    if page == "dataloader":
        pytest.importorskip("torch", reason="PyTorch is not installed: make torch")
    monkeypatch.setenv("BATCHD_ADDRESS", address)
    first, *between, last = blocks(page, "python")
    streams = re.findall(r"^\[streams\.(\w+)\]", (FOLDER / f"{page}.md").read_text(), re.MULTILINE)
    seen = [run_batchd(last.replace(f'"{streams[0]}"', f'"{name}"'), data) for name in streams]
    for images, labels in seen:
        assert images.shape == (IMAGES, 224, 224, 3)
        assert labels.tolist() == sorted(labels.tolist())
        assert len(set(labels.tolist())) == len(CLASSES)
    if page in NOT_RUN or not find_spec(LIBRARIES.get(page, page)):
        return
    images, labels = run_other(page, [first], data, tmp_path)
    for ours, our_labels in seen:
        assert our_labels.tolist() == labels.tolist()
        difference = np.abs(images - ours).mean()
        assert difference < DIFFERENCE_MAX
    assert len(between) == (page == "streaming")
