"""Containers and their frames, for sources and steps, by PyAV; and their limits, without it."""

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
