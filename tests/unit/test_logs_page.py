"""docs/logs.md has every event that the daemon logs, at its level, and no other."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "logs.md"
LEVELS = ("debug", "info", "warning", "error", "critical", "exception")
ROW = re.compile(r"^\| `([^`]+)` \| (\w+) \| (.+?) \|(.*)\|$")


def events_of(tree):
    """Each event of a module with its level. One that is rationed is logged by ``speak``, at the level of its assignment."""
    spoken = None
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            for assigned in ast.walk(node):
                if isinstance(assigned, ast.Assign) and getattr(assigned.targets[0], "id", "") == "speak":
                    spoken = assigned.value.body.attr
            for call in ast.walk(node):
                if isinstance(call, ast.Call) and getattr(call.func, "id", "") == "speak":
                    yield call, spoken
            spoken = None
    for call in ast.walk(tree):
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
            continue
        if call.func.attr in LEVELS and getattr(call.func.value, "id", "") == "_log":
            yield call, call.func.attr


def events_in_the_code():
    """All events of all modules of the server that log."""
    found = set()
    for file in (ROOT / "batchd").rglob("*.py"):
        text = file.read_text()
        if "structlog.get_logger()" not in text:
            continue
        for call, level in events_of(ast.parse(text)):
            event = call.args[0]
            assert isinstance(event, ast.Constant), f"{file}:{call.lineno}: the event is no plain text"
            found.add((event.value, level))
    return found


def events_on_the_page():
    """The rows of the tables."""
    rows = [match for line in PAGE.read_text().splitlines() if (match := ROW.match(line)) and match[2] in LEVELS]
    return [(match[1], match[2]) for match in rows]


def test_every_event_is_on_the_page_at_its_level_and_no_other():
    """Once: an operator who finds a line in the log finds what it means."""
    page = events_on_the_page()

    assert len(page) == len(set(page))
    assert set(page) == events_in_the_code()


def test_each_warning_and_error_says_what_to_do():
    """A line that asks for somebody's attention tells what helps."""
    for line in PAGE.read_text().splitlines():
        match = ROW.match(line)
        if match and match[2] in ("warning", "error"):
            assert match[4].strip(), match[1]


def test_an_event_has_one_level():
    """Whoever filters by level must not get half of an event."""
    names = [event for event, _level in events_in_the_code()]

    assert len(names) == len(set(names))


def test_the_reading_of_the_code_finds_an_event_that_is_rationed():
    """As well as a plain one: what this module does not see, it cannot ask for."""
    module = ast.parse(
        "def f():\n    speak = _log.warning if allowed else _log.debug\n    speak('rationed')\n    _log.error('plain')\n"
    )

    assert {(call.args[0].value, level) for call, level in events_of(module)} == {
        ("rationed", "warning"),
        ("plain", "error"),
    }
