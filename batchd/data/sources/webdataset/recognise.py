"""Recognise shards in tar format, by the members of the first samples. CLI.

A field is declared if all of the first samples have its member: an image, a list of images in
numbered members, a number or text in ``cls``, a text in ``txt``, an array in ``npy``, the numbers
and texts in ``json``.
"""

import io
import json
import re
from itertools import islice
from typing import BinaryIO

from batchd.data.samples.columns import parse_column
from batchd.data.sources import recognise
from batchd.data.sources.arrays.index import read_header
from batchd.data.sources.interface import FoundFiles, Recognised
from batchd.data.sources.webdataset import options
from batchd.data.sources.webdataset.scan import LABEL_BYTES_MAX, TarMember, TarSample, content_of, samples_in
from batchd.data.storage.survey import Survey
from batchd.errors import SourceInvalid

_NUMBERED = re.compile(rf"(?P<name>(?:.*\.)?)(?P<number>0|[1-9][0-9]{{0,3}})\.(?:{'|'.join(options.IMAGE_ENDINGS)})")
"""The member of an image of a list."""


def _recognise(files: FoundFiles, survey: Survey) -> Recognised:
    names, others, path = recognise.training_files(files, options.WebDatasetSource)
    with survey.open(path) as stream:
        samples = list(islice(samples_in(path, stream, survey), recognise.LOOKED_AT))
        if not samples:
            raise SourceInvalid(f"{path} has no samples")
        found, reasons = _members(samples, stream)
    shards = recognise.patterns_of(files, names)
    types = recognise.choose_fields({name: text for name, (text, _member) in found.items()}, reasons).types
    found = {name: found[name] for name in types}
    if not types:
        raise SourceInvalid(f"{path}: the first samples have no member in common that batchd reads")
    usual = {name: options.usual_member(parse_column(name, text)).text for name, text in types.items()}
    members = {name: member for name, (_text, member) in found.items() if member != usual[name]}
    source = options.WebDatasetSource(root=files.root, shards=shards, fields=types, names=members)
    if not members and types == {"image": "image", options.LABEL: "int64"}:
        source = options.WebDatasetSource(root=files.root, shards=shards)
    elif not members and list(types) == ["image"]:
        source = options.WebDatasetSource(root=files.root, shards=shards, label="")
    return Recognised(source, names, recognise.left_out_notes("member", reasons), others=others)


def _members(samples: list[TarSample], stream: BinaryIO) -> tuple[dict[str, tuple[str, str]], dict[str, str]]:
    """The type and the member of each field, and why other members, or keys of them, are none."""
    found: dict[str, tuple[str, str]] = {}
    reasons: dict[str, str] = {}
    endings = dict.fromkeys(ending.lower() for sample in samples for ending in sample.members)
    if all(sample.find(options.IMAGE_ENDINGS) for sample in samples):
        found["image"] = "image", ";".join(options.IMAGE_ENDINGS)
    lists, numbered = _image_lists(samples)
    found |= lists
    for ending in endings:
        if (
            ending in numbered
            or (ending in options.IMAGE_ENDINGS and "image" in found)
            or ending.endswith(f".{options.POINTS_ENDING}")
        ):
            continue
        members = [member for _number, member in filter(None, (sample.find([ending]) for sample in samples))]
        if len(members) < len(samples):
            reasons[f".{ending}"] = f"absent from {len(samples) - len(members)} of the first {len(samples)} samples"
            continue
        if ending.rpartition(".")[2] in options.MEDIA_ENDINGS["audio"]:
            name = ending.rpartition(".")[0] or options.AUDIO
            found[name] = "audio", ending
            continue
        is_small = all(member.size <= LABEL_BYTES_MAX for member in members)
        fields = _fields(ending, members, stream, reasons) if is_small or ending.endswith(options.IMAGE_ENDINGS) else {}
        if not fields and not any(key.startswith(f".{ending}:") for key in reasons):
            reasons[f".{ending}"] = "no type of field reads it" if is_small else f"longer than {LABEL_BYTES_MAX} bytes"
        found |= fields
    return found, reasons


