"""Recognise lines of JSON: the types of their keys, and keys that name images. CLI.

The types come from the first lines of the first file. Keys in objects are paths of keys. A key
becomes an image if its texts end like images and the first file exists: beside the lines, or in a
folder below the place; lists of such texts become a list of images.
"""

import os
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path

from batchd.data.samples.errors import SampleUnreadable
from batchd.data.sources import recognise
from batchd.data.sources.csv.recognise import root_of_images
from batchd.data.sources.files.options import IMAGE_ENDINGS, SOUND_ENDINGS
from batchd.data.sources.interface import FoundFiles, Recognised
from batchd.data.sources.jsonl.options import JsonlSource
from batchd.data.sources.jsonl.scan import LineFinder
from batchd.data.sources.jsonl.values import json_object
from batchd.data.storage.survey import Survey
from batchd.errors import SourceInvalid

_LINE_BYTES_MAX = 16 << 20
LINES_MAX = 10_000
"""Lines that the types come from."""
_DEPTH_MAX = 8
_FILES = {"image": IMAGE_ENDINGS, "audio": SOUND_ENDINGS}
"""The types of texts that are paths of such files."""


def _recognise(files: FoundFiles, survey: Survey) -> Recognised:
    _names, _others, path = recognise.training_files(files, JsonlSource)
    lines = _objects(path, survey)
    values = recognise.values_by_name(map(_leaves, lines))
    found = recognise.common_fields(values, len(lines))
    types = found.types
    image_root = None
    lists = {name: _lists_of_texts(values[name]) for name, why in found.reasons.items() if why == recognise.TEXT_LISTS}
    for name in [*(name for name, text in types.items() if text == "text"), *lists]:
        paths = [one for those in lists[name] for one in those] if name in lists else list(map(str, values[name]))
        endings = {recognise.ending_of(os.fsencode(value)) for value in paths}
        media = next((word for word, those in _FILES.items() if endings.issubset(those)), None)
        root = None if media is None else root_of_images(files, path, paths[0], survey)
        if media is None or root is None or image_root not in (None, root):
            continue
        if name not in lists:
            types[name], image_root = media, root
        elif media == "image":
            types[name], image_root = recognise.image_list(max(map(len, lists[name]))), root
            del found.reasons[name]
    if not types:
        what = "no key has a text, a number or a list of numbers in each of its first lines"
        has_chats = any(map(recognise.is_chat, values.values()))
        raise SourceInvalid(f"{path}: {recognise.CHATS if has_chats else what}")
    whole = {
        name: [one for one in values[name] if isinstance(one, int)] for name, text in types.items() if text == "int64"
    }
    exact = {name for name, those in whole.items() if max(map(abs, those)) <= recognise.FLOAT32_WHOLE}
    words = {text.partition("[")[0] for text in types.values()}
    named = {ending for word, those in _FILES.items() if word in words for ending in those}
    images = [name for name in files.names if recognise.ending_of(name) in named]
    root = None if image_root == path.parent else image_root
    found = found._replace(exact=exact)
    recognised = recognise.recognise_records(JsonlSource, files, found, "key", image_root=root)
    return recognised._replace(names=[*recognised.names, *images])


def _lists_of_texts(values: Iterable[object]) -> list[list[str]]:
    return [[str(text) for text in value] for value in values if isinstance(value, list)]


def _objects(path: Path, survey: Survey) -> list[Mapping[str, object]]:
    """The objects on the first lines of a file. Raises ``SourceInvalid`` if there are none."""
    with survey.open(path) as stream:
        next(LineFinder(path).starts(stream), None)  # refuses another format
        stream.seek(0)
        lines = iter(lambda: stream.readline(_LINE_BYTES_MAX), b"")
        first = list(islice((line for line in lines if line.strip()), LINES_MAX))
    reason = "is empty"
    objects = []
    for line in first:
        try:
            objects.append(json_object(line))
        except SampleUnreadable as error:
            reason = f"has no line that can be read: one {error}"
    if not objects:
        raise SourceInvalid(f"{path} {reason}")
    return objects


def _leaves(value: object, path: str = "") -> Iterator[tuple[str, object]]:
    """The values in an object that are no objects, with their paths of keys; no nulls."""
    if isinstance(value, dict) and path.count(".") < _DEPTH_MAX:
        for key, inner in value.items():
            yield from _leaves(inner, f"{path}.{key}" if path else key)
    elif value is not None:
        yield path, value


RECOGNISE = {JsonlSource: _recognise}
