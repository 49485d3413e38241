"""The steps on text, as plain data. Daemon, workers and CLI; standard library only.

A *word* is the text between white space, without the characters at its two ends that are neither
letter, digit nor mark: ``"(Don't stop!)"`` has the words ``Don't`` and ``stop``. White space is
what Python's ``str.split()`` splits at, letters and digits are what ``str.isalnum()`` says, marks
are Unicode's category M. Nothing is normalised.
"""

from pathlib import Path
from typing import Annotated, ClassVar, Literal

from batchd.data.pipeline.options import FieldStep
from batchd.data.samples.checks import Example, Range
from batchd.data.samples.columns import check_field_names
from batchd.data.samples.location import check_path
from batchd_wire.record import options

TOKENS_MAX = 1 << 20
WORDS_MAX = 1 << 20
TEXT_BYTES_MAX = 1 << 26
TOKEN_MAX = (1 << 31) - 1


@options
class TextStep(FieldStep):
    """Base of the steps on text."""

    is_for_each: ClassVar[bool] = True
    op: str
    field: str = "text"

    @property
    def makes(self) -> tuple[str, ...]:
        """The fields that it makes of the text, if they have other names."""
        return ()

    @property
    def touches(self) -> frozenset[str]:
        """The text, and what is made of it."""
        return frozenset({self.field, *self.makes})


@options
class Tokenize(TextStep):
    """Turn text into token numbers with a Hugging Face tokenizer.json.

    The field ``to`` is int32[max_length]. Further fields are ``to`` with ``_mask``,
    uint8[max_length], 1 for a token and 0 for padding, and ``to`` with ``_length``, int32, the
    number of tokens. They replace the text. Needs the library tokenizers:
    ``pip install 'batchd[text]'``.
    """

    op: Literal["tokenize"] = "tokenize"
    to: str = "tokens"
    """The name of the field of the tokens."""
    file: Annotated[Path, Example("/data/tokenizer.json")]
    """The tokenizer.json. Its padding and truncation are ignored."""
    max_length: Annotated[int, Range(1, TOKENS_MAX), Example(128)]
    """Most tokens of a text, special ones counted in."""
    padding: Literal["max_length", "none"] = "max_length"
    """"max_length" puts ``pad_id`` behind the tokens up to max_length. "none" makes int32[?], as
    many as there are, without mask and length; a later step must then give it a shape."""
    truncation: bool = True
    """Whether a text with more tokens is cut at its end, its special tokens kept; when not, it is a
    bad sample."""
    pad_id: Annotated[int, Range(0, TOKEN_MAX)] | None = None
    """The number of the padding. When not set, the one that the tokenizer.json has for padding,
    else that of its special token [PAD] or <pad>, else 0."""
    special_tokens: bool = True
    """Whether the tokenizer adds its special tokens, such as [CLS] and [SEP]."""

    def __post_init__(self) -> None:
        check_field_names(*self.makes)
        check_path("file", self.file)

    @property
    def makes(self) -> tuple[str, ...]:
        """The fields that it makes."""
        return (self.to,) if self.padding == "none" else (self.to, f"{self.to}_mask", f"{self.to}_length")


