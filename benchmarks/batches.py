"""Benchmark: several documents in one row: room lost, time of the plan, tokens/s.

    plan      documents with a median length of 500 and at most 4,096, in rows of 4,096
    balance   attention cost of the most expensive of 8 ranks, divided by their mean, over all steps
    buckets   filling of padded batches of 32 such documents, and of those of a budget; plan and
              memory of ten million
    first     seconds from the daemon's command to the first batch of rows of ten million documents,
              whose index is kept; and from connecting to the batch at step 10^6
    pictures  in their own size, 0.05 to 1.2 megapixels, packed in a budget of 16,384 patches, and
              ragged in a budget of 12.8 megapixels with 64 buckets: bytes of the rows of a batch,
              divided by those of the pictures in it; CPU for a pixel, divided by that of rows of
              560 x 560
    tokens    tokens/s of a packed stream on two workers, divided by those of a torch DataLoader
              with two workers whose collate function packs the documents of a batch, and of Grain
              with two processes and its best-fit packing; each where it is installed
    small     batches/s of arrays in files, in an order of each epoch: 32 rows of 2,048 int32, 256
              of 28 x 28 uint8, and 4,096 of 32 float32; divided by those of a DataLoader with two
              workers, Grain with two processes, tf.data with the array in its memory, and of the
              fastest of the three

All sides of ``tokens`` read the same documents through the same Python object. A figure whose peer
is not installed is named as not measured.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from importlib.util import find_spec
from itertools import islice
from multiprocessing.connection import Connection
from pathlib import Path
from struct import Struct
from textwrap import dedent
from typing import Any

import numpy as np
from harness import Bench, Figure, Player, endless, family_cpu_s, orders, served, spread
from numpy.typing import NDArray

import batchd_client
from batchd.core.buckets import BucketOrder, buckets_of
from batchd.core.epochs import planned
from batchd.core.packs import PackLimits, Packs, template
from batchd.core.plan import Plan
from batchd.stream.grouping import BALANCE_BUCKETS
from batchd_wire.position import Position

ROOM, ROWS = 4096, 16
RANKS, PADDED_ROWS = 8, 32
MOST_ROWS, TOKENS = 512, 65_536
PICTURES, PATCH, BUDGET, FIXED_SIDE = 2_000, 14, 16_384, 560
FOLDERS = {"own": "own", "ragged": "own", "fixed": "fixed"}
PIXELS, LARGEST_SIDE = 12_800_000, 77 * PATCH
LIMITS = PackLimits(ROOM, 256, 4096, "split")
SAMPLES = 10_000_000
DOCUMENTS = 40_000
BATCHES = 800
BINS = 256
"""Open rows among which Grain chooses: with more it fills rows better, and takes longer."""
REPEATS = 50
FAR = 1_000_000
SETTLED_S = 2.5
SMALL_S = 3.0
Side = Callable[..., None]
"""A process that answers each order with a rate."""
MODULE = """
    import numpy as np

    class Documents:
        def __init__(self, folder):
            self._ends = np.load(folder + "/ends.npy")
            self._tokens = np.load(folder + "/tokens.npy", mmap_mode="r")

        def __len__(self):
            return len(self._ends) - 1

        def __getitem__(self, sample):
            return {"tokens": np.array(self._tokens[self._ends[sample] : self._ends[sample + 1]])}
