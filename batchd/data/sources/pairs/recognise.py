"""Recognise images with labels of YOLO, or with XML of Pascal VOC. CLI.

images/train/1.jpg    labels/train/1.txt     YOLO; also train/images and train/labels
1.jpg                 1.txt                  the same beside each other
JPEGImages/1.jpg      Annotations/1.xml      Pascal VOC, with the parts in ImageSets/Main
"""

import os
import re
from collections.abc import Sequence

from batchd.data.sources import recognise
from batchd.data.sources.files.options import IMAGE_ENDINGS
from batchd.data.sources.interface import FoundFiles, Recognised
from batchd.data.sources.pairs.options import VOC_CLASSES, VocSource, YoloSource, check_pattern, labels_of
from batchd.data.storage.index import readable
from batchd.data.storage.survey import Survey
from batchd.errors import SourceInvalid

_BYTES = 256 << 10
_XMLS_MAX = 10_000
"""Whose classes are looked at."""
_OBJECTS = re.compile(rb"\s*[0-9]+([ \t]+-?[0-9]*\.?[0-9]+(e-?[0-9]+)?){4,}[ \t]*[\r\n]")
"""A class and its box, or the corners of a polygon."""
_BOX_NUMBERS = 5
_POINTS = re.compile(rb"^kpt_shape:\s*(?:\[\s*|\n\s*-\s*)([0-9]{1,3})\b", re.MULTILINE)
"""In the YAML of ultralytics: how many points, of two numbers or of three."""
_NAME = re.compile(rb"<object>.*?<name>\s*(.*?)\s*</name>", re.DOTALL)
_PARTS = b"ImageSets/Main/"


def _yolo(files: FoundFiles, survey: Survey) -> Recognised:
    there = set(recognise.of_kind(files, YoloSource))
    labels = {name: os.fsencode(labels_of(os.fsdecode(name))) for name in _images(files)}
    folders = {name.rpartition(b"/")[0] for name, text in labels.items() if text in there}
    images, others = recognise.training_part(
        [name for name in labels if name.rpartition(b"/")[0] in folders], files.part
    )
    texts = [labels[name] for name in images if labels[name] in there]
    if not any(_OBJECTS.match(_start(files, text, survey)) for text in texts[: recognise.LOOKED_AT]):
        raise SourceInvalid(f"{files.root}: no text of the name of an image has a class and a box in each line")
    points = _points(files, texts, survey)
    source = YoloSource(root=files.root, images=_pattern(files, images), keypoints=points)
    notes = ["classes are numbers here; names = [...] of the source gives them names, such as those of data.yaml"]
    if points:
        notes.append('keypoints are left out: fields = ["image", "boxes", "classes", "keypoints"] names them')
    return Recognised(source, [*images, *texts], tuple(notes), dict.fromkeys(labels, recognise.OTHER_PART), others)


def _points(files: FoundFiles, texts: Sequence[bytes], survey: Survey) -> int:
    """How many points follow each box, as the YAML beside the folders says, or the first lines."""
    for name in files.names:
        if b"/" not in name and name.endswith((b".yaml", b".yml")):
            told = _POINTS.search(_start(files, name, survey))
            if told is not None:
                return int(told[1])
    lines = [line for text in texts[: recognise.LOOKED_AT] for line in _start(files, text, survey).splitlines()[:1]]
    numbers = {len(line.split()) - _BOX_NUMBERS for line in lines} - {-_BOX_NUMBERS}
    count = numbers.pop() if len(numbers) == 1 else 0
    return count // 3 if count % 3 == 0 and count % 2 else 0  # the corners of a polygon are even


def _voc(files: FoundFiles, survey: Survey) -> Recognised:
    xmls = {_stem(name): name for name in recognise.of_kind(files, VocSource)}
    images = [name for name in _images(files) if _stem(name) in xmls]
    both = [xmls[_stem(name)] for name in images]
    starts = [_start(files, name, survey) for name in both[:_XMLS_MAX]]
    if not any(b"<annotation" in start for start in starts[: recognise.LOOKED_AT]):
        raise SourceInvalid(f"{files.root}: no XML of the name of an image has an annotation of Pascal VOC")
    found = {name.decode(errors="replace") for start in starts for name in _NAME.findall(start)}
    names = VOC_CLASSES if found <= set(VOC_CLASSES) else tuple(sorted(found))
    lists = {readable(name)[len(_PARTS) : -4]: name for name in files.names if name.startswith(_PARTS)}
    parts = [part for part in recognise.PARTS if part in lists]
    part = files.part or next((one for one in recognise.TRAINING_PARTS if one in lists), "")
    source = VocSource(
        root=files.root,
        images=_pattern(files, images),
        annotations=_pattern(files, both),
        part=readable(lists[part]) if part in lists else None,
        names=names,
    )
    notes = (f"the classes of the first {_XMLS_MAX} XMLs",) if len(both) > _XMLS_MAX else ()
    left_out = dict.fromkeys(lists.values(), "lists of other parts, or of one class")
    return Recognised(source, [*images, *both], notes, left_out, tuple(one for one in parts if one != part))


def _images(files: FoundFiles) -> list[bytes]:
    endings = zip(files.names, files.endings, strict=True)
    return [name for name, ending in endings if ending in IMAGE_ENDINGS and name not in files.unusable]


def _pattern(files: FoundFiles, names: Sequence[bytes]) -> str:
    """One pattern of these files alone. Raises ``SourceInvalid``."""
    patterns = recognise.patterns_of(files, names)
    try:
        if len(patterns) > 1:
            raise ValueError(", ".join(patterns))
        check_pattern(patterns[0])
    except ValueError as error:
        raise SourceInvalid(f"{files.root}: no one pattern matches its images alone: {error}") from None
    return patterns[0]


def _stem(name: bytes) -> bytes:
    return name.rpartition(b"/")[2].rpartition(b".")[0]


def _start(files: FoundFiles, name: bytes, survey: Survey) -> bytes:
    with survey.open(files.root / os.fsdecode(name)) as stream:
        return stream.read(_BYTES)


RECOGNISE = {YoloSource: _yolo, VocSource: _voc}
