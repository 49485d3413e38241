"""The log: its form, and lines that neither foreign text nor a full pipe can damage.

    text       on a terminal: time, level, event, facts, in colours
    journal    if standard error is the journal's: <priority>event: facts
    json       otherwise: one object on each line

Levels by audience: DEBUG the developer, INFO one line for each event in the life of the daemon,
WARNING the daemon healed itself, ERROR an operator must act. ``log_events`` has every event.

The other end of standard error may be full, slow or closed:

    room      write
    no room   (a sleeping reader) wait once for a moment; then drop lines until there is room
    error     (no space on the disk, no reader) drop the line

Invariant: one event is one line. Control characters and line ends of foreign text are escaped, so
neither a terminal nor the journal obeys them.
Invariant: logging never blocks for long and never raises. Dropped lines are counted, and the next
line that is written says how many; a line that was cut is ended before the next begins.
"""

import logging
import os
import select
import stat
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import structlog
from structlog.typing import EventDict, Processor

from batchd.cli.text import escaped
from batchd.runtime.children import fill_standard_streams

if TYPE_CHECKING:  # the daemon of a script imports no click
    from batchd.cli.options import LogFormat

_log = structlog.get_logger()

Keep: TypeAlias = Callable[[str, str, str, str], None]
"""Called with level, event, its stream or "", and the event with its facts as text."""

JOURNAL_VARIABLE = "JOURNAL_STREAM"
JOURNAL_COMMAND = "journalctl -u"
PRIORITIES = {"debug": 7, "info": 6, "warning": 4, "error": 3, "critical": 2}
"""Of syslog(3); systemd reads them from the start of a line (SyslogLevelPrefix=)."""
VALUE_CHARACTERS_MAX = 4_000
PORTION_BYTES = select.PIPE_BUF
"""A pipe that has any room has room for so much."""
PATIENCE_MS = 100
STANDARD_OUTPUT, STANDARD_ERROR = 1, 2


class LogLines:
    """A logger for structlog: each method writes one line to ``descriptor``."""

    def __init__(self, descriptor: int) -> None:
        self.lost = 0
        self._descriptor = descriptor
        self._poll = select.poll()
        self._poll.register(descriptor, select.POLLOUT)
        self._is_cut = False
        self._is_stuck = False

    def write(self, line: str) -> None:
        """Write a line, or count it as dropped."""
        data = line.encode("utf-8", "backslashreplace") + b"\n"
        if self._is_cut:
            data = b"\n" + data
        before = len(data)
        try:
            while data and self._has_room():
                data = data[os.write(self._descriptor, data[:PORTION_BYTES]) :]
        except OSError:
            self._is_stuck = False  # the error came at once, so try the next line, too
        if data:
            self.lost += 1
            self._is_cut = self._is_cut or len(data) < before
        else:
            self._is_cut = self._is_stuck = False
            self.lost = 0

    msg = debug = info = warning = error = critical = write

    def _has_room(self) -> bool:
        ready = bool(self._poll.poll(0 if self._is_stuck else PATIENCE_MS))
        self._is_stuck = not ready
        return ready

    def mention_lost(self, _logger: object, _method: str, event: EventDict) -> EventDict:
        """A processor: add the number of dropped lines to the event."""
        return {**event, "lost_lines": self.lost} if self.lost else event


def print_line(line: str) -> None:
    """Print a line of a process that serves, which goes on if the line cannot be written."""
    LogLines(STANDARD_OUTPUT).write(line)


def set_up_logs(level: str, log_format: "LogFormat" = "auto", keep: Keep | None = None) -> None:
    """Write events of ``level`` (a name of ``logging``) or above to standard error and ``keep``."""
    fill_standard_streams()
    lines = LogLines(STANDARD_ERROR)
    structlog.configure(
        processors=[structlog.processors.add_log_level, lines.mention_lost, _cut, *_kept(keep), *_form(log_format)],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=lambda *_names: lines,
        cache_logger_on_first_use=True,
    )


