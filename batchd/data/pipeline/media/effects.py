"""The effects of the steps that decode media. Daemon, workers, CLI; standard library only.

audio: bytes  --> audio: float32 [160000]    audio_length: int32    10 s at 16 kHz
audio: bytes  --> audio: float32 [?]                                whole files
video: a file --> image: uint8 [clips, frames, ?, ?, 3]    audio: float32 [clips, samples]
"""

from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version

from batchd.data.pipeline.effects import Columns, NoSuchField, StepInvalid, column_of, described, effect, replaced
from batchd.data.pipeline.media.options import CLIP_PLACES, PLACES, DecodeAudio, DecodeVideo
from batchd.data.samples.columns import Column
from batchd.runtime.suggestions import pip_command


@effect.register
def _decode_audio(step: DecodeAudio, columns: Columns) -> Columns:
    column = file_of(step, columns, "audio", "sound")
    check_libraries(step.op, step.needs)
    check_start(step, columns, PLACES, ())
    channels = () if step.channels == 1 else (step.channels,)
    made = replace(column, kind="array", dtype=step.dtype, shape=(step.samples or None, *channels))
    length = () if step.length_field is None else (Column(step.length_field, dtype="int32"),)
    return replaced(step, columns, made, *length)


@effect.register
def _decode_video(step: DecodeVideo, columns: Columns) -> Columns:
    file_of(step, columns, "video", "video")
    check_libraries(step.op, ("av",), "video")
    check_start(step, columns, CLIP_PLACES, step.lengths[:-1])
    channels = 1 if step.color == "gray" else 3
    image = Column(step.into, shape=(*step.lengths, None, None, channels), is_bgr=step.color == "bgr")
    times = (Column(step.times, dtype="float64", shape=step.lengths),) if step.times else ()
    sound_shape = (*step.lengths[:-1], step.samples, *((step.audio_channels,) if step.audio_channels > 1 else ()))
    sound = (Column(step.audio, dtype="float32", shape=sound_shape),) if step.audio else ()
    return replaced(step, columns, image, *times, *sound)


def file_of(step: DecodeAudio | DecodeVideo, columns: Columns, kind: str, word: str) -> Column:
    """The column that a step decodes. Raises ``StepInvalid`` if it is no file of this kind."""
    column = column_of(step, columns)
    if column.kind != kind:
        raise StepInvalid(
            f'"{step.op}" needs a {word} file, and {column.name!r} is {described(column)}; the source says what it is: '
            f'fields = {{ {column.name} = "{kind}" }}, or media = "{kind}" of folder, glob and list',
            ("field",),
        )
    return column


def check_libraries(op: str, names: Sequence[str], extra: str = "sound") -> None:
    """Raise ``StepInvalid`` if a distribution that decodes files is not installed."""
    for name in names:
        try:
            version(name)
        except PackageNotFoundError:
            advice = pip_command(f"batchd[{extra}]")
            raise StepInvalid(f'"{op}" needs {name}, which is not installed: {advice}') from None


def check_start(
    step: DecodeAudio | DecodeVideo, columns: Columns, places: Sequence[str], shape: tuple[int, ...]
) -> None:
    """Raise ``StepInvalid`` if the start is none of ``places``, and no field of this shape."""
    name = step.start_field
    if name is None:
        return
    start = columns.get(name)
    if start is None:
        reason = f'"{step.op}" has start = "{name}", which is neither "{places[0]}" nor "{places[1]}" nor a field'
        raise NoSuchField(reason, ("start",), [name], columns)
    if start.kind != "array" or start.shape != shape or start.dtype == "bool":
        numbers = f"{shape[0]} numbers" if shape else "one number"
        text = f'"{step.op}" takes its start, in seconds, from {numbers}, and {name!r} is {described(start)}'
        raise StepInvalid(text, ("start",))
