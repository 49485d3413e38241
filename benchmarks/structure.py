"""Benchmark: samples with structure, beside torchvision, albumentations, Hugging Face, and by hand.

    coco    CPU for a photograph with boxes and masks of objects, read from a JSON of COCO, decoded,
            scaled to 480 x 480 with all of them, flipped and jittered
    vlm     CPU for a photograph between texts: decoded, scaled to at most 1280 tokens of 28 x 28,
            cut into patches, and packed with its tokens into rows of 8,192; beside a collate
            function by hand (Pillow and numpy); and the room that is left empty in planned rows
    mosaic  images/s of four photographs in one with their boxes, beside ultralytics' own loader;
            both keep images in memory, or read files
    scan    CPU of the scan of a JSON with 120,000 images and 860,000 objects, and its memory
    chats   tokens/s of 20,000 chats as rows of 4,096 tokens, from the daemon's start to the last
            row of the first epoch, where nothing is kept from before: each round has a new folder,
            with the chats and all caches; beside ``datasets.map`` on the same two cores. CPU is of
            all processes, from their start to their end

Sides take turns. Ours makes rows in this process, and mosaics in a daemon; peers run in their
environments of peers/environments.py, each in a process for its turn. Masks of "coco" are made by
pycocotools there.
"""

import json
import os
import re
import resource
import shutil
import statistics
import subprocess
import sysconfig
import tempfile
import time
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from time import process_time
from typing import Any

import environments
import numpy as np
import pictures
import playing
from harness import Bench, Figure, spread
from peers.common import adopt_orphans, cpu_s, tree
from sides import Side
from tokenizers import AddedToken, Regex, Tokenizer, models, pre_tokenizers, trainers

import batchd
import batchd_client
from batchd.core.packs import PackLimits, Packs
from batchd.data.pipeline.execute import Pipeline
from batchd.data.pipeline.image.options import ColorJitter, Decode, Follow, RandomFlip, Resize
from batchd.data.pipeline.image.probe import probe_image
from batchd.data.pipeline.sample_fields import columns_after
from batchd.data.pipeline.shapes.options import Interleave, Pack, PadBatch
from batchd.data.sources.coco.options import CocoSource
from batchd.data.sources.interface import kind_of, open_reader
from batchd.data.sources.jsonl.options import JsonlSource
from batchd.data.storage.access import Storage
from batchd.data.storage.survey import Survey
from batchd.worker.packs import PackWriter
from batchd_wire.fields import Field

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
ROW, PLACE, ROWS_OF_TEXT = 8192, 9, 20_000
VLM_STEPS = (
    Decode(field="images"),
    Resize(field="images", max_pixels=1003520, min_pixels=3136, multiple_of=28),
    Interleave(image_token=PLACE, size=14, merge=2),
)
VLM_TARGET = 1.5
TARGETS = {"torchvision": 2.0, "albumentations": 1.5}
"""The least ratio of CPU of each peer."""
MOSAIC_PEER = "ultralytics"
MOSAIC_TARGETS = {"-cached": 1.5, "": 1.5}
"""The least ratio of images/s: with images in memory, and from files."""
MOSAIC_FILES = 1024
"""More than ultralytics' workers keep of those that they decoded last: 128 each."""
IMAGES, OBJECTS = 120_000, 860_000
CHATS, ROOM, VOCABULARY = 60_000, 4096, 32_000
PATTERN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
"""At which Llama 3 cuts a text."""
CONFIG = """\
[daemon]
workers = 2
cache_dir = "{0}"
[streams.sft]
source = {{ type = "jsonl", root = "{0}", shards = ["chats.jsonl"], fields = {{ messages = "json" }} }}
batch_size = 8
cache = "decoded"
cache_memory = "1GiB"
pipeline = [
    {{ op = "chat", tokenizer = "{0}/tokenizer.json", template = "chatml", max_length = {1} }},
    {{ op = "pack", field = "tokens", length = {1} }},
]
"""