@options
class Chat(TextStep):
    """Turn the messages of a chat into token numbers, and a mask of those that are learned.

    The field ``to`` is int32[?], and the field ``mask`` uint8[?] of the same length, 1 for the
    words of the roles in ``loss`` and the token that ends them. They replace the messages: a list
    of objects with "role" and "content", or "from" and "value", of type "json" in the source. A
    chat without a learned token is a bad sample, unless ``loss`` is empty. Needs the library
    tokenizers: ``pip install 'batchd[text]'``.
    """

    is_for_each: ClassVar[bool] = False
    later: ClassVar[frozenset[str]] = frozenset({"tools", "image"})
    op: Literal["chat"] = "chat"
    field: str = "messages"
    to: str = "tokens"
    """The name of the field of the tokens."""
    mask: str = "loss_mask"
    """The name of the field that says which tokens are learned."""
    tools: str = ""
    """The field of the definitions of tools, of type "json": a list as that of OpenAI, also as a
    text, or null for a chat without tools. The template says where they are; "gemma" has none."""
    tokenizer: Annotated[Path, Example("/data/tokenizer.json")]
    """The tokenizer.json. It has the special tokens of the template."""
    template: Annotated[Literal["chatml", "llama3", "mistral", "gemma"] | Path, Example("chatml")]
    """The form in which messages are written: "chatml" (Qwen, Hermes), "llama3", "mistral",
    "gemma", or a file of your own, in TOML or, if its name ends in .json, in JSON."""
    loss: tuple[Literal["system", "user", "assistant", "tool"], ...] = ("assistant",)
    """The roles whose words are learned; [] for none."""
    max_length: Annotated[int, Range(1, TOKENS_MAX), Example(4096)]
    """Most tokens of a chat."""
    truncate: Literal["turns", "left", "right", "bad"] = "turns"
    """The treatment of a longer chat: "turns" keeps the message of the system and the last whole
    exchanges (a message of the user, and what follows it); "left" and "right" cut tokens off at
    this side; "bad" makes it a bad sample, as "turns" does if one exchange is too long."""
    special_text: Literal["keep", "parse"] = "keep"
    """The treatment of the text of a special token, such as </s>, in a message: "keep" leaves it
    text, so that no message can end itself; "parse" makes the token of it, as apply_chat_template
    does."""
    image: str = ""
    """The tokens of an image, such as "<image>" or "<|vision_start|><|image_pad|><|vision_end|>":
    they stand for each part of a message of type "image", and for each text "<image>". Then
    "interleave" gives them their patches. When not set, a part of type "image" is refused."""
    generation_prompt: bool = False
    """Whether the words that begin an answer are at the end, for chats that a model continues."""

    def __post_init__(self) -> None:
        check_field_names(*self.makes)
        check_path("tokenizer", self.tokenizer)
        if self.to == self.mask:
            raise ValueError(f"to and mask are both {self.to!r}")
        if self.tools == self.field:
            raise ValueError(f"field and tools are both {self.field!r}")
        if isinstance(self.template, Path):
            check_path("template", self.template)

    @property
    def makes(self) -> tuple[str, ...]:
        """The fields that it makes."""
        return self.to, self.mask

    @property
    def touches(self) -> frozenset[str]:
        """The messages, the tools, and what is made of them."""
        return frozenset({self.field, *self.makes, *filter(None, [self.tools])})


@options
class Lowercase(TextStep):
    """Convert a text to lower case, as Python's ``str.lower()`` does, in any language."""

    op: Literal["lowercase"] = "lowercase"


@options
class RemoveStopwords(TextStep):
    """Take the words of a list out of a text.

    A word is the text between white space, without punctuation at its ends. Punctuation around a
    removed word stays; if there is none, its white space is removed too, and the rest is joined by
    single spaces: "The cat (the old one), and a dog." without "the", "and" and "a" is "cat ( old
    one), dog.".
    """

    op: Literal["remove_stopwords"] = "remove_stopwords"
    file: Annotated[Path, Example("/data/stopwords.txt")]
    """The list: UTF-8, one word on each line; blank lines are ignored, and so are comments after a
    # at the beginning of a line or after white space."""
    case: Literal["ignore", "exact"] = "ignore"
    """"ignore" compares words after ``str.lower()``, "exact" as they are."""

    def __post_init__(self) -> None:
        check_path("file", self.file)


@options
class Lookup(TextStep):
    """Turn the words of a text into the rows of a table.

    The field ``to`` is float32[max_words, columns of the table]. A further field is ``to`` with
    ``_length``, int32, the number of rows that count; behind them are zeros. Words are the text
    between white space, without punctuation at its ends; they are compared as they are, so
    "lowercase" may be needed before. They replace the text.
    """

    op: Literal["lookup"] = "lookup"
    to: str = "vectors"
    """The name of the field of the rows."""
    words: Annotated[Path, Example("/data/words.txt")]
    """The words: UTF-8, one on each line; that of row i of the table on line i, from 0. The first
    of equal words is used."""
    table: Annotated[Path, Example("/data/vectors.npy")]
    """The table: an .npy file of float32 with two dimensions, [words, columns]. Workers map it, so
    that it is in memory once."""
    max_words: Annotated[int, Range(1, WORDS_MAX), Example(64)]
    """Most words of a text."""
    unknown: Literal["skip", "zeros"] = "skip"
    """The treatment of words that are not in the table: "skip" leaves them out, "zeros" makes each
    a row of zeros."""
    truncation: bool = True
    """Whether of a text with more rows the first max_words count; when not, it is a bad sample."""

    def __post_init__(self) -> None:
        check_field_names(*self.makes)
        check_path("words", self.words)
        check_path("table", self.table)

    @property
    def makes(self) -> tuple[str, ...]:
        """The fields that it makes."""
        return self.to, f"{self.to}_length"


@options
class TextBytes(TextStep):
    """Turn text into its bytes: uint8[length], UTF-8 followed by zeros.

    ``batchd_client.text(batch["text"])`` gives strings. A text with the character NUL is a bad
    sample, because its end would be ambiguous.
    """

    op: Literal["text_bytes"] = "text_bytes"
    length: Annotated[int, Range(1, TEXT_BYTES_MAX), Example(256)]
    """Length of the field, in bytes."""
    truncation: bool = True
    """Whether a longer text is cut, after the last complete character that fits; otherwise it is a
    bad sample."""
