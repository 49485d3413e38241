"""Facts and problems of a stream that need no scan. Daemon, ``check`` and ``prepare``.

    StreamConfig ------------------------> pipeline: steps, cut, longest record
    source ------------------------------> columns
    files of steps ----------------------> digests
    modules of the user's functions -----> code
    index of the source -----------------> order and weights of its samples

Nothing here imports the user's functions. Each problem has its key:

    source      at its own key, or that of one of its parts      streams.a.source.sources[1].path
    functions   at the key that names them                       streams.a.pipeline[2].function
    steps       at the step, or at the option that is wrong      streams.a.pipeline[1].field
    the whole   if the steps leave no valid fields               streams.a.pipeline

Invariant: a stream has one plan, made when it is opened and passed to all code that needs its
facts. Invariant: a stream without problems has columns.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field, replace
from itertools import pairwise, takewhile
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from batchd.config.draft import StreamDraft
from batchd.config.schema import problem_at
from batchd.config.tree import BlockShuffle, DaemonConfig, StreamConfig, Weights
from batchd.core.draws import POINT_BITS, SINGLE_MAX, bounds_of
from batchd.core.epochs import BOUNDS, FACT, STARTS, WEIGHTS, planned
from batchd.core.erasing import RowErasing, erase_fields
from batchd.core.mixing import MIX_FIELDS, RowMixing
from batchd.core.mixtures import Segment
from batchd.core.packs import PartPacks, packed_in
from batchd.core.plan import Plan
from batchd.data.functions.find import CallArguments, ModuleNotFound, find_module, function_problems, parse_function
from batchd.data.pipeline import sample_fields
from batchd.data.pipeline.cache_split import PipelinePlan, plan_pipeline
from batchd.data.pipeline.call.effects import ARGUMENTS
from batchd.data.pipeline.call.options import Call
from batchd.data.pipeline.image.options import CropToBucket, Decode, Follow
from batchd.data.pipeline.media.options import DecodeAudio
from batchd.data.pipeline.options import StepOptions, step_to_plain, with_inner
from batchd.data.pipeline.shapes.options import LAST_STEPS, Pack, RoomStep
from batchd.data.pipeline.step_files import Digests, StepFileInvalid, digests_of
from batchd.data.samples.columns import Column
from batchd.data.sources.arrays.index import read_array
from batchd.data.sources.code.options import FunctionOptions
from batchd.data.sources.composed.options import MixSource, moment_of, sources_in
from batchd.data.sources.interface import kind_of
from batchd.data.sources.neighbours import blocks_of_bytes, blocks_of_samples
from batchd.data.sources.options import SourceOptions, source_to_plain
from batchd.data.sources.push.options import PushSource
from batchd.data.sources.source_checks import check_source, known_columns
from batchd.data.storage.access import Storage
from batchd.data.storage.index import NUMBER, SourceIndex
from batchd.errors import KeyPath, Problem, ProblemKind, SourceInvalid
from batchd.runtime.sandbox import Access
from batchd.stream.access import access_of
from batchd.worker.messages import AFTER_STEPS, SampleRecipe
from batchd_wire.fields import RAGGED, Field
from batchd_wire.position import Position
from batchd_wire.record import frozen
from batchd_wire.views import Array
from batchd_wire.wording import counted

IMAGE_AXES = 2
IMAGE_SHAPE = 3
CHANNELS_MAX = 4
"""The dimensions of an image that vary: its height and its width."""
LIVE_STEPS = 1 << 40
"""Batches in an epoch of a live stream, which never ends: at a million per second it lasts twelve
days."""


@frozen
class StreamCode:
    """Modules of one stream: digests by name, and the folders that workers search first."""

    python_path: tuple[str, ...] = ()
    digests: dict[str, str] = field(default_factory=dict)


@frozen
class StreamPlan:
    """The plan of one stream.

    ``columns``: of the source. ``digests``: SHA-256 of each file that a step reads. ``code``: the
    user's modules. ``runs_own_code``: the source, or a part of it, is the user's own code.
    ``access``: what workers have to reach; None if nobody knows, or if they shall not be enclosed.
    """

    name: str
    config: StreamConfig
    columns: tuple[Column, ...]
    pipeline: PipelinePlan
    digests: Digests
    code: StreamCode
    runs_own_code: bool
    access: Access | None = None

    @property
    def pack(self) -> Pack | None:
        """The last step of a packed stream."""
        return sample_fields.pack_of(self.pipeline.steps)

    @property
    def mixing(self) -> RowMixing | None:
        """How rows of a batch are mixed; None if they are not."""
        return mixing_of(self.name, self.config, self.columns)

    @property
    def erasing(self) -> RowErasing | None:
        """How parts of rows are erased; None if they are not."""
        return erasing_of(self.name, self.config, self.columns)

    def recipe(self) -> SampleRecipe:
        """How samples are made, for the processes that make them; ``pack`` joins them to rows."""
        return SampleRecipe(
            seed=self.config.seed,
            source=source_to_plain(self.config.source),
            columns=[(column.name, column.text) for column in self.columns],
            steps=[step_to_plain(step) for step in self.pipeline.steps if not isinstance(step, Pack)],
            cut=self.pipeline.cut,
            record_bytes_max=self.pipeline.record_bytes_max,
            cropped=list(self.pipeline.cropped.items()),
            files=[(str(path), digest) for path, digest in self.digests.items()],
            python_path=list(self.code.python_path),
            modules=list(self.code.digests.items()),
            access=[] if self.access is None else [self.access],
        )


def plan_stream(name: str, config: StreamConfig, columns: tuple[Column, ...], daemon: DaemonConfig) -> StreamPlan:
    """Plan a stream, whose steps fit the ``columns``. Raises ``SourceInvalid``, naming the key."""
    python_path = daemon.python_path or ()
    pipeline = plan_pipeline(config.pipeline, config.cache_kind, config.cache_short_side)
    check_bucket(name, config, columns)
    check_drawn(name, config, columns)
    check_kept(name, config, columns)
    try:
        code = code_of(config, python_path)
    except SourceInvalid as error:
        raise SourceInvalid(f"streams.{name}.source: {error}") from None
    try:
        digests = digests_of(pipeline.steps)
    except StepFileInvalid as error:
        raise SourceInvalid(f"streams.{name}.pipeline: {error}") from None
    access = access_of(config, python_path) if daemon.encloses else None
    return StreamPlan(name, config, columns, pipeline, digests, code, runs_own_code(config.source), access)


def check_kept(name: str, config: StreamConfig, columns: Sequence[Column]) -> None:
    """Raise ``SourceInvalid`` if a cache of single images is wanted for lists of them."""
    lists = {column.name for column in columns if column.kind == "images"}
    found = next((one.field for one in config.pipeline if isinstance(one, Decode) and one.field in lists), None)
    if found is not None and config.cache in {"points", "pixels"}:
        raise SourceInvalid(
            f'streams.{name}.cache: "{config.cache}" is for single images, and {found!r} is a list; "encoded" and "decoded" '
            "keep it"
        )


def check_drawn(name: str, config: StreamConfig, columns: Sequence[Column]) -> None:
    """Raise ``SourceInvalid`` if what trainers mix and erase are no images of one size."""
    mixing_of(name, config, columns)
    erasing_of(name, config, columns)


def mixing_of(name: str, config: StreamConfig, columns: Sequence[Column]) -> RowMixing | None:
    """How the rows of a stream are mixed. Raises ``SourceInvalid`` if it has no images for that."""
    mix = config.mix
    if mix is None:
        return None
    size = _size_of_rows(f"streams.{name}.mix", mix.field, config, columns)
    return RowMixing(mix.mixup, mix.cutmix, mix.probability, mix.switch, mix.by == "row", *size)


def erasing_of(name: str, config: StreamConfig, columns: Sequence[Column]) -> RowErasing | None:
    """How rows of a stream are erased. Raises ``SourceInvalid`` if it has no images for that."""
    erase = config.erase
    if erase is None:
        return None
    size = _size_of_rows(f"streams.{name}.erase", erase.field, config, columns)
    return RowErasing(erase.probability, erase.area, erase.aspect, erase.count, erase.fill, *size)


def drawn_fields(config: StreamConfig) -> tuple[Field, ...]:
    """The fields of the numbers by which trainers mix and erase."""
    erase = config.erase
    mixed, erased = config.mix is not None, () if erase is None else erase_fields(erase.count, erase.fill)
    return (*(MIX_FIELDS if mixed else ()), *erased)


def _size_of_rows(key: str, field: str | None, config: StreamConfig, columns: Sequence[Column]) -> tuple[int, int]:
    """Height and width of the images that trainers change: of ``field``, or of the only one."""
    if sample_fields.pack_of(config.pipeline) is not None:
        raise SourceInvalid(f'{key}: rows of "pack" have several samples each, so trainers change none; leave it out')
    made, drawn = sample_fields.columns_after(columns, config.pipeline), [field.name for field in drawn_fields(config)]
    if taken := set(drawn) & made.keys():
        raise SourceInvalid(f"{key}: a sample has a field {min(taken)!r} already; rename it")
    most = sample_fields.SAMPLE_FIELDS_MAX - len(drawn)
    if len(made) > most:
        text = f'{len(made)} fields, and beside {" and ".join(drawn)} a batch holds {most}; "drop" leaves some out'
        raise SourceInvalid(f"{key}: a sample has {text}")
    sizes = {name: size for name, column in made.items() if (size := _image_size(column)) is not None}
    chosen = field or next(iter(sizes), "")
    if chosen not in sizes or (field is None and len(sizes) > 1):
        text = f"{field!r} is no field of images of one size" if field else "which images are meant is not clear"
        of_views = [name for name, column in made.items() if column.made_by == "views" and column.is_fixed]
        known = "a step such as random_resized_crop makes such a field"
        if any(column.size_axes for column in made.values()):
            known = "images have another size in each batch, and random_resized_crop gives all one"
        if sizes:
            known = f"give field one of {', '.join(sizes)}"
        elif field in of_views or (of_views and field is None):
            known = f"{of_views[0]!r} has several views: give each a field of its own in into, and name one"
        raise SourceInvalid(f"{key}: {text}; {known}")
    return sizes[chosen]


def _image_size(column: Column) -> tuple[int, int] | None:
    """Height and width of a field of images of one size, channels last or first; else None."""
    if not column.is_fixed or column.varying is not None or len(column.fixed_shape) != IMAGE_SHAPE:
        return None
    first, second, third = column.fixed_shape
    return (first, second) if third <= CHANNELS_MAX else (second, third) if first <= CHANNELS_MAX else None


_FILES = {"encoded": "an image", "video": "a video", "audio": "a sound"}


def check_bucket(name: str, config: StreamConfig, columns: Sequence[Column]) -> None:
    """Raise ``SourceInvalid`` if samples have no size by which a bucket is chosen."""
    bucket = config.buckets
    if bucket is None:
        return
    key, field = f"streams.{name}.bucket.field", bucket.field
    if config.bucket is None:
        key = f"streams.{name}.pipeline"
    steps = [step for step in config.pipeline if not isinstance(step, LAST_STEPS)]
    is_after = bucket.by in AFTER_STEPS
    made = sample_fields.columns_after(columns, steps) if is_after else {column.name: column for column in columns}
    where = "after the steps" if is_after else "in the source"
    if field not in made:
        raise SourceInvalid(f"{key}: a sample has no {field!r} {where}; it has {', '.join(made)}")
    if config.bucket is None:
        _check_bucket_crop(key, config.pipeline, field)
    column = made[field]
    kind = f"{_FILES[column.kind]} file" if column.is_file else column.text
    if bucket.by == "bytes" and column.kind in ("json", "texts"):
        raise SourceInvalid(f"{key}: {field!r} is {kind} {where}, which has no number of bytes")
    if bucket.by == "length" and (column.kind != "array" or column.shape[:1] != (None,)):
        raise SourceInvalid(f"{key}: {field!r} is {kind} {where}: only numbers [?, …] differ in length")
    if bucket.by == "value" and (column.kind != "array" or column.shape != ()):
        raise SourceInvalid(f'{key}: {field!r} is {kind} {where}: by = "value" needs one number')
    random = sample_fields.drawing_step(steps, field, by_value=bucket.by == "value")
    if is_after and random is not None:
        raise SourceInvalid(
            f'{key}: {field!r} must have the same {bucket.by} in all epochs, and "{random}" draws random numbers for it'
            + (
                ", if it does not say random = false, or name its outputs without this field"
                if random == "call"
                else ""
            )
        )
    is_image = column.kind == "encoded" or (column.kind == "array" and column.shape[:2] == (None, None))
    needs = {
        **dict.fromkeys(("aspect", "pixels"), (is_image, "image files, and pixels [?, ?, …], differ in size")),
        "seconds": (column.kind in {"audio", "video"}, "files of sound or video last seconds"),
    }
    is_fit, only = needs.get(bucket.by, (True, ""))
    if not is_fit:
        raise SourceInvalid(f"{key}: {field!r} is {kind} {where}: only {only}")


def _check_bucket_crop(key: str, steps: Sequence[StepOptions], field: str) -> None:
    """Raise ``SourceInvalid`` if steps give an image other proportions than its file has."""
    for step in takewhile(lambda step: not isinstance(step, CropToBucket), steps):
        if step.changes is not None and field not in step.changes:
            continue
        if isinstance(step, Decode) and step.exif == "ignore":
            raise SourceInvalid(
                f'{key}: "crop_to_bucket" chooses the size for the upright image, and exif = "ignore" leaves it as stored; '
                "leave exif out"
            )
        if not step.keeps_pixels and not isinstance(step, Follow):
            raise SourceInvalid(
                f'{key}: "crop_to_bucket" chooses the size by the proportions that {field!r} has in the source, and '
                f'"{step.op}" in front of it may change these; put it behind'
            )


def budgeted_field(config: StreamConfig, columns: Sequence[Column]) -> str | None:
    """The field whose room in each row follows from the budget of a batch; None if none does.

    The sizes of its bucket must bound it: a length that alone varies, the seconds of a whole sound,
    or the pixels of a ragged image that no step enlarges. ``columns``: of the source; the steps fit
    them.
    """
    bucket = config.bucket
    if bucket is None or bucket.budget is None:
        return None
    column = sample_fields.columns_after(columns, config.pipeline).get(bucket.field)
    if column is None or column.varying is None:
        return None
    if bucket.by == "length":
        return column.name if column.varying.axes == (0,) else None
    if bucket.by == "seconds":
        return column.name if bucket_rate(config) else None
    on_field = (step for step in config.pipeline if step.changes is None or column.name in step.changes)
    keeps_pixels = all(step.keeps_pixels for step in on_field if not isinstance(step, LAST_STEPS))
    is_bounded = bucket.by == "pixels" and column.varying.kind == RAGGED and keeps_pixels
    return column.name if is_bounded and len(column.varying.axes) == IMAGE_AXES else None


def bucket_rate(config: StreamConfig) -> int:
    """The samples of each second by which a bucket is chosen, of whole sounds; else 0."""
    bucket = config.bucket
    if bucket is None or bucket.by != "seconds":
        return 0
    match [step for step in config.pipeline if step.changes is None or bucket.field in step.changes]:
        case [DecodeAudio(seconds=None) as decode, RoomStep()]:
            return decode.rate
    return 0


def code_of(stream: StreamConfig, python_path: Sequence[Path]) -> StreamCode:
    """Find the modules of a stream. Raises ``SourceInvalid`` if one is missing."""
    steps = with_inner({(place,): step for place, step in enumerate(stream.pipeline)})
    named = [*(source for _key, source in sources_in(stream.source)), *steps.values()]
    functions = [step.function for step in named if isinstance(step, (FunctionOptions, Call))]
    if not functions:
        return StreamCode()
    try:
        modules = {parse_function(function).module for function in functions}
        digests = {module: find_module(module, python_path).digest for module in sorted(modules)}
    except ModuleNotFound as error:
        raise SourceInvalid(str(error)) from None
    return StreamCode(tuple(map(str, python_path)), digests)


def runs_own_code(whole: SourceOptions) -> bool:
    """True if the source, or a part of it, is the user's own code."""
    return any(source.is_own_code for _key, source in sources_in(whole))


