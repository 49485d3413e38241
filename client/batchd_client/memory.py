"""The memory of one slot, mapped read-only once and for as long as anybody looks at it. Runs in the trainer.

Invariant: nothing is believed of a descriptor that came over the lifeline: its size, its seals and its kind are asked from
the kernel before it is mapped, so the daemon cannot shrink it under a reader (that is how SIGBUS is made).
"""

import ctypes
import fcntl
import mmap
import os
import stat
import sys
import weakref

import numpy as np

from batchd_client.errors import ProtocolError


class SlotMemory:
    """One slot, mapped. ``page`` reads its header, ``address`` is where it starts, ``slot_bytes`` how long it is.

    The mapping ends with the last reference; arrays hold one, so it outlives the connection where they do.
    """

    __slots__ = ("address", "page", "slot_bytes")

    def __init__(self, descriptor: int, slot_bytes: int) -> None:
        """Map what ``descriptor`` names, and close it. Raises ``ProtocolError`` where it is not a sealed slot of this size."""
        try:
            _check(descriptor, slot_bytes)
            self.page = _map(descriptor, slot_bytes)
        finally:
            os.close(descriptor)
        self.slot_bytes = slot_bytes
        self.address: int = np.frombuffer(self.page, dtype=np.uint8).__array_interface__["data"][0]


def _check(descriptor: int, slot_bytes: int) -> None:
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        raise ProtocolError("a slot was shared as something that is no memory")
    if status.st_size != slot_bytes:
        raise ProtocolError(f"a slot of {slot_bytes} bytes was shared as {status.st_size} bytes")
    try:
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    except OSError as error:
        raise ProtocolError(f"a slot was shared as a file without seals ({error.strerror})") from None
    if not seals & fcntl.F_SEAL_SHRINK:
        raise ProtocolError("a slot was shared that is not sealed against shrinking")


def _map(descriptor: int, slot_bytes: int) -> memoryview:
    if sys.version_info >= (3, 13):
        return memoryview(mmap.mmap(descriptor, slot_bytes, mmap.MAP_SHARED, mmap.PROT_READ, trackfd=False))
    return np.asarray(_Mapping(descriptor, slot_bytes)).data


class _Mapping:
    """A read-only mapping without a descriptor of its own, which Python's keeps before 3.13.

    A ring may have as many slots as a process usually may have descriptors, and the trainer needs some for itself.
    """

    __slots__ = ("__array_interface__", "__weakref__")

    def __init__(self, descriptor: int, slot_bytes: int) -> None:
        """Map it. Raises ``OSError`` where the kernel does not."""
        address = _libc.mmap(None, slot_bytes, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, 0)
        if address in {None, MAP_FAILED}:
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error))
        self.__array_interface__ = {"version": 3, "shape": (slot_bytes,), "typestr": "|u1", "data": (address, True)}
        unmapping = weakref.finalize(self, _libc.munmap, address, slot_bytes)
        unmapping.atexit = False  # arrays may be looked at until the very end


_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
MAP_FAILED = ctypes.c_void_p(-1).value
