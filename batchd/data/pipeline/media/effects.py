"""The effects of the steps that decode media. Daemon, workers, CLI; standard library only.

audio: bytes  --> audio: float32 [160000]    audio_length: int32    10 s at 16 kHz
audio: bytes  --> audio: float32 [?]                                whole files
"""

from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version

from batchd.data.pipeline.effects import Columns, NoSuchField, StepInvalid, column_of, described, effect, replaced
from batchd.data.pipeline.media.options import DecodeAudio
from batchd.data.samples.columns import Column
from batchd.runtime.suggestions import pip_command


@effect.register
def _decode_audio(step: DecodeAudio, columns: Columns) -> Columns:
    column = column_of(step, columns)
    if column.kind != "audio":
        raise StepInvalid(
            f'"decode_audio" needs a sound file, and {column.name!r} is {described(column)}; the source says what it is: '
            f'fields = {{ {column.name} = "audio" }}, or media = "audio" for folders',
            ("field",),
        )
    check_libraries(step.op, step.needs)
    if step.start_field is not None:
        _check_start(step.start_field, columns)
    channels = () if step.channels == 1 else (step.channels,)
    made = replace(column, kind="array", dtype=step.dtype, shape=(step.samples or None, *channels))
    length = () if step.length_field is None else (Column(step.length_field, dtype="int32"),)
    return replaced(step, columns, made, *length)


def check_libraries(op: str, names: Sequence[str]) -> None:
    """Raise ``StepInvalid`` if a distribution that decodes sound is not installed."""
    for name in names:
        try:
            version(name)
        except PackageNotFoundError:
            advice = pip_command("batchd[sound]")
            raise StepInvalid(f'"{op}" needs {name}, which is not installed: {advice}') from None


def _check_start(name: str, columns: Columns) -> None:
    start = columns.get(name)
    if start is None:
        reason = f'"decode_audio" has start = "{name}", which is neither "random" nor "middle" nor a field'
        raise NoSuchField(reason, ("start",), [name], columns)
    if start.kind != "array" or start.shape or start.dtype == "bool":
        text = f'"decode_audio" takes its start, in seconds, from one number, and {name!r} is {described(start)}'
        raise StepInvalid(text, ("start",))
