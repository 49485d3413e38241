"""The DataLoader beside batchd: its interpreter, its job, and its figures. In the user's shell.

    find_interpreter --> write_job --> measure_loader: dataloader.py in that interpreter -> Figures

Its samples are some of the stream's, at random: the paths of files, else what batchd's own reader
has read, in a copy, so that reading costs the DataLoader nothing there.

Invariant: the child needs nothing of batchd in its environment.
"""

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, fields
from pathlib import Path
from random import Random
from time import monotonic
from typing import BinaryIO, ClassVar

import numpy as np

from batchd.commands.bench import dataloader, measure
from batchd.commands.bench.measure import Figures, Report
from batchd.config.tree import StreamConfig
from batchd.data.pipeline.cache_split import plan_pipeline
from batchd.data.pipeline.image.options import (
    CenterCrop,
    ChanceStep,
    ColorJitter,
    Decode,
    Gray,
    ImageStep,
    Layout,
    Normalize,
    RandomCrop,
    RandomFlip,
    RandomResizedCrop,
    Resize,
    To,
)
from batchd.data.pipeline.options import StepOptions
from batchd.data.pipeline.text.options import Lowercase, TextBytes
from batchd.data.samples.errors import SampleUnreadable
from batchd.data.samples.values import Value
from batchd.data.sources.code.options import PluginSource, PythonSource
from batchd.data.sources.composed.options import sources_in
from batchd.data.sources.interface import HasParts, NamesFiles, PlacesFiles, Reader, open_reader, read_ahead
from batchd.data.storage.access import Storage
from batchd.data.storage.index import SourceIndex
from batchd.errors import BatchdError, ExitCode
from batchd.runtime.children import PIPE, STDOUT, describe, start_program
from batchd.runtime.suggestions import nearest, pip_command

KNOWN = (
    *(Decode, Resize, CenterCrop, RandomCrop, RandomResizedCrop, RandomFlip, Gray, ColorJitter, Normalize, Layout, To),
    *(Lowercase, TextBytes),
)
"""The steps that torchvision has, too, or that take a line; ``dataloader`` says which ones of them
it cannot do without torchvision."""
OLDEST = (3, 9)
"""The oldest Python that runs ``dataloader``."""
SAMPLES_MAX = 20_000
COPIED_BYTES_MAX = 256 << 20
COPYING_S = 3.0
READ_TOGETHER = 64
PROBE_S = 30.0
OUTPUT_BYTES = 4096
LAST_WORDS_MAX = 80
LOADER_PATIENCE_S = 120.0
"""Time for the start of torch and one batch, beyond that of the measurement."""
PROBED = "batchd bench: "
PROBE = f"""import sys
sys.path = [folder for folder in sys.path if folder]
found = []
try:
    from importlib.util import find_spec
    found = [name for name in ("torch", "numpy", "torchvision", "PIL", "cv2", "pip") if find_spec(name)]
except ImportError:
    pass
print("{PROBED}" + " ".join([".".join(map(str, sys.version_info[:3]))] + found))
"""
"""Says the version and which modules are there. Any Python since 2.7 can read it."""


class InterpreterError(BatchdError):
    """The interpreter of ``--python`` runs no DataLoader; the text says what is missing."""

    exit_code: ClassVar[ExitCode] = ExitCode.USAGE


class LoaderError(Exception):
    """The DataLoader has no figures; the text is the reason."""


@dataclass(frozen=True, slots=True)
class Interpreter:
    """A Python of the user's. ``modules``: those of ``PROBE`` that it has."""

    path: str
    version: str
    modules: frozenset[str]

    def lacking(self, stream: StreamConfig) -> list[str]:
        """What the DataLoader of a stream needs, and is not installed there."""
        found = [name for name in ("torch", "numpy") if name not in self.modules]
        if any(isinstance(step, ImageStep) for step in stream.pipeline) and not self.modules & {"PIL", "cv2"}:
            found.append("torchvision")  # brings Pillow along
        return found

    def require(self, stream: StreamConfig) -> None:
        """Raise ``InterpreterError`` if something is lacking, with the line that installs it."""
        if lacking := self.lacking(stream):
            line = pip_command(*lacking, python=self.path, has_pip="pip" in self.modules)
            raise InterpreterError(f"{self.path} (Python {self.version}) has no {', '.join(lacking)}: {line}")


