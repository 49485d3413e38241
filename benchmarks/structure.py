"""Benchmark: samples with structure, beside torchvision v2 and albumentations.

    coco    CPU for a photograph with boxes and masks of objects, read from a JSON of COCO, decoded,
            scaled to 480 x 480 with all of them, flipped and jittered
    scan    CPU of the scan of a JSON with 120,000 images and 860,000 objects, and its memory

Sides take turns. Ours makes rows in this process; peers run in the environment ``structure`` of
peers/environments.py, each in a process for its turn, with pycocotools for their masks.
"""

import json
import resource
import statistics
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from time import process_time

import environments
import numpy as np
import pictures
import playing
from harness import Bench, Figure, spread
from sides import Side

from batchd.data.pipeline.execute import Pipeline
from batchd.data.pipeline.image.options import ColorJitter, Decode, Follow, RandomFlip, Resize
from batchd.data.pipeline.image.probe import probe_image
from batchd.data.pipeline.shapes.options import PadBatch
from batchd.data.sources.coco.options import CocoSource
from batchd.data.sources.interface import kind_of, open_reader
from batchd.data.storage.access import Storage
from batchd.data.storage.survey import Survey

SIDE, PHOTOGRAPHS, OBJECTS_MAX = 480, 128, 14
STEPS = (
    Decode(),
    Follow(boxes="boxes", masks="masks", labels=("classes",)),
    Resize(size=(SIDE, SIDE)),
    RandomFlip(),
    ColorJitter(brightness=0.3, contrast=0.3, saturation=0.3),
    PadBatch(field="boxes", max_shape=(OBJECTS_MAX, 4)),
    PadBatch(field="classes", max_shape=(OBJECTS_MAX,)),
    PadBatch(field="masks", max_shape=(OBJECTS_MAX, SIDE, SIDE)),
)
PEERS, SCRIPT, LOG = "structure", "structure_side.py", environments.BUILD / "logs" / "structure.log"
TARGETS = {"torchvision": 2.0, "albumentations": 1.5}
"""The least ratio of CPU of each peer."""
IMAGES, OBJECTS = 120_000, 860_000


def run(bench: Bench) -> None:
    """Both parts."""
    _scan(bench)
    data = _written(bench.photos, bench.scratch / "coco")
    if environments.make([PEERS]):
        print("structure beside torchvision and albumentations: not measured")
        return
    LOG.parent.mkdir(parents=True, exist_ok=True)
    stage = playing.Stage(bench.scratch, 1.0, 4.0)

    def peer_us(name: str) -> float:
        found = playing.measure(Side(name, name, PEERS, SCRIPT, name), data, LOG, stage)
        return 1e6 * found.cpu_s / found.images

    ours = _Rows(data)
    rounds = [
        {"batchd": bench.measure("coco", ours.image_us), **{name: peer_us(name) for name in TARGETS}}
        for _ in range(bench.rounds)
    ]
    for name, target in TARGETS.items():
        ratios = [one[name] / one["batchd"] for one in rounds]
        print(f"boxes and masks, CPU of {name} / ours: {spread(ratios)}")
        bench.report(Figure(f"structure-coco-{name}", statistics.median(ratios), ">=", target))


def _written(photos: Path, folder: Path) -> Path:
    """Photographs with up to eleven objects each; the folder has "images" and "coco.json"."""
    folder.mkdir()
    pictures.link_photographs(photos, folder / "images", PHOTOGRAPHS)
    random = np.random.default_rng(0)
    images, objects = [], []
    for number in range(PHOTOGRAPHS):
        name = f"{number:05}.jpg"
        header = probe_image(memoryview((folder / "images" / name).read_bytes()))
        size = np.array([header.width, header.height])
        images.append({"id": number, "file_name": name, "height": header.height, "width": header.width})
        for _ in range(int(random.integers(0, 12))):
            corners = int(random.integers(8, 40))
            angles, radii = np.sort(random.uniform(0, 2 * np.pi, corners)), random.uniform(0.6, 1, corners)
            radii *= random.uniform(0.05, 0.3) * size.min()
            middle = random.uniform(0, 1, 2) * size
            polygon = np.stack([radii * np.cos(angles), radii * np.sin(angles)], axis=1) + middle
            polygon = np.clip(polygon, 0, size).round(2)
            low, wide = polygon.min(axis=0), np.ptp(polygon, axis=0)
            one = {"bbox": [*low.tolist(), *wide.tolist()], "segmentation": [polygon.reshape(-1).tolist()]}
            objects.append({"id": len(objects), "image_id": number, "category_id": 1, "area": 1, "iscrowd": 0, **one})
    categories = [{"id": 1, "name": "thing"}]
    (folder / "coco.json").write_text(json.dumps({"images": images, "annotations": objects, "categories": categories}))
    return folder