def is_journal(descriptor: int, environment: Mapping[str, str]) -> bool:
    """True if the descriptor is the journal's: its variable names device and inode."""
    status = os.fstat(descriptor)
    return environment.get(JOURNAL_VARIABLE) == f"{status.st_dev}:{status.st_ino}"


def log_unknown_variables() -> None:
    """Warn of variables that look like batchd's, and that nothing reads."""
    from batchd.config.environment import unknown_variables  # noqa: PLC0415  most commands have no use for pydantic

    for variable, advice in unknown_variables(os.environ).items():
        _log.warning("unknown variable", variable=variable, advice=advice)


def log_place() -> str:
    """Where the log is, for people: the journal of a unit, a file, a terminal or a pipe."""
    if is_journal(STANDARD_ERROR, os.environ):
        unit = unit_of(Path("/proc/self/cgroup"))
        return f"the journal ({JOURNAL_COMMAND} {unit})" if unit else "the journal"
    if os.isatty(STANDARD_ERROR):
        return "the daemon's terminal"
    with suppress(OSError):
        place = Path(f"/proc/self/fd/{STANDARD_ERROR}").readlink()
        if stat.S_ISREG(os.fstat(STANDARD_ERROR).st_mode):
            return str(place)
    return "standard error of the daemon"


def unit_of(control_groups: Path) -> str:
    """The service of systemd that a file of control groups in /proc names; "" if it is none."""
    with suppress(OSError):
        last = control_groups.read_text().strip().rpartition("/")[2]
        return last if last.endswith(".service") else ""
    return ""


def _kept(keep: Keep | None) -> list[Processor]:
    """A processor that keeps each line, as text."""

    def pass_on(_logger: object, method: str, event: EventDict) -> EventDict:
        if keep is not None:
            keep(method, str(event["event"]), str(event.get("stream", "")), _line(event))
        return event

    return [pass_on] if keep is not None else []


def _form(log_format: "LogFormat") -> list[Processor]:
    """The last processors, which make a line of an event."""
    is_terminal, to_journal = os.isatty(STANDARD_ERROR), is_journal(STANDARD_ERROR, os.environ)
    is_json = log_format == "json" or (log_format == "auto" and not is_terminal and not to_journal)
    if to_journal:
        return [_json_with_priority if is_json else _text_with_priority]
    if is_json:
        return [structlog.processors.TimeStamper(fmt="iso", utc=True), _render_json]
    stamp = structlog.processors.TimeStamper(fmt="%H:%M:%S", utc=False)
    return [stamp, _text_in_colors if is_terminal else _text]


def _cut(_logger: object, _method: str, event: EventDict) -> EventDict:
    """A processor: shorten long values."""
    for name, value in event.items():
        if isinstance(value, str) and (more := len(value) - VALUE_CHARACTERS_MAX) > 0:
            event[name] = f"{value[:VALUE_CHARACTERS_MAX]}... ({more} characters more)"
    return event


def _text_with_priority(_logger: object, method: str, event: EventDict) -> str:
    return f"<{PRIORITIES[method]}>{_line(event)}"


def _text(_logger: object, method: str, event: EventDict) -> str:
    return f"{event['timestamp']} {method:<7} {_line(event)}"


def _text_in_colors(_logger: object, method: str, event: EventDict) -> str:
    color = _COLORS[method]
    return f"{_DIM}{event['timestamp']}{_PLAIN} {color}{method:<7}{_PLAIN} {_line(event, _BOLD, _DIM, _PLAIN)}"


def _line(event: EventDict, bold: str = "", dim: str = "", plain: str = "") -> str:
    """The event and its facts as ``key=value``."""
    facts = [f"{dim}{name}={plain}{_value(fact)}" for name, fact in event.items() if name not in _NO_FACTS]
    what = f"{bold}{escaped(str(event['event']))}{plain}"
    return f"{what}: {' '.join(facts)}" if facts else what


def _value(fact: object) -> str:
    text = escaped(str(fact))
    if text and not set(' "=') & set(text):
        return text
    return '"' + text.replace('"', '\\"') + '"'


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


def _json_with_priority(logger: object, method: str, event: EventDict) -> str:
    return f"<{PRIORITIES[method]}>{_render_json(logger, method, event)!s}"
