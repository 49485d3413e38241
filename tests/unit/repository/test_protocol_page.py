"""docs/protocol.md describes the messages of the code, all of them and no others."""

import inspect
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

from batchd_wire import PROTOCOL_VERSION, messages
from batchd_wire.codec import ITEMS_MAX, Message, Vocabulary, message
from batchd_wire.codes import ErrorCode

DOCS = Path(__file__).parents[3] / "docs"
KINDS = [
    kind
    for _name, kind in inspect.getmembers(messages, inspect.isclass)
    if issubclass(kind, Message) and kind is not Message
]


@pytest.fixture(scope="module")
def maker():
    """Import the script that writes the page."""
    spec = spec_from_file_location("make_protocol", DOCS / "make_protocol.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def page(maker):
    """Generate the page."""
    return maker.protocol_markdown()


def section(page, title):
    """Return the part of the page under a title, up to the next title."""
    _, found, rest = page.partition(f"\n{title}\n")
    assert found, f"there is no section {title!r}"
    return rest.partition("\n#")[0]


def test_the_page_is_up_to_date(page):
    """The page in the repository equals the output of the script."""
    assert (DOCS / "protocol.md").read_text() == page, "docs/protocol.md is not what the code says; run `make docs`"


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_message_has_its_number_its_way_and_each_field_with_a_meaning(page, kind):
    """This covers messages that are added later.

    The test fails for a field without a meaning, so that no reader has to ask for it.
    """
    text = section(page, f"### {kind.code} `{kind.__name__}`")

    assert text.lstrip().startswith("*"), "the message has no receiver"
    for name in kind.field_names:
        (row,) = [line for line in text.splitlines() if line.startswith(f"| `{name}` |")]
        meaning = row.split("|")[3].strip()
        assert meaning, f"say what {kind.__name__}.{name} means in the docstring of {kind.__name__}"


@pytest.mark.parametrize("code", ErrorCode, ids=lambda code: code.name)
def test_every_error_code_has_its_number(page, code):
    """The table names the Python exception of each code."""
    assert f"| {code.value} | `{code.name}` | `" in section(page, "### `ErrorCode`")


def test_the_drawings_and_the_limits_are_there(page):
    """The page has the slot's header, a session and the limits of the codec, as in the modules."""
    assert "| magic BATCHD01 | generation    | slot id        | epoch          |" in section(
        page, "## `batchd_wire.slot`"
    )
    assert "SlotShared + file descriptor" in section(page, "## `batchd_wire.messages`")
    assert f"| `ITEMS_MAX` | {ITEMS_MAX} |" in section(page, "## `batchd_wire.codec`")
    assert f"Version {PROTOCOL_VERSION}." in page


@pytest.mark.parametrize(
    ("name", "way"),
    [
        ("TO_DAEMON_LIFELINE", ("trainer", "daemon", "lifeline")),
        ("TO_TRAINER", ("daemon", "trainer", "ZeroMQ")),
        ("TO_TRAINER_REMOTE", ("daemon", "trainer", "remote")),
    ],
)
def test_the_way_of_a_message_is_read_from_its_vocabulary(maker, name, way):
    """The vocabulary names sender, receiver and socket."""
    assert maker.way_of(name) == way


def test_a_message_that_is_added_comes_onto_the_page(maker, monkeypatch):
    """A message in any vocabulary appears on the page."""

    @message(99)
    class Whisper(Message):
        """Said quietly. ``loudness`` is in decibels."""

        loudness: int | None
        echoes: list[tuple[str, bytes]]

    Whisper.__module__ = messages.__name__
    monkeypatch.setattr(messages, "Whisper", Whisper, raising=False)
    monkeypatch.setattr(messages, "TO_TRAINER_REMOTE", Vocabulary(Whisper), raising=False)

    text = maker.protocol_markdown()

    assert "| 99 | [`Whisper`](#99-whisper) | daemon | trainer | remote |" in text
    assert "*daemon to trainer, remote.* Said quietly." in text
    assert "| `loudness` | number or nil | in decibels |" in text
    assert "| `echoes` | array of (text, bytes) |" in text
