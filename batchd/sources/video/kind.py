"""Frames of video files: any sample by its number. The scan is ``video_scan``.

Invariant: no decoder runs in the daemon, and no demuxer: FFmpeg looks at files in processes that
may die of them.
"""

from batchd.samples.columns import Column
from batchd.sources.files.walk import shards_problems
from batchd.sources.interface import BuiltInKind
from batchd.sources.isolated_scan import scan_apart
from batchd.sources.video.options import VideoSource
from batchd.sources.video.reader import VideoReader
from batchd.storage.access import Storage
from batchd.storage.index import SourceIndex
from batchd.storage.survey import Survey

SCAN_MODULE = "batchd.sources.video.scan"


def _columns(source: VideoSource, _storage: Storage) -> tuple[Column, ...]:
    height, width = source.size or (None, None)
    several = (source.frames,) if source.frames > 1 else ()
    path = (Column("path", shape=(source.path_bytes,)),) if source.path_bytes else ()
    return (
        Column("image", shape=(*several, height, width, source.channels)),
        Column("label", dtype="int64"),
        Column("time", dtype="float64", shape=several),
        *path,
    )


def _scan(source: VideoSource, survey: Survey) -> SourceIndex:
    """Find the frames of all files. Raises ``SourceInvalid``."""
    return scan_apart(SCAN_MODULE, source, survey, source.scan_timeout_s)


KIND = BuiltInKind(
    problems=lambda source, storage: shards_problems(source.root, source.files, storage, "files"),
    columns=_columns,
    scan=_scan,
    open=lambda source, index, max_bytes, _storage: VideoReader(source, index, max_bytes),
)
