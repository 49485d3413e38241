"""The manual of the log has the events that the server logs, each at its level, and no other."""

import ast
from pathlib import Path

import pytest

from batchd.cli.log_events import EVENTS

ROOT = Path(__file__).parents[3]
LEVELS = ("debug", "info", "warning", "error", "critical", "exception")

LOG_CALLS = ("write",)
"""Names of a choice between two levels; the higher level counts."""


def events_of(tree):
    """Return each call in a module that logs an event, with its level."""
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    passing_on = {}
    for function in functions:
        for call, level in chosen(function):
            if is_parameter(call.args[0], function):
                passing_on[function.name] = level
            else:
                yield call, level
    logged = {call: call.func.attr for call in ast.walk(tree) if logs(call)}
    for function in functions:
        for call in [one for one in ast.walk(function) if one in logged and is_parameter(one.args[0], function)]:
            passing_on[function.name] = logged.pop(call)
    yield from logged.items()
    for call in ast.walk(tree):
        name = getattr(call.func, "attr", getattr(call.func, "id", "")) if isinstance(call, ast.Call) else ""
        if name in passing_on:
            yield call, passing_on[name]


def chosen(function):
    """Return the events logged at one of two levels: limited events and sometimes expected ones."""
    level = None
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") in LOG_CALLS:
            level = max(node.value.body.attr, node.value.orelse.attr, key=LEVELS.index)
    for call in ast.walk(function):
        if isinstance(call, ast.Call) and getattr(call.func, "id", "") in LOG_CALLS:
            yield call, level


def logs(node):
    """Return whether this is a call of the module's logger, or of one that an object was given."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return False
    logger = getattr(node.func.value, "id", getattr(node.func.value, "attr", ""))
    return node.func.attr in LEVELS and logger == "_log"


def is_parameter(node, function):
    """Return whether the event is a parameter of the function."""
    return isinstance(node, ast.Name) and node.id in {one.arg for one in function.args.args}


def events_in_the_code():
    """Return the events of all server modules that log."""
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


def test_every_event_has_its_entry_at_its_level_and_no_other():
    """Each event is explained once, so an operator can look up any line of the log."""
    entries = [(name, event.level) for events in EVENTS.values() for name, event in events.items()]

    assert len(entries) == len(set(entries))
    assert set(entries) == events_in_the_code()


def test_each_warning_and_error_says_what_to_do():
    """A line that needs the operator's attention says what helps."""
    for events in EVENTS.values():
        for name, event in events.items():
            assert event.remedy or event.level not in ("warning", "error"), name


@pytest.mark.thorough
def test_an_event_has_one_level():
    """A filter by level must not hide a part of an event."""
    names = [event for event, _level in events_in_the_code()]

    assert len(names) == len(set(names))


def test_the_reading_of_the_code_finds_an_event_that_is_limited():
    """Limited, plain and passed-on events are found; the module sees only names in the code."""
    module = ast.parse(
        "def f():\n    write = _log.warning if allowed else _log.debug\n    write('limited')\n    _log.error('plain')\n"
        "def g():\n    write = _log.info if expected else _log.warning\n    write('expected now and then')\n    h('passed on')\n"
        "def h(event):\n    _log.warning(event)\n    self.h('passed on by a method')\n"
    )

    assert {(call.args[0].value, level) for call, level in events_of(module)} == {
        ("limited", "warning"),
        ("plain", "error"),
        ("expected now and then", "warning"),
        ("passed on", "warning"),
        ("passed on by a method", "warning"),
    }