def run(bench: Bench) -> None:
    """All parts."""
    _scan(bench)
    _chats(bench)
    shown = _written_lines(bench.photos, bench.scratch / "vlm")
    rows = _PackedRows(shown)
    bench.report(Figure("structure-vlm-padding-percent", 100 * rows.empty(), "<=", 2.0))
    data = _written(bench.photos, bench.scratch / "coco")
    _mosaic(bench, data, _written(bench.photos, bench.scratch / "mosaic", MOSAIC_FILES))
    if environments.make([PEERS]):
        print("structure beside torchvision and albumentations: not measured")
        return
    LOG.parent.mkdir(parents=True, exist_ok=True)
    stage = playing.Stage(bench.scratch, 1.0, 4.0)

    def peer_us(name: str, data: Path) -> float:
        found = playing.measure(Side(name, name, PEERS, SCRIPT, name), data, LOG, stage)
        return 1e6 * found.cpu_s / found.images

    ours = _Rows(data)
    rounds = [
        {"batchd": bench.measure("coco", ours.image_us), **{name: peer_us(name, data) for name in TARGETS}}
        for _ in range(bench.rounds)
    ]
    ratios = [peer_us("vlm", shown) / bench.measure("vlm", rows.image_us) for _ in range(bench.rounds)]
    print(f"images between texts, CPU of a collate function by hand / ours: {spread(ratios)}")
    bench.report(Figure("structure-vlm-by-hand", statistics.median(ratios), ">=", VLM_TARGET))
    for name, target in TARGETS.items():
        ratios = [one[name] / one["batchd"] for one in rounds]
        print(f"boxes and masks, CPU of {name} / ours: {spread(ratios)}")
        bench.report(Figure(f"structure-coco-{name}", statistics.median(ratios), ">=", target))


def _mosaic(bench: Bench, kept: Path, files: Path) -> None:
    """Images/s of two workers of each side, and the CPU that an image takes them.

    ``kept``: images that fit into memory. ``files``: those that are read.
    """
    if environments.make([MOSAIC_PEER]):
        print("mosaic beside ultralytics: not measured")
        return
    LOG.parent.mkdir(parents=True, exist_ok=True)
    stage = playing.Stage(bench.scratch, 10.0, 8.0, 16)  # each begins with nothing decoded
    for kind, target in MOSAIC_TARGETS.items():
        data = kept if kind else files
        names = {"batchd": environments.OURS, MOSAIC_PEER: MOSAIC_PEER}
        rounds = [
            {
                name: playing.measure(Side(name, name, where, "mosaic_side.py", name + kind), data, LOG, stage)
                for name, where in names.items()
            }
            for _ in range(bench.rounds)
        ]
        speeds = [{name: one.images / one.seconds for name, one in found.items()} for found in rounds]
        cpu_s = [{name: one.cpu_s / one.images for name, one in found.items()} for found in rounds]
        ratios = [one["batchd"] / one[MOSAIC_PEER] for one in speeds]
        print(f"mosaic{kind}, images/s, ours / {MOSAIC_PEER}: {spread(ratios)}")
        print(
            f"mosaic{kind}, CPU of {MOSAIC_PEER} / ours: {spread([one[MOSAIC_PEER] / one['batchd'] for one in cpu_s])}"
        )
        bench.report(Figure(f"structure-mosaic{kind}", statistics.median(ratios), ">=", target))


def _written(photos: Path, folder: Path, count: int = PHOTOGRAPHS) -> Path:
    """Photographs with up to eleven objects each, as COCO and as YOLO has them.

    The folder has "images", "coco.json" and "labels".
    """
    (folder / "labels").mkdir(parents=True)
    pictures.link_photographs(photos, folder / "images", count)
    random = np.random.default_rng(0)
    images, objects = [], []
    for number in range(count):
        name = f"{number:05}.jpg"
        header = probe_image(memoryview((folder / "images" / name).read_bytes()))
        size = np.array([header.width, header.height])
        lines = []
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
            lines.append(" ".join(map(str, [0, *((low + wide / 2) / size), *(wide / size)])))
        (folder / "labels" / f"{number:05}.txt").write_text("\n".join(lines))
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