def find_interpreter(given: str) -> Interpreter:
    """The interpreter that a user names: a path, a folder of an environment, or a command.

    Raises ``InterpreterError`` if it is none, or too old.
    """
    path = _program(given)
    try:
        with start_program([path, "-c", PROBE], stdout=PIPE, stderr=STDOUT) as child:
            said = child.read(PROBE_S, OUTPUT_BYTES).decode(errors="replace")
            how = (
                f"ended with {describe(child.end() or 0)}" if child.has_ended() else f"said nothing for {PROBE_S:.0f} s"
            )
    except OSError as error:
        raise InterpreterError(f"{path} is no Python interpreter: {error.strerror}") from None
    answer = next((line for line in said.splitlines() if line.startswith(PROBED)), None)
    if answer is None:
        last = next((f": {line.strip()[:LAST_WORDS_MAX]}" for line in reversed(said.splitlines()) if line.strip()), "")
        raise InterpreterError(f"{path} is no Python interpreter: started as one, it {how}{last}")
    version, *modules = answer.removeprefix(PROBED).split()
    if tuple(int(part) for part in version.split(".")[:2]) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise InterpreterError(f"{path} is Python {version}: the DataLoader's side needs {oldest} or newer")
    return Interpreter(path, version, frozenset(modules))


def _program(given: str) -> str:
    """The absolute path of a program; a link stays one, as an environment is found by it."""
    path = Path(given).expanduser().absolute()
    if path.is_dir():
        inside = path / "bin" / "python"
        if not inside.exists():
            raise InterpreterError(
                f"{path} has no bin/python, so it is no virtual environment: python3 -m venv makes one"
            )
        return str(inside)
    if path.exists():
        return str(path)
    command = shutil.which(given) if "/" not in given else None
    if command is None:
        near = nearest(path.name, (one.name for one in path.parent.iterdir())) if path.parent.is_dir() else None
        help_ = (
            f"did you mean {path.with_name(near)}?" if near else "name an interpreter, or the folder of an environment"
        )
        raise InterpreterError(f"no such file or command: {given}; {help_}")
    return command


def why_none(stream: StreamConfig) -> str:
    """Why there is no DataLoader that does the same; "" if there is one."""
    for _key, source in sources_in(stream.source):
        if isinstance(source, (PythonSource, PluginSource)):
            return "the source is code of your own"
    others = [step.op for step in stream.pipeline if not isinstance(step, KNOWN) or _is_special(step)]
    return f"no counterpart of the step {', '.join(dict.fromkeys(others))}" if others else ""


def _is_special(step: StepOptions) -> bool:
    """Whether it has options that its counterpart lacks."""
    if isinstance(step, Resize):
        return (step.size or step.shorter_side) is None or (step.max_longer_side or step.multiple_of) is not None
    if isinstance(step, CenterCrop) and step.place != (0.5, 0.5):
        return True
    return isinstance(step, ChanceStep) and step.probability < 1


def plain_steps(steps: Sequence[StepOptions]) -> list[Mapping[str, object]]:
    """The steps of a pipeline with their options by name, as ``dataloader`` has them."""
    return [{each.name: getattr(step, each.name) for each in fields(step)} for step in steps]