def code_problems(
    sources: Iterable[tuple[KeyPath, SourceOptions]], steps: Mapping[int, StepOptions], python_path: Sequence[Path]
) -> list[tuple[KeyPath, str]]:
    """Problems of the functions that a stream names, each with its key in the stream.

    ``sources``: with their keys in the stream's source. ``steps``: by their index in its pipeline.
    """
    named: list[tuple[KeyPath, str, CallArguments]] = [
        (("source", *key, *inner, "function"), source.function, source.arguments)
        for key, whole in sources
        for inner, source in sources_in(whole)
        if isinstance(source, FunctionOptions)
    ]
    named += [
        (("pipeline", *place, "function"), step.function, ARGUMENTS)
        for place, step in with_inner({(place,): step for place, step in steps.items()}).items()
        if isinstance(step, Call)
    ]
    return [(key, text) for key, name, arguments in named for text in function_problems(name, python_path, arguments)]


def planned_index(plan: StreamPlan, index: SourceIndex) -> SourceIndex:
    """Add what the order of an epoch needs to the index of a source; the digest is still its own.

    Raises ``SourceInvalid`` if the source cannot have the order.
    """
    config = plan.config
    facts: dict[str, object] = {}
    arrays: dict[str, Array] = {}
    if isinstance(config.shuffle, BlockShuffle):
        facts["open_blocks"] = config.shuffle.blocks
        arrays[STARTS] = _blocks_of(f"streams.{plan.name}.shuffle", config.shuffle, config.source, index)
    if isinstance(config.source, MixSource) and config.source.changes:
        packs = packed_in(index.arrays)
        sizes = [samples for samples, _facts in index.facts["parts"]]
        if isinstance(packs, PartPacks):
            sizes = list(map(len, packs.packs))
        facts["rows"] = rows = config.source.samples or sum(sizes)
        try:
            order = config.seed, config.is_shuffled
            segments = segments_of(
                config.source, Plan(rows, config.batch_size, *order, config.drop_last, repeats=config.repeats)
            )
        except SourceInvalid as error:
            raise SourceInvalid(f"streams.{plan.name}.{error}") from None
        facts["mixture"] = sizes, segments
    if config.weights is not None:
        try:
            weights = weights_of(config.weights, config.source, index)
        except SourceInvalid as error:
            raise SourceInvalid(f"streams.{plan.name}.weights: {error}") from None
        facts["rows"] = rows = config.weights.samples or len(index)
        if not config.weights.replacement:
            arrays[WEIGHTS] = weights
        else:
            arrays[BOUNDS] = bounds = bounds_of(weights, rows)
            if STARTS in arrays:  # of draws, which ascend with their samples
                ends = -(-bounds[arrays[STARTS][1:] - 1] >> POINT_BITS)
                arrays[STARTS] = np.unique(np.append(0, ends)).astype(NUMBER)
    if not facts:
        return index
    return replace(index, facts={**index.facts, FACT: facts}, arrays={**index.arrays, **arrays})


