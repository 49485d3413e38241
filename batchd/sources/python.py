"""Somebody's own object with ``__len__`` and ``__getitem__`` as a source. Daemon and workers.

    daemon   asks a helper process for the length, once; imports nothing
    worker   makes an object of its own before the first sample, and asks it for samples by number

Invariant: the daemon's index holds a length, and a digest of what is known of the object: its source file, options and length,
and the text that people change with their data.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from operator import getitem
from tempfile import TemporaryFile
from typing import IO, Any

from batchd.config.code_sources import PythonSource
from batchd.config.function import parse_function
from batchd.config.values import Value
from batchd.errors import SourceInvalid
from batchd.functions.find import ModuleNotFound, find_module
from batchd.functions.load import FunctionUnusable, load_for
from batchd.functions.signature import Given
from batchd.functions.told import FunctionFailed, call
from batchd.samples.errors import SampleUnreadable
from batchd.sources.declared import columns_of, named, values_of
from batchd.sources.kinds import BuiltInKind
from batchd.storage.index import SourceIndex
from batchd.storage.survey import Survey

STDERR_BYTES_MAX = 4096
"""How much of what a helper said last is shown."""
ANSWER_BYTES_MAX = 4096
LENGTH_MAX = 1 << 62


class PythonReader:
    """Samples of an object that was made in this process."""

    def __init__(self, source: PythonSource, max_bytes: int) -> None:
        self._function = source.function
        self._columns = columns_of(source.fields)
        self._max_bytes = max_bytes
        try:
            self._object = make_object(source.function, source.options)
        except FunctionFailed as error:
            raise FunctionUnusable(f"calling {source.function} in a worker: {error}") from None
        if not hasattr(type(self._object), "__getitem__"):
            raise FunctionUnusable(f"what {source.function} returns in a worker has no __getitem__")

    def read(self, sample: int) -> Mapping[str, Value]:
        """See ``kinds.Reader``."""
        try:
            given = call(getitem, self._object, sample)
        except FunctionFailed as error:
            raise SampleUnreadable(str(error)) from None
        return values_of(self._columns, named(self._columns, given), self._max_bytes)

    def known(self, _sample: int) -> Mapping[str, Value]:
        """Nothing is known without asking."""
        return {}

    def name(self, sample: int) -> str:
        """As it would be written in Python."""
        return f"{self._function}[{sample}]"

    def close(self) -> None:
        """The object goes with the process."""


def make_object(function: str, options: Mapping[str, Any]) -> Any:
    """Import the function and call it. Raises ``FunctionUnusable`` or ``FunctionFailed``."""
    return call(load_for(function, Given(options=options)), **options)


def _scan(source: PythonSource, survey: Survey) -> SourceIndex:
    """Have a helper ask for the length. Raises ``SourceInvalid`` with its last words where it fails."""
    module = parse_function(source.function).module
    try:
        digest = find_module(module, survey.python_path).digest
    except ModuleNotFound as error:
        raise SourceInvalid(str(error)) from None
    asked = {
        "function": source.function,
        "options": source.options,
        "python_path": list(map(str, survey.python_path)),
        "code": {module: digest},
    }
    length = _ask(source, json.dumps(asked).encode())
    survey.progress(length)
    facts = {
        "function": source.function,
        "code": digest,
        "options": source.options,
        "fields": list(source.fields.items()),
        "digest": source.digest,
    }
    return SourceIndex.build(length, facts, {}, {})


def _ask(source: PythonSource, question: bytes) -> int:
    """The length of the object, from a process that makes it."""
    with TemporaryFile() as asked, TemporaryFile() as said:
        asked.write(question)
        asked.seek(0)
        ours, theirs = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            problem = _run(theirs, asked, said, source.length_timeout_s)
            answer = _answer(ours)
        finally:
            os.close(ours)
            os.close(theirs)
        if problem is None and isinstance(answer, int) and 0 < answer <= LENGTH_MAX:
            return answer
        if problem is None:
            raise SourceInvalid(f"{source.function} gives an object with {answer} samples")
        said.seek(max(0, said.seek(0, os.SEEK_END) - STDERR_BYTES_MAX))
        words = said.read().decode("utf-8", "replace").strip()
    raise SourceInvalid(f"asking {source.function} for its length: {problem}" + (f":\n{words}" if words else ""))


def _run(result: int, asked: IO[bytes], said: IO[bytes], timeout_s: float) -> str | None:
    """Run the helper to its end; what went wrong, where something did. Nothing of its group stays."""
    popen = subprocess.Popen(
        [sys.executable, "-P", "-m", "batchd.worker.length", str(result)],
        pass_fds=(result,),
        stdin=asked,
        stdout=said,
        stderr=said,
        process_group=0,
    )
    try:
        status = popen.wait(timeout_s)
    except subprocess.TimeoutExpired:
        return f"it took longer than length_timeout_s = {timeout_s:g}"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(popen.pid, signal.SIGKILL)
        popen.wait()
    if status == 0:
        return None
    return (
        f"its process ended with exit status {status}" if status > 0 else f"its process was ended by signal {-status}"
    )


def _answer(descriptor: int) -> object:
    try:
        return json.loads(os.read(descriptor, ANSWER_BYTES_MAX))["length"]
    except (BlockingIOError, ValueError, LookupError, TypeError):
        return None


KIND = BuiltInKind(
    problems=lambda _source, _storage: [],
    columns=lambda source, _storage: columns_of(source.fields),
    scan=_scan,
    open=lambda source, _index, max_bytes, _storage: PythonReader(source, max_bytes),
)
