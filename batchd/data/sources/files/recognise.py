"""Recognise folders of images or sounds, and lists of images. CLI.

cat/1.jpg  dog/2.jpg                   a folder with classes
1.jpg  2.jpg                           a flat folder
train/cat/1.jpg  test/cat/2.jpg        the folder of the training part
1.jpg  cat/2.jpg                       patterns for the larger part
labels.txt: "cat/1.jpg 0"              a list, if its first file exists
"""

import os
from itertools import islice

from batchd.data.samples.columns import MediaWord
from batchd.data.sources import recognise
from batchd.data.sources.files.options import IMAGE_ENDINGS, SOUND_ENDINGS, FolderSource, GlobSource, ListSource
from batchd.data.sources.files.scan import lines_of, read_line
from batchd.data.sources.interface import FoundFiles, Recognised
from batchd.data.storage.index import readable
from batchd.data.storage.paths import may_lead_out
from batchd.data.storage.survey import Survey
from batchd.errors import SourceInvalid
from batchd_wire.wording import counted


def _recognise_files(files: FoundFiles, _survey: Survey) -> Recognised:
    """Images or sounds, whichever are more."""
    usable = [pair for pair in zip(files.names, files.endings, strict=True) if pair[0] not in files.unusable]
    images, sounds = (
        [name for name, ending in usable if ending in endings] for endings in (IMAGE_ENDINGS, SOUND_ENDINGS)
    )
    if len(images) >= len(sounds):
        made, fewer, what = _of_media(files, images, "image"), sounds, "sounds"
    else:
        made, fewer, what = _of_media(files, sounds, "audio"), images, "images"
    others = dict.fromkeys(fewer, f"{what}, which a stream of its own can read")
    return made._replace(left_out={**others, **made.left_out})


def _of_media(files: FoundFiles, names: list[bytes], media: MediaWord) -> Recognised:
    if files.patterns:
        source = GlobSource(root=files.root, patterns=recognise.patterns_of(files, names), media=media)
        return Recognised(source, names)
    part, others = recognise.training_folder(names, files.part)
    root, before = (files.root / os.fsdecode(part), part + b"/") if part else (files.root, b"")
    left_out = dict.fromkeys(names, recognise.OTHER_PART)
    names = [name for name in names if name.startswith(before)]
    deep = [name for name in names if b"/" in name[len(before) :]]
    flat = [name for name in names if b"/" not in name[len(before) :]]
    folders = {name[len(before) :].partition(b"/")[0] for name in files.folders if name.startswith(before)}
    classes = {name[len(before) :].partition(b"/")[0] for name in deep}
    if (deep and not flat and folders == classes) or (flat and not folders):
        return Recognised(FolderSource(path=root, media=media), names, (), left_out, others)
    endings = sorted({readable(name.rpartition(b".")[2]) for name in names})
    end = endings[0] if len(endings) == 1 else f"{{{','.join(endings)}}}"
    if len(deep) >= len(flat):
        left_out |= dict.fromkeys(flat, "outside of the class folders")
        source = GlobSource(root=root, patterns=(f"*/**/*.{end}",), classes="folder", media=media)
        return Recognised(source, deep, (), left_out, others)
    what = "images" if media == "image" else "sounds"
    left_out |= dict.fromkeys(deep, f"in folders beside more {what} without one")
    return Recognised(GlobSource(root=root, patterns=(f"*.{end}",), media=media), flat, (), left_out, others)


def _recognise_list(files: FoundFiles, survey: Survey) -> Recognised:
    texts = sorted(recognise.of_kind(files, ListSource), key=lambda name: name.count(b"/"))
    lists = [name for name in texts[: recognise.LOOKED_AT] if _is_list(files, name, survey)]
    if len(lists) != 1:
        many = f": {', '.join(map(readable, lists[:3]))}; name one of them" if lists else ""
        raise SourceInvalid(f"{files.root} has {counted(len(lists), 'list')} of images{many}")
    path = files.root / os.fsdecode(lists[0])
    lines = [line for _number, line in islice(lines_of(path, survey), recognise.LOOKED_AT)]
    is_outside = any(may_lead_out(read_line(line, allow_outside_root=True)[0]) for line in lines)
    images = [name for name in files.names if recognise.ending_of(name) in IMAGE_ENDINGS]
    return Recognised(ListSource(path=path, allow_outside_root=is_outside), [*lists, *images])


def _is_list(files: FoundFiles, name: bytes, survey: Survey) -> bool:
    """True if the first lines of a text name images with labels, and the first image exists."""
    path = files.root / os.fsdecode(name)
    try:
        lines = list(islice(lines_of(path, survey), 4))
        first, *_others = [read_line(line, allow_outside_root=True)[0] for _number, line in lines]
    except (ValueError, SourceInvalid):
        return False
    image = path.parent / os.fsdecode(first)
    return not survey.storage.at(image).file_problems(image, "the image")


RECOGNISE = {FolderSource: _recognise_files, ListSource: _recognise_list}