def _blocks_of(key: str, shuffle: BlockShuffle, source: SourceOptions, index: SourceIndex) -> NDArray[np.int64]:
    """Return the first sample of each block, and the number of all: int64 ``[blocks + 1]``."""
    neighbours = kind_of(source).neighbours(source, index)
    if neighbours.why_none:
        raise SourceInvalid(f"{key}: the source has no blocks of neighbours: {neighbours.why_none}; use shuffle = true")
    if shuffle.block_samples is not None:
        return blocks_of_samples(neighbours, len(index), shuffle.block_samples).astype(NUMBER)
    if neighbours.why_no_bytes:
        raise SourceInvalid(f"{key}.block_bytes: {neighbours.why_no_bytes}; use block_samples")
    assert shuffle.block_bytes is not None, "one of both is given"
    return blocks_of_bytes(neighbours, len(index), shuffle.block_bytes).astype(NUMBER)


def epoch_plan(plan: StreamPlan, index: SourceIndex) -> Plan:
    """Plan which sample is in which batch. Raises ``SourceInvalid`` if the stream has no batch.

    ``index``: as ``planned_index`` returns it; of a packed stream with its packs.
    """
    config = plan.config
    packs = packed_in(index.arrays)
    samples = index.facts.get(FACT, {}).get("rows", len(index if packs is None else packs))
    if isinstance(config.source, PushSource):
        samples = config.batch_size * LIVE_STEPS
    documents = None if packs is None else len(index)
    order = config.seed, config.is_shuffled
    epochs = Plan(samples, config.batch_size, *order, config.drop_last, documents, **config.draws)
    epochs = planned(epochs, index.facts, index.arrays)
    if epochs.steps == 0:
        of_what = counted(samples, "sample" if packs is None else "pack")
        raise SourceInvalid(
            f"streams.{plan.name}: a source of {of_what} makes no batch of {config.batch_size}, and drop_last = true drops the "
            "rest; set a smaller batch_size, or drop_last = false"
        )
    return epochs


