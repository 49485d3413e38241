"""Containers and their frames, for sources and steps, by PyAV; and their limits, without it."""

from collections.abc import Sequence

CLIP_FRAMES_MAX = 4096
SAMPLE_BYTES_MAX = 1 << 30
"""Bytes of the pixels of one sample."""
DECODERS = frozenset(
    {
        *("h264", "hevc", "libdav1d", "vp9", "vp8", "mjpeg", "mpeg4", "mpeg2video", "mpeg1video", "h263", "msmpeg4"),
        *("prores", "dnxhd", "ffv1", "huffyuv", "utvideo", "rawvideo", "png"),
    }
)
"""FFmpeg's names of the decoders that may be used."""
LOSSLESS = frozenset({"ffv1", "huffyuv", "utvideo", "rawvideo", "png"})
"""Those whose pictures are the same by every version of FFmpeg."""


def check_codecs(codecs: Sequence[str]) -> None:
    """Raise ``ValueError`` for a name of no decoder that may be used."""
    strange = [codec for codec in codecs if codec not in DECODERS]
    if strange:
        raise ValueError(f"codecs has {strange[0]!r}, which is none of {', '.join(sorted(DECODERS))}")


def libraries_for(codecs: Sequence[str]) -> tuple[str, ...]:
    """Distributions whose version decides pixels by these decoders; of all, if there are none."""
    return () if codecs and LOSSLESS.issuperset(codecs) else ("av",)
