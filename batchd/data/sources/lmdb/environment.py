"""An LMDB database, open for reading. Daemon (in a process of its own) and workers.

The library maps the whole file and reads from memory: a file that is cut ends the process with
SIGBUS. So the length of the file is compared with the length that the database needs, when it is
opened and before each record.

Invariant: a process has a database open once, as the library demands, however many streams read it;
and never across a fork.
"""

import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import lmdb

from batchd.data.samples.errors import SampleUnreadable
from batchd.data.storage.paths import open_regular
from batchd.errors import SourceInvalid

DATA_FILE = "data.mdb"


class Environment:
    """One state of a database, read-only: later writes of other processes are not seen."""

    _opened: dict[tuple[int, int], Self] = {}  # noqa: RUF012  by device and inode, of this process

    def __init__(self, path: Path) -> None:
        self._users = 0
        with ExitStack() as where_it_fails:
            self._descriptor = os.open(data_file(path), os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            where_it_fails.callback(os.close, self._descriptor)
            self._env = lmdb.open(
                str(path), subdir=path.is_dir(), readonly=True, create=False, lock=False, readahead=False, max_dbs=1
            )
            where_it_fails.callback(self._env.close)
            self.bytes_needed = (self._env.info()["last_pgno"] + 1) * self._env.stat()["psize"]
            self._check_length()
            self.transaction: Any = self._env.begin(buffers=True)
            if self._env.open_db(None, txn=self.transaction).flags()["dupsort"]:
                raise SampleUnreadable("has keys with several records (dupsort), of which only one could be read")
            where_it_fails.pop_all()

    @classmethod
    def of(cls, path: Path) -> Self:
        """The database at a path, to close each time. Raises ``SampleUnreadable``, ``OSError``."""
        try:
            descriptor = open_regular(str(data_file(path)), os.O_RDONLY)
            status = os.fstat(descriptor)
            os.close(descriptor)
            if not status.st_size:
                raise SampleUnreadable("is empty: LMDB writes at least two pages")
            identity = (status.st_dev, status.st_ino)
            one = cls._opened.get(identity)
            if one is None:
                one = cls._opened[identity] = cls(path)
        except SourceInvalid as error:
            raise SampleUnreadable(str(error)) from None
        except lmdb.Error as error:
            size, problem = data_file(path).stat().st_size, str(error).removeprefix(f"{path}: ")
            raise SampleUnreadable(f"is not an LMDB database, or is damaged ({size} bytes): {problem}") from None
        one._users += 1
        return one

    def get(self, key: bytes) -> memoryview | None:
        """The record under a key, as long as the database is open. Raises ``SampleUnreadable``."""
        self._check_length()
        try:
            value: memoryview | None = self.transaction.get(key)
        except lmdb.Error as error:
            raise SampleUnreadable(f"the database is damaged: {error}") from None
        return value

    def is_database(self, key: bytes) -> bool:
        """True if a key is the name of a database in this one, and has no record."""
        try:
            self._env.open_db(key, txn=self.transaction, create=False)
        except lmdb.Error:
            return False
        return True

    def close(self) -> None:
        """Close it, where this was the last user."""
        self._users -= 1
        if self._users:
            return
        for identity in [identity for identity, one in self._opened.items() if one is self]:
            del self._opened[identity]
        self.transaction.abort()
        self._env.close()
        os.close(self._descriptor)

    def _check_length(self) -> None:
        size = os.fstat(self._descriptor).st_size
        if size < self.bytes_needed:
            raise SampleUnreadable(f"the database is cut: it has {size} bytes, and its pages need {self.bytes_needed}")


def data_file(path: Path) -> Path:
    """The file that holds the records."""
    return path / DATA_FILE if path.is_dir() else path
