"""``batchd check --explain``: shows how workers will decode and process a few samples.

Runs in the user's shell. Steps on an image are one plan, made from the file's header before
anything is decoded; here it is printed instead of executed.

Invariant: no decoder runs, and of the user's functions only those of a source.
"""

from collections.abc import Iterator, Sequence
from itertools import takewhile

from batchd.cli.text import aligned
from batchd.config.directories import default_cache_dir
from batchd.config.tree import DaemonConfig
from batchd.daemon.stream_plan import StreamPlan, epoch_plan
from batchd.functions.load import expect
from batchd.pipeline.call.options import Call
from batchd.pipeline.execute import Pipeline
from batchd.pipeline.image.geometry import Cut, Move, Orientation, Padding, Resampling, Warp
from batchd.pipeline.image.options import Decode
from batchd.pipeline.image.stages import ImagePlan
from batchd.pipeline.options import StepOptions
from batchd.pipeline.shapes.options import RoomStep
from batchd.samples.errors import SampleUndecodable, SampleUnreadable
from batchd.samples.sizes import round_bytes
from batchd.sources.interface import Reader, open_reader
from batchd.sources.scan import scan_source
from batchd.storage.access import Storage
from batchd.storage.index import SourceIndex
from batchd.storage.index_cache import IndexCache
from batchd_wire.position import Position
from batchd_wire.wording import counted

SAMPLES = 4
_TITLES = ("sample", "name", "file", "decoded", "then")


def explained(plan: StreamPlan, daemon: DaemonConfig, storage: Storage) -> Iterator[str]:
    """Lines for one stream: its first samples and their plans. Raises ``BatchdError``."""
    name, stream = plan.name, plan.config
    whole, cut = plan.pipeline.steps, plan.pipeline.cut
    steps = list(takewhile(lambda step: not isinstance(step, Call | RoomStep), whole))
    if stream.source.is_live:
        yield f"{name}: its samples are not there yet"
        return
    decode = next((step for step in steps if isinstance(step, Decode)), None)
    if decode is None:
        yield f"{name}: no image is decoded" + (" in front of your function" if len(steps) < len(whole) else "")
        return
    cache = IndexCache(daemon.cache_dir or default_cache_dir())
    index = scan_source(stream.source, lambda _found: None, cache, storage, daemon.python_path or ())
    expect(plan.code.python_path, plan.code.digests)
    epochs = epoch_plan(name, stream, len(index))
    samples = epochs.indices(Position(0, 0), 0, min(SAMPLES, epochs.rows(0))).tolist()
    if stream.cache == "decoded":
        yield f"{name}: the cache keeps what {_named(whole[:cut])} make; in each epoch {_named(whole[cut:])}"
        steps = steps[:cut]
    pipeline = Pipeline(plan.columns, steps, stream.seed, has_rows=False)
    yield f"{name}: the first {counted(len(samples), 'sample')} of epoch 0"
    kept_bytes: list[int] = []
    yield from aligned([_TITLES, *_rows(plan, index, pipeline, samples, decode, kept_bytes, storage)])
    if stream.cache == "decoded" and kept_bytes:
        need_bytes = round(sum(kept_bytes) / len(kept_bytes) * len(index))
        budget = "cache_memory" if stream.cache_dir is None else "cache_size"
        yield f"{name}: all {len(index):,} samples need some {round_bytes(need_bytes)}, if they are like these ({budget} =)"


def _named(steps: Sequence[StepOptions]) -> str:
    return ", ".join(step.op for step in steps) or "nothing"


def _rows(  # noqa: PLR0917  what is read, and how, and what comes of it
    plan: StreamPlan,
    index: SourceIndex,
    pipeline: Pipeline,
    samples: Sequence[int],
    decode: Decode,
    kept_bytes: list[int],
    storage: Storage,
) -> Iterator[tuple[str, ...]]:
    source = plan.config.source
    reader = open_reader(source, index, plan.pipeline.record_bytes_max, storage)
    try:
        for sample in samples:
            yield (str(sample), reader.name(sample), *_cells(reader, pipeline, sample, decode, kept_bytes))
    finally:
        reader.close()


def _cells(
    reader: Reader, pipeline: Pipeline, sample: int, decode: Decode, kept_bytes: list[int]
) -> tuple[str, str, str]:
    try:
        values = reader.read(sample)
        plan = pipeline.plan(values, 0, sample)
    except (SampleUnreadable, SampleUndecodable) as error:
        return "a bad sample", "", str(error)
    assert plan is not None, "there is a decode step"
    kept_bytes.append(plan.geometry.height * plan.geometry.width * (1 if decode.color == "gray" else 3))
    file = values[decode.field]
    assert isinstance(file, memoryview), "it is decoded"
    return f"{round_bytes(len(file))}, {_stored(plan)}", _decoded(plan), _then(plan)


def _stored(plan: ImagePlan) -> str:
    header = plan.header
    turned = f", EXIF {header.orientation}" if header.orientation > 1 else ""
    return f"{header.format} {header.width} x {header.height}{turned}"


def _decoded(plan: ImagePlan) -> str:
    """The output of the decoder: all or a box, its scale, and other changes."""
    factor, box = plan.decoding.factor, plan.decoding.box
    height, width = -(-plan.header.height // factor), -(-plan.header.width // factor)
    scale = f" at 1/{factor}" if factor > 1 else ""
    if box == Cut(0, 0, height, width):
        return f"all{scale}: {width} x {height}"
    if plan.tiles is not None:
        how = f"cut from {plan.tiles[0]} of {plan.tiles[1]} tiles"
    else:
        how = "alone" if plan.is_cut_by_decoder else f"cut from {width} x {height}"
    return f"{box.width} x {box.height}{scale} from {box.left}, {box.top}, {how}"


def _then(plan: ImagePlan) -> str:
    done = [_move(move) for move in plan.decoding.moves]
    return ", ".join([*done, *_turns(plan.geometry.turn)]) or "as it is"


def _move(move: Move) -> str:
    size = f"{move.width} x {move.height}"
    match move:
        case Resampling():
            return f"scaled to {size} ({move.interpolation})"
        case Cut():
            return f"cut to {size} from {move.left}, {move.top}"
        case Padding():
            return f"padded to {size}"
        case Warp():
            return f"rotated by {move.degrees:.1f} degrees"


def _turns(turn: Orientation) -> Iterator[str]:
    """Turns are made last and together, in this order."""
    if turn.transpose:
        yield "transposed"
    if turn.vertical:
        yield "flipped upside down"
    if turn.horizontal:
        yield "flipped left to right"
