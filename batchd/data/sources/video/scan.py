"""Scans video files for their frames, in a process of its own: see ``data.sources.scan``.

No frame is decoded. A file is read once, from its first packet to its last. Packets are in decoding
order, each with the time at which its frame is shown; the number in the header does not count.

    names       uint8 [bytes]         the paths of the files below the root, joined
    files       int64 [4, files + 1]  where each file begins in names, samples, frames, packets, and
                                      where the last one ends
    units       int64 [files, 2]      a time of the file is so many numerator / denominator seconds
    labels      int64 [files]
    digests     uint8 [files, 32]     of the bytes of the file, or of some of them if it is long
    classes     uint8 [bytes]         the names of the labels, a NUL after each
    order       uint32 [frames]       the packet of each frame, in display order
    keys        uint32 [frames]       the packet at which decoding begins that gives the frame
    times       int64 [packets]       when a packet's frame is shown; packets are in decoding order
    checksums   uint32 [packets]      CRC-32 of the data

    packets     I0  P3  B1  B2  I4  P7  B5  B6
    order        0   2   3   1   4   6   7   5
    keys         0   0   0   0   4   4   4   4

Frames and packets are counted within their file. Samples have no arrays of their own: they begin
at each ``every``-th frame.

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

from batchd.data.media.containers import PlainFile, VideoUnreadable, open_video
from batchd.data.media.frames import in_order, read_packets
from batchd.data.samples.columns import Column
from batchd.data.sources.arrays.index import fingerprint
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
        self.samples = 0
        self._source = source
        self._names = bytearray()
        self._files = array("q", [0, 0, 0, 0])
        self._units = array("q")
        self._labels = array("q")
        self._digests = bytearray()
        self._order = array("I")
        self._keys = array("I")
        self._times = array("q")
        self._checksums = array("I")

    def add(self, path: Path, file: BinaryIO, label: int, survey: Survey) -> None:
        """Add the frames of one file, all with ``label``."""
        try:
            container, stream = open_video(PlainFile(file.fileno()))
        except VideoUnreadable as error:
            raise SourceInvalid(f"{readable(os.fsencode(path))} {error}") from None
        with container:
            try:
                found = read_packets(container, stream, partial(survey.progress, self.samples))
                order, keys = in_order(found)
            except VideoUnreadable as error:
                raise SourceInvalid(f"{path} {error}") from None
            unit = stream.time_base
        assert unit is not None, "as open_video found"
        _size, digest = fingerprint(file, os.fstat(file.fileno()).st_size)
        self.samples += max(0, -(-(len(order) - self._source.span + 1) // self._source.every))
        name = os.fsencode(path.relative_to(self._source.root))
        check_path_length("the path", name, self._source.path_bytes)
        self._names += name
        self._order.frombytes(order.astype(np.uint32).tobytes())
        self._keys.frombytes(keys.astype(np.uint32).tobytes())
        self._times.extend(found.times)
        self._checksums.extend(found.checksums)
        self._digests += bytes.fromhex(digest)
        self._units.extend((unit.numerator, unit.denominator))
        self._labels.append(label)
        self._files.extend((len(self._names), self.samples, len(self._order), len(self._times)))

    def finish(self, class_names: list[bytes], survey: Survey) -> SourceIndex:
        """Make the index; nothing may be added afterwards."""
        arrays: dict[str, Array] = {
            "names": np.frombuffer(self._names, np.uint8),
            "files": number_array(self._files).reshape(-1, 4).T,
            "units": number_array(self._units).reshape(-1, 2),
            "labels": number_array(self._labels),
            "digests": np.frombuffer(self._digests, np.uint8).reshape(len(self._labels), -1),
            "classes": blob(class_names),
            "order": number_array(self._order),
            "keys": number_array(self._keys),
            "times": number_array(self._times),
            "checksums": number_array(self._checksums),
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
