"""The one writer of what commands print. Runs in the user's shell.

    say, draw          standard output, for people
    note, warn         standard error, for people
    emit, emit_json    standard output, for programs and files: as it is
    progress, show_progress    what vanishes again, on a terminal alone

Text for people is wrapped between words on a terminal, and paths below the current folder begin
there; elsewhere a line is a line. What an encoding lacks falls back to ASCII.

Invariant: no other module of ``batchd.cli`` writes to standard output or standard error, but
``log_lines``, which writes the log.
Invariant: what goes to standard error never ends a command, even if no one reads it.
"""

import codecs
import json
import os
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from batchd.cli.text import escaped, width_of, without_styles, wrapped
from batchd.errors import BatchdError, ExitCode, scarcity

if TYPE_CHECKING:  # a daemon has no use for rich
    from rich.console import Console, RenderableType
    from rich.progress import Progress, ProgressColumn

PIPED_COLUMNS = 200
"""Width without a terminal, where names are not cut."""
USUAL_COLUMNS = 80
FALLBACK = "batchd.terminal"
"""The name of the error handler of encodings."""
_IN_ASCII = str.maketrans("█▓▒░·▏▎▍▌▋▊▉━╸╺…—«»", "#=-..     ##---~-[]") | {ord("→"): "->"}
"""Bars, and the marks of texts; other characters are escaped."""


def accept_any_text() -> None:
    """Let standard output and standard error write what their encoding lacks, in ASCII."""
    codecs.register_error(FALLBACK, _in_ascii)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            with suppress(OSError):  # it cannot be written at all
                stream.reconfigure(errors=FALLBACK)


def _in_ascii(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError), "streams for output only"
    text = error.object[error.start : error.end].translate(_IN_ASCII)
    return text.encode("ascii", "backslashreplace").decode("ascii"), error.end


@contextmanager
def guarded_output() -> Iterator[None]:
    """Write all of the output, and make a sentence of what keeps a command from writing.

    Raises ``BatchdError``. A reader that is gone, such as `head`, ends a command in silence.
    """
    if sys.stdout is None:  # it was closed
        sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115  it lasts as long as the process
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except OSError as error:
        is_output = _is_stuck()
        if isinstance(error, BrokenPipeError) and is_output:
            sys.exit(ExitCode.FAILED)
        text = scarcity(error)
        if text is None:
            raise
        raise BatchdError(f"standard output cannot be written: {text}" if is_output else text) from None


def _is_stuck() -> bool:
    """Whether standard output takes nothing.

    What it has not taken is dropped, not tried at exit.
    """
    try:
        sys.stdout.write("\n")  # where nothing is buffered, only another write tells
        sys.stdout.flush()
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
        return True
    return False


def is_terminal(stream: TextIO | None) -> bool:
    """True for a stream that people look at; None if it was closed."""
    return stream is not None and stream.isatty()


def columns(stream: TextIO | None = None) -> int:
    """Width of a stream's terminal, by default standard output's; elsewhere there is no limit."""
    stream = sys.stdout if stream is None else stream
    if not is_terminal(stream):
        return sys.maxsize
    given = os.environ.get("COLUMNS", "")
    if given.isdigit() and int(given):
        return int(given)
    with suppress(OSError, ValueError):  # it is no terminal of the kernel's
        return os.get_terminal_size(stream.fileno()).columns or USUAL_COLUMNS
    return USUAL_COLUMNS


# --- for people -----------------------------------------------------------------------------------


def say(*lines: str) -> None:
    """Print what a command found. Of an indented line, each part is indented."""
    if lines:
        _write(sys.stdout, _fitting("\n".join(lines), sys.stdout))


def note(*lines: str) -> None:
    """Print on standard error what a command does meanwhile, or what it says besides."""
    if lines:
        with suppress(OSError):
            _write(sys.stderr, _fitting("\n".join(lines), sys.stderr))


def warn(text: str) -> None:
    """Print a warning, or an error, on standard error."""
    note(f"\x1b[1;31mbatchd:\x1b[0m {text}")