class Findings(NamedTuple):
    """Result of checks. ``columns``: None if unknown, or if the steps make no fields of them."""

    columns: tuple[Column, ...] | None
    problems: list[Problem]


def look_at_stream(
    name: str, draft: StreamDraft, python_path: Sequence[Path] | None, storage: Storage, *, thoroughly: bool = True
) -> Findings:
    """Check the source, the functions and the steps of a stream, without a scan.

    ``python_path`` is None if it is unknown; then no functions are looked up. Not ``thoroughly``:
    check only the source's columns, because it will be scanned.
    """
    looks = [(key, check_source(source, storage, thoroughly=thoroughly)) for key, source in draft.sources]
    found: list[tuple[ProblemKind, KeyPath, str]] = [
        (ProblemKind.UNUSABLE_SOURCE, ("source", *key, *problem.key), problem.text)
        for key, look in looks
        for problem in look.problems
    ]
    try:
        columns = known_columns([look for _key, look in looks])
    except SourceInvalid:  # the source's own options are wrong anyhow
        columns = None
    if columns is not None:
        columns = (*columns, *(Column(name, dtype="int64") for name in draft.source_fields))
    wrong_names = sample_fields.reserved_names(columns or ())
    found += [(ProblemKind.UNUSABLE_SOURCE, ("source",), text) for text in wrong_names]
    if python_path is not None:
        found += [
            (ProblemKind.OWN_FUNCTION, *problem) for problem in code_problems(draft.sources, draft.steps, python_path)
        ]
    check = sample_fields.StepCheck(columns)
    for place in range(len(draft.steps) + len(draft.gaps)):
        if place in draft.steps:
            check.check_step(place, draft.steps[place])
        else:
            check.skip_step(place, *draft.gaps[place])
    wrong_steps = check.finish()
    found += [(ProblemKind.STEP_MISFIT, ("pipeline", *problem.key), problem.text) for problem in wrong_steps]
    data = {"streams": {name: draft.data}}
    problems = [problem_at(("streams", name, *key), kind, text, data) for kind, key, text in found]
    return Findings(None if wrong_names or wrong_steps else columns, problems)


