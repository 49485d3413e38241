"""Somebody's own object with ``__len__`` and ``__getitem__`` as a source. Daemon and workers.

    daemon   asks a helper process for the length, once; imports nothing
    worker   makes an object of its own before the first sample, and asks it for samples by number

Invariant: the daemon's index holds a length, and a digest of what is known of the object: its
source file, options and length, and the text that people change with their data.
"""

import json
import os
from collections.abc import Mapping
from operator import getitem
from typing import Any

from batchd.children import PIPE, STDOUT, describe, start
from batchd.errors import SourceInvalid
from batchd.functions.calls import FunctionFailed, call
from batchd.functions.find import ModuleNotFound, find_module, parse_function
from batchd.functions.load import FunctionUnusable, load_for
from batchd.functions.signature import Given
from batchd.samples.errors import SampleUnreadable
from batchd.samples.values import Value
from batchd.sources.code.declared import columns_of, named, values_of
from batchd.sources.code.options import PythonSource
from batchd.sources.interface import BuiltInKind
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
    """The length of the object, from a process that makes it. Nothing of its process group stays."""
    result = os.memfd_create("batchd-length", os.MFD_CLOEXEC)
    try:
        child = start(
            "batchd.worker.length", str(result), descriptors=[result], given=question, stdout=PIPE, stderr=STDOUT
        )
        with child:
            words = child.read(source.length_timeout_s, STDERR_BYTES_MAX).decode("utf-8", "replace").strip()
            is_late = not child.has_ended()
            status = child.end()
        answer = _answer(result)
    finally:
        os.close(result)
    if is_late:
        problem = f"it took longer than length_timeout_s = {source.length_timeout_s:g}"
    elif status:
        problem = f"its process ended with {describe(status)}"
    elif isinstance(answer, int) and 0 < answer <= LENGTH_MAX:
        return answer
    else:
        raise SourceInvalid(f"{source.function} gives an object with {answer} samples")
    raise SourceInvalid(f"asking {source.function} for its length: {problem}" + (f":\n{words}" if words else ""))


def _answer(descriptor: int) -> object:
    try:
        return json.loads(os.pread(descriptor, ANSWER_BYTES_MAX, 0))["length"]
    except (ValueError, LookupError, TypeError):
        return None


KIND = BuiltInKind(
    problems=lambda _source, _storage: [],
    columns=lambda source, _storage: columns_of(source.fields),
    scan=_scan,
    open=lambda source, _index, max_bytes, _storage: PythonReader(source, max_bytes),
)
