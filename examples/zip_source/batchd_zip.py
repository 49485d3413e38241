"""Images in a zip file as a source of batchd.

``{ type = "plugin", name = "zip", options = { path = "photos.zip" } }``

    photos.zip     cat/1.jpg   cat/2.jpg   dog/3.jpg      the first folder is the class

The scan notes where each member's bytes lie; a worker reads them with one system call, in any
order, whether they are stored or deflated.
"""

import os
import stat
import struct
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

import numpy as np

from batchd.plugin import Column, PluginSource, SampleUnreadable, SourceIndex, SourceInvalid, SourceKind, Survey, Value

IMAGE_ENDINGS = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp")
LOCAL_HEADER = struct.Struct("<26xHH")
"""How long name and extra field are in front of a member's bytes, from APPNOTE.TXT, 4.3.7."""


def problems(source: PluginSource) -> list[str]:
    """Return what is wrong with the options: unknown ones, or a file that does not exist."""
    unknown = sorted(source.options.keys() - {"path"})
    if unknown:
        return [f"unknown option {', '.join(unknown)}; a zip source has path"]
    if not isinstance(source.options.get("path"), str):
        return ["options.path must name the zip file"]
    return [] if path_of(source).is_file() else [f"there is no file {path_of(source)}"]


def columns(_source: PluginSource) -> tuple[Column, ...]:
    """An image, which a decode step has to follow, and the number of its class."""
    return Column("image", "encoded"), Column("label", dtype="int64")


def scan(source: PluginSource, survey: Survey) -> SourceIndex:
    """Record for each image: first byte, stored bytes, bytes, checksum, is it deflated."""
    try:
        with path_of(source).open("rb") as stream, zipfile.ZipFile(stream) as archive:
            status = os.fstat(stream.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise SourceInvalid(f"{path_of(source)} is not a regular file")
            survey.saw(os.fsencode(path_of(source)), status)
            members = [member for member in archive.infolist() if member.filename.lower().endswith(IMAGE_ENDINGS)]
            places = np.array([place_of(member, stream) for member in members], np.int64).reshape(-1, 5)
    except (OSError, zipfile.BadZipFile, struct.error) as error:
        raise SourceInvalid(f"{path_of(source)} cannot be read as a zip file: {error}") from None
    names = [member.filename.encode() for member in members]
    classes = [name.partition(b"/")[0] for name in names]
    class_names, labels = np.unique(np.array(classes, object), return_inverse=True)
    arrays = {
        "places": places,
        "labels": labels.astype(np.int64),
        "names": np.frombuffer(b"".join(names), np.uint8),
        "name_ends": np.cumsum([len(name) for name in names], dtype=np.int64),
        "classes": np.frombuffer(b"".join(name + b"\0" for name in class_names), np.uint8),
    }
    survey.progress(len(members))  # a scan that takes long tells it now and then
    return SourceIndex.build(len(members), {}, arrays, {})


def place_of(member: zipfile.ZipInfo, stream: BinaryIO) -> tuple[int, int, int, int, int]:
    """Where a member's bytes are. What zipfile can read and we cannot is refused."""
    if member.flag_bits & 1 or member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise SourceInvalid(f"{member.filename} is encrypted, or compressed by something other than deflate")
    stream.seek(member.header_offset)
    name_bytes, extra_bytes = LOCAL_HEADER.unpack(stream.read(LOCAL_HEADER.size))
    start = member.header_offset + LOCAL_HEADER.size + name_bytes + extra_bytes
    return start, member.compress_size, member.file_size, member.CRC, member.compress_type == zipfile.ZIP_DEFLATED


class ZipReader:
    """Reads any image; belongs to one worker."""

    def __init__(self, source: PluginSource, index: SourceIndex, max_bytes: int) -> None:
        self._path = path_of(source)
        self._index = index
        self._max_bytes = max_bytes
        self._descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)

    def read(self, sample: int) -> Mapping[str, Value]:
        """The bytes of the image file, checked against the archive's checksum."""
        start, stored, size, checksum, is_deflated = self._index.arrays["places"][self._index.checked(sample)].tolist()
        if max(stored, size) > self._max_bytes:
            raise SampleUnreadable(f"has {size} bytes, more than max_bytes = {self._max_bytes}")
        data = os.pread(self._descriptor, stored, start)
        if is_deflated:
            try:
                data = zlib.decompressobj(-zlib.MAX_WBITS).decompress(data, size)
            except zlib.error as error:
                raise SampleUnreadable(f"its bytes from {start} on cannot be inflated: {error}") from None
        if len(data) != size or zlib.crc32(data) != checksum:
            raise SampleUnreadable(f"its bytes from {start} on are not what the archive's checksum says")
        return {"image": memoryview(data), **self.known(sample)}

    def known(self, sample: int) -> Mapping[str, Value]:
        """The label stands in the index."""
        return {"label": self._index.arrays["labels"][sample]}

    def name(self, sample: int) -> str:
        """Where the sample is, for messages."""
        ends = self._index.arrays["name_ends"]
        name = self._index.arrays["names"][ends[sample - 1] if sample else 0 : ends[sample]]
        return f"{self._path}: {name.tobytes().decode(errors='backslashreplace')}"

    def close(self) -> None:
        """Close the archive."""
        os.close(self._descriptor)


def path_of(source: PluginSource) -> Path:
    """The zip file; batchd has made the path absolute."""
    return Path(source.options["path"])


KIND = SourceKind(problems=problems, columns=columns, scan=scan, open=ZipReader)