def write_job(folder: Path, stream: StreamConfig, index: SourceIndex, storage: Storage, workers: int) -> Path:
    """Write what the child needs into a folder. Raises ``LoaderError`` if it has no sample."""
    samples: list[Mapping[str, object]] = []
    numbers = Random(0).sample(range(len(index)), min(SAMPLES_MAX, len(index)))  # noqa: S311  no secrets
    until_s = monotonic() + COPYING_S
    reason = "the source is empty"
    longest = plan_pipeline(stream.pipeline).record_bytes_max
    with (
        (folder / "copies").open("wb") as copies,
        closing(open_reader(stream.source, index, longest, storage)) as reader,
    ):
        for place, number in enumerate(numbers):
            if samples and (monotonic() > until_s or copies.tell() > COPIED_BYTES_MAX):
                break
            if place % READ_TOGETHER == 0 and _file_of(reader, number) is None:
                read_ahead(reader, numbers[place : place + READ_TOGETHER])
            try:
                file = _file_of(reader, number)
                values = reader.read(number) if file is None else reader.known(number)
            except SampleUnreadable as error:
                reason = str(error)
                continue
            sample: dict[str, object] = {} if file is None else {"image": file}
            for name, value in values.items():
                sample[name] = _copied(copies, value)
            samples.append(sample)
        copies.write(b"\0")  # an empty file cannot be mapped
    if not samples:
        raise LoaderError(f"no sample can be read: {reason}")
    counters, job = folder / "counters", folder / "job.json"
    counters.write_bytes(bytes(workers * dataloader.COUNTER_BYTES))
    content = {
        "parent": os.getpid(),
        "workers": workers,
        "batch_size": stream.batch_size,
        "counters": str(counters),
        "copies": str(folder / "copies"),
        "steps": plain_steps(stream.pipeline),
        "samples": samples,
    }
    job.write_text(json.dumps(content))
    return job


def _file_of(reader: Reader, number: int) -> str | None:
    """The path of a sample that is a whole file of this host."""
    while isinstance(reader, HasParts):
        reader, _index, number = reader.part_with(number)
    if not isinstance(reader, PlacesFiles) or not isinstance(reader, NamesFiles) or reader.place(number) is None:
        return None
    file = reader.file(number)
    return os.fsdecode(file) if file is not None else None


def _copied(copies: BinaryIO, value: Value) -> object:
    """A value as ``dataloader.Samples`` has it; all but a number is copied."""
    first = copies.tell()
    if isinstance(value, memoryview):
        return [first, first + copies.write(value)]
    if isinstance(value, (str, list, dict)):
        return {"text": value}
    array = np.asarray(value)
    if array.ndim == 0:
        return array.item()
    return [first, first + copies.write(array.tobytes()), array.dtype.str, array.shape]


def measure_loader(
    interpreter: Interpreter, job: Path, workers: int, until_s: float, report: Report
) -> tuple[Figures, str]:
    """Figures of the DataLoader, and its libraries. Raises ``LoaderError``."""
    log, counters = job.with_name("log"), job.with_name("counters")
    with log.open("wb") as output:
        child = start_program([interpreter.path, dataloader.__file__, str(job)], stdout=output.fileno(), stderr=STDOUT)

    def count() -> tuple[int, float]:
        if child.has_ended(measure.TICK_S):
            raise LoaderError(f"it ended: {_last_words(log) or describe(child.end() or 0)}")
        return int(np.fromfile(counters, np.int64).sum()), monotonic()

    with child:
        began_s = monotonic()
        while not (first := count())[0]:
            report(0, 0.0)
            if first[1] > until_s + LOADER_PATIENCE_S:
                raise LoaderError(f"it made no sample in {first[1] - began_s:.0f} s")
        warm_s = max(measure.MEASURED_S_MIN / 2, measure.WARM_UP_SHARE * (until_s - monotonic()))
        child.has_ended(warm_s)
        figures = measure.figures_until(until_s, workers, count, lambda: measure.tree_cpu_s(child.pid), report)
    named = (line.removeprefix(dataloader.TOOLS) for line in _lines(log) if line.startswith(dataloader.TOOLS))
    return figures, next(named, "")


def _lines(log: Path) -> list[str]:
    return log.read_text(errors="replace").splitlines()


def _last_words(log: Path) -> str:
    """The last line that it wrote: of a traceback, the error."""
    return next((line.strip() for line in reversed(_lines(log)) if line.strip()), "")
