"""Sources of token numbers in files. Daemon, workers and CLI; standard library only."""

from pathlib import Path
from typing import Annotated, ClassVar, Literal, TypeAlias

from batchd.data.samples.checks import Checks, Example
from batchd.data.samples.columns import LENGTH_MAX, Column, check_field_names
from batchd.data.sources.options import FilesOptions
from batchd_wire.record import options

TokenFormat: TypeAlias = Literal["flat", "megatron"]
TokenType: TypeAlias = Literal["uint8", "int8", "uint16", "int16", "uint32", "int32", "int64"]


@options
class TokensSource(FilesOptions):
    """Files of token numbers, one after the other, such as nanoGPT's and Megatron's.

    A sample is a window of `length` tokens, or a document.
    """

    endings: ClassVar[tuple[str, ...]] = (".bin", ".idx")

    type: Literal["tokens"] = "tokens"
    """Kind of source."""

    path: Annotated[Path | None, Example("/data/train.bin")] = None
    """The file, if it is one."""

    root: Path | None = None
    """The folder of the files, where they are several."""

    files: tuple[str, ...] = ()
    """The paths of the files below the root, or patterns of them, such as ["train-*.bin"]."""

    allow_outside_root: bool = False
    """Whether links may lead out of the root."""

    format: TokenFormat = "flat"
    """"flat" files have tokens alone, "megatron" files X.bin have an index X.idx of their
    documents."""

    dtype: Annotated[TokenType, Example("uint16")]
    """Type of a token, in the files and in a batch, such as "uint16". An index must have the
    same."""

    length: Annotated[int | None, Example(1025)] = None
    """Tokens of a sample: windows of this length through each file, without regard to documents.
    When not set, each document of an index is a sample of its own length."""

    overlap: int = 0
    """How many tokens at the end of a window are also the first ones of the next. 1 is for models
    that predict the next token: length = 1025 has the inputs [:-1] and the targets [1:]."""

    offset: int = 0
    """Bytes before the first token in each flat file, such as 1024 in the files of llm.c."""

    field: str = "tokens"
    """Name of the tokens in a batch."""

    def _check(self, checks: Checks) -> None:
        with checks.at():
            self.settle_paths()
            self.check_files()
        with checks.at("field"):
            check_field_names(self.field)
        if self.length is None and self.format == "flat":
            checks.say(
                "length must be set, as in length = 1024: flat files have no documents; for pairs of .bin and .idx set "
                'format = "megatron"',
                "length",
            )
        if self.length is not None and not 1 <= self.length <= LENGTH_MAX:
            checks.say(f"length must be from 1 to {LENGTH_MAX}, not {self.length}", "length")
        elif not 0 <= self.overlap < (self.length or 1):
            checks.say(f"overlap must be 0 or more, and less than length, not {self.overlap}", "overlap")
        if self.offset < 0 or (self.offset and self.format == "megatron"):
            checks.say("offset is 0 or more, and counts only for flat files", "offset")

    @property
    def columns(self) -> tuple[Column, ...]:
        """The tokens."""
        return (Column(self.field, dtype=self.dtype, shape=(self.length,)),)
