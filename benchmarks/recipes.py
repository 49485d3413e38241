"""Benchmark: recipes of pictures, beside one view, timm and torchvision.

    two, dino     CPU of two views (SimCLR: a crop of 8 % to 100 %, and a flip) against that of one,
                  and of two global and eight local ones (DINO) against one global one, decoded, cut
                  and scaled into the row of a batch. ``first``: no access points are known,
                  ``later``: from those that a cache has by then
    own-size      CPU of a trainer for a batch of 64 out of a slot of 256, but for its quarter of
                  the hand-over
    streams       CPU of the workers for three streams of other augmentations in one order, of
                  photographs that no cache holds, against that of one stream
    timm, dino    images/s of the cookbook's stream on two workers, as bytes, beside timm's loader,
                  which erases on the device, and beside torchvision v2 in a DataLoader
    rand-augment  CPU for a photograph of 224 x 224, beside timm's on Pillow
    mixup         CPU for a batch of 256 float32 images in torch, beside torchvision's ``MixUp``;
                  milliseconds on a GPU

Sides take turns, photograph by photograph in one process. There the time is the thread's own on a
CPU, so that others on the machine hardly count. A round is an epoch, so each has other crops. Peers
run in the environment ``recipes`` of peers/environments.py, each in a process for its turn.
"""

import statistics
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from time import perf_counter, thread_time_ns
from typing import Any

import environments
import numpy as np
import pictures
import playing
from harness import CROP, RESIZE, Bench, Figure, Player, served, spread
from sides import Side
from speed import read_in_turn
from tables import Measurement

import batchd_client
from batchd.data.pipeline.augment.options import RandAugment
from batchd.data.pipeline.execute import Pipeline
from batchd.data.pipeline.image.jpeg_box import found_points
from batchd.data.pipeline.image.options import Decode, RandomFlip, RandomResizedCrop, Resize
from batchd.data.pipeline.image.probe import probe_image
from batchd.data.pipeline.options import StepOptions
from batchd.data.pipeline.views.options import View, Views
from batchd.data.samples.columns import Column
from batchd.data.samples.kept_files import KeptFiles
from batchd_client.memory import ReceiveBuffer
from batchd_client.mixing import MIX_BOX, MIX_LAMBDA, MIX_ROW, mixed

ANY = (RandomResizedCrop(size=(224, 224)), RandomFlip())
GLOBAL = (RandomResizedCrop(size=(224, 224), scale=(0.4, 1.0)), RandomFlip())
LOCAL = (RandomResizedCrop(size=(96, 96), scale=(0.05, 0.4)), RandomFlip())
RECIPES: Mapping[str, tuple[Sequence[StepOptions], Views, float]] = {
    "two": (ANY, Views(into={"image": View(count=2, steps=ANY)}), 1.7),
    "dino": (GLOBAL, Views(into={"image": View(count=2, steps=GLOBAL), "local": View(count=8, steps=LOCAL)}), 2.6),
}
"""The steps of one view, all views, and the most that these may take of it."""


RAND_AUGMENT = ([Decode(), Resize(size=(224, 224))], [Decode(), Resize(size=(224, 224)), RandAugment()])
PEERS, SCRIPT, LOG = "recipes", "recipes_side.py", environments.BUILD / "logs" / "recipes.log"
LOADERS = {"timm": 2.4, "dino": 3.0}
"""Streams of the cookbook, and the least ratio of images/s."""
PEER_ROUNDS, PHOTOGRAPHS, BATCH = 3, 256, 64
WARM_UP_S = 4.0
"""More than the first epoch of so few photographs, which finds access points."""
AUGMENTED = {
    name: f"{CROP[:-1]}, {step} ]"
    for name, step in (
        ("a", '{ op = "color_jitter", brightness = 0.4 }'),
        ("b", '{ op = "gray", probability = 0.2 }'),
        ("c", '{ op = "solarize", probability = 0.2 }'),
    )
}
SECONDS = 3.0
SLOT_ROWS, OWN_ROWS, OWN_BATCHES, GPU_BATCHES = 256, 64, 5_000, 100


def run(bench: Bench) -> None:
    """Each part, the ones without peers first."""
    files = [path.read_bytes() for path in sorted(bench.photos.rglob("*")) if path.suffix.lower() in {".jpg", ".jpeg"}]
    _views(bench, files)
    _own_size(bench)
    _streams(bench)
    try:
        _peers(bench, files)
    except playing.SideFailed as error:
        print(f"recipes beside timm and torchvision: {error}; see {LOG}")
    _mixup_on_gpu(bench)


