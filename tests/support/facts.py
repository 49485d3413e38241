"""What is known of media files, in a dictionary instead of a cache."""


class Facts:
    """See ``kept_files.FileFacts``. ``records``: by their keys."""

    def __init__(self) -> None:
        self.records: dict[bytes, bytes] = {}

    def find(self, key: bytes) -> memoryview | None:
        """The record of a key."""
        return memoryview(self.records[key]) if key in self.records else None

    def keep(self, key: bytes, record: bytes) -> None:
        """Keep a record."""
        self.records[key] = record
