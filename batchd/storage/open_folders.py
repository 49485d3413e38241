"""Files of samples, opened by the folders in which they lie. Workers only.

A file may lie behind links, and must not lie outside of its source's root. Where it really lies, the kernel tells of a file that
is open, which takes longer than to open it. So a folder that was seen to lie within the root stays open, and files in it are
opened by their names alone: no link can lead elsewhere from there but the last one, which is not followed then.

Invariant: what ``open`` gives lies within the bound, whoever changes links and folders meanwhile.
"""

import errno
import os

from batchd.samples.errors import SampleUnreadable
from batchd.storage.open_files import OPEN_FLAGS, check_opened

FOLDERS_MAX = 4096
"""Of a source with more of them, the first ones that are met stay open."""
_FOLDER_FLAGS = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
_HAS_LINKS = -1
"""In place of a folder's descriptor, where files in it are links."""


class Folders:
    """Opens files. Belongs to one reader. ``bound``: a real path that no file may lie outside of; None: any may lie anywhere."""

    def __init__(self, bound: bytes | None) -> None:
        self._bound = bound
        self._open: dict[bytes, int] = {}
        self._has_room = bound is not None

    def open(self, path: bytes) -> int:
        """The descriptor of a file, to read, which is the caller's.

        Raises ``OSError``, and ``SampleUnreadable`` for a file that lies outside.
        """
        folder, _, name = path.rpartition(b"/")
        known = self._open.get(folder)
        if known is not None and known != _HAS_LINKS:
            try:
                return os.open(name, OPEN_FLAGS | os.O_NOFOLLOW, dir_fd=known)
            except OSError as error:  # a link, or there may be another folder by that name now
                os.close(self._open.pop(folder))
                if error.errno == errno.ELOOP:
                    self._open[folder] = known = _HAS_LINKS
        descriptor = os.open(path, OPEN_FLAGS)
        try:
            check_opened(descriptor, self._bound)
            if known != _HAS_LINKS and self._has_room:
                self._keep(folder)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def close(self) -> None:
        """Close the folders."""
        while self._open:
            descriptor = self._open.popitem()[1]
            if descriptor != _HAS_LINKS:
                os.close(descriptor)

    def _keep(self, folder: bytes) -> None:
        """Have a folder open from now on, if it lies within the bound, and there is a descriptor for it."""
        try:
            descriptor = os.open(folder or b"/", _FOLDER_FLAGS)
        except OSError:
            self._has_room = False
            return
        try:
            check_opened(descriptor, self._bound)
        except (OSError, SampleUnreadable):
            os.close(descriptor)
            return
        self._open[folder] = descriptor
        self._has_room = len(self._open) < FOLDERS_MAX
