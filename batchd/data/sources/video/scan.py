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
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from batchd.data.media.containers import VideoUnreadable
from batchd.data.media.indexed import GrowingFrames
from batchd.data.samples.columns import Column
from batchd.data.sources.files.index import check_path_length, path_columns
from batchd.data.sources.files.scan import folder_labels
from batchd.data.sources.files.walk import matching, shards_problems
from batchd.data.sources.finding import FilePattern, NamedSamples
from batchd.data.sources.interface import BuiltInKind
from batchd.data.sources.neighbours import in_files
from batchd.data.sources.scan import answer, isolated_scan
from batchd.data.sources.video.options import VideoSource
from batchd.data.storage.access import Storage
from batchd.data.storage.index import SourceIndex, blob, number_array, readable
from batchd.data.storage.survey import Survey
from batchd.data.storage.values import fingerprint
from batchd.errors import SourceInvalid
from batchd.runtime import failpoints
from batchd_wire.views import Array
from batchd_wire.wording import counted

MODULE = "batchd.data.sources.video.scan"


def scan(source: VideoSource, survey: Survey) -> SourceIndex:
    """Find the frames of all files, by path, in the scanning process. Raises ``SourceInvalid``."""
    folders = matching(source.file_patterns, survey)
    growing = _GrowingIndex(source)
    found = [folder for folder, _names in folders]
    labels, class_names = folder_labels(source.classes, found, str(source.root), survey)
    for label, (folder, names) in zip(labels, folders, strict=True):
        for name in names:
            path = source.root / os.fsdecode(folder) / os.fsdecode(name)
            with survey.open(path) as stream:
                failpoints.passing("scan.video.opening")
                growing.add(path, stream, label, survey)
            survey.progress(growing.samples)
    if growing.samples == 0:
        raise SourceInvalid(
            f"no file of {source.place} has the {counted(source.span, 'frame')} that a sample reaches over"
        )
    return growing.finish(class_names, survey)


class _GrowingIndex:
    """An index of videos while it is built."""

    def __init__(self, source: VideoSource) -> None:
        self._source = source
        self._frames = GrowingFrames()
        self._samples = array("q", [0])
        self._labels = array("q")

    @property
    def samples(self) -> int:
        """The samples so far."""
        return self._samples[-1]

    def add(self, path: Path, file: BinaryIO, label: int, survey: Survey) -> None:
        """Add the frames of one file, all with ``label``."""
        name = os.fsencode(path.relative_to(self._source.root))
        check_path_length("the path", name, self._source.path_bytes)
        _size, digest = fingerprint(file, os.fstat(file.fileno()).st_size)
        try:
            frames = self._frames.add(name, file, digest, partial(survey.progress, self.samples))
        except VideoUnreadable as error:
            raise SourceInvalid(f"{readable(os.fsencode(path))} {error}") from None
        clips = -(-(len(frames.order) - self._source.span + 1) // self._source.every)
        self._samples.append(self.samples + max(0, clips))
        self._labels.append(label)

    def finish(self, class_names: list[bytes], survey: Survey) -> SourceIndex:
        """Make the index; nothing may be added afterwards."""
        names, frames, packets = number_array(self._frames.ends).reshape(-1, 3).T
        found = self._frames.arrays()
        arrays: dict[str, Array] = {
            "names": found["names"],
            "files": np.stack([names, number_array(self._samples), frames, packets]),
            "units": found["units"],
            "labels": number_array(self._labels),
            "digests": found["digests"],
            "classes": blob(class_names),
            **{name: found[name] for name in ("order", "keys", "times", "checksums")},
        }
        source = self._source
        options = ["every", "frames", "stride", "size", "interpolation", "color", "rotation"]
        facts = {name: getattr(source, name) for name in options}
        place = {"root": os.fsdecode(source.root.absolute()), **survey.place()}
        return SourceIndex.build(self.samples, facts, arrays, place)


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
