"""Writes down every time this interpreter makes code or objects from data.

Imported by itself where it is in ``PYTHONPATH``.

Left out is the ``__init__`` that ``batchd_wire.record`` compiles, from the names of the fields of
one of batchd's classes, when the first value of that class is made.

One line for each event in the file that ``BATCHD_TEST_AUDIT`` names: the process, the event, and
the innermost frames. A line is one write to a file opened for appending, so processes may share it.
"""

import os
import sys

EVENTS = frozenset(
    {
        "pickle.find_class",
        "marshal.loads",
        "marshal.load",
        "exec",
        "compile",
        "code.__new__",
        "function.__new__",
        "os.system",
    }
)
"""Unpickling that could call something.

Byte-code and its use; ``eval``, ``exec`` and ``compile``; a shell.
"""
FRAMES = 4

_file = os.open(os.environ["BATCHD_TEST_AUDIT"], os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)


def _record(event: str, _arguments: tuple[object, ...]) -> None:
    if event in EVENTS and not _is_of_record():
        os.write(_file, f"{os.getpid()} {event} {' < '.join(_frames())}\n".encode())


def _is_of_record() -> bool:
    frame = sys._getframe(1).f_back
    while frame is not None:
        code = frame.f_code
        if code.co_name == "compile_init" and code.co_filename.endswith("/batchd_wire/record.py"):
            return True
        frame = frame.f_back
    return False


def _frames() -> list[str]:
    """Where it happens, the innermost first."""
    found = []
    frame = sys._getframe(1).f_back  # none where the interpreter itself has it done
    while frame is not None and len(found) < FRAMES:
        found.append(f"{frame.f_code.co_filename}:{frame.f_lineno}")
        frame = frame.f_back
    return found


sys.addaudithook(_record)
