"""``batchd prepare``: run a pipeline once over all samples of a stream, into shards.

    samples   0 ............ k-1 | k ............ 2k-1 | ...
              NAME-000000.tar    | NAME-000001.tar     | ...    an order for one worker each

    prepare.json         what is prepared here; a command for anything else is refused
    NAME-000000.tar ...  shards, whole
    *.unfinished         left by a killed process; removed
    sizes.tsv            name and bytes of each finished shard, written before it is renamed
    bad.tsv              shard, sample, path and reason of each sample that is in no shard
    short_groups.tsv     what was done to each video, if they get short groups of pictures

A sample that killed two workers counts as bad. Bad samples are left out. The command fails above
the stream's ``max_bad_fraction``, and at the first bad sample with ``on_error = "fail"``.

Invariants: a shard with its final name and its recorded size is whole: after any interruption, the
same command writes the missing shards. ``bad.tsv`` has one line for each bad sample of the finished
shards. A worker counts as ended when its pidfd is readable, so a shard that another one starts
again has no second writer.
"""

import fcntl
import json
import os
import tarfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from json import dumps
from pathlib import Path
from typing import NamedTuple, Self, TypeAlias

from batchd.config.schema import toml_value
from batchd.config.tree import DaemonConfig, StreamConfig
from batchd.data.pipeline.effects import StepInvalid
from batchd.data.pipeline.sample_fields import columns_after
from batchd.data.pipeline.shapes.options import LAST_STEPS
from batchd.data.pipeline.step_files import named_by_content
from batchd.data.samples.columns import Column
from batchd.data.sources.interface import kind_of
from batchd.data.sources.scan import scan_source
from batchd.data.sources.webdataset import options as webdataset
from batchd.data.storage.access import Storage
from batchd.data.storage.index import readable
from batchd.data.storage.index_cache import IndexCache
from batchd.data.storage.paths import why_unwritable
from batchd.errors import BatchdError, ConfigInvalid, Problem, ProblemKind, path_text
from batchd.runtime.sandbox import NOTHING
from batchd.runtime.suggestions import pip_command
from batchd.stream.plan import code_problems, plan_stream
from batchd.worker.members import GROUPS_ENDING, is_image, is_image_list, main_image
from batchd.worker.messages import PrepareStream, SampleBad, ShardWritten, WriteShard
from batchd.worker.order_runner import OrderProgress, OrderRunner, OrderToRun, WorkersEnd
from batchd_wire.wording import counted

ABOUT = "prepare.json"
SIZES = "sizes.tsv"
BAD = "bad.tsv"
SHORT_GROUPS = "short_groups.tsv"
ENCODING_TIMES = 60
"""Encoding a video may take so many times the stream's ``sample_timeout_s``."""
UNFINISHED = ".unfinished"
DIGESTS = {
    "source": "the source's files have changed, or its options",
    "steps": "the pipeline, the seed, or what a step reads or calls has changed",
}
"""The facts that have changed if one of these digests differs."""


class UnpreparedSample(NamedTuple):
    """A bad sample, which is in no shard."""

    shard: str
    sample: int
    path: str
    reason: str