def _written_lines(photos: Path, folder: Path) -> Path:
    """Lines of JSON with tokens and the paths of one to three photographs, in ``PLACE`` of each."""
    folder.mkdir()
    pictures.link_photographs(photos, folder / "images", PHOTOGRAPHS)
    random = np.random.default_rng(0)
    lines, left = [], [f"{number:05}.jpg" for number in range(PHOTOGRAPHS)]
    while left:
        names, left = left[: (count := int(random.integers(1, 4)))], left[count:]
        tokens = random.integers(10, 30_000, int(random.integers(20, 400)))
        tokens[random.choice(len(tokens), len(names), replace=False)] = PLACE
        lines.append(json.dumps({"tokens": tokens.tolist(), "images": [f"images/{name}" for name in names]}))
    (folder / "samples.jsonl").write_text("\n".join(lines))
    return folder


class _PackedRows:
    """Our side: samples with photographs into rows, one after the other, as they fit."""

    def __init__(self, data: Path) -> None:
        fields = {"tokens": "int32[?]", "images": "image[<=3]"}
        source = JsonlSource(root=data, shards=("samples.jsonl",), fields=fields, allow_outside_root=True)
        self._index = kind_of(source).scan(source, Survey(lambda _found: None))
        self._reader = open_reader(source, self._index, 1 << 26, Storage())
        self._pipeline = Pipeline(list(source.columns), VLM_STEPS, 0, has_rows=False)
        self._sizes = Pipeline(list(source.columns), VLM_STEPS, 0, has_rows=False, measures=True)
        self._pack = Pack(field="tokens", length=ROW, too_long="drop")
        columns = columns_after(source.columns, (*VLM_STEPS, self._pack)).values()
        index = Field("index", "int64", (self._pack.documents_max,))
        fields_of_row = [*(column.field for column in columns if column.field), index]
        self._row = {field.name: np.full(field.shape, 1, field.dtype) for field in fields_of_row}
        self.image_us()

    def image_us(self) -> float:
        """CPU for each photograph."""
        begun_s = process_time()
        writer = PackWriter(self._pack, self._pipeline.columns, self._row)
        for sample in range(len(self._index)):
            made = self._pipeline.make(self._reader.read(sample), 0, sample, 0)
            if writer.elements + len(made["tokens"]) > ROW:  # type: ignore[arg-type]  # an array
                writer.finish()
                writer = PackWriter(self._pack, self._pipeline.columns, self._row)
            writer.add(sample, 0, made)
        writer.finish()
        return 1e6 * (process_time() - begun_s) / PHOTOGRAPHS

    def empty(self) -> float:
        """The part of the rows that is empty, with many samples of such lengths."""
        lengths = [
            len(self._sizes.make(self._reader.read(sample), 0, sample, 0)["tokens"])  # type: ignore[arg-type]  # an array
            for sample in range(len(self._index))
        ]
        random = np.random.default_rng(1)
        many = random.choice(lengths, ROWS_OF_TEXT) + random.integers(0, 200, ROWS_OF_TEXT)
        packs = Packs.plan(many, PackLimits(ROW, self._pack.documents_max, self._pack.window, "drop"))
        return 1 - packs.elements / (len(packs) * ROW)


# --- the scan -------------------------------------------------------------------------------------


def _scan(bench: Bench) -> None:
    """Once: it takes half a minute."""
    file = bench.scratch / "instances.json"
    _write_instances(file)
    cpu_s, mib = bench.measure("scan", lambda: _in_a_process(_scanned, file))
    print(f"scan of {file.stat().st_size >> 20} MiB: {cpu_s:.1f} CPU s, {mib:.0f} MiB of memory")
    bench.report(Figure("structure-scan-cpu-s", cpu_s, "<=", 60, 1))
    bench.report(Figure("structure-scan-mib", mib, "<=", 1024, 0))


