"""Formats of image files, by their first bytes. Daemon, workers and CLI; standard library only.

Invariant: a file's name is never asked.
"""

MAGIC_BYTES = 16
"""The beginning of a file that decides."""


def image_format(start: bytes) -> str | None:
    """The format of an image file that starts so: JPEG, PNG, WebP, BMP or GIF; None for others."""
    if start.startswith(b"\xff\xd8\xff"):
        return "JPEG"
    if start.startswith(b"\x89PNG\r\n\x1a\n"):
        return "PNG"
    if start.startswith(b"RIFF") and start[8:12] == b"WEBP":
        return "WebP"
    if start.startswith(b"BM"):
        return "BMP"
    if start.startswith((b"GIF87a", b"GIF89a")):
        return "GIF"
    return None