FILE_BYTES_MAX = 16 << 30


def weights_of(wanted: Weights, source: SourceOptions, index: SourceIndex) -> NDArray[np.float64]:
    """Return the weight of each sample: float64 ``[samples]``, 0 or more, and not all 0.

        weights = { by = "class", power = 0.5 }    samples of a class ** 0.5, dealt to its samples
        weights = "weights.npy"                    as the file says

    Raises ``SourceInvalid``.
    """
    weights = _from_file(wanted.file, len(index)) if wanted.file else _by_class(wanted.power, source, index)
    drawn = int(np.count_nonzero(weights))
    if not drawn:
        raise SourceInvalid("all weights are 0, so no sample can be drawn")
    if not wanted.replacement:
        assert wanted.samples is not None, "its table requires it"
        if wanted.samples > drawn:
            raise SourceInvalid(
                f"samples = {wanted.samples} cannot be drawn without replacement from {counted(drawn, 'sample')} with a weight "
                "above 0; set fewer, or replacement = true"
            )
        if len(index) > SINGLE_MAX:
            raise SourceInvalid(
                f"without replacement each epoch's draw looks at all samples, at most {SINGLE_MAX:,}, and there are "
                f"{len(index):,}; use replacement = true"
            )
    return weights


def _by_class(power: float, source: SourceOptions, index: SourceIndex) -> NDArray[np.float64]:
    labels = kind_of(source).labels(source, index)
    if labels is None:
        raise SourceInvalid(
            'by = "class" needs labels in the index, and the index of this source has none: they are read with each sample; '
            "name a file of weights instead"
        )
    _classes, class_of, counts = np.unique(labels, return_inverse=True, return_counts=True)
    # digits that are the same on every machine
    by_class = [float(f"{count ** (power - 1):.9g}") for count in counts.tolist()]
    return np.asarray(by_class, np.float64)[class_of]


