"""The programs of docs/moving: batchd's program runs, and equals the other loader's if installed.

On a page the first program is the other loader's and the last one is batchd's. Other loaders run
in a process of their own, on a CPU, without shuffling and with fixed numbers for random steps. DALI
and FFCV run in the environments that ``make test-moving`` makes, as FFCV wants an old NumPy.
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

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "moving"
PAGES = sorted(path.stem for path in FOLDER.glob("*.md"))
CLASSES = ("cat", "dog", "owl")
LIBRARIES = {"dataloader": "torchvision", "huggingface": "datasets", "tfdata": "tensorflow"}
ENVIRONMENTS = {"dali": "dali-torch", "ffcv": "ffcv"}
"""Pages with random steps, and the folder in build/peers that has the library."""
ROWS = {"dali": 48, "ffcv": 32}
"""Samples of an epoch where they are not all: DALI fills the last batch up, FFCV leaves it out."""
FIXED = {
    "device_id=0": "device_id=None",
    "shuffle=True": "shuffle=False",
    "shardshuffle=100": "shardshuffle=False",
    ".shuffle(1000)": "",
    ".shuffle(seed=1)": "",
    "num_workers=8": "num_workers=0",
    "random_shuffle=True": "random_shuffle=False",
    "OrderOption.RANDOM": "OrderOption.SEQUENTIAL",
    'files, device="mixed"': "files, random_area=[1, 1], random_aspect_ratio=[4 / 3, 4 / 3]",
    "fn.random.coin_flip()": "fn.random.coin_flip(probability=0)",
    "RGBImageDecoder((224, 224))": "RGBImageDecoder((224, 224), (1, 1), (4 / 3, 4 / 3))",
    "RandomHorizontalFlip()": "RandomHorizontalFlip(0)",
}
"""Replaced in programs: they run on a CPU, without shuffling, and take whole photographs."""
FIXED_STEPS = {
    "random_resized_crop": {"scale": [1.0, 1.0], "ratio": [4 / 3, 4 / 3]},
    "random_flip": {"probability": 0.0},
}
IMAGES, IMAGE_MEAN, IMAGE_STD = 40, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
DIFFERENCE_MAX = 2
"""Tolerance of the mean channel of all pixels, of 255, as the pages say."""
SEE = """
import numpy as np
SEEN = [], []
def see(images, labels): SEEN[0].append(np.array(images)); SEEN[1].append(np.array(labels))
"""
SEE_LISTS = """
import numpy as np
SEEN = [], []
def see(images, labels): SEEN[0][:], SEEN[1][:] = [np.stack(images)], [np.array(labels)]
"""
SAVE = """
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
    for old, new in {**FIXED, '"/data/': f'"{data}/'}.items():
        text = text.replace(old, new)
    return re.sub(r"^    \.\.\. .*$", "    see(images, labels)", text, flags=re.MULTILINE)


def interpreter(page: str) -> str:
    """Return the Python that has the library of a page, or nothing."""
    if page in ENVIRONMENTS:
        folder = ROOT / "build" / "peers" / ENVIRONMENTS[page]
        return str(folder / "bin" / "python") if (folder / ".ready").exists() else ""
    return sys.executable if find_spec(LIBRARIES.get(page, page)) else ""


def run_python(python: str, text: str, home: Path) -> None:
    """Run a program of another loader, which may write files in a folder and asks no server."""
    text += "\nimport os\nos._exit(0)\n"  # some loaders' threads never end
    environment = {**os.environ, "HOME": str(home), "HF_HUB_OFFLINE": "1", "TMPDIR": str(home)}
    done = subprocess.run([python, "-c", text], capture_output=True, text=True, env=environment, check=False)
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
    "ffcv": """
from pathlib import Path
import cv2
from ffcv.fields import IntField, RGBImageField
from ffcv.writer import DatasetWriter
class Photographs:
    files = sorted(Path("/data/photos").glob("*/*.jpg"))
    classes = sorted({file.parent.name for file in files})
    def __len__(self): return len(self.files)
    def __getitem__(self, index):
        file = self.files[index]
        return cv2.imread(str(file))[:, :, ::-1], self.classes.index(file.parent.name)
fields = {"image": RGBImageField(write_mode="jpg", jpeg_quality=95), "label": IntField()}
DatasetWriter("/data/photos.beton", fields, num_workers=1).from_indexed_dataset(Photographs())
""",
}
"""Programs that write a page's data with its own library, in place of the test's."""


