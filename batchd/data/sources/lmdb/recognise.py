"""Recognise LMDB databases, by their first records. CLI.

any key           a map in msgpack                      format = "msgpack"
image-1 label-1   a record for each field of a sample   key = "{field}-*"
any key           an image, or a text                   one field
"""

import os
import re
from collections.abc import Mapping
from pathlib import Path

import lmdb

from batchd.data.samples.errors import SampleUnreadable
from batchd.data.samples.location import check_local
from batchd.data.sources import recognise
from batchd.data.sources.interface import FoundFiles, Recognised
from batchd.data.sources.lmdb.environment import Environment
from batchd.data.sources.lmdb.options import LmdbSource
from batchd.data.sources.lmdb.reader import unpacked
from batchd.data.storage.index import readable
from batchd.data.storage.survey import Survey
from batchd.errors import SourceInvalid

_LOCK_FILE = b"lock.mdb"
_KEY = re.compile(rb"([A-Za-z_]+)([-_/:.])(\d+)")
FIRST_MAX = 512
"""Maximum number of records to read: keys are sorted, so the records of a field are adjacent."""


def _recognise(files: FoundFiles, _survey: Survey) -> Recognised:
    names = recognise.of_kind(files, LmdbSource)
    data = [name for name in names if name.rpartition(b"/")[2] != _LOCK_FILE]
    data, others = recognise.training_part(data, files.part)
    if len(data) != 1:
        raise SourceInvalid(f"{files.root} has {len(data)} databases; name one of them")
    path = files.root / os.fsdecode(data[0])
    check_local("the database", path)
    path = path.parent if path.name == "data.mdb" else path
    folder, _slash, last = data[0].rpartition(b"/")
    lock = folder + _slash + _LOCK_FILE if last == b"data.mdb" else data[0] + b"-lock"
    beside = [name for name in names if name in (data[0], lock)] if others else names
    return _of_records(path, _first_records(path))._replace(names=beside, others=others)


def _first_records(path: Path) -> dict[bytes, bytes]:
    """The first records; with keys like ``image-000001``, the first ones of each name."""
    try:
        environment = Environment.of(path)
    except SampleUnreadable as error:
        raise SourceInvalid(f"{path}: {error}") from None
    try:
        records: dict[bytes, bytes] = {}
        cursor = environment.transaction.cursor()
        more = cursor.first()
        while more and len(records) < FIRST_MAX:
            key = bytes(cursor.key())
            records[key] = bytes(cursor.value())
            begun = _KEY.fullmatch(key)
            named = [one for one in records if begun is not None and one.startswith(begun[1] + begun[2])]
            if begun is not None and len(named) >= recognise.LOOKED_AT:  # skip to the next name
                more = cursor.set_range(begun[1] + bytes([begun[2][0] + 1]))
            elif begun is None and len(records) >= recognise.LOOKED_AT:
                break
            else:
                more = cursor.next()
    except lmdb.Error as error:
        raise SourceInvalid(f"{path} is damaged: {error}; copy it again") from None
    finally:
        environment.close()
    if not records:
        raise SourceInvalid(f"{path} has no records")
    return records


def _of_records(path: Path, records: Mapping[bytes, bytes]) -> Recognised:
    maps = [fields for value in records.values() if (fields := _map(value)) is not None]
    if len(maps) == len(records):
        values = recognise.values_by_name(fields.items() for fields in maps)
        found = recognise.common_fields({key: values[key] for key in maps[0]}, len(maps))
        named = recognise.named_fields(recognise.choose_fields(found.types, found.reasons).types)
        if found.types:
            source = LmdbSource(path=path, fields=named.fields, names=named.names, format="msgpack")
            return Recognised(source, (), recognise.left_out_notes("field", found.reasons))
    parts = [found for found in map(_KEY.fullmatch, records) if found is not None]
    names = list(dict.fromkeys(part[1] for part in parts))
    if parts and len({part[2] for part in parts}) == 1 and len(names) > 1:
        return _of_several(
            path,
            parts[0][2].decode(),
            {readable(name): [records[part[0]] for part in parts if part[1] == name] for name in names},
        )
    text = recognise.type_of(list(records.values()))
    if text in ("image", "text"):
        return Recognised(LmdbSource(path=path, fields={text: text}), ())
    raise _unknown(path, records)


def _of_several(path: Path, separator: str, values: Mapping[str, list[bytes]]) -> Recognised:
    digits = {name for name, those in values.items() if all(value.strip().lstrip(b"-").isdigit() for value in those)}
    types = {
        name: "int64" if name in digits else recognise.type_of(those) or "uint8[?]" for name, those in values.items()
    }
    odd = [name for name, text in types.items() if digits and text == "uint8[?]"]
    fields = recognise.named_fields({name: text for name, text in types.items() if name not in odd})
    source = LmdbSource(
        path=path,
        fields=fields.fields,
        names=fields.names,
        key=f"{{field}}{separator}*",
        format="text" if digits else "bytes",
    )
    return Recognised(
        source, (), recognise.left_out_notes("field", dict.fromkeys(odd, "bytes that are no image and no text"))
    )


def _map(value: bytes) -> Mapping[str, object] | None:
    """The fields of a record in msgpack; None for other records."""
    try:
        found = unpacked(memoryview(value), len(value))
    except SampleUnreadable:
        return None
    fields = {key: one for key, one in found.items() if isinstance(key, str)}
    return fields if fields and len(fields) == len(found) else None


def _unknown(path: Path, records: Mapping[bytes, bytes]) -> SourceInvalid:
    key, value = next(iter(records.items()))
    return SourceInvalid(
        f"{path}: the record {readable(key)!r} begins with {value[:12]!r}, which is not an image, a text or a map in "
        'msgpack; declare its fields yourself: `batchd config` has an example of type = "lmdb"'
    )


RECOGNISE = {LmdbSource: _recognise}