def _in_a_process(target: Callable[[Path, Connection], None], file: Path) -> Any:
    context = get_context("spawn")
    receiving, sending = context.Pipe(duplex=False)
    process = context.Process(target=target, args=(file, sending))
    process.start()
    found = receiving.recv()
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


# --- chats ----------------------------------------------------------------------------------------


def _chats(bench: Bench) -> None:
    """Both sides make all rows of the same chats, each in processes of its own."""
    if environments.make(["chats"]):
        print("chats beside datasets.map: not measured")
        return
    folder = bench.scratch / "chats"
    folder.mkdir()
    _write_chats(folder)
    command = [*environments.command("chats"), str(Path(__file__).parent / "peers" / "chats_side.py"), str(folder)]

    def theirs() -> Any:
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        return json.loads(done.stdout.splitlines()[-1])

    rounds = [
        (bench.measure("chats", lambda: _in_a_process(_packed, folder)), bench.measure("datasets.map", theirs))
        for _ in range(bench.rounds)
    ]
    for ours, peer in rounds:
        assert ours["tokens"] == peer["tokens"], "the same tokens"
    filled = rounds[0][0]["tokens"] / (rounds[0][0]["rows"] * ROOM)
    cpu = [peer["cpu_s"] / ours["cpu_s"] for ours, peer in rounds]
    rate = [peer["seconds"] / ours["seconds"] for ours, peer in rounds]
    print(f"chats: CPU of datasets.map / ours: {spread(cpu)}; tokens/s of ours / datasets.map: {spread(rate)}")
    bench.report(Figure("structure-chats-tokens", statistics.median(rate), ">=", 3))
    bench.report(Figure("structure-chats-cpu", statistics.median(cpu), ">=", 3))
    bench.report(Figure("structure-chats-filled-percent", 100 * filled, ">=", 98))


def _packed(folder: Path, sending: Connection) -> None:
    """Tokens, rows and seconds of the first epoch, and the CPU of all processes till they end."""
    adopt_orphans()
    with tempfile.TemporaryDirectory(dir=folder) as fresh:
        for file in ("chats.jsonl", "tokenizer.json"):
            shutil.copy(folder / file, fresh)
        config = Path(fresh) / "batchd.toml"
        config.write_text(CONFIG.format(fresh, ROOM))
        begun_s, before_s = time.perf_counter(), _family_cpu_s()
        tokens = rows = 0
        with batchd.serve(config) as address, batchd_client.connect(address) as daemon:
            for batch in daemon.stream("sft", epochs=1):
                tokens, rows = tokens + int(batch["lengths"].sum()), rows + len(batch["tokens"])
            seconds = time.perf_counter() - begun_s
        cpu_s = _family_cpu_s() - before_s
    sending.send({"tokens": tokens, "rows": rows, "seconds": seconds, "cpu_s": cpu_s})


def _family_cpu_s() -> float:
    """CPU of this process and of all its descendants, those that ended included."""
    return sum(map(cpu_s, tree(os.getpid())))


def _write_chats(folder: Path) -> None:
    """Paragraphs of Python's own documentation as chats, and a tokenizer trained on them."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    texts = [text for file in files for text in re.findall(r'"""(.*?)"""', file.read_text(errors="replace"), re.DOTALL)]
    paragraphs = [part.strip() for text in texts for part in re.split(r"\n\s*\n", text) if len(part) > 40]
    tokenizer = Tokenizer(models.BPE())
    own = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(PATTERN), "isolated"), own])
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(paragraphs, trainer)
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in ("<|im_start|>", "<|im_end|>")])
    tokenizer.save(str(folder / "tokenizer.json"))
    random = np.random.default_rng(0)
    with (folder / "chats.jsonl").open("w") as into:
        for _ in range(CHATS):
            messages = []
            for _ in range(int(random.integers(1, 4))):
                said, *answer = random.choice(len(paragraphs), int(random.integers(2, 5))).tolist()
                messages += [
                    {"role": "user", "content": paragraphs[said]},
                    {"role": "assistant", "content": "\n\n".join(paragraphs[place] for place in answer)},
                ]
            into.write(json.dumps({"messages": messages}) + "\n")
