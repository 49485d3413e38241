"""How the log looks, and that nobody's words can forge it. Set once, at the start of a process.

    text       on a terminal: time, level, event, facts, in colours
    journal    where standard error is the journal's: <priority>event: facts; the journal has time and process itself
    json       otherwise: one object on each line

Levels by audience: DEBUG the developer, INFO one line for each event in the life of the daemon,
WARNING it healed itself, ERROR somebody must act. docs/logs.md has every event.

Invariant: one event is one line. What peers and files bring is shown without anything that a
terminal or the journal would obey: control characters, escapes and line ends are written as such.
"""

import logging
import os
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any, Literal

import structlog

from batchd.cli.log_lines import LogLines, standard_error

LogFormat = Literal["auto", "text", "json"]
Event = MutableMapping[str, Any]

JOURNAL_VARIABLE = "JOURNAL_STREAM"
PRIORITIES = {"debug": 7, "info": 6, "warning": 4, "error": 3, "critical": 2}
"""Of syslog(3), which systemd reads from the beginning of a line (SyslogLevelPrefix=, on by default)."""
VALUE_CHARACTERS_MAX = 4_000


def set_up_logs(level: str, log_format: LogFormat = "auto") -> None:
    """Write what is at least ``level`` (a name of ``logging``) to standard error."""
    descriptor = standard_error()
    lines = LogLines(descriptor)
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            lines.mention_lost,
            _cut,
            *_form(log_format, is_terminal=os.isatty(descriptor), is_journal=is_journal(descriptor, os.environ)),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=lambda *_names: lines,
        cache_logger_on_first_use=True,
    )


def is_journal(descriptor: int, environment: Mapping[str, str]) -> bool:
    """Is this descriptor the one that systemd connected to the journal? Its variable names device and inode."""
    status = os.fstat(descriptor)
    return environment.get(JOURNAL_VARIABLE) == f"{status.st_dev}:{status.st_ino}"


def _form(log_format: LogFormat, *, is_terminal: bool, is_journal: bool) -> list[Callable[..., Any]]:
    """The last processors: what makes a line of an event."""
    is_json = log_format == "json" or (log_format == "auto" and not is_terminal and not is_journal)
    if is_journal:
        return [_json_with_priority if is_json else _text_with_priority]
    if is_json:
        return [structlog.processors.TimeStamper(fmt="iso", utc=True), structlog.processors.JSONRenderer()]
    stamp = structlog.processors.TimeStamper(fmt="%H:%M:%S", utc=False)
    return [stamp, _text_in_colors if is_terminal else _text]


def _cut(_logger: object, _method: str, event: Event) -> Event:
    """No value is longer than anybody reads."""
    return {name: _shortened(value) if isinstance(value, str) else value for name, value in event.items()}


def _shortened(text: str) -> str:
    more = len(text) - VALUE_CHARACTERS_MAX
    return f"{text[:VALUE_CHARACTERS_MAX]}... ({more} characters more)" if more > 0 else text


def escaped(text: str) -> str:
    r"""The text with everything that is no visible character written out, as \n and \x1b."""
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else _written_out(one) for one in text)


def _written_out(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")


def _text_with_priority(_logger: object, method: str, event: Event) -> str:
    """One line for the journal."""
    return f"<{PRIORITIES[method]}>{_told(event)}"


def _text(_logger: object, method: str, event: Event) -> str:
    """One line for a file that people read."""
    return f"{event['timestamp']} {method:<7} {_told(event)}"


def _text_in_colors(_logger: object, method: str, event: Event) -> str:
    """One line for a terminal."""
    color = _COLORS[method]
    return f"{_DIM}{event['timestamp']}{_PLAIN} {color}{method:<7}{_PLAIN} {_told(event, _BOLD, _DIM, _PLAIN)}"


def _told(event: Event, bold: str = "", dim: str = "", plain: str = "") -> str:
    """The event, and what belongs to it as ``key=value``."""
    facts = [f"{dim}{name}={plain}{_value(fact)}" for name, fact in event.items() if name not in _NO_FACTS]
    what = f"{bold}{escaped(str(event['event']))}{plain}"
    return f"{what}: {' '.join(facts)}" if facts else what


def _value(fact: object) -> str:
    text = escaped(str(fact))
    if text and not set(' "=') & set(text):
        return text
    inner = text.replace('"', '\\"')
    return f'"{inner}"'


_NO_FACTS = {"event", "level", "timestamp"}
_BOLD, _DIM, _PLAIN = "\x1b[1m", "\x1b[2m", "\x1b[0m"
_COLORS = {
    "debug": _DIM,
    "info": "\x1b[32m",
    "warning": "\x1b[33m",
    "error": "\x1b[1;31m",
    "critical": "\x1b[1;31m",
}
_render_json = structlog.processors.JSONRenderer()


def _json_with_priority(logger: object, method: str, event: Event) -> str:
    return f"<{PRIORITIES[method]}>{_render_json(logger, method, event)!s}"
