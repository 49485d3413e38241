"""Compressed files, recognised by their first bytes. Daemon, in a scan; standard library only."""

from typing import NamedTuple

MAGIC_BYTES_MAX = 10
"""The bytes at a file's beginning that identify every kind; fewer may identify none."""


class Compression(NamedTuple):
    """The name of a compression, and the command that unpacks standard input to standard output."""

    name: str
    unpack: str


ZLIB = Compression(
    "ZLIB", "python3 -c 'import sys, zlib; sys.stdout.buffer.write(zlib.decompress(sys.stdin.buffer.read()))'"
)
"""Has no magic bytes. TensorFlow writes it; the caller knows what else may begin like it."""
_BY_MAGIC = {
    b"\x1f\x8b": Compression("gzip", "gzip -dc"),
    **{b"BZh%d1AY&SY" % level: Compression("bzip2", "bzip2 -dc") for level in range(1, 10)},
    b"\xfd7zXZ\0": Compression("xz", "xz -dc"),
    b"\x28\xb5\x2f\xfd": Compression("zstd", "zstd -dc"),
    b"\x04\x22\x4d\x18": Compression("lz4", "lz4 -dc"),
}
assert max(map(len, _BY_MAGIC)) == MAGIC_BYTES_MAX


def compression_of(start: bytes) -> Compression | None:
    """How the file is compressed that starts with these bytes; None where it is not."""
    return next((found for magic, found in _BY_MAGIC.items() if start.startswith(magic)), None)
