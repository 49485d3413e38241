"""Recognise video files; their folders are classes. CLI."""

import os

from batchd.data.sources.interface import FoundFiles, Recognised
from batchd.data.sources.recognise import of_kind, patterns_of, training_folder
from batchd.data.sources.video.options import VideoSource
from batchd.data.storage.survey import Survey

SOUND = 'frames without their sound, which a field of type "audio" and the step "decode_audio" read'


def _recognise(files: FoundFiles, _survey: Survey) -> Recognised:
    names = of_kind(files, VideoSource)
    part, others = training_folder(names, files.part)
    names = [name for name in names if not part or name.startswith(part + b"/")]
    root, before = (files.root / os.fsdecode(part), len(part) + 1) if part else (files.root, 0)
    below = [name[before:] for name in names]
    has_classes = len({name.rpartition(b"/")[0] for name in below}) > 1 and all(b"/" in name for name in below)
    source = VideoSource(
        root=root,
        files=patterns_of(files._replace(names=below if part else files.names), below),
        classes="folder" if has_classes else "none",
    )
    clips = "each sample is one frame; frames = 16 makes clips of 16, and stride = 4 takes every fourth frame"
    return Recognised(source, names, (clips, SOUND), others=others)


RECOGNISE = {VideoSource: _recognise}
