"""A real server on this machine with the part of Google Cloud Storage that batchd uses.

For tests of sources.

The name of a file is BUCKET/PATH. The server lists a bucket like the XML interface:
?list-type=2&prefix=a/&delimiter=/
"""

from urllib.parse import parse_qs
from xml.sax.saxutils import escape

from support.http_files import FileServer

MODIFIED = "Thu, 01 Jan 2026 00:00:00 GMT"


class GoogleServer(FileServer):
    """Serves ``files`` without credentials."""

    def __init__(self, files: dict[str, bytes] | None = None, port: int = 0) -> None:
        super().__init__(files, port)
        self.headers["Last-Modified"] = MODIFIED

    @property
    def environment(self) -> dict[str, str]:
        """The environment variables that readers need."""
        return {"GOOGLE_BASE_URL": self.url, "GOOGLE_SKIP_SIGNATURE": "true"}

    def find(self, name: str) -> bytes | None:
        """A file, or the entries of a folder of a bucket."""
        bucket, question, query = name.partition("?")
        return self._listed(f"{bucket.rstrip('/')}/", parse_qs(query)) if question else super().find(name)

    def _listed(self, bucket: str, query: dict[str, list[str]]) -> bytes:
        prefix = query.get("prefix", [""])[0]
        found = {
            name.removeprefix(bucket): data for name, data in self.files.items() if name.startswith(bucket + prefix)
        }
        is_flat = "delimiter" not in query
        here = {name: data for name, data in found.items() if is_flat or "/" not in name[len(prefix) :]}
        folders = {prefix + name[len(prefix) :].partition("/")[0] + "/" for name in found.keys() - here.keys()}
        files = "".join(
            f"<Contents><Key>{escape(name)}</Key><LastModified>2026-01-01T00:00:00Z</LastModified>"
            f"<Size>{len(data)}</Size><ETag>{hash(data):x}</ETag></Contents>"
            for name, data in sorted(here.items())
        )
        below = "".join(f"<CommonPrefixes><Prefix>{escape(one)}</Prefix></CommonPrefixes>" for one in sorted(folders))
        return f"<ListBucketResult>{files}{below}</ListBucketResult>".encode()