"""


def run(bench: Bench) -> None:
    """The plans of ten million documents, then both sides in turns."""
    _plan(bench)
    _balance(bench)
    _buckets(bench)
    _first(bench)
    _small(bench)
    _pictures(bench)
    peers = _installed(PEERS)
    folder = bench.scratch / "documents"
    folder.mkdir()
    lengths = _lengths(DOCUMENTS)
    np.save(folder / "ends.npy", np.cumsum([0, *lengths]))
    np.save(folder / "tokens.npy", np.arange(lengths.sum(), dtype=np.int32))
    (folder / "documents.py").write_text(dedent(MODULE))
    config = folder / "batchd.toml"
    config.write_text(
        f'[daemon]\nworkers = 2\npython_path = ["{folder}"]\n[streams.documents]\nbatch_size = {ROWS}\n'
        f'source = {{ type = "python", function = "documents:Documents", options = {{ folder = "{folder}" }}, '
        'fields = { tokens = "int32[?]" } }\n'
        f'pipeline = [ {{ op = "pack", field = "tokens", length = {ROOM} }} ]\n'
    )
    with ExitStack() as stack:
        address = stack.enter_context(served(config))
        sides = {"batchd": stack.enter_context(Player(_packed, address))}
        for name, side in peers.items():
            sides[name] = stack.enter_context(Player(side, str(folder), has_children=True))
        rounds = [
            {name: bench.measure(name, partial(side.ask, None)) for name, side in sides.items()}
            for _ in range(bench.rounds)
        ]
    print("tokens/s: " + ", ".join(f"{side} {spread([one[side] for one in rounds], 0)}" for side in sides))
    for name in PEERS:
        bench.compare(f"batches-tokens-to-{name.lower()}", rounds, "batchd", (name,), 1.5)


def _installed(peers: dict[str, tuple[str, Side]]) -> dict[str, Side]:
    return {name: side for name, (module, side) in peers.items() if find_spec(module) is not None}


def _lengths(samples: int) -> NDArray[np.int64]:
    drawn = np.exp(np.random.default_rng(0).normal(np.log(500), 1.0, samples)).astype(np.int64)
    return drawn.clip(1, ROOM)


def _plan(bench: Bench) -> None:
    lengths = _lengths(SAMPLES)
    found = [bench.measure("plan", partial(_planned, lengths)) for _ in range(min(3, bench.rounds))]
    packs = found[0][0]
    seconds = [us for _packs, us in found]
    table_mb = sum(array.nbytes for array in packs.to_arrays().values()) / 1e6
    empty = 100 * (1 - packs.elements / (len(packs) * ROOM))
    print(f"plan of {SAMPLES:,} documents: {spread(seconds, 3)} us a document; {empty:.2f} % of the room is empty")
    bench.report(Figure("batches-room-empty-percent", empty, "<=", 0.5))
    bench.report(Figure("batches-plan-us", statistics.median(seconds), "<=", 0.5))
    bench.report(Figure("batches-plan-mb", table_mb, "<=", 50, 1))
    begun_s = time.perf_counter()
    for repeat in range(REPEATS):
        packs.contents(repeat, np.arange(ROWS) + 1_000 * ROWS * repeat, 0, shuffle=True)
    taken_us = (time.perf_counter() - begun_s) / REPEATS * 1e6
    print(f"documents of a batch of {ROWS} rows at any position: {taken_us:.0f} us")


def _balance(bench: Bench) -> None:
    """Rows of 4,096 for 8 ranks, one each in a step; attention costs the sum of squared lengths."""
    lengths = _lengths(DOCUMENTS)
    packs = Packs.plan(lengths, LIMITS)
    order = BucketOrder.from_arrays(buckets_of(packs.attention(lengths, ROOM), BALANCE_BUCKETS, 1, RANKS), 0)
    ratios = {}
    for name, ordered in (("with", order), ("without", None)):
        parts = packs.contents(0, np.arange(len(packs)), 0, shuffle=True, order=ordered)
        costs = np.bincount(parts[:, 0], (lengths[parts[:, 1]]) ** 2.0)
        ratios[name] = _over_mean(costs)
    print(f"attention, most expensive of {RANKS} ranks / mean: {ratios['with']:.3f}; {ratios['without']:.2f} at random")
    bench.report(Figure("batches-attention-over-ranks", ratios["with"], "<=", 1.1))


def _over_mean(costs: NDArray[np.float64]) -> float:
    steps = costs[: len(costs) // RANKS * RANKS].reshape(-1, RANKS)
    return float((steps.max(1) / steps.mean(1)).mean())


def _buckets(bench: Bench) -> None:
    lengths = _lengths(DOCUMENTS)
    for count, ranks in ((1, 1), (16, 1), (16, RANKS), (64, RANKS)):
        order = BucketOrder.from_arrays(buckets_of(lengths, count, PADDED_ROWS, ranks), 0)
        assert order is not None, "its buckets were planned"
        batches = lengths[order.samples_at(0, np.arange(DOCUMENTS))].reshape(-1, PADDED_ROWS)
        longest = batches.max(1)
        filling = 100 * (1 - batches.mean() / longest.mean())
        over = _over_mean(longest.astype(np.float64))
        print(f"{count} buckets, balance {ranks}: {filling:.0f} % filling; longest batch of a step / mean {over:.2f}")
    bench.report(Figure("batches-bucket-filling-percent", float(filling), "<=", 5))
    arrays = buckets_of(lengths, 64, MOST_ROWS, budget=TOKENS)
    plan = planned(Plan(DOCUMENTS, MOST_ROWS, 0, shuffle=True, drop_last=False), {}, arrays)
    steps = np.arange(plan.steps)
    rows = plan.rows_of(np.zeros_like(steps), steps)
    rooms = [
        count * lengths[plan.indices(Position(0, step), 0, count)].max() for step, count in enumerate(rows.tolist())
    ]
    used, filling = 100 * np.mean(rooms) / TOKENS, 100 * (1 - lengths.sum() / np.sum(rooms))
    print(
        f"64 buckets, a budget of {TOKENS:,}: {rows.min()} to {rows.max()} rows; {used:.0f} % used; {filling:.0f} % filling"
    )
    bench.report(Figure("batches-budget-used-percent", float(used), ">=", 95))
    lengths = _lengths(SAMPLES)
    arrays, plan_us = bench.measure("bucket plan", partial(_bucket_plan, lengths))
    bench.report(Figure("batches-bucket-plan-us", plan_us, "<=", 0.5))
    bench.report(Figure("batches-bucket-mb", sum(array.nbytes for array in arrays.values()) / 1e6, "<=", 50, 1))
    far = BucketOrder.from_arrays(arrays, 0)
    plan = Plan(SAMPLES, PADDED_ROWS, 0, shuffle=True, drop_last=False, order=far)
    begun_s = time.perf_counter()
    for repeat in range(REPEATS):
        plan.indices(Position(repeat, 6_000 * repeat), 0, PADDED_ROWS)
    taken_us = (time.perf_counter() - begun_s) / REPEATS * 1e6
    print(f"samples of a batch of {PADDED_ROWS} at any position, of a new epoch each: {taken_us:.0f} us")


def _bucket_plan(lengths: NDArray[np.int64]) -> tuple[dict[str, NDArray[Any]], float]:
    """Buckets of such samples, and the microseconds that planning takes for each."""
    begun_s = time.perf_counter()
    arrays = buckets_of(lengths, 64, PADDED_ROWS)
    return arrays, (time.perf_counter() - begun_s) / len(lengths) * 1e6


def _first(bench: Bench) -> None:
    lengths = _lengths(SAMPLES)
    ends = np.cumsum(lengths)
    with (bench.scratch / "many.bin").open("wb") as tokens:
        tokens.truncate(int(ends[-1]) * 2)  # all zeros, without blocks on the disk
    with (bench.scratch / "many.idx").open("wb") as index:
        index.write(Struct("<9sQBQQ").pack(b"MMIDIDX\0\0", 1, 8, SAMPLES, SAMPLES + 1))
        for numbers, dtype in ((lengths, "<i4"), (2 * (ends - lengths), "<i8"), (np.arange(SAMPLES + 1), "<i8")):
            numbers.astype(dtype).tofile(index)
    configs = {}
    for rows in (ROWS, 1):
        configs[rows] = bench.scratch / f"many-{rows}.toml"
        configs[rows].write_text(
            f'[daemon]\nworkers = 2\ncache_dir = "{bench.scratch / "indexes"}"\n[streams.many]\nbatch_size = {rows}\n'
            f'source = {{ type = "tokens", path = "{bench.scratch / "many.bin"}", format = "megatron", dtype = "uint16" }}\n'
            f'pipeline = [ {{ op = "pack", field = "tokens", length = {ROOM} }} ]\n'
        )
    time.sleep(SETTLED_S)  # or the index is not kept
    print(f"rows of {SAMPLES:,} documents, index scanned and planned: {_first_batch_s(configs[ROWS]):.1f} s")
    seconds = [bench.measure("first", partial(_first_batch_s, configs[ROWS])) for _ in range(min(3, bench.rounds))]
    print(f"the same, index kept: {spread(seconds)} s")
    bench.report(Figure("batches-first-s", statistics.median(seconds), "<=", 2))
    with served(configs[1]) as address:
        far_s = [bench.measure("far", partial(_batch_s, address, FAR)) for _ in range(min(3, bench.rounds))]
    print(f"connect to the batch at step {FAR:,}: {spread(far_s)} s")
    bench.report(Figure("batches-far-s", statistics.median(far_s), "<=", 1))


def _first_batch_s(config: Path) -> float:
    begun_s = time.perf_counter()
    with served(config) as address:
        _batch_s(address, 0)
        return time.perf_counter() - begun_s


def _batch_s(address: str, step: int) -> float:
    begun_s = time.perf_counter()
    with batchd_client.connect(address) as daemon, daemon.stream("many") as stream:
        stream.seek(0, step)
        next(iter(stream)).release()
        return time.perf_counter() - begun_s


def _small(bench: Bench) -> None:
    made = np.random.default_rng(0)
    arrays = {
        "tokens": made.integers(0, 50_000, (20_000, 2_048), np.int32),
        "digits": made.integers(0, 256, (60_000, 28, 28), np.uint8),
        "floats": made.random((10**6, 32), np.float32),
    }
    installed = _installed(SMALL_PEERS)
    for name, (rows, targets) in SMALL.items():
        file = bench.scratch / f"{name}.npy"
        np.save(file, arrays[name])
        config = bench.scratch / f"{name}.toml"
        config.write_text(
            f"[daemon]\nworkers = 2\n[streams.{name}]\nbatch_size = {rows}\n"
            f'source = {{ type = "npy", root = "{bench.scratch}", arrays = {{ x = "{file.name}" }} }}\n'
        )
        with ExitStack() as stack:
            sides = {"batchd": stack.enter_context(Player(_served_rows, stack.enter_context(served(config)), name))}
            for peer, side in installed.items():
                sides[peer] = stack.enter_context(Player(side, str(file), rows, has_children=True))
            rounds = [
                {side: bench.measure(side, partial(player.ask, None)) for side, player in sides.items()}
                for _ in range(bench.rounds)
            ]
        rates = ", ".join(f"{side} {spread([one[side] / rows for one in rounds], 0)}" for side in sides)
        print(f"batches/s of {rows:,} rows of {name}: {rates}")
        for peer, target in targets.items():
            peers = tuple(SMALL_PEERS) if peer == "fastest" else (peer,)
            bench.compare(f"batches-small-{name}-to-{peer.lower()}", rounds, "batchd", peers, target)


def _served_rows(pipe: Connection, address: str, name: str) -> None:
    with batchd_client.connect(address) as daemon, daemon.stream(name) as stream:
        _count(pipe, (batch["x"] for batch in endless(stream)))


class Rows:
    """The rows of an array in a file, for loaders that ask for each by its number."""

    def __init__(self, file: str) -> None:
        self._file = file
        self._array = np.load(file, mmap_mode="r")

    def __len__(self) -> int:
        return len(self._array)

    def __getitem__(self, row: int) -> NDArray[Any]:
        return np.array(self._array[row])


def _loaded_rows(pipe: Connection, file: str, rows: int) -> None:
    from torch.utils.data import DataLoader  # noqa: PLC0415  of this side alone

    loader: Any = DataLoader(Rows(file), rows, shuffle=True, num_workers=2, persistent_workers=True)  # type: ignore[arg-type]
    _count(pipe, (batch.numpy() for _epoch in range(1 << 30) for batch in loader))


def _grain_rows(pipe: Connection, file: str, rows: int) -> None:
    import grain  # noqa: PLC0415  of this side alone

    dataset = grain.MapDataset.source(Rows(file)).shuffle(seed=0).repeat().batch(rows)
    reading = grain.ReadOptions(num_threads=1, prefetch_buffer_size=16)
    _count(pipe, iter(dataset.to_iter_dataset(reading).mp_prefetch(grain.MultiprocessingOptions(num_workers=2))))


def _tf_rows(pipe: Connection, file: str, rows: int) -> None:
    import tensorflow as tf  # type: ignore[import-not-found, import-untyped, unused-ignore]  # noqa: PLC0415  the same

    array = np.load(file)
    dataset = tf.data.Dataset.from_tensor_slices(array).shuffle(len(array)).repeat().batch(rows)
    _count(pipe, dataset.prefetch(tf.data.AUTOTUNE).as_numpy_iterator())


SMALL = {
    "tokens": (32, {"tf.data": 1.0, "DataLoader": 10.0, "fastest": 1.5}),
    "digits": (256, {"tf.data": 1.5}),
    "floats": (4_096, {"fastest": 1.5}),
}
"""Rows of a batch; the ratio to reach, by peer."""
SMALL_PEERS = {
    "DataLoader": ("torch", _loaded_rows),
    "Grain": ("grain", _grain_rows),
    "tf.data": ("tensorflow", _tf_rows),
}


def _count(pipe: Connection, batches: Iterator[NDArray[Any]]) -> None:
    """Answer each order with the rows/s of some seconds; one number of each batch is read."""
    for _order in orders(pipe):
        next(batches)
        begun_s, count, total = time.perf_counter(), 0, 0.0
        while time.perf_counter() < begun_s + SMALL_S:
            batch = next(batches)
            total += float(batch.flat[-1])
            count += len(batch)
        pipe.send(count / (time.perf_counter() - begun_s))


def _pictures(bench: Bench) -> None:
    import cv2  # noqa: PLC0415  of this part alone

    files = sorted(bench.photos.rglob("*.jpg"))
    random = np.random.default_rng(0)
    for name in ("own", "fixed"):
        (bench.scratch / name).mkdir()
        for number in range(PICTURES):
            height, width = FIXED_SIDE, FIXED_SIDE
            if name == "own":
                height, width = random.integers(16, 78, 2) * PATCH
            image = cv2.resize(cv2.imread(str(files[number % len(files)])), (int(width), int(height)))
            cv2.imwrite(str(bench.scratch / name / f"{number}.jpg"), image)
    steps = {
        "own": f'{{ op = "patches", size = {PATCH} }}, {{ op = "pack", field = "image", length = {BUDGET}, '
        'documents = 128, too_long = "drop" }',
        "ragged": f'{{ op = "ragged", max_shape = [{LARGEST_SIDE}, {LARGEST_SIDE}, 3] }}',
        "fixed": f'{{ op = "resize", size = [{FIXED_SIDE}, {FIXED_SIDE}] }}',
    }
    batches = {
        "own": "batch_size = 1",
        "ragged": f'batch_size = 256\nbucket = {{ field = "image", by = "pixels", count = 64, budget = {PIXELS} }}',
        "fixed": "batch_size = 10",
    }
    config = bench.scratch / "pictures.toml"
    config.write_text(
        "[daemon]\nworkers = 2\n"
        + "".join(
            f'[streams.{name}]\nsource = {{ type = "folder", path = "{bench.scratch / FOLDERS[name]}" }}\n'
            f'{batches[name]}\npipeline = [ {{ op = "decode" }}, {step} ]\n'
            for name, step in steps.items()
        )
    )
    with served(config) as address, Player(_pixels, address) as player:
        rounds = [{name: bench.measure(name, partial(player.ask, name)) for name in steps} for _ in range(bench.rounds)]
    for name, shown in (("own", "pictures"), ("ragged", "ragged")):
        ratios = [one[name]["ns"] / one["fixed"]["ns"] for one in rounds]
        of_pixel = spread([one[name]["ns"] for one in rounds], 1)
        print(f"{shown}, CPU of workers for a pixel: {of_pixel} ns; / fixed {spread(ratios)}")
        room = statistics.median(one[name]["room"] for one in rounds)
        slots = statistics.median(one[name]["slots"] for one in rounds)
        print(f"{shown}, bytes of rows / of pixels {room:.2f}; of slots {slots:.2f}")
        bench.report(Figure(f"batches-{shown}-slot-bytes", room, "<=", 1.1))
        bench.report(Figure(f"batches-{shown}-cpu-to-fixed", statistics.median(ratios), "<=", 1.1))


def _pixels(pipe: Connection, address: str) -> None:
    """CPU of workers for a pixel, in ns; bytes of rows and of slots, divided by those of pixels."""
    with batchd_client.connect(address) as connection:
        workers = [worker["pid"] for worker in connection.status()["workers"]]
        for name in orders(pipe):
            with connection.stream(name) as stream:
                batches = endless(stream)
                next(batches).release()
                begun_s, pixels, size, slots = sum(map(family_cpu_s, workers)), 0, 0, 0
                for batch in islice(batches, 2 * len(stream)):
                    with batch:
                        pixels += _pixels_in(name, batch)
                        size += sum(batch.room(field).array.nbytes for field in batch)
                        slots += batch.memory.slot_bytes
                used_s = sum(map(family_cpu_s, workers)) - begun_s
            pipe.send({"ns": used_s / pixels * 1e9, "room": size / (3 * pixels), "slots": slots / (3 * pixels)})


def _pixels_in(name: str, batch: batchd_client.Batch) -> int:
    if name == "ragged":
        return int(batch["image_shape"].astype(np.int64).prod(axis=1).sum())
    return int(batch["lengths"].sum()) * PATCH**2 if name == "own" else batch.samples * FIXED_SIDE**2


def _planned(lengths: NDArray[np.int64]) -> tuple[Packs, float]:
    begun_s = time.perf_counter()
    packs = Packs.plan(lengths, LIMITS)
    return packs, (time.perf_counter() - begun_s) / len(lengths) * 1e6


def _packed(pipe: Connection, address: str) -> None:
    with batchd_client.connect(address) as connection, connection.stream("documents") as stream:
        batches = (int(batch["lengths"].sum()) for batch in endless(stream))
        _answer(pipe, batches)


def _collated(pipe: Connection, folder: str) -> None:
    import sys  # noqa: PLC0415  of this side alone

    from torch.utils.data import DataLoader  # noqa: PLC0415  the same

    sys.path.insert(0, folder)
    from documents import Documents  # type: ignore[import-not-found]  # noqa: PLC0415  the same

    documents: Any = Documents(folder)
    rows = ROWS * ROOM * len(documents) // int(np.load(Path(folder) / "ends.npy")[-1])
    loader = DataLoader(
        documents, batch_size=rows, shuffle=True, num_workers=2, collate_fn=_collate, persistent_workers=True
    )
    _answer(pipe, (tokens for _epoch in range(1 << 30) for tokens, _rows in loader))


def _collate(documents: list[dict[str, Any]]) -> tuple[int, Any]:
    """Pack the documents by best fit, as many rows as that takes: int32 ``[rows, ROOM]`` each."""
    import torch  # noqa: PLC0415  of this side alone

    documents.sort(key=lambda one: -len(one["tokens"]))
    packs = template([len(one["tokens"]) for one in documents], LIMITS)
    rows = {name: np.zeros((len(packs), ROOM), np.int32) for name in ("tokens", "segment_ids", "position_ids")}
    for row, pack in enumerate(packs):
        end = 0
        for number, document in enumerate(pack):
            tokens = documents[document]["tokens"]
            begin, end = end, end + len(tokens)
            rows["tokens"][row, begin:end] = tokens
            rows["segment_ids"][row, begin:end] = number + 1
            rows["position_ids"][row, begin:end] = np.arange(len(tokens))
    return sum(len(one["tokens"]) for one in documents), {name: torch.from_numpy(all_) for name, all_ in rows.items()}


def _grained(pipe: Connection, folder: str) -> None:
    import sys  # noqa: PLC0415  of this side alone

    import grain  # type: ignore[import-not-found, unused-ignore]  # noqa: PLC0415  the same

    sys.path.insert(0, folder)
    from documents import Documents  # noqa: PLC0415  the same

    reading = grain.ReadOptions(num_threads=1, prefetch_buffer_size=16)
    documents = grain.MapDataset.source(Documents(folder)).shuffle(seed=0).repeat().to_iter_dataset(reading)
    packed = grain.experimental.BestFitPackIterDataset(
        documents, length_struct={"tokens": ROOM}, num_packing_bins=BINS
    ).batch(ROWS)
    batches = packed.mp_prefetch(grain.MultiprocessingOptions(num_workers=2))
    _answer(pipe, (int((batch["tokens_segment_ids"] > 0).sum()) for batch in batches))


PEERS = {"DataLoader": ("torch", _collated), "Grain": ("grain", _grained)}
"""The module that a side needs, and the side."""


def _answer(pipe: Connection, batches: Iterator[int]) -> None:
    """Answer each order with the tokens/s of the next batches."""
    for _order in orders(pipe):
        next(batches)
        begun_s = time.perf_counter()
        tokens = sum(islice(batches, BATCHES))
        pipe.send(tokens / (time.perf_counter() - begun_s))
