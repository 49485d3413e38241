"""Recognise JSON of COCO beside its images. CLI.

annotations/instances_train2017.json     the one with boxes of the training part
train2017/000000000009.jpg               images below the folder that has the first
"""

import os
from pathlib import Path

from batchd.data.sources import recognise
from batchd.data.sources.coco.document import Document
from batchd.data.sources.coco.options import CocoSource
from batchd.data.sources.csv.recognise import root_of_images
from batchd.data.sources.files.options import IMAGE_ENDINGS
from batchd.data.sources.interface import FoundFiles, Recognised
from batchd.data.storage.index import readable
from batchd.data.storage.survey import Survey
from batchd.errors import SourceInvalid

_INSTANCES, _KEYPOINTS = b"instances", b"keypoints"
"""In names of files that have boxes, and boxes with keypoints."""
_START_BYTES = 256 << 10
_ANNOTATIONS_MAX = 10_000
"""Among which a box is looked for."""
_NOTE = 'masks, keypoints, areas and ids are left out: fields = ["image", "boxes", "classes", "masks"] names some'


def _recognise(files: FoundFiles, survey: Survey) -> Recognised:
    names = recognise.of_kind(files, CocoSource)
    documents = [name for name in names[: recognise.LOOKED_AT] if _is_coco(files.root / os.fsdecode(name), survey)]
    if not documents:
        path = files.root / os.fsdecode(names[0])
        why = "is no JSON of COCO, with images and annotations"
        if _start(path, survey).lstrip().startswith(b"["):
            why = "is a list, and batchd reads records of JSON one a line: jq -c '.[]' FILE > NEW.jsonl"
        raise SourceInvalid(f"{files.root / readable(names[0])} {why}")
    best = [name for name in documents if _INSTANCES in name] or [name for name in documents if _KEYPOINTS in name]
    chosen, others = recognise.training_part(best or documents, files.part)
    if len(chosen) > 1:
        raise SourceInvalid(
            f"{files.root} has {len(chosen)} JSONs of COCO, {', '.join(map(readable, chosen[:3]))}; name one of them"
        )
    path = files.root / os.fsdecode(chosen[0])
    name, has_boxes = _first(path, survey)
    root = root_of_images(files, path, name, survey)
    if root is None:
        raise SourceInvalid(f"{path} names the image {name!r}, and no folder here has it; name the folder around both")
    before = os.fsencode(os.path.relpath(root, files.root)) + b"/"
    images = [
        one
        for one, ending in zip(files.names, files.endings, strict=True)
        if ending in IMAGE_ENDINGS and (before == b"./" or one.startswith(before))
    ]
    if not has_boxes:
        raise SourceInvalid(f'{path}: its annotations have no "bbox"; batchd reads boxes, masks and keypoints of COCO')
    left_out = dict.fromkeys(names, "annotations of other parts, or of another kind")
    return Recognised(CocoSource(path=path, images=root), [*chosen, *images], (_NOTE,), left_out, others)


def _is_coco(path: Path, survey: Survey) -> bool:
    """True for a JSON as COCO has it, by its first bytes."""
    data = _start(path, survey)
    has_images = b'"images"' in data and b'"file_name"' in data
    return has_images or (b'"annotations"' in data and b'"image_id"' in data)


def _start(path: Path, survey: Survey) -> bytes:
    with survey.open(path) as stream:
        return stream.read(_START_BYTES)


def _first(path: Path, survey: Survey) -> tuple[str, bool]:
    """The file name of the first image, and whether an annotation has a box."""
    name, has_boxes, annotations = "", False, 0
    with survey.open(path) as stream:
        for key, _start, _end, value in Document(path, stream).elements():
            if key == "images" and not name and isinstance(value, dict):
                name = str(value.get("file_name", ""))
            if key == "annotations" and isinstance(value, dict):
                annotations += 1
                has_boxes |= "bbox" in value
            if name and (has_boxes or annotations >= _ANNOTATIONS_MAX):
                break
    return name, has_boxes or not annotations


RECOGNISE = {CocoSource: _recognise}
