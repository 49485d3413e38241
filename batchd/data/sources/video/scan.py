"""Scans video files for their frames, in a process of its own: see ``data.sources.scan``.

No frame is decoded. A file is read once, from its first packet to its last. Packets are in decoding
order, each with the time at which its frame is shown; the number in the header does not count.

    files       int64 [4, files + 1]  where each file begins in names, samples, frames, packets, and
                                      where the last one ends
    labels      int64 [files]
    classes     uint8 [bytes]         the names of the labels, a NUL after each
    ...         the arrays of ``media.indexed``

Samples have no arrays of their own: they begin at each ``every``-th frame.

Invariants: no decoder runs, and no demuxer in the daemon; as long as packets come, progress is
reported. Within a file, frames are in the order of their times, and no two times are the same.
"""

import os
import sys
from array import array
from functools import partial

import numpy as np
from numpy.typing import NDArray

from batchd.data.media.indexed import GrowingFrames
from batchd.data.samples.columns import Column
from batchd.data.sources.files.index import check_path_length, path_columns
from batchd.data.sources.files.scan import folder_labels
from batchd.data.sources.files.walk import below, matching, shards_problems
from batchd.data.sources.finding import FilePattern, NamedSamples
from batchd.data.sources.interface import BuiltInKind
from batchd.data.sources.neighbours import in_files
from batchd.data.sources.scan import answer, isolated_scan
from batchd.data.sources.video.options import VideoSource
from batchd.data.storage.access import Storage
from batchd.data.storage.index import SourceIndex, blob, number_array, readable
from batchd.data.storage.survey import Survey
from batchd.errors import SourceInvalid
from batchd.runtime import failpoints
from batchd_wire.wording import counted

MODULE = "batchd.data.sources.video.scan"
_ARRAYS = ("names", "files", "units", "labels", "digests", "classes", "order", "keys", "times", "checksums")
"""In the order of the digest."""


def scan(source: VideoSource, survey: Survey) -> SourceIndex:
    """Find the frames of all files, by path, in the scanning process. Raises ``SourceInvalid``."""
    folders = matching(source.file_patterns, survey)
    growing, samples, labels = GrowingFrames(), array("q", [0]), array("q")
    found = [folder for folder, _names in folders]
    folders_labels, class_names = folder_labels(source.classes, found, str(source.root), survey)
    for label, (folder, names) in zip(folders_labels, folders, strict=True):
        for name in (below(folder, name) for name in names):
            path = source.root / os.fsdecode(name)
            check_path_length("the path", name, source.path_bytes)
            with survey.open(path) as file:
                failpoints.passing("scan.video.opening")
                frames, reason = growing.add(name, file, partial(survey.progress, samples[-1]))
            if reason:
                raise SourceInvalid(f"{readable(os.fsencode(path))} {reason}")
            clips = -(-(len(frames.order) - source.span + 1) // source.every)
            samples.append(samples[-1] + max(0, clips))
            labels.append(label)
            survey.progress(samples[-1])
    if samples[-1] == 0:
        raise SourceInvalid(
            f"no file of {source.place} has the {counted(source.span, 'frame')} that a sample reaches over"
        )
    of_names, of_frames, of_packets = growing.ends
    files = np.stack([of_names, number_array(samples), of_frames, of_packets])
    of_source = {"files": files, "labels": number_array(labels), "classes": blob(class_names)}
    all_arrays = growing.arrays() | of_source
    arrays = {name: all_arrays[name] for name in _ARRAYS}
    options = ["every", "frames", "stride", "size", "interpolation", "color", "rotation"]
    facts = {name: getattr(source, name) for name in options}
    place = {"root": os.fsdecode(source.root.absolute()), **survey.place()}
    return SourceIndex.build(samples[-1], facts, arrays, place)


def _columns(source: VideoSource, _storage: Storage) -> tuple[Column, ...]:
    height, width = source.size or (None, None)
    several = (source.frames,) if source.frames > 1 else ()
    return (
        Column("image", shape=(*several, height, width, source.channels)),
        Column("label", dtype="int64"),
        Column("time", dtype="float64", shape=several),
        *path_columns(source.path_bytes),
    )


def _scan(source: VideoSource, survey: Survey) -> SourceIndex:
    return isolated_scan(MODULE, source, survey, source.scan_timeout_s)


def _find(_source: VideoSource, index: SourceIndex, pattern: FilePattern) -> NDArray[np.int64]:
    names, samples = index.arrays["files"][:2]
    listed = NamedSamples(names, index.arrays["names"], os.path.join(os.fsencode(index.place["root"]), b""))  # noqa: PTH118  bytes
    found = [pattern.chosen(samples[file], samples[file + 1]) for file in listed.find(pattern)]
    return np.concatenate(found or [np.zeros(0, np.int64)])


KINDS = {
    VideoSource: BuiltInKind(
        problems=shards_problems,
        columns=_columns,
        scan=_scan,
        neighbours=lambda _source, index: in_files(
            np.append(0, index.arrays["files"][1, :-1]), len(index), why_no_bytes="frames have no sizes of their own"
        ),
        find=_find,
        labels=lambda _source, index: np.repeat(index.arrays["labels"], np.diff(index.arrays["files"][1])),
    )
}


if __name__ == "__main__":
    sys.exit(answer(scan))
