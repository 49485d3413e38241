"""Sources in users' own Python, or in another package. Daemon, workers and CLI."""

import json
from dataclasses import field
from typing import Annotated, Any, ClassVar, Literal

from batchd.data.functions.find import CallArguments, parse_function
from batchd.data.samples.checks import Checks, Example, Range
from batchd.data.samples.columns import check_types
from batchd.data.sources.options import DeclaredOptions, SourceOptions
from batchd_wire.record import options

LENGTH_TIMEOUT_MAX_S = 86_400.0
OPTIONS_CHARACTERS_MAX = 8_192
NUMBER_MAX = (1 << 63) - 1
SAMPLES_MAX = 1 << 40
"""Samples of an epoch without an end: at a million a second it takes twelve days."""


def check_options(options: dict[str, object]) -> None:
    """Raise ``ValueError`` if they do not fit into a message to a worker."""
    characters = len(json.dumps(options))
    if characters > OPTIONS_CHARACTERS_MAX:
        raise ValueError(
            f"options has {characters} characters, more than {OPTIONS_CHARACTERS_MAX}; put what is long into a file, and name it"
        )
    values = [options]
    while values:
        value: Any = values.pop()
        if isinstance(value, int) and abs(value) > NUMBER_MAX:
            raise ValueError(f"options has a number above {NUMBER_MAX}; write it as text")
        values += value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


class FunctionOptions(DeclaredOptions):
    """Base of the sources that call a user's function."""

    __slots__ = ()
    is_own_code: ClassVar[bool] = True
    offered: ClassVar[str] = ""
    """An argument that the function gets besides its options if it takes one of this name."""
    function: str
    options: dict[str, object]

    @property
    def place(self) -> str:
        """The function, for messages."""
        return self.function

    @property
    def arguments(self) -> CallArguments:
        """The arguments that the function is called with."""
        return CallArguments(options=self.options, offered=self.offered)

    def _check(self, checks: Checks) -> None:
        with checks.at("function"):
            parse_function(self.function)
        if not self.fields:
            text = 'fields must not be empty; write for example { image = "uint8[32,32,3]", label = "int64" }'
            checks.say(text, "fields")
        check_types(checks, "fields", self.fields or {})
        with checks.at("options"):
            check_options(self.options)
        if self.offered and self.offered in self.options:
            checks.say(f"options cannot have {self.offered}: each instance gets its own", "options", self.offered)


@options
class PythonSource(FunctionOptions):
    """Your own object with `__len__` and `__getitem__`, such as a torch `Dataset`.

    Each worker makes one for itself.
    """

    type: Literal["python"] = "python"
    """Kind of source."""

    function: Annotated[str, Example("package.module:name")]
    """The maker of the object, as "package.module:name": a class, or a function that returns it.
    Imported only in worker processes, from the folders of `python_path` in [daemon]."""

    fields: Annotated[dict[str, str], Example({"image": "uint8[32,32,3]", "label": "int64"})]
    """Fields of `object[i]`, with types: { image = "uint8[32,32,3]", label = "int64" }. A
    tuple has this order, a dict has these names, and a single field may be the value itself.
    "image" is the bytes of an image file."""

    options: Annotated[dict[str, object], Example({"split": "train"})] = field(default_factory=dict)
    """Keyword arguments of the class or the function. Relative paths under keys such as `path` and
    `root` are relative to the file, as everywhere; all other values are passed unchanged."""

    digest: str = ""
    """Any text that you change when the data changes. batchd does not know what your object reads;
    it refuses a saved position if source, options, length or this text differ."""

    length_timeout_s: Annotated[float, Range(0.1, LENGTH_TIMEOUT_MAX_S)] = 600.0
    """Maximum time to make the object once and to ask for its length when the daemon starts, in
    seconds."""


@options
class GeneratorSource(FunctionOptions):
    """Your own Python generator, endless or not.

    Each worker runs one of its own, so the same position is never the same samples again:
    docs/sources/generator.md says what that changes.
    """

    is_live: ClassVar[bool] = True
    offered: ClassVar[str] = "rng"

    type: Literal["generator"] = "generator"
    """Kind of source."""

    function: Annotated[str, Example("package.module:name")]
    """The generator function, as "package.module:name", called with the options and, where it takes
    one, with `rng`, a `numpy.random.Generator` of its own; see `seed`. A generator that ends is
    called again."""

    fields: Annotated[dict[str, str], Example({"image": "uint8[32,32,3]", "label": "int64"})]
    """The yielded fields, with their types: { image = "uint8[32,32,3]", label = "int64" }. A tuple
    has this order, a dict has these names, and a single field may be the value itself. "image" is
    the bytes of an image file."""

    options: Annotated[dict[str, object], Example({"level": 3})] = field(default_factory=dict)
    """Keyword arguments of the function. Relative paths under keys such as `path` and `root` are
    relative to the file, as everywhere; all other values are passed unchanged."""

    epoch_samples: Annotated[int, Range(1, SAMPLES_MAX)] | None = None
    """How many samples are called an epoch. When not set, the first epoch never ends."""

    seed: Annotated[int, Range(0, NUMBER_MAX)] | None = None
    """Makes `rng` repeatable: worker i, as `batchd status` numbers it, gets
    `numpy.random.default_rng((seed, i))`, and `default_rng((seed, i, n))` when its generator is
    called again for the nth time. A worker that takes the place of a dead one has a number of its
    own. When not set, no two instances have the same numbers."""

    yields: Literal["sample", "batch"] = "sample"
    """Value of each `yield`: a sample, or a batch of any length, whose arrays have one more
    dimension in front, as Keras's generators do; batches are taken apart."""

    @property
    def unread(self) -> str:
        """See ``SourceOptions``."""
        return f"the samples that {self.function} yields"


@options
class PluginSource(SourceOptions):
    """A source of an installed package, found by an entry point of the group `batchd.sources`."""

    type: Literal["plugin"] = "plugin"
    """Kind of source."""

    name: Annotated[str, Example("zip")]
    """Name of the entry point."""

    options: Annotated[dict[str, object], Example({"path": "/data/photos.zip"})] = field(default_factory=dict)
    """The options of the package; see its documentation. Relative paths under keys such as `path`
    and `root` are relative to the file, as everywhere."""

    is_own_code: ClassVar[bool] = True

    @property
    def unscanned(self) -> str:
        """See ``SourceOptions``."""
        return f"the samples of {self.place}: the plugin finds them when the daemon starts"

    @property
    def place(self) -> str:
        """The place of the samples, for messages."""
        return " ".join([self.name, *(f"{name}={value}" for name, value in self.options.items())])
