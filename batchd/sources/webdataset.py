"""Shards in tar format become an index: which bytes of which shard are a sample's image, and what its label is. Daemon.

Where the source says which fields samples have, ``webdataset_fields`` makes the index instead. Labels are read here; of images
only the place is noted, and workers read them with one ``pread`` each, in any order.

Invariant: what is no plain tar file, ends too soon, or has samples without image or label is refused here with the shard's
name and the member's; what is changed after that is found by whoever reads it.
"""

import json
import os
from pathlib import Path
from typing import BinaryIO

from batchd.config.columns import Column
from batchd.config.file_sources import WebDatasetSource
from batchd.errors import SourceInvalid
from batchd.sources.files import GrowingIndex
from batchd.sources.kinds import BuiltInKind, Reader
from batchd.sources.reader import FilesReader, image_columns
from batchd.sources.tar_members import TarMember, samples_in
from batchd.sources.walk import Patterns, shards_of, shards_problems
from batchd.sources.webdataset_fields import scan_fields
from batchd.sources.webdataset_reader import MembersReader, fields_columns
from batchd.storage.access import Storage
from batchd.storage.index import SourceIndex, readable
from batchd.storage.survey import Survey

LABEL_BYTES_MAX = 1 << 20
_LABEL_MAX = (1 << 63) - 1


def _scan(source: WebDatasetSource, survey: Survey) -> SourceIndex:
    """Find the samples of all shards, in the order of the shards' paths. Raises ``SourceInvalid``."""
    if source.fields:
        return scan_fields(source, survey)
    growing = GrowingIndex(survey.progress, source.path_bytes)
    shards = shards_of(Patterns(source.root, source.shards, "shards", source.allow_outside_root), survey)
    for number, shard in enumerate(shards):
        path = source.root / os.fsdecode(shard)
        found = len(growing)
        with survey.open(path) as stream:
            for _key, members in samples_in(path, stream):
                survey.looked()
                image, label = _image(source, path, members), _label(source, path, stream, members)
                growing.add(os.fsencode(image.name), label, (number, image.start, image.size))
        if len(growing) == found:
            raise SourceInvalid(f"{path} holds no sample; leave it out of the shards")
    return growing.finish(source.root, [], survey, shards)


def _image(source: WebDatasetSource, path: Path, members: dict[str, TarMember]) -> TarMember:
    for ending in source.image:
        member = members.get(ending)
        if member is not None:
            return member
    name = next(iter(members.values())).name
    raise SourceInvalid(
        f"{path}: the sample of {readable(os.fsencode(name))} has no image: its endings are {', '.join(members)}, and "
        f"image = {list(source.image)}"
    )


def _label(source: WebDatasetSource, path: Path, stream: BinaryIO, members: dict[str, TarMember]) -> int:
    ending, _, key = source.label.partition(":")
    if not ending:
        return 0
    member = members.get(ending)
    if member is None:
        name = next(iter(members.values())).name
        raise SourceInvalid(
            f"{path}: the sample of {readable(os.fsencode(name))} has no member .{ending} for its label; label = "
            f'"{source.label}" says that it has, and label = "" that there are no labels'
        )
    shown = readable(os.fsencode(member.name))
    if member.size > LABEL_BYTES_MAX:
        raise SourceInvalid(f"{path}: {shown} has {member.size} bytes, too many for a label")
    place = stream.tell()
    stream.seek(member.start)
    text = stream.read(member.size)
    stream.seek(place)
    try:
        found = json.loads(text)[key] if key else int(text.decode("ascii"))
    except (ValueError, KeyError, TypeError, RecursionError):
        found = None
    if type(found) is not int or not -_LABEL_MAX <= found <= _LABEL_MAX:
        what = f"JSON with a whole number under {key!r}" if key else "a whole number"
        raise SourceInvalid(f"{path}: {shown} is not {what}")
    return found


def _columns(source: WebDatasetSource, _storage: Storage) -> tuple[Column, ...]:
    return fields_columns(source) if source.fields else image_columns(source.path_bytes)


def _open(source: WebDatasetSource, index: SourceIndex, max_bytes: int, storage: Storage) -> Reader:
    return (MembersReader if source.fields else FilesReader.of)(source, index, max_bytes, storage)


KIND = BuiltInKind(
    problems=lambda source, storage: shards_problems(source.root, source.shards, storage),
    columns=_columns,
    scan=_scan,
    open=_open,
)
