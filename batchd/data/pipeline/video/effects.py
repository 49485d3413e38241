"""The effect of the step that decodes videos. Daemon, workers, CLI; standard library only.

video: a file  --decode_video-->  image: uint8 [clips, frames, ?, ?, 3]
                                  audio: float32 [clips, samples]
"""

from importlib.metadata import PackageNotFoundError, version

from batchd.data.pipeline.effects import Columns, NoSuchField, StepInvalid, column_of, described, effect, replaced
from batchd.data.pipeline.video.options import DecodeVideo
from batchd.data.samples.columns import Column
from batchd.runtime.suggestions import pip_command


@effect.register
def _decode_video(step: DecodeVideo, columns: Columns) -> Columns:
    column = column_of(step, columns)
    if column.kind != "video":
        raise StepInvalid(
            f'"decode_video" needs a video file, and {column.name!r} is {described(column)}; the source says what it is: '
            f'fields = {{ {column.name} = "video" }}, or media = "video" of folder, glob and list',
            ("field",),
        )
    try:
        version("av")
    except PackageNotFoundError:
        text = f'"decode_video" needs av, which is not installed: {pip_command("batchd[video]")}'
        raise StepInvalid(text) from None
    if step.start_field is not None:
        _check_start(step, step.start_field, columns)
    channels = 1 if step.color == "gray" else 3
    image = Column(step.into, shape=(*step.lengths, None, None, channels), is_bgr=step.color == "bgr")
    times = (Column(step.times, dtype="float64", shape=step.lengths),) if step.times else ()
    sound_shape = (*step.lengths[:-1], step.samples, *((step.audio_channels,) if step.audio_channels > 1 else ()))
    sound = (Column(step.audio, dtype="float32", shape=sound_shape),) if step.audio else ()
    return replaced(step, columns, image, *times, *sound)


def _check_start(step: DecodeVideo, name: str, columns: Columns) -> None:
    start = columns.get(name)
    if start is None:
        reason = f'"decode_video" has start = "{name}", which is neither "random" nor "uniform" nor a field'
        raise NoSuchField(reason, ("start",), [name], columns)
    wanted = step.lengths[:-1]
    if start.kind != "array" or start.shape != wanted or start.dtype == "bool":
        text = "one number" if not wanted else f"{step.clips} numbers"
        raise StepInvalid(
            f'"decode_video" takes its starts, in seconds, from {text}, and {name!r} is {described(start)}', ("start",)
        )
