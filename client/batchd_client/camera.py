"""Push frames of a camera or video file: ``python -m batchd_client.camera STREAM --device 0``.

Runs in the PRODUCER, as a program of its own. Needs OpenCV (``pip install
opencv-python-headless``), which the rest of the client does not.

    capture --frame, BGR--> RGB --> put: the field "image", and "time" (seconds since 1970) if the
                                    stream has it

A stream with an image of type "image" gets JPEG files, any other stream pixels. If the stream needs
a certain size, the camera is asked for it.

Invariant: each frame is pushed at most once, in order; frames that the stream drops are counted,
never repeated.
"""

import argparse
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from batchd_client.errors import BatchdClientError
from batchd_client.producer import Producer, push
from batchd_wire.wording import counted

TIME = "time"
CHANNELS_LAST = 3


class CameraError(RuntimeError):
    """A camera or a file without suitable frames."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Push until the file ends or a signal arrives. Returns 0, or 1 after printing an error."""
    options = _parser().parse_args(arguments)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with push(options.stream, options.address) as producer:
            return _run(producer, options)
    except (BatchdClientError, CameraError) as error:
        print(f"{_PROGRAM}: {error}", file=sys.stderr)  # noqa: T201  a program says what is wrong
        return 1


def _run(producer: Producer, options: argparse.Namespace) -> int:
    capture = Capture(options.device, producer.fields, options.field, is_bgr=options.bgr)
    started_s = time.monotonic()
    frames = 0
    try:
        while (sample := capture.read()) is not None or (options.loop and capture.rewind()):
            if sample is None:
                continue
            if options.fps:
                time.sleep(max(0.0, started_s + frames / options.fps - time.monotonic()))
            producer.put(sample)
            frames += 1
    except KeyboardInterrupt:
        pass
    finally:
        capture.close()
    statistics = producer.statistics()
    print(f"{counted(statistics.pushed, 'frame')} pushed, {statistics.dropped} dropped")  # noqa: T201  what the program did
    return 0


class Capture:
    """Frames as samples with these ``fields``. ``device``: a number, or the path of a video file.

    Raises ``CameraError`` if it cannot be opened, or the stream has fields that it cannot fill.
    """

    def __init__(self, device: str, fields: Mapping[str, str], field: str, *, is_bgr: bool = False) -> None:
        self._cv2 = _opencv()
        self._field, self._is_bgr = field, is_bgr
        self._is_file = not device.isdecimal()
        self._device = device
        self._has_time = TIME in fields
        self._encodes = fields.get(field) == "image"
        _check_fields(fields, field)
        if self._is_file and not Path(device).exists():
            raise CameraError(f"there is no file {device}; a camera is a number, such as --device 0")
        self._capture = self._cv2.VideoCapture(device if self._is_file else int(device))
        if not self._capture.isOpened():
            raise CameraError(f"{'the file' if self._is_file else 'camera'} {device} cannot be opened")
        self._ask_for_size(fields[field])

    def read(self) -> dict[str, object] | None:
        """Return the next sample; the image is uint8 ``[height, width, 3]``, or JPEG bytes.

        None at the end of a file. Raises ``CameraError`` if a camera gives no more frames.
        """
        is_there, pixels = self._capture.read()
        if not is_there:
            if self._is_file:
                return None
            raise CameraError(f"camera {self._device} gives no more frames")
        if not self._is_bgr and not self._encodes:
            pixels = self._cv2.cvtColor(pixels, self._cv2.COLOR_BGR2RGB)
        value: object = self._cv2.imencode(".jpg", pixels)[1].tobytes() if self._encodes else pixels
        return {self._field: value, **({TIME: time.time()} if self._has_time else {})}

    def rewind(self) -> bool:
        """Go back to the beginning of a file. Raises ``CameraError`` if it has no frames."""
        self._capture.release()
        self._capture = self._cv2.VideoCapture(self._device)
        if not self._capture.grab():
            raise CameraError(f"the file {self._device} has no frames")
        self._capture.release()
        self._capture = self._cv2.VideoCapture(self._device)
        return True

    def close(self) -> None:
        """Release the device."""
        self._capture.release()

    def _ask_for_size(self, text: str) -> None:
        lengths = text.rpartition("[")[2].removesuffix("]").split(",")
        if self._is_file or len(lengths) != CHANNELS_LAST or "?" in lengths:
            return
        self._capture.set(self._cv2.CAP_PROP_FRAME_HEIGHT, int(lengths[0]))
        self._capture.set(self._cv2.CAP_PROP_FRAME_WIDTH, int(lengths[1]))


def _check_fields(fields: Mapping[str, str], field: str) -> None:
    if field not in fields:
        raise CameraError(f"the stream has no field {field!r}: it has {', '.join(fields)}; choose one with --field")
    others = sorted(set(fields) - {field, TIME})
    if others:
        raise CameraError(
            f"a camera has nothing for the fields {', '.join(others)} of the stream; leave them out of it"
        )


def _opencv() -> Any:
    try:
        import cv2  # noqa: PLC0415  the client does without it
    except ImportError:
        raise CameraError("OpenCV is not installed: pip install opencv-python-headless") from None
    return cv2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=_PROGRAM, description="Push the frames of a camera or a video file into a live stream."
    )
    parser.add_argument("stream", help='a stream whose source is of type "push"')
    parser.add_argument("--device", default="0", help="the camera's number, or a video file (default: 0)")
    parser.add_argument("--address", help="the daemon's, such as ipc:///run/batchd (default: where it usually is)")
    parser.add_argument("--field", default="image", help="the field of the frames (default: image)")
    parser.add_argument("--fps", type=_rate, help="at most so many frames a second (default: as they come)")
    parser.add_argument("--loop", action="store_true", help="begin a file again at its end")
    parser.add_argument("--bgr", action="store_true", help="leave the channels as OpenCV has them")
    return parser


def _rate(text: str) -> float:
    rate = float(text)
    if not 0 < rate <= 1e6:  # noqa: PLR2004  frames a second
        raise argparse.ArgumentTypeError("more than 0 frames a second")
    return rate


_PROGRAM = "python -m batchd_client.camera"

if __name__ == "__main__":
    sys.exit(main())
