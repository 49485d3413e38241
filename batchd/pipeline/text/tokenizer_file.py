"""The tokenizer.json of a ``tokenize`` step.

Workers; the daemon and ``batchd check`` look whether it is one.

The library ``tokenizers`` is imported here and nowhere else.

Invariant: only options of the step decide on padding, truncation and special tokens; nothing is
downloaded and no thread is started.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from tokenizers import Tokenizer

from batchd.pipeline.step_files import StepFileInvalid, read_file
from batchd.pipeline.text.options import TOKEN_MAX, Tokenize
from batchd.samples.errors import SampleUndecodable

TOKENIZER_BYTES_MAX = 1 << 30
PADDING_NAMES = ("[PAD]", "<pad>")
"""What the special token for padding is called."""


@contextmanager
def failures_as(problem: type[StepFileInvalid | SampleUndecodable], what: str) -> Iterator[None]:
    """Raise what the library cannot do as a ``problem``."""
    try:
        yield
    except Exception as error:  # noqa: BLE001  the library raises nothing narrower
        raise problem(f"{what}: {error}") from None


def load_tokenizer(step: Tokenize) -> tuple[Tokenizer, int]:
    """The tokenizer as the step wants it, and the number of its padding.

    Raises ``StepFileInvalid``.
    """
    content = read_file(step.file, TOKENIZER_BYTES_MAX)
    with failures_as(StepFileInvalid, f"{step.file} is no tokenizer.json, or it is cut"):
        tokenizer = Tokenizer.from_str(content.decode())
    if getattr(tokenizer.model, "dropout", None):
        raise StepFileInvalid(
            f"{step.file} has dropout = {tokenizer.model.dropout}, which makes other tokens of the same text each time; remove it"
        )
    pad_id = _pad_id(tokenizer) if step.pad_id is None else step.pad_id
    if pad_id > TOKEN_MAX:
        raise StepFileInvalid(f"{step.file} pads with {pad_id}, which int32 cannot hold; set pad_id")
    tokenizer.no_padding()
    tokenizer.no_truncation()
    special = tokenizer.num_special_tokens_to_add(False) if step.special_tokens else 0
    if special > step.max_length:
        raise StepFileInvalid(
            f"{step.file} adds {special} special tokens, more than max_length = {step.max_length}; set special_tokens = false, "
            "or a larger max_length"
        )
    if step.truncation:
        tokenizer.enable_truncation(step.max_length)
    return tokenizer, pad_id


def _pad_id(tokenizer: Tokenizer) -> int:
    """The number that the file has for padding, else that of its special token for it, else 0."""
    if tokenizer.padding is not None:
        return int(tokenizer.padding["pad_id"])
    tokens = tokenizer.get_added_tokens_decoder().items()
    return min((int(number) for number, token in tokens if token.special and token.content in PADDING_NAMES), default=0)