def _views(bench: Bench, files: Sequence[bytes]) -> None:
    """Each recipe, without access points and with them."""
    points = [found_points(view, probe_image(view)) for view in map(memoryview, files)]
    for name, (one, views, target) in RECIPES.items():
        for records, when in ((None, "first"), (points, "later")):
            sides = ([Decode(), *one], [Decode(), views])
            epochs = range(bench.rounds + 1)
            # The first round warms up.
            rounds = [bench.measure(name, partial(_epoch_us, files, records, sides, epoch)) for epoch in epochs][1:]
            ratios = [several / single for single, several in rounds]
            spent = " and ".join(spread(list(us), 0) for us in zip(*rounds, strict=True))
            print(f"{name}, {when}: {spent} us for a photograph; {spread(ratios)}")
            bench.report(Figure(f"recipes-{name}-{when}", statistics.median(ratios), "<=", target))


def _epoch_us(
    files: Sequence[bytes], records: Sequence[bytes] | None, sides: Sequence[Sequence[StepOptions]], epoch: int
) -> tuple[float, ...]:
    """CPU for each photograph, by side."""
    kept = KeptFiles(["image"])
    pipelines = [Pipeline([Column("image", "encoded")], steps, 0, kept=kept) for steps in sides]
    rows = [
        {name: np.full((len(files), *field.fixed_shape), 1, np.uint8) for name, field in one.columns.items()}
        for one in pipelines
    ]  # touched, as slots are
    spent_ns = [0] * len(sides)
    for sample, file in enumerate(files):
        values = {"image": memoryview(file)}
        kept.points.begin({"image": records[sample]} if records else {}, is_kept=False)
        for turn in range(len(sides)):
            side = (turn + sample + epoch) % len(sides)
            row = {name: array[sample] for name, array in rows[side].items()}
            begun_ns = thread_time_ns()
            pipelines[side].run(values, epoch, sample, 0, row)
            spent_ns[side] += thread_time_ns() - begun_ns
    return tuple(spent / len(files) / 1000 for spent in spent_ns)


# --- one order, several streams or sizes ----------------------------------------------------------


def _own_size(bench: Bench) -> None:
    """Take batches that are decoded: whole ones, parts of them, and those of a smaller stream."""
    config = bench.config(pipeline=RESIZE, shuffle="false")
    config.write_text(config.read_text() + bench.stream("small", pipeline=RESIZE, shuffle="false", batch_size=OWN_ROWS))
    with served(config) as address, batchd_client.connect(address) as daemon:
        own = daemon.stream("photos", batch_size=OWN_ROWS)
        streams = daemon.stream("photos"), own, daemon.stream("small")
        copies = sum(isinstance(batch.memory, ReceiveBuffer) for batch in own)
        rounds = [
            bench.measure("own-size", lambda: [_taken_us(stream, OWN_BATCHES) for stream in streams])
            for _ in range(bench.rounds + 1)
        ][1:]  # the first one decodes
    whole, cut, small = (list(us) for us in zip(*rounds, strict=True))
    more = [own_us - whole_us * OWN_ROWS / SLOT_ROWS for whole_us, own_us in zip(whole, cut, strict=True)]
    print(
        f"us of a batch of {SLOT_ROWS}: {spread(whole, 1)}; of {OWN_ROWS}: {spread(cut, 1)}, {spread(more, 1)} of them for"
    )
    print(f"the cut; of {OWN_ROWS} in a stream of its own: {spread(small, 1)}; copies: {copies}")
    bench.report(Figure("recipes-own-size-us", statistics.median(more), "<=", 5, 1))
    bench.report(Figure("recipes-own-size-copies", copies, "<=", 0, 0))


def _taken_us(stream: batchd_client.Stream, batches: int) -> float:
    """CPU of this thread for each of so many batches."""
    taken, begun_ns = 0, thread_time_ns()
    while taken < batches:
        for batch in stream:
            with batch:
                taken += 1
    return (thread_time_ns() - begun_ns) / taken / 1000


