"""Writes docs/protocol.md to standard output, from the modules of the protocol: ``make docs``.

Everything is found: the modules of ``batchd_wire``, their vocabularies, messages, constants and
enumerations, with the words of their docstrings. Nothing is listed by hand but the order of the
modules, those that are no protocol, and the meaning of fields that are the same in every message,
so a new message is on the page as soon as it is in a vocabulary.
"""

import ast
import inspect
import re
import sys
from collections.abc import Iterator
from enum import Enum
from importlib import import_module
from pkgutil import iter_modules
from types import ModuleType
from typing import Any, NamedTuple, get_args, get_origin, get_type_hints

import batchd_wire
from batchd.cli.config import wrap_prose
from batchd_client.errors import error_for_code
from batchd_wire.codec import Message, Vocabulary
from batchd_wire.codes import ErrorCode

READING_ORDER = ("runtime", "messages", "codes", "codec", "channel", "slot", "fields")
"""Other modules follow behind these, by name."""
NO_PROTOCOL = {"record", "threads", "wording"}
"""Modules that daemon and trainers share, but that say nothing of what goes between them."""
SAME_EVERYWHERE = {
    "batch_size": "samples in a whole batch",
    "busy_us": "microseconds that the work took",
    "count": "how many rows",
    "epoch": "of the position",
    "fingerprint": "what the stream is; another source, seed or pipeline has another one",
    "first": "the first row",
    "generation": "what the header of the slot must say",
    "layout": "a `SlotLayout`",
    "name": "for people",
    "on_error": "what is done with bad samples, as the configuration says",
    "order": "the number of the order that is meant",
    "pid": "the sender's process, for people",
    "request": "a number that the asker chooses and that the answer repeats",
    "samples": "of the whole stream, or those that are meant",
    "secret": "what `Welcome` gave",
    "seed": "of the stream",
    "sequence": "of the position in its subscription",
    "shuffle": "whether each epoch has an order of its own",
    "slot": "the number of the slot that is meant",
    "slot_bytes": "the size of the slot",
    "status": "by name",
    "step": "of the position",
    "steps": "of one epoch of the stream",
    "stream": "the stream that is meant",
    "subscription": "the number of the subscription that is meant, as `Subscribed` gives it",
    "text": "for people: what is wrong, by how much and what helps",
    "version": "the `PROTOCOL_VERSION` that the sender speaks",
    "window": "how many positions ahead are kept ready",
}
"""What a field means wherever the docstring of its message says nothing else of it."""
HEAD = f"""# Protocol

*Made by `make docs` from `client/batchd_wire`; do not edit.*

Version {batchd_wire.PROTOCOL_VERSION}. What the daemon and its trainers exchange: messages, error codes, and the layout of
the memory that they share. A number is given once and never reused. Between the daemon and its own processes, which are always
of the same version, see `batchd/worker/messages.py`.

In the tables a *number* is whole and from 0 to `NUMBER_MAX`, a list in parentheses is an array of exactly these, and
*anything* is whatever msgpack carries within the limits of the codec.
"""
_CODE_LINE = re.compile(r"\S+ {2,}\S|\s{4}")
_ABOUT_A_FIELD = re.compile(r"^`\w+`(:| is| are)? ")
_SENTENCE_END = re.compile(r"(?<=[.?]) +(?=[A-Z`(])|(?<=;) +(?=`)")


def protocol_markdown() -> str:
    """The page ``docs/protocol.md``."""
    parts = [HEAD, "## All messages\n", *_overview()]
    for module in wire_modules():
        parts += _module_section(module)
    return wrap_prose("\n".join(parts).rstrip() + "\n")


def wire_modules() -> list[ModuleType]:
    """The modules of the protocol, in the order in which they are read."""
    names = [module.name for module in iter_modules(batchd_wire.__path__) if module.name not in NO_PROTOCOL]
    known = [name for name in READING_ORDER if name in names]
    return [import_module(f"batchd_wire.{name}") for name in known + sorted(set(names) - set(known))]


class Way(NamedTuple):
    """From whom to whom the messages of one vocabulary go, and through what."""

    sender: str
    receiver: str
    socket: str


def way_of(name: str) -> Way:
    """Read a vocabulary's name: ``TO_receiver``, maybe ``FROM_sender``, maybe the socket."""
    words = name.lower().split("_")
    assert words[0] == "to", f"the vocabulary {name} does not say who receives it"
    receiver, more = words[1], words[2:]
    sender = "trainer" if receiver == "daemon" else "daemon"
    if "from" in more:
        sender = more[more.index("from") + 1]
        more = [word for word in more if word not in {"from", sender}]
    socket = " ".join(more) or "ZeroMQ"
    return Way(sender, receiver, socket)


def vocabularies(module: ModuleType) -> dict[str, Vocabulary]:
    """The vocabularies that a module defines, by name."""
    return {name: value for name, value in vars(module).items() if isinstance(value, Vocabulary)}


def messages_of(vocabulary: Vocabulary) -> list[type[Message]]:
    """The messages of a vocabulary, by number."""
    return [kind for _code, kind in sorted(vocabulary.kinds.items())]


def ways_of_messages() -> dict[type[Message], list[Way]]:
    """Every message that is in a vocabulary, with all the ways it may go."""
    found: dict[type[Message], list[Way]] = {}
    for module in wire_modules():
        for name, vocabulary in vocabularies(module).items():
            for kind in messages_of(vocabulary):
                found.setdefault(kind, []).append(way_of(name))
    return found


# --- sections -------------------------------------------------------------------------------------