def _image_lists(samples: list[TarSample]) -> tuple[dict[str, tuple[str, str]], set[str]]:
    """The fields whose images are numbered members, NAME.0.jpg and so on, and their endings.

    Each of the first samples has at least one, and one has several.
    """
    found: dict[str, tuple[str, str]] = {}
    numbered: set[str] = set()
    names: dict[str, list[dict[str, int]]] = {}
    for sample in samples:
        mine: dict[str, dict[str, int]] = {}
        for ending in map(str.lower, sample.members):
            if match := _NUMBERED.fullmatch(ending):
                mine.setdefault(match["name"], {})[ending] = int(match["number"])
        for name, members in mine.items():
            names.setdefault(name, []).append(members)
    for name, of_samples in names.items():
        if len(of_samples) == len(samples) and max(map(len, of_samples)) > 1:
            column = parse_column("images", recognise.image_list(1 + max(max(one.values()) for one in of_samples)))
            room = f"{name}{{0..{column.most - 1}}}"
            endings = sorted({ending.rpartition(".")[2] for one in of_samples for ending in one})
            found[recognise.field_name(name.rstrip(".") or "images")] = (
                column.text,
                ";".join(f"{room}.{ending}" for ending in endings),
            )
            numbered |= {ending for one in of_samples for ending in one}
    return found, numbered


def _fields(
    ending: str, members: list[TarMember], stream: BinaryIO, reasons: dict[str, str]
) -> dict[str, tuple[str, str]]:
    """The fields of a member: type and member by name; empty if batchd cannot read it.

    Adds to ``reasons`` why keys of JSON are left out.
    """
    name, _dot, last = ending.rpartition(".")
    if last in options.IMAGE_ENDINGS:
        return {recognise.field_name(name or last): ("image", ending)}
    contents = [content_of(stream, member) for member in members]
    try:
        if last == options.JSON_ENDING:
            return _json_fields(ending, [json.loads(content) for content in contents], reasons)
        if last == options.LABEL_ENDING and all(content.strip().lstrip(b"-").isdigit() for content in contents):
            return {options.LABEL if not name else recognise.field_name(name): ("int64", ending)}
        if last in (options.LABEL_ENDING, options.TEXT_ENDING):
            all(content.decode() for content in contents)
            return {
                recognise.field_name(name or ("text" if last == options.TEXT_ENDING else options.LABEL)): (
                    "text",
                    ending,
                )
            }
        if last == options.ARRAY_ENDING:
            return {recognise.field_name(name or "array"): (_array_type(ending, contents), ending)}
    except (ValueError, RecursionError, SourceInvalid):
        pass
    return {}


def _array_type(ending: str, contents: list[bytes]) -> str:
    """The type of arrays in .npy files. Raises ``SourceInvalid`` or ``ValueError``."""
    arrays = [read_header(ending, io.BytesIO(content)) for content in contents]
    (dtype,) = {array.dtype.newbyteorder("=").name for array in arrays}
    lengths = zip(*(array.shape for array in arrays), strict=True)
    shape = ",".join(str(those[0]) if len(set(those)) == 1 else "?" for those in lengths)
    return f"{dtype}[{shape}]" if shape else dtype


def _json_fields(ending: str, objects: list[object], reasons: dict[str, str]) -> dict[str, tuple[str, str]]:
    tables = [one for one in objects if isinstance(one, dict)]
    if len(tables) < len(objects):
        return {}
    found = recognise.common_fields(recognise.values_by_name(table.items() for table in tables), len(tables))
    reasons |= {f".{ending}:{key}": reason for key, reason in found.reasons.items()}
    return {recognise.field_name(key): (text, f"{ending}:{key}") for key, text in found.types.items()}


RECOGNISE = {options.WebDatasetSource: _recognise}
