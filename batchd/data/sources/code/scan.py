"""Make the index of users' own objects and generators, and of packages. Daemon.

    object       a helper process is asked for the length, once; the daemon imports nothing
    generator    there is nothing to scan
    plugin       the scan of the package

Invariant: the index of an object holds a length, and a digest of what is known of the object: its
source file, options and length, and the text that users change with their data.
"""

import json
import os
import sys

from batchd.data.functions.find import ModuleNotFound, find_module, parse_function
from batchd.data.sources.code.options import SAMPLES_MAX, GeneratorSource, PluginSource, PythonSource
from batchd.data.sources.interface import BuiltInKind
from batchd.data.storage.index import SourceIndex
from batchd.data.storage.paths import status_of
from batchd.data.storage.survey import Survey
from batchd.errors import SourceInvalid
from batchd.plugin import plugin_kind
from batchd.runtime.children import PIPE, STDOUT, describe, start

STDERR_BYTES_MAX = 4096
"""Bytes of a helper's last output that are shown."""
ANSWER_BYTES_MAX = 4096
LENGTH_MAX = 1 << 62


def _scan_object(source: PythonSource, survey: Survey) -> SourceIndex:
    """Have a helper ask for the length. Raises ``SourceInvalid`` with its last output."""
    facts = _facts(source, survey)
    asked = {
        "function": source.function,
        "options": source.options,
        "python_path": list(map(str, survey.python_path)),
        "code": {parse_function(source.function).module: facts["code"]},
    }
    length = _ask(source, json.dumps(asked).encode())
    survey.progress(length)
    return SourceIndex.build(length, {**facts, "digest": source.digest}, {}, {})


def _facts(source: PythonSource | GeneratorSource, survey: Survey) -> dict[str, object]:
    """Facts about a function. Raises ``SourceInvalid`` if its module is absent."""
    try:
        digest = find_module(parse_function(source.function).module, survey.python_path).digest
    except ModuleNotFound as error:
        raise SourceInvalid(str(error)) from None
    return {
        "function": source.function,
        "code": digest,
        "options": source.options,
        "fields": list(source.fields.items()),
    }


def _ask(source: PythonSource, question: bytes) -> int:
    """The length of the object, from a helper; its whole process group is ended."""
    result = os.memfd_create("batchd-length", os.MFD_CLOEXEC)
    try:
        module = "batchd.data.sources.code.length"
        child = start(module, str(result), descriptors=[result], given=question, stdout=PIPE, stderr=STDOUT)
        with child:
            words = child.read(source.length_timeout_s, STDERR_BYTES_MAX).decode("utf-8", "replace").strip()
            is_late = not child.has_ended()
            status = child.end()
        try:
            answer = json.loads(os.pread(result, ANSWER_BYTES_MAX, 0))["length"]
        except (ValueError, LookupError, TypeError):
            answer = None
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


def _scan_generator(source: GeneratorSource, survey: Survey) -> SourceIndex:
    """Nothing is scanned. Raises ``SourceInvalid`` if the module is absent."""
    facts = {**_facts(source, survey), "yields": source.yields}
    if source.seed is not None:
        facts["seed"] = source.seed
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


KINDS = {
    PythonSource: BuiltInKind(scan=_scan_object),
    GeneratorSource: BuiltInKind(scan=_scan_generator),
    PluginSource: BuiltInKind(
        problems=lambda source, _storage: plugin_kind(source).problems(source),
        columns=lambda source, _storage: plugin_kind(source).columns(source),
        scan=_scan_plugin,
    ),
}
