"""Recognise LeRobot data sets by meta/info.json, whose codebase_version is theirs. CLI."""

import os

from batchd.data.sources.interface import FoundFiles, Recognised
from batchd.data.sources.lerobot.info import INFO, fields_of, read_info
from batchd.data.sources.lerobot.options import LeRobotSource
from batchd.data.storage.survey import Survey
from batchd.errors import SourceInvalid

_MINE = (b"data/", b"videos/", b"meta/", b"images/")
_TIMES = "each sample is one frame; times = { action = [0, 0.1] } adds what was before and after it"


def _recognise(files: FoundFiles, survey: Survey) -> Recognised:
    if os.fsencode(INFO) not in files.names:
        raise SourceInvalid(f"{files.root} has no {INFO}")
    source = LeRobotSource(root=files.root)
    info = read_info(source, survey)
    fields = fields_of(source, info)
    names = [name for name in files.names if name.startswith(_MINE)]
    left_out = (f"features that are not read: {', '.join(fields.left_out)}",) if fields.left_out else ()
    return Recognised(source, names, (_TIMES, *left_out))


RECOGNISE = {LeRobotSource: _recognise}
