"""What a program has once: no copies and no pickles of batches, streams and connections. Runs in the trainer.

A copy would share the lease or the claim of the original: to release one would let the daemon write
under the other.
"""

from typing import ClassVar, NoReturn, SupportsIndex

from batchd_client.errors import CopyRefused


class Unique:
    """Refuses ``copy.copy``, ``copy.deepcopy`` and pickling; ``INSTEAD`` says what to do."""

    __slots__ = ()
    INSTEAD: ClassVar[str]

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        """Raise ``CopyRefused``."""
        raise CopyRefused(f"{self!r} cannot be copied or pickled: {self.INSTEAD}")