@pytest.fixture(scope="module")
def written(data: Path) -> set[str]:
    """Make the data of the pages whose libraries write it."""
    pages = {page for page in WRITE if interpreter(page)}
    for page in pages:
        texts = [WRITE[page], *blocks(page, "python")[1:-1]]
        text = "".join(texts).replace('"/data/', f'"{data}/')
        run_python(interpreter(page), text, data)
    return pages


@pytest.fixture(scope="module")
def address(start_shared_daemon, data: Path, written: set[str]) -> str:  # noqa: ARG001  data first
    """Serve the streams of all pages, in the order of the files; return the address.

    Those with random steps are served with fixed numbers, too.
    """
    text = "".join(text for page in PAGES for text in blocks(page, "toml")).replace('"/data/', f'"{data}/')
    streams = tomllib.loads(text)["streams"]
    assert set(PAGES) - {"huggingface"} <= set(streams)
    for page in ENVIRONMENTS:
        steps = [{**step, **FIXED_STEPS.get(step["op"], {})} for step in streams[page]["pipeline"]]
        streams[f"{page}_fixed"] = {**streams[page], "pipeline": steps}
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
    return np.concatenate(seen[0]), np.concatenate(seen[1])


def run_other(page: str, text: str, data: Path, tmp_path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Return what the other loader's program sees."""
    file = tmp_path / "seen.npz"
    first = f"SEEN_FILE = {str(file)!r}{SEE_LISTS if page == 'streaming' else SEE}"
    run_python(interpreter(page), first + program(text, data) + SAVE, tmp_path)
    with np.load(file) as arrays:
        return arrays["images"], arrays["labels"]


def as_commented(text: str, images: np.ndarray, labels: np.ndarray) -> bool:
    """Tell whether the comment of a program's loop says the types and shapes of its batches."""
    said = re.findall(r"(\w+) \[16(.*?)\]", re.search(r"^    \.\.\.  # (.*)$", text, re.MULTILINE)[1])
    return said == [
        (str(array.dtype), "".join(f", {length}" for length in array.shape[1:])) for array in (images, labels)
    ]


@pytest.mark.thorough(after_first=True)
@pytest.mark.parametrize("page", PAGES)
def test_both_programs_of_a_page_give_the_same_labels_and_like_pixels(
    page, data, address, tmp_path, monkeypatch
) -> None:
    """The samples come in the order of the files; types and shapes are those in the comments."""
    if page == "dataloader":
        pytest.importorskip("torch", reason="PyTorch is not installed: make torch")
    monkeypatch.setenv("BATCHD_ADDRESS", address)
    first, *between, last = blocks(page, "python")
    assert len(between) == (page == "streaming")
    streams = re.findall(r"^\[streams\.(\w+)\]", (FOLDER / f"{page}.md").read_text(), re.MULTILINE)
    names = [*streams, f"{page}_fixed"] if page in ENVIRONMENTS else streams
    seen = [run_batchd(last.replace(f'"{streams[0]}"', f'"{name}"'), data) for name in names]
    for images, labels in seen:
        assert as_commented(last, images, labels)
        assert in_range(images).shape == (IMAGES, 224, 224, 3)
        assert labels.tolist() == sorted(labels.tolist())
        assert len(set(labels.tolist())) == len(CLASSES)
    if not interpreter(page):
        return
    images, labels = run_other(page, first, data, tmp_path)
    assert len(images) == len(labels) == ROWS.get(page, IMAGES)
    assert page == "streaming" or as_commented(first, images, labels)
    count = min(IMAGES, len(images))
    for ours, our_labels in seen[-1:] if page in ENVIRONMENTS else seen:
        assert our_labels[:count].tolist() == labels[:count].ravel().tolist()
        difference = np.abs(in_range(images)[:count] - in_range(ours)[:count]).mean()
        assert difference < DIFFERENCE_MAX
