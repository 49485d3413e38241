"""The effect of the step that decodes videos. Daemon, workers, CLI; standard library only.

video: a file  --decode_video-->  image: uint8 [clips, frames, ?, ?, 3]
                                  audio: float32 [clips, samples]
"""

from batchd.data.pipeline.effects import Columns, effect, replaced
from batchd.data.pipeline.media.effects import check_libraries, check_start, file_of
from batchd.data.pipeline.video.options import PLACES, DecodeVideo
from batchd.data.samples.columns import Column


@effect.register
def _decode_video(step: DecodeVideo, columns: Columns) -> Columns:
    file_of(step, columns, "video", "video")
    check_libraries(step.op, ("av",), "video")
    check_start(step, columns, PLACES, step.lengths[:-1])
    channels = 1 if step.color == "gray" else 3
    image = Column(step.into, shape=(*step.lengths, None, None, channels), is_bgr=step.color == "bgr")
    times = (Column(step.times, dtype="float64", shape=step.lengths),) if step.times else ()
    sound_shape = (*step.lengths[:-1], step.samples, *((step.audio_channels,) if step.audio_channels > 1 else ()))
    sound = (Column(step.audio, dtype="float32", shape=sound_shape),) if step.audio else ()
    return replaced(step, columns, image, *times, *sound)