def _from_file(file: Path, samples: int) -> NDArray[np.float64]:
    try:
        with file.open("rb") as stream:
            stored = read_array(str(file), stream)
            stream.seek(0)
            content = stream.read(FILE_BYTES_MAX)
    except OSError as error:
        raise SourceInvalid(f"{file}: {error.strerror}") from None
    stored.check_end(str(file), len(content))
    if stored.shape != (samples,) or stored.dtype.kind not in "fiu":
        raise SourceInvalid(
            f"{file} holds {stored.dtype}{list(stored.shape)}, and the source has {counted(samples, 'sample')}: save a number "
            "for each"
        )
    weights = stored.numbers(str(file), memoryview(content)).astype(np.float64)
    wrong = np.flatnonzero(~((weights >= 0) & (weights < np.inf)))
    if len(wrong):
        raise SourceInvalid(f"{file}:{wrong[0]}: {weights[wrong[0]]:g} is no weight; weights are 0 or more")
    return weights


def segments_of(source: MixSource, plan: Plan) -> list[Segment]:
    """Return the shares of a mix by the row of the run from which they count.

        source.weights = { "0" = ..., ... }        batches and epochs as rows of the run

    ``plan``: of the rows of an epoch. Raises ``SourceInvalid`` for two that begin with the same
    row, and for one between the copies of a batch.
    """
    assert isinstance(source.weights, dict), "its weights change"
    rows, steps = plan.samples, max(1, plan.steps)
    found = {}
    for text, weights in source.weights.items():
        moment = moment_of(text)
        assert moment is not None, "its table has read it"
        number, counts_epochs = moment
        epoch, step = (number, 0) if counts_epochs else divmod(number, steps)
        if step % plan.repeats:
            begin = number - step % plan.repeats
            raise SourceInvalid(
                f"source.weights: with repeats = {plan.repeats}, batches {begin} to {begin + plan.repeats - 1} have the same "
                f"samples, so no weights can begin with batch {number}; use {begin} or {begin + plan.repeats}"
            )
        found[text] = Segment(epoch * rows + min(plan.first_place(Position(epoch, step)), rows), weights)
    ordered = sorted(found.items(), key=lambda entry: entry[1].first)
    for (before, one), (behind, other) in pairwise(ordered):
        if one.first == other.first:
            raise SourceInvalid(
                f"source.weights: {before!r} and {behind!r} are the same moment, batch 0 of epoch {one.first // rows}: an epoch "
                f"has {counted(steps, 'batch')}"
            )
    return [segment for _text, segment in ordered]
