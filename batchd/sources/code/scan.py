"""Users' own objects and generators, and what packages bring, become an index. Daemon.

    object       a helper process is asked for the length, once; the daemon imports nothing
    generator    there is nothing to scan
    plugin       the scan of the package

Invariant: the index of an object holds a length, and a digest of what is known of the object: its
source file, options and length, and the text that users change with their data.
"""

import json
import os
import sys
from collections.abc import Sequence

from batchd.children import PIPE, STDOUT, describe, start
from batchd.errors import SourceInvalid
from batchd.functions.find import ModuleNotFound, find_module, parse_function
from batchd.sources.code.options import SAMPLES_MAX, GeneratorSource, PluginSource, PythonSource
from batchd.sources.code.plugin import plugin_kind
from batchd.sources.interface import BuiltInKind, SourceProblem
from batchd.storage.access import Storage
from batchd.storage.index import SourceIndex
from batchd.storage.paths import status_of
from batchd.storage.survey import Survey

STDERR_BYTES_MAX = 4096
"""How much of what a helper said last is shown."""
ANSWER_BYTES_MAX = 4096
LENGTH_MAX = 1 << 62


def _scan_object(source: PythonSource, survey: Survey) -> SourceIndex:
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


def _scan_generator(source: GeneratorSource, survey: Survey) -> SourceIndex:
    """There is nothing to scan. Raises ``SourceInvalid`` where the module is gone."""
    try:
        digest = find_module(parse_function(source.function).module, survey.python_path).digest
    except ModuleNotFound as error:
        raise SourceInvalid(str(error)) from None
    facts = {
        "function": source.function,
        "code": digest,
        "options": source.options,
        "fields": list(source.fields.items()),
        "yields": source.yields,
        **({} if source.seed is None else {"seed": source.seed}),
    }
    return SourceIndex.build(source.epoch_samples or SAMPLES_MAX, facts, {}, {})


def _scan_plugin(source: PluginSource, survey: Survey) -> SourceIndex:
    kind = plugin_kind(source)
    module = getattr(sys.modules.get(kind.scan.__module__), "__file__", None)
    if module is not None:  # another version of the package may find something else
        survey.saw(os.fsencode(module), status_of(os.fsencode(module)))
    index = kind.scan(source, survey)
    if not len(index):
        raise SourceInvalid(f"{source.place} holds no sample")
    return index


def _plugin_problems(source: PluginSource, _storage: Storage) -> Sequence[str | SourceProblem]:
    try:
        return plugin_kind(source).problems(source)
    except SourceInvalid as error:
        return [str(error)]


KINDS = {
    PythonSource: BuiltInKind(
        columns=lambda source, _storage: source.columns,
        scan=_scan_object,
    ),
    GeneratorSource: BuiltInKind(
        columns=lambda source, _storage: source.columns,
        scan=_scan_generator,
    ),
    PluginSource: BuiltInKind(
        problems=_plugin_problems,
        columns=lambda source, _storage: plugin_kind(source).columns(source),
        scan=_scan_plugin,
    ),
}