def _streams(bench: Bench) -> None:
    """The augmentations alone and together, each read at the same pace."""
    with ExitStack() as stack:
        players = {}
        for name, pipelines in {"one": ["a"], "all": list(AUGMENTED)}.items():
            text = '[daemon]\nworkers = 2\nmemory = "2GiB"\n'
            for one in pipelines:
                text += bench.stream(one, pipeline=AUGMENTED[one], batch_size=BATCH, repeats=8, cache='"off"')
            config = bench.scratch / f"{name}.toml"
            config.write_text(text)
            players[name] = stack.enter_context(Player(read_in_turn, stack.enter_context(served(config))))
        rounds = [
            {name: bench.measure(name, partial(player.ask, SECONDS))["workers"] for name, player in players.items()}
            for _ in range(bench.rounds)
        ]
    ratios = [len(AUGMENTED) * one["all"] / one["one"] for one in rounds]
    print(f"{len(AUGMENTED)} streams with other augmentations / one, CPU of workers: {spread(ratios)}")
    bench.report(Figure("recipes-streams-cpu", statistics.median(ratios), "<=", 1.6))


# --- beside peers ---------------------------------------------------------------------------------


def _peers(bench: Bench, files: Sequence[bytes]) -> None:
    """A round has each side once."""
    if environments.make([PEERS]):
        print("recipes beside timm and torchvision: not measured")
        return
    folder = bench.scratch / "photographs"
    pictures.link_photographs(bench.photos, folder, PHOTOGRAPHS)
    LOG.parent.mkdir(parents=True, exist_ok=True)
    stage = playing.Stage(bench.scratch, WARM_UP_S, 4.0, BATCH)

    def played(variant: str, environment: str = PEERS, script: str = SCRIPT) -> Measurement:
        return playing.measure(Side(variant, variant, environment, script, variant), folder, LOG, stage)

    rounds = range(min(PEER_ROUNDS, bench.rounds))
    for name, target in LOADERS.items():
        sides = [(played(name, environments.OURS, "batchd_side.py"), played(name)) for _ in rounds]
        print(f"{name}, CPU of the peer / ours: {spread([_cpu_us(peer) / _cpu_us(ours) for ours, peer in sides])}")
        rates = [{"batchd": ours.rate, name: peer.rate} for ours, peer in sides]
        bench.compare(f"recipes-{name}-images", rates, "batchd", [name], target)
    augmented = [_epoch_us(files, None, RAND_AUGMENT, epoch) for epoch in rounds]
    ratios = [(with_it - without) / _cpu_us(played("rand-augment")) for without, with_it in augmented]
    print(f"rand-augment, CPU / timm's: {spread(ratios)}")
    bench.report(Figure("recipes-rand-augment-cpu", statistics.median(ratios), "<=", 0.5))
    ratios = [_cpu_us(played("mixed")) / _cpu_us(played("mixup")) for _ in rounds]
    print(f"mixup, CPU / torchvision's: {spread(ratios)}")
    bench.report(Figure("recipes-mixup-cpu", statistics.median(ratios), "<=", 1))


def _cpu_us(measured: Measurement) -> float:
    """CPU of all processes for an image."""
    return 1e6 * measured.cpu_s / measured.images


def _mixup_on_gpu(bench: Bench) -> None:
    """As a loader mixes a batch that is its own."""
    torch: Any = import_module("torch") if find_spec("torch") else None
    if torch is None or not torch.cuda.is_available():
        print("mixup on a GPU: not measured, as there is none here for torch")
        return
    rows = np.arange(SLOT_ROWS)
    numbers = {MIX_ROW: (rows + 1) % SLOT_ROWS, MIX_LAMBDA: np.full(SLOT_ROWS, 0.3, np.float32)}
    batch = {
        "image": torch.rand(SLOT_ROWS, 3, 224, 224, device="cuda"),
        "label": torch.arange(SLOT_ROWS, device="cuda"),
        **numbers,
        MIX_BOX: np.zeros((SLOT_ROWS, 4), np.int32),
    }

    def mixed_ms() -> float:
        torch.cuda.synchronize()
        begun_s = perf_counter()
        for _ in range(GPU_BATCHES):
            mixed(batch, classes=1000, in_place=True)
        torch.cuda.synchronize()
        return (perf_counter() - begun_s) / GPU_BATCHES * 1000

    mixed_ms()
    ms = [bench.measure("mixup on a GPU", mixed_ms) for _ in range(bench.rounds)]
    print(f"mixup on {torch.cuda.get_device_name()}: {spread(ms)} ms for a batch of {SLOT_ROWS}")
    bench.report(Figure("recipes-mixup-gpu-ms", statistics.median(ms), "<=", 1))
