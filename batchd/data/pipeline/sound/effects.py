"""The effects of the steps on sound. Daemon, workers, CLI; standard library only.

audio: float32 [?]       --log_mel-->   audio: float32 [?, 80]
audio: int16 [160000]    --log_mel-->   audio: float32 [1001, 80]
audio: float32 [?, 2]    --log_mel-->   audio: float32 [?, 80, 2]
"""

from batchd.data.pipeline.effects import FLOAT_MAX, Columns, StepInvalid, changed, column_of, described, effect
from batchd.data.pipeline.media.effects import check_libraries
from batchd.data.pipeline.media.options import libraries_of
from batchd.data.pipeline.sound import options
from batchd.data.pipeline.step_files import StepFileInvalid, check_content, files_below
from batchd.data.samples.columns import Column


@effect.register
def _spectrogram(step: options.SpectrumStep, columns: Columns) -> Columns:
    samples, *channels = _sound(step, columns).shape
    if samples is not None and samples < step.samples_min:
        raise StepInvalid(f'"{step.op}" needs {step.samples_min} samples or more, and {step.field!r} has {samples}')
    frames = None if samples is None else step.frames(samples)
    return changed(step, columns, dtype="float32", shape=(frames, step.width, *channels))


@effect.register
def _scaled(step: options.Gain | options.NormalizeLoudness | options.FolderSound, columns: Columns) -> Columns:
    _sound(step, columns)
    if isinstance(step, options.FolderSound):
        check_libraries(step.op, libraries_of(step.formats))
    return changed(step, columns, dtype="float32")


@effect.register
def _speed(step: options.Speed, columns: Columns) -> Columns:
    samples, *channels = _sound(step, columns).shape
    return changed(step, columns, dtype="float32", shape=(samples if set(step.factors) == {1} else None, *channels))


@effect.register
def _trim(step: options.Trim, columns: Columns) -> Columns:
    _samples, *channels = _sound(step, columns).shape
    return changed(step, columns, shape=(None, *channels))


@check_content.register
def _check_folder(step: options.FolderSound) -> None:
    if not files_below(step.root, step.patterns):
        raise StepFileInvalid(f"{step.root} has no file that patterns = {list(step.patterns)} match")


@effect.register
def _spec_augment(step: options.SpecAugment, columns: Columns) -> Columns:
    column = column_of(step, columns)
    if column.kind != "array" or column.dtype not in FLOAT_MAX or len(column.shape) not in (2, 3):
        raise StepInvalid(
            f'"spec_augment" needs a spectrogram, such as float32 [frames, bands], and {column.name!r} is {described(column)}'
        )
    if abs(step.fill) > FLOAT_MAX[column.dtype]:
        raise StepInvalid(f'"spec_augment" has fill = {step.fill:g}, which {column.dtype} cannot hold', ("fill",))
    return changed(step, columns)


def _sound(step: options.SoundStep, columns: Columns) -> Column:
    column = column_of(step, columns)
    is_sound = column.kind == "array" and column.dtype in options.SOUND_TYPES and len(column.shape) in (1, 2)
    if not is_sound or None in column.shape[1:]:
        raise StepInvalid(
            f'"{step.op}" needs sound, {" or ".join(options.SOUND_TYPES)} [samples] or [samples, channels], '
            f"and {column.name!r} is {described(column)}"
        )
    return column