class ShardFolder:
    """Locks the folder while shards are written. A context manager.

    Raises ``BatchdError``: it is not writable, in use, or has something else.
    """

    def __init__(self, path: Path, about: dict[str, object]) -> None:
        self.path = path
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise BatchdError(why_unwritable(path, error)) from None
        with ExitStack() as where_it_fails:
            where_it_fails.callback(os.close, self._descriptor)
            try:
                self._begin(about)
            except BlockingIOError:
                raise BatchdError(f"another batchd prepare is at work in {path}") from None
            except OSError as error:
                raise BatchdError(f"{error.filename or path} cannot be used: {error.strerror}") from None
            where_it_fails.pop_all()

    def _begin(self, about: dict[str, object]) -> None:
        """Lock the folder, remove unfinished files, and read the records of earlier runs."""
        fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self._claim(about)
        for left in self.path.glob(f"*{UNFINISHED}"):
            left.unlink()
        there = {file.name: file.stat().st_size for file in self.path.iterdir() if file.is_file()}
        self._sizes = {shard: size for shard, size in self._read_sizes() if there.get(shard) == size}
        _write(self.path / SIZES, "".join(f"{shard}\t{size}\n" for shard, size in self._sizes.items()))
        self.left_out = [one for one in self._read_bad() if self.has(one.shard)]
        """The bad samples of the finished shards."""
        self._write_bad()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for left in self.path.glob(f"*{UNFINISHED}"):
            left.unlink()
        os.close(self._descriptor)

    def has(self, shard: str) -> bool:
        """True if this shard is finished."""
        return shard in self._sizes

    def finish(self, shard: str, size: int, left_out: Iterable[UnpreparedSample]) -> None:
        """Rename a shard of ``size`` bytes after its size and its bad samples are on the disk."""
        self.left_out += left_out
        try:
            self._write_bad()
            with (self.path / SIZES).open("a") as stream:
                stream.write(f"{shard}\t{size}\n")
                stream.flush()
                os.fsync(stream.fileno())
            self._sizes[shard] = size
            (self.path / f"{shard}{UNFINISHED}").rename(self.path / shard)
            os.fsync(self._descriptor)
        except OSError as error:
            raise BatchdError(why_unwritable(self.path / shard, error)) from None

    def _claim(self, about: dict[str, object]) -> None:
        """Record what is prepared here, or compare it with the record."""
        file = self.path / ABOUT
        if not file.exists():
            others = sorted(entry.name for entry in self.path.iterdir())
            if others:
                raise BatchdError(f"{self.path} is not empty ({others[0]}): name a new folder")
            _write(file, json.dumps(about, indent=2) + "\n")
            return
        try:
            there = json.loads(file.read_text(encoding="utf-8"))
        except ValueError:
            there = None
        if not isinstance(there, dict):
            raise BatchdError(f"{file} is damaged: name a new folder, or remove this one")
        for name, value in about.items():
            if there.get(name) != value:
                why = DIGESTS.get(name, f"{name} was {there.get(name)!r}, and is {value!r} now")
                raise BatchdError(
                    f"something else was prepared in {self.path}: {why}; name a new folder, or remove this one"
                )

    def _read_sizes(self) -> Iterator[tuple[str, int]]:
        """Shard and bytes of each complete line of ``sizes.tsv``."""
        file = self.path / SIZES
        for line in file.read_text(errors="surrogateescape").splitlines(keepends=True) if file.exists() else []:
            shard, _, size = line.partition("\t")
            if line.endswith("\n") and size.strip().isdecimal() and "/" not in shard:
                yield shard, int(size)

    def _read_bad(self) -> list[UnpreparedSample]:
        file = self.path / BAD
        lines = file.read_text(errors="surrogateescape").splitlines()[1:] if file.exists() else []
        parts = (line.split("\t") for line in lines)
        return [
            UnpreparedSample(shard, int(sample), path, reason)
            for shard, sample, path, reason in (cells for cells in parts if len(cells) == len(UnpreparedSample._fields))
        ]

    def _write_bad(self) -> None:
        def cell(value: object) -> str:
            return readable(str(value).encode("utf-8", "surrogateescape"))

        rows = [("shard", "sample", "path", "reason"), *sorted(set(self.left_out))]
        _write(self.path / BAD, "".join("\t".join(map(cell, row)) + "\n" for row in rows))


def _write(file: Path, text: str) -> None:
    """Write a file under another name, flush it, and rename it."""
    unfinished = file.with_name(f".{file.name}")
    with unfinished.open("w", encoding="utf-8", errors="surrogateescape") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    unfinished.rename(file)


SEEN_MIN = 100
"""Samples before their bad fraction counts."""


@dataclass(frozen=True, slots=True)
class Output:
    """Pixels in ``image_format`` (jpg, png, webp) with ``quality`` (1 to 100).

    ``short_groups``: see ``worker.messages.PrepareStream``.
    """

    folder: Path
    shard_samples: int
    image_format: str
    quality: int
    short_groups: int = 0


