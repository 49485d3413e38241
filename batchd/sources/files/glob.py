"""Whatever matches patterns becomes an index. Daemon.

root/**/*.jpg               every path that matches, once, folders in the order of their paths and files in that of their names
"""

from batchd.errors import SourceInvalid
from batchd.sources.files.index import GrowingIndex
from batchd.sources.files.options import GlobSource
from batchd.sources.files.reader import FilesReader, image_columns
from batchd.sources.files.walk import Patterns, below, matching, shards_problems
from batchd.sources.interface import BuiltInKind
from batchd.storage.index import SourceIndex
from batchd.storage.patterns import no_match
from batchd.storage.survey import Survey


def _scan(source: GlobSource, survey: Survey) -> SourceIndex:
    growing = GrowingIndex(survey.progress, source.path_bytes)
    found = matching(Patterns(source.root, source.patterns, "patterns", source.allow_outside_root), survey)
    if not found:
        raise SourceInvalid(no_match(source.root, source.patterns))
    for label, (folder, names) in enumerate(found):
        for name in names:
            growing.add(below(folder, name), label if source.classes == "folder" else 0)
    classes = [folder for folder, _ in found] if source.classes == "folder" else [b""]
    return growing.finish(source.root, classes, survey)


KIND = BuiltInKind(
    problems=lambda source, storage: shards_problems(source.root, source.patterns, storage, "patterns"),
    columns=lambda source, _storage: image_columns(source.path_bytes),
    scan=_scan,
    open=FilesReader.of,
)
