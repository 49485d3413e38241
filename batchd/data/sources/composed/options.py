"""Sources made of other sources. Daemon, workers and CLI; standard library only."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

from batchd.data.samples.checks import Checks, Example
from batchd.data.samples.kinds import OneOf
from batchd.data.sources.options import SOURCE_KINDS, SourceOptions
from batchd.errors import KeyPath
from batchd_wire.record import options
from batchd_wire.wording import counted

PARTS_MAX = 256
NUMBER_MAX = (1 << 63) - 1
DIGITS_MAX = 18


Part: TypeAlias = Annotated[SourceOptions, OneOf(SOURCE_KINDS, "type")]
_TWO_FOLDERS = [{"type": "folder", "path": "/data/photos"}, {"type": "folder", "path": "/data/more"}]


@options
class ConcatSource(SourceOptions):
    """Several sources, one after the other.

    Their samples have the same fields, and their labels mean the same.
    """

    type: Literal["concat"] = "concat"
    """Kind of source."""

    sources: Annotated[tuple[Part, ...], Example(_TWO_FOLDERS)]
    """The sources."""

    source_field: str = ""
    """Name of a field that says which source a sample is from: int64, counted from 0. "" leaves it
    out."""

    def __post_init__(self) -> None:
        _check_parts(self.sources)

    @property
    def place(self) -> str:
        """The place of the samples, for messages."""
        return " + ".join(part.place for part in self.sources)


@options
class MixSource(SourceOptions):
    """Several sources, mixed by weight.

    The order is always the same, and even: each stretch has its share of each source.
    """

    type: Literal["mix"] = "mix"
    """Kind of source."""

    sources: Annotated[tuple[Part, ...], Example(_TWO_FOLDERS)]
    """The sources. Their samples have the same fields, and their labels mean the same."""

    weights: Annotated[tuple[float, ...] | dict[str, tuple[float, ...]], Example([3, 1])] = ()
    """For each source its share, such as [3, 1]; only their proportions count, and without any all
    shares are equal. Shares that change are a table such as { "0" = [1, 0], "20000" = [1, 3] }: the
    shares from a batch of the run on, counted over all epochs and ranks, or from "epoch 3" on."""

    temperature: float | None = None
    """Instead of weights: the share of a source grows with its number of samples to the power of
    1 / temperature. 1 is the share that it has; a larger temperature gives small sources more."""

    until: Literal["all", "first"] = "all"
    """When an epoch ends: "all" when every sample of every source was used, while smaller sources
    repeat; "first" when one of them ends, so that no sample is repeated, and the rest of the others
    is never used. It counts only while weights do not change."""

    samples: int | None = None
    """Samples in an epoch whose weights change, with "pack" its rows; when not set, as many as all
    sources have together. Epochs follow each other: each source goes on where it was, pass after
    pass."""

    source_field: str = ""
    """Name of a field that says which source a sample is from: int64, counted from 0. "" leaves it
    out."""

    def _check(self, checks: Checks) -> None:
        with checks.at():
            _check_parts(self.sources)
        if isinstance(self.weights, dict):
            self._check_changes(checks, self.weights)
        elif self.weights:
            self._check_weights(checks, self.weights)
        if self.temperature is not None:
            if self.weights:
                checks.say("give weights or a temperature, and not both", "temperature")
            if not 0 < self.temperature < float("inf"):
                checks.say(f"the temperature must be more than 0, not {self.temperature:g}", "temperature")
        if self.samples is not None and not self.changes:
            checks.say(
                "samples counts only with weights that change; the weights and until decide the others", "samples"
            )
        if self.samples is not None and not 1 <= self.samples <= NUMBER_MAX:
            checks.say("samples must be 1 or more", "samples")

    def _check_weights(self, checks: Checks, weights: tuple[float, ...], *key: str) -> None:
        """Check the weights, or with ``key`` those of a moment, when sources may be out of use."""
        if len(weights) != len(self.sources):
            have = f"{counted(len(self.sources), 'source')} and {counted(len(weights), 'weight')}"
            checks.say(f"{have}; give each source one", "weights", *key)
        for number, weight in enumerate(weights):
            if not (0 <= weight < float("inf") if key else 0 < weight < float("inf")):
                least = "0 or more" if key else "more than 0"
                checks.say(f"weights must be {least}, not {weight:g}", "weights", *key, number)
        if key and weights and not any(weights):
            checks.say("one of these weights must be more than 0", "weights", *key)

    def _check_changes(self, checks: Checks, weights: dict[str, tuple[float, ...]]) -> None:
        for moment, one in weights.items():
            self._check_weights(checks, one, moment)
            if moment_of(moment) is None:
                text = f'{moment!r} is no moment: use the number of a batch, such as "20000", or "epoch 3"'
                checks.say(text, "weights", moment)
        if not any(moment_of(moment) in {(0, False), (0, True)} for moment in weights):
            checks.say('there are no weights for the beginning; give some for "0"', "weights")
        if self.until != "all":
            checks.say("until counts only while weights do not change; use samples", "until")

    @property
    def changes(self) -> bool:
        """True if the shares change with the batches of a run."""
        return isinstance(self.weights, dict)

    @property
    def place(self) -> str:
        """The place of the samples, for messages."""
        return " + ".join(part.place for part in self.sources)


@options
class SubsetSource(SourceOptions):
    """Some of the samples of a source: a range of them, or those that a file names."""

    type: Literal["subset"] = "subset"
    """Kind of source."""

    of: Annotated[Part, Example(_TWO_FOLDERS[0])]
    """The source."""

    start: int | str = 0
    """The first sample: a number, or a percentage of all, such as "90%"."""

    stop: int | str = "100%"
    """The sample before which the range ends: a number, or a percentage of all. Two ranges that
    meet share no sample."""

    shuffle_seed: int | None = None
    """Puts all samples into an order of its own before the range is taken, for parts that are each
    like the whole: with the same seed, stop = "90%" and start = "90%" are a training and a
    validation set. Unset, it is the order of the source, in which a folder has class after
    class."""

    indices: Path | None = None
    """A file of sample numbers, counted from 0: text with one on each line, or a .npy file of whole
    numbers. Use it instead of a range; a number may occur several times."""

    def __post_init__(self) -> None:
        self.settle_paths()
        _check_parts((self.of,))
        for name, text in (("start", self.start), ("stop", self.stop)):
            if share_of(text, 100) is None:
                raise ValueError(f'{name} = {text!r} is neither a number nor a percentage, such as "90%"')
        if isinstance(self.start, int) and isinstance(self.stop, int) and self.start >= self.stop:
            raise ValueError(f"the range from start = {self.start} to stop = {self.stop} holds no sample")
        if self.shuffle_seed is not None and not 0 <= self.shuffle_seed <= NUMBER_MAX:
            raise ValueError("shuffle_seed must be 0 or more")
        if self.indices is not None and (self.start, self.stop, self.shuffle_seed) != (0, "100%", None):
            raise ValueError("indices stand in place of start, stop and shuffle_seed")

    @property
    def place(self) -> str:
        """The place of the samples, for messages."""
        which = str(self.indices) if self.indices is not None else f"{self.start} to {self.stop}"
        return f"{which} of {self.of.place}"


def parts_of(source: SourceOptions) -> Sequence[tuple[KeyPath, SourceOptions]]:
    """The direct parts of a source, each with its key; empty if it has none."""
    match source:
        case ConcatSource(sources=sources) | MixSource(sources=sources):
            return [(("sources", number), part) for number, part in enumerate(sources)]
        case SubsetSource(of=part):
            return [(("of",), part)]
        case _:
            return []


def sources_in(source: SourceOptions, key: KeyPath = ()) -> Iterator[tuple[KeyPath, SourceOptions]]:
    """All parts of a source, at any depth, and then the source, each with its key."""
    for name, part in parts_of(source):
        yield from sources_in(part, (*key, *name))
    yield key, source


def share_of(given: int | str, samples: int) -> int | None:
    """A number, or a percentage of ``samples``, rounded down; None for anything else."""
    if isinstance(given, int):
        return given if 0 <= given <= NUMBER_MAX else None
    whole, point, fraction = given.removesuffix("%").partition(".")
    if not given.endswith("%"):
        return None
    digits = whole + fraction
    if not digits.isdecimal() or not digits.isascii() or len(digits) > 15 or (point and not fraction):  # noqa: PLR2004  as exact as need be
        return None
    whole_share = 100 * 10 ** len(fraction)
    # exact, as floats are not
    return int(digits) * samples // whole_share if int(digits) <= whole_share else None


def moment_of(text: str) -> tuple[int, bool] | None:
    """A moment at which weights change: a number, and if it counts epochs; None for other texts."""
    number = text.removeprefix("epoch ")
    if not number.isascii() or not number.isdecimal() or len(number) > DIGITS_MAX:
        return None
    return int(number), number != text


def _check_parts(parts: tuple[SourceOptions, ...]) -> None:
    if not 1 <= len(parts) <= PARTS_MAX:
        raise ValueError(f"from 1 to {PARTS_MAX} sources, not {len(parts)}")
    live = next((part for part in parts if part.is_live), None)
    if live is not None:
        raise ValueError(f'samples of type "{live.type}" have no numbers, so it cannot be a part of another source')