class _Rows:
    """Our side: each photograph into one row, an epoch after the other."""

    def __init__(self, data: Path) -> None:
        fields = ("image", "boxes", "classes", "masks")
        source = CocoSource(path=data / "coco.json", images=data / "images", fields=fields, allow_outside_root=True)
        index = kind_of(source).scan(source, Survey(lambda _found: None))
        self._reader = open_reader(source, index, 1 << 26, Storage())
        self._pipeline = Pipeline(list(source.columns), STEPS, 0)
        self._row = {name: np.full(field.fixed_shape, 1, field.dtype) for name, field in self._pipeline.columns.items()}
        self._epoch = 0
        self.image_us()

    def image_us(self) -> float:
        """CPU for each photograph of the next epoch."""
        begun_s = process_time()
        for sample in range(PHOTOGRAPHS):
            self._pipeline.run(self._reader.read(sample), self._epoch, sample, 0, self._row)
        self._epoch += 1
        return 1e6 * (process_time() - begun_s) / PHOTOGRAPHS


# --- the scan -------------------------------------------------------------------------------------


def _scan(bench: Bench) -> None:
    """Once: it takes half a minute."""
    file = bench.scratch / "instances.json"
    _write_instances(file)
    cpu_s, mib = bench.measure("scan", lambda: _in_a_process(file))
    print(f"scan of {file.stat().st_size >> 20} MiB: {cpu_s:.1f} CPU s, {mib:.0f} MiB of memory")
    bench.report(Figure("structure-scan-cpu-s", cpu_s, "<=", 60, 1))
    bench.report(Figure("structure-scan-mib", mib, "<=", 1024, 0))


def _in_a_process(file: Path) -> tuple[float, float]:
    context = get_context("spawn")
    receiving, sending = context.Pipe(duplex=False)
    process = context.Process(target=_scanned, args=(file, sending))
    process.start()
    found: tuple[float, float] = receiving.recv()
    process.join()
    return found


def _scanned(file: Path, sending: Connection) -> None:
    """CPU and memory of a scan in this process."""
    source = CocoSource(path=file, images=file.parent)
    begun_s = process_time()
    index = kind_of(source).scan(source, Survey(lambda _found: None))
    assert len(index) == IMAGES, "all images"
    sending.send((process_time() - begun_s, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024))


def _write_instances(file: Path) -> None:
    """A JSON like that of COCO's training part, with polygons of 8 to 90 corners."""
    random = np.random.default_rng(0)
    polygons = [random.uniform(0, 640, 2 * corners).round(2).tolist() for corners in random.integers(8, 91, 500)]
    written = [json.dumps([polygon]) for polygon in polygons]
    of_image, of_polygon = random.integers(0, IMAGES, OBJECTS).tolist(), random.integers(0, 500, OBJECTS).tolist()
    with file.open("w") as into:
        into.write('{"images": [')
        for number in range(IMAGES):
            name = f"{number:012}.jpg"
            into.write(
                f'{", " if number else ""}{{"id": {number}, "file_name": "{name}", "height": 480, "width": 640, '
                f'"coco_url": "http://images.cocodataset.org/train2017/{name}"}}'
            )
        into.write('], "annotations": [')
        for number, (image, polygon) in enumerate(zip(of_image, of_polygon, strict=True)):
            into.write(
                f'{", " if number else ""}{{"segmentation": {written[polygon]}, "area": 531.8, "iscrowd": 0, '
                f'"image_id": {image}, "bbox": [1.1, 2.2, 30.5, 40.25], "category_id": {number % 90 + 1}, "id": {number}}}'
            )
        into.write('], "categories": [' + ", ".join(f'{{"id": {n}, "name": "c{n}"}}' for n in range(1, 91)) + "]}")