def _overview() -> Iterator[str]:
    yield "| number | message | from | to | over |"
    yield "|---|---|---|---|---|"
    for kind, ways in sorted(ways_of_messages().items(), key=lambda item: item[0].code):
        for way in ways:
            yield f"| {kind.code} | [`{kind.__name__}`](#{_anchor(kind)}) | {way.sender} | {way.receiver} | {way.socket} |"
    yield ""


def _module_section(module: ModuleType) -> Iterator[str]:
    yield f"## `{module.__name__}`\n"
    yield _markdown(module.__doc__ or "")
    yield from _constants(module)
    for value in vars(module).values():
        if inspect.isclass(value) and value.__module__ == module.__name__ and issubclass(value, Enum):
            yield from _enumeration(value)
    ways = ways_of_messages()
    for kind in _defined_messages(module):
        yield from _message(kind, ways.get(kind, []))


def _defined_messages(module: ModuleType) -> list[type[Message]]:
    kinds = [
        value
        for value in vars(module).values()
        if inspect.isclass(value) and issubclass(value, Message) and value is not Message
    ]
    return sorted((kind for kind in kinds if kind.__module__ == module.__name__), key=lambda kind: kind.code)


def _message(kind: type[Message], ways: list[Way]) -> Iterator[str]:
    prose, meanings = _meanings(kind)
    directions = "; ".join(f"{way.sender} to {way.receiver}, {way.socket}" for way in ways)
    yield f"### {kind.code} `{kind.__name__}`\n"
    yield f"*{directions}.* {prose}\n"
    yield "| field | type | meaning |"
    yield "|---|---|---|"
    hints = get_type_hints(kind)
    for name in kind.field_names:
        yield f"| `{name}` | {_type_words(hints[name])} | {_cell(meanings[name])} |"
    yield ""


def _meanings(kind: type[Message]) -> tuple[str, dict[str, str]]:
    """Divide a docstring into the text on the whole message and that on each field."""
    text = " ".join((inspect.getdoc(kind) or "").replace("``", "`").split())
    first, *others = _SENTENCE_END.split(text)
    prose, meanings = [first], {}
    for sentence in others:
        about = [name for name in kind.field_names if f"`{name}`" in sentence]
        if len(about) == 1 and sentence.startswith(f"`{about[0]}`"):
            meanings[about[0]] = _ABOUT_A_FIELD.sub("", sentence).rstrip(".;")
        else:
            prose.append(sentence)
    said = re.sub(r";$", ".", " ".join(prose))
    for name in set(kind.field_names) - set(meanings):
        meanings[name] = "see above" if f"`{name}`" in said else SAME_EVERYWHERE.get(name, "")
    return said, meanings


def _type_words(hint: Any) -> str:
    """A field's type in the words of the codec."""
    plain = {int: "number", str: "text", bytes: "bytes", bool: "boolean", float: "float", object: "anything"}
    if hint in plain:
        return plain[hint]
    if get_origin(hint) is list:
        return f"array of {_type_words(get_args(hint)[0])}"
    if get_origin(hint) is tuple:
        return f"({', '.join(map(_type_words, get_args(hint)))})"
    if get_origin(hint) is dict:
        return "map from text to anything"
    return " or ".join("nil" if part is type(None) else _type_words(part) for part in get_args(hint))


def _enumeration(kind: type[Enum]) -> Iterator[str]:
    """The members of an enumeration; error codes with what the Python client raises for them."""
    is_codes = kind is ErrorCode
    yield f"### `{kind.__name__}`\n"
    yield _markdown(inspect.getdoc(kind) or "")
    yield "| number | name | the Python client raises |" if is_codes else "| number | name |"
    yield "|---|---|---|" if is_codes else "|---|---|"
    for member in kind:
        raised = f" `{type(error_for_code(member, '')).__name__}` |" if is_codes else ""
        yield f"| {member.value} | `{member.name}` |{raised}"
    yield ""


def _constants(module: ModuleType) -> Iterator[str]:
    """Public constants with their values and the words behind them."""
    tree = ast.parse(inspect.getsource(module)).body
    rows = []
    for statement, following in zip(tree, [*tree[1:], None], strict=True):
        match statement:
            case ast.Assign(targets=[ast.Name(id=name)]) if name.isupper() and not name.startswith("_"):
                value = getattr(module, name)
                if isinstance(value, (int, bytes, str, dict)):
                    rows.append(f"| `{name}` | {_value_words(value)} | {_cell(_words_behind(following))} |")
            case _:
                continue
    if rows:
        yield from ["| constant | value | meaning |", "|---|---|---|", *rows, ""]


def _words_behind(statement: ast.stmt | None) -> str:
    match statement:
        case ast.Expr(value=ast.Constant(value=str(text))):
            return _one_line(text)
        case _:
            return ""


def _value_words(value: object) -> str:
    if isinstance(value, int):
        return str(value)
    if isinstance(value, dict):
        return ", ".join(f"{key}: {item}" for key, item in value.items())
    return f"`{value!r}`"


# --- Markdown -------------------------------------------------------------------------------------


def _markdown(docstring: str) -> str:
    """A docstring as Markdown: drawings and aligned lists stay, the rest becomes paragraphs."""
    parts = []
    for paragraph in inspect.cleandoc(docstring).split("\n\n"):
        if any(_CODE_LINE.match(line) for line in paragraph.split("\n")):
            parts.append(f"```text\n{paragraph}\n```")
        else:
            parts.append(paragraph.replace("``", "`"))
    return "\n\n".join(parts) + "\n"


def _one_line(text: str) -> str:
    return " ".join(text.replace("``", "`").split())


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _anchor(kind: type[Message]) -> str:
    """What Markdown makes of the title of a message."""
    return f"{kind.code}-{kind.__name__.lower()}"


if __name__ == "__main__":
    sys.stdout.write(protocol_markdown())