Progress: TypeAlias = Callable[[int, int, int], None]
"""Gets the numbers of samples: all, those that are done, and the bad ones, which are left out."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """The result. ``shards``: the names of all shards."""

    samples: int
    shards: list[str]
    shard_bytes: int
    left_out: list[UnpreparedSample]
    empty: list[str]
    """Shards without a good sample."""
    columns: dict[str, Column]
    videos: list[dict[str, object]]
    """What was done to each video that got short groups: ``media.short_groups.Regrouped.facts``."""


@dataclass(frozen=True, slots=True)
class PrepareJob:
    """The stream, and the means to read it."""

    name: str
    config: StreamConfig
    daemon: DaemonConfig
    cache: IndexCache
    storage: Storage


def prepare(work: PrepareJob, output: Output, progress: Progress) -> Prepared:
    """Write the missing shards. Raises ``BatchdError``; a later call continues from there."""
    _check_source(work)
    columns = kind_of(work.config.source).columns(work.config.source, work.storage)
    # samples of a shard need not have one shape
    steps = tuple(step for step in work.config.pipeline if not isinstance(step, LAST_STEPS))
    try:
        made = dict(columns_after(columns, steps))
        _check_lists(made)
        if output.short_groups:
            _check_videos(made)
    except StepInvalid as problem:
        raise ConfigInvalid(
            [Problem(path_text(("streams", work.name, "pipeline")), ProblemKind.STEP_MISFIT, str(problem))]
        ) from None
    alone = work.config.model_copy(update={"pipeline": steps, "cache": "off", "cache_short_side": None})
    plan = plan_stream(work.name, alone, columns, work.daemon)
    index = scan_source(alone.source, lambda _found: None, work.cache, work.storage, work.daemon.python_path or ())
    recipe, folder = plan.recipe(), str(output.folder.absolute())
    if plan.access is not None:
        recipe = recipe._replace(access=[plan.access.joined(NOTHING._replace(write=[folder]))])
    order = PrepareStream(
        recipe,
        work.storage.limits.to_wire(),
        work.storage.as_of_ns,
        folder,
        output.image_format,
        output.quality,
        output.short_groups,
    )
    shards = _shards(work.name, len(index), output)
    named = [named_by_content(step, plan.digests) for step in steps]
    made_of = dumps([recipe.columns, named, recipe.seed, plan.code.digests], sort_keys=True)
    about = {
        "stream": work.name,
        "source": index.digest,
        "samples": len(index),
        "steps": sha256(made_of.encode()).hexdigest(),
        **{name: value for name, value in asdict(output).items() if name != "folder" and value},
    }
    with ShardFolder(output.folder, about) as shard_folder:
        descriptor = index.to_memfd()
        try:
            timeout_s = work.daemon.sample_timeout_s * (ENCODING_TIMES if output.short_groups else 1)
            with OrderRunner(work.daemon.worker_count(), timeout_s) as workers:
                workers.serve((order, [descriptor]))
                _Run(work, shard_folder, shards, workers, progress).run()
        finally:
            os.close(descriptor)
        names = [shard.name for shard in shards]
        size = sum((output.folder / name).stat().st_size for name in names)
        bad = Counter(one.shard for one in shard_folder.left_out)
        empty = [shard.name for shard in shards if bad[shard.name] == shard.count]
        videos = list(_videos(output.folder, names)) if output.short_groups else []
        return Prepared(len(index), names, size, shard_folder.left_out, empty, made, [facts for _name, facts in videos])


def _videos(folder: Path, shards: Iterable[str]) -> Iterator[tuple[str, dict[str, object]]]:
    """What was done to each video, as its shard says; writes the report."""
    found = []
    for shard in shards:
        with tarfile.open(folder / shard) as tar:
            for member in tar:
                if member.name.endswith(GROUPS_ENDING):
                    content = tar.extractfile(member)
                    assert content is not None, "a file"
                    found.append((f"{shard}\t{member.name.removesuffix(GROUPS_ENDING)}", json.load(content)))
    titles = ["done", "longest_group", "bytes_before", "bytes", "psnr", "psnr_worst_frame"]
    rows = [
        ["shard", "video", *titles],
        *([name, *(str(facts.get(title, "")) for title in titles)] for name, facts in found),
    ]
    _write(folder / SHORT_GROUPS, "".join("\t".join(row) + "\n" for row in rows))
    yield from found


def _check_source(work: PrepareJob) -> None:
    """Raise ``ConfigInvalid`` for a live source, and for a missing function."""
    source = work.config.source
    if source.is_live:
        text = (
            f'samples of type "{source.type}" cannot be read twice, so what was interrupted could not go on with them'
        )
        raise ConfigInvalid([Problem(f"streams.{work.name}.source", ProblemKind.NOT_TO_PREPARE, text)])
    problems = code_problems([((), source)], dict(enumerate(work.config.pipeline)), work.daemon.python_path or ())
    if problems:
        where = ("streams", work.name)
        raise ConfigInvalid(
            [Problem(path_text((*where, *key)), ProblemKind.OWN_FUNCTION, text) for key, text in problems]
        )


def _shards(name: str, samples: int, output: Output) -> list[WriteShard]:
    return [
        WriteShard(number + 1, f"{name}-{number:06}.tar", first, min(output.shard_samples, samples - first))
        for number, first in enumerate(range(0, samples, output.shard_samples))
    ]


@dataclass(slots=True)
class _Run:
    work: PrepareJob
    folder: ShardFolder
    shards: list[WriteShard]
    workers: OrderRunner
    progress: Progress
    done: int = 0
    """Samples of finished shards."""

    def run(self) -> None:
        """Have the missing shards written."""
        missing = [shard for shard in self.shards if not self.folder.has(shard.name)]
        self.done = sum(shard.count for shard in self.shards) - sum(shard.count for shard in missing)
        try:
            self.workers.run([OrderToRun(shard.order, shard) for shard in missing], self._heard, self._report)
        except WorkersEnd as how:
            raise BatchdError(
                f"the writing processes end before they write ({how}); what they say stands above"
            ) from None

    def _heard(self, writing: OrderProgress) -> None:
        shard, last = self.shards[writing.order.number - 1], writing.reports[-1]
        if isinstance(last, SampleBad):
            self._check_bad(last, len(writing.reports), writing.samples_done)
            return
        assert isinstance(last, ShardWritten)
        if last.hopeless:
            raise BatchdError(f"{last.hopeless}; the same command goes on from here")
        bad = [
            UnpreparedSample(shard.name, one.sample, one.path, one.reason)
            for one in writing.reports
            if isinstance(one, SampleBad)
        ]
        self.folder.finish(shard.name, last.shard_bytes, bad)
        self.done += shard.count

    def _check_bad(self, last: SampleBad, bad_here: int, done_here: int) -> None:
        """Raise ``BatchdError`` if the stream allows no more bad samples."""
        if self.work.config.on_error == "fail":
            raise BatchdError(f'{last.path}: {last.reason} (sample {last.sample}; on_error = "fail")')
        bad = len(self.folder.left_out) + bad_here
        seen = self.done + done_here + 1
        allowed = self.work.config.max_bad_fraction
        if seen >= SEEN_MIN and bad > allowed * seen:
            raise BatchdError(
                f"{counted(bad, 'bad sample')} of {seen}, more than max_bad_fraction = {allowed} of the stream allows; the last "
                f"one is {last.path}: {last.reason}"
            )

    def _report(self) -> None:
        samples, works = sum(shard.count for shard in self.shards), self.workers.works
        done = self.done + sum(work.samples_done for work in works)
        bad = len(self.folder.left_out) + sum(len(work.reports) for work in works)
        self.progress(samples, done, bad)


_PAIR = {"image": "image", "label": "int64"}
"""The fields of a source that names none."""


def source_table(root: Path, shards: str, columns: Mapping[str, Column]) -> str:
    """The table of a ``webdataset`` source that reads the pattern ``shards`` below ``root``."""
    members = _stored(columns)
    fields = {name: column.text for name, (column, _member) in members.items()}
    names = {
        name: member.text for name, (column, member) in members.items() if member != webdataset.usual_member(column)
    }
    table: dict[str, object] = {"type": "webdataset", "root": str(root), "shards": [shards]}
    if list(fields.items()) != list(_PAIR.items()):
        table["fields"] = fields
    if names:
        table["names"] = names
    return toml_value(table)


def _check_videos(columns: Mapping[str, Column]) -> None:
    """Raise ``StepInvalid`` if there is no video to get short groups, or nothing to make them."""
    if not any(column.kind == "video" for column in columns.values()):
        raise StepInvalid(
            "short groups are for fields that are video files after the pipeline: leave the steps out (--set "
            '\'streams.STREAM.pipeline=[]\'), and say what fields are: fields = { video = "video" }, or media = "video"'
        )
    try:
        version("av")
    except PackageNotFoundError:
        raise StepInvalid(f"short groups need av, which is not installed: {pip_command('batchd[video]')}") from None


def _check_lists(columns: Mapping[str, Column]) -> None:
    """Raise ``StepInvalid`` for lists that no members hold."""
    for name, column in columns.items():
        if column.kind == "arrays" and not is_image_list(column):
            raise StepInvalid(
                f'a shard holds lists of images and texts, and {name!r} is {column.text}; "pick" takes one'
            )


def _stored(columns: Mapping[str, Column]) -> dict[str, tuple[Column, webdataset.Member]]:
    """Type and member from which a ``webdataset`` source reads each column again."""
    main = main_image(columns)
    found = {}
    for name, column in columns.items():
        read = Column(name, "encoded") if is_image(column) else column
        read = Column(name, "images", most=column.most) if is_image_list(column) else read
        is_main = name == main
        found[name] = read, webdataset.Member(webdataset.IMAGE_ENDINGS) if is_main else webdataset.usual_member(read)
    return found