def draw(parts: "Iterable[RenderableType]", on: "Console | None" = None) -> None:
    """Print tables, and lines of text in colours, one below the other."""
    from rich.text import Text  # noqa: PLC0415  commands that draw

    console = console_of() if on is None else on
    for part in parts:
        if not isinstance(part, Text | str):
            console.print(part)
            continue
        text = Text(part) if isinstance(part, str) else part
        if console.is_terminal and not text.spans:
            text = Text("\n".join(_lines(near(text.plain), console.width)), text.style)
        console.print(text, soft_wrap=True)


def console_of(*, errors: bool = False) -> "Console":
    """Standard output, or standard error, as rich draws on it: wide where there is no terminal."""
    from rich.console import Console  # noqa: PLC0415  as above

    stream = sys.stderr if errors else sys.stdout
    width = None if is_terminal(stream) else PIPED_COLUMNS
    return Console(file=stream, markup=False, highlight=False, emoji=False, width=width)


def near(text: str) -> str:
    """The text with each path below the current folder as seen from there."""
    with suppress(OSError):  # the folder is gone
        return _below_here(str(Path.cwd())).sub("", text)
    return text


@cache
def _below_here(folder: str) -> re.Pattern[str]:
    """Match the beginning of a path below ``folder``; nothing in the root, as all is below it."""
    return re.compile(rf"(?<![\w.~/-]){re.escape(folder)}/(?=[^\s/`'\"])" if folder != "/" else r"(?!)")


_BEGINNING = re.compile(r"((?:\x1b\[[0-9;]*m)*)( *)")
"""Styles and blanks at the beginning of a line."""
_OBEYED = re.compile(r"\x1b\[[0-9;]*m|[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
"""Styles, and characters that a terminal obeys."""


def _fitting(text: str, stream: TextIO | None) -> str:
    """The text as ``stream`` can show it. No character of it moves a cursor, whoever wrote it."""
    text = _OBEYED.sub(lambda found: found[0] if found[0].endswith("m") else escaped(found[0]), text)
    if not is_terminal(stream):
        return without_styles(text)
    text = "\n".join(_lines(near(text), columns(stream)))
    return without_styles(text) if os.environ.get("NO_COLOR") else text


def _lines(text: str, width: int) -> Iterable[str]:
    for line in text.split("\n"):
        if width_of(line) <= width:
            yield line
        else:
            beginning = _BEGINNING.match(line)
            assert beginning is not None, "it may be empty"
            style, blank = beginning.groups()
            yield from wrapped(line[beginning.end() :], width, style + blank, blank)


def can_ask() -> bool:
    """True if someone sees a question, and can answer it."""
    return is_terminal(sys.stdin) and is_terminal(sys.stdout)


def confirm(question: str) -> bool:
    """Ask for y or n; n is the default."""
    from click import confirm as ask  # noqa: PLC0415  a daemon asks nothing

    say("")
    return ask(near(question))


# --- for programs and files -----------------------------------------------------------------------


def emit(text: str) -> None:
    """Print text for a file or a program, as it is; its last line is ended."""
    _write(sys.stdout, text.removesuffix("\n"))


def emit_json(value: object) -> None:
    """Print an object or a list of JSON."""
    emit(json.dumps(value, indent=2))


# --- what vanishes --------------------------------------------------------------------------------


def progress(*columns: "str | ProgressColumn") -> "Progress":
    """Bars on standard error, if it is a terminal."""
    from rich.progress import Progress  # noqa: PLC0415  commands that take long

    console = console_of(errors=True)
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def show_progress(text: str) -> None:
    """Show a line on a terminal, over the one before; "" removes it."""
    if is_terminal(sys.stderr):
        with suppress(OSError):
            sys.stderr.write(f"\r{text}\x1b[K\r")
            sys.stderr.flush()


def _write(stream: TextIO | None, text: str) -> None:
    if stream is not None:
        stream.write(f"{text}\n")
        stream.flush()
