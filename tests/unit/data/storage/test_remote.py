"""Failing requests to servers: which are retried, how often, and the final error."""

import io
from collections.abc import Callable
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st
from obstore.exceptions import GenericError

from batchd.data.storage import access
from batchd.data.storage.access import FETCHED_BYTES_MAX, ObjectStream, Storage
from batchd.data.storage.ahead import RequestBudget, Requested
from batchd.data.storage.reader import WHOLE_BYTES_MAX, Extent, RemoteBytes
from batchd.data.storage.values import ObjectUnreadable, StorageLimits, Version, Wanted
from batchd.errors import SourceInvalid
from support.http_files import SECRET, Cut, Fault, FileServer, IgnoreRange, Stall, Status
from support.waiting import PATIENCE_S, wait_until

CONTENT = bytes(range(256)) * 40
TRIES = 3


def read(storage: Storage, web: FileServer, start: int = 5, size: int = 100, name: str = "a") -> bytes:
    """Read some bytes of a file, as a worker does."""
    return bytes(storage.client.read(Wanted(f"{web.url}/{name}", start, size), storage.limits.deadline_s))


@pytest.mark.thorough(after_first=True)
@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (Status(500), "its server answers 500"),
        (Status(503), "its server answers 503"),
        (Status(429), "its server answers 429"),
        (Stall(), "its server does not answer"),
        (Stall(after=7), "its server does not answer"),
        (Cut(after=0), "the connection was closed within the answer"),
        (Cut(after=99), "the connection was closed within the answer"),
    ],
)
def test_what_may_pass_is_asked_again(web: FileServer, fault: Fault, reason: str, storage: Storage) -> None:
    """The configuration sets the number of retries, and the error names it."""
    web.files["a"] = CONTENT
    web.faults["a"] = [fault] * (TRIES - 1)
    assert read(storage, web) == CONTENT[5:105]
    assert [one.span for one in web.asked] == ["bytes=5-104"] * TRIES

    web.faults["a"] = [fault] * TRIES
    with pytest.raises(ObjectUnreadable, match=rf"^{reason} \(asked 3 times\)$"):
        read(storage, web)
    assert len(web.asked) == 2 * TRIES


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (Status(404), r"it is not there \(404\)"),
        (Status(403), r"it may not be read \(403\)"),
        (Status(401), r"the server asks for other credentials \(401\)"),
        (
            IgnoreRange(),
            "its server ignores Range, so no part of a file can be read: use one that knows range requests",
        ),
    ],
)
def test_what_stays_as_it_is_is_asked_once(web: FileServer, fault: Fault, reason: str, storage: Storage) -> None:
    """The error does not repeat the server's own words."""
    web.files["a"] = CONTENT
    web.faults["a"] = [fault]

    with pytest.raises(ObjectUnreadable, match=f"^{reason}$") as problem:
        read(storage, web)
    assert SECRET not in str(problem.value)
    assert len(web.asked) == 1


@pytest.mark.parametrize(
    ("url", "asked", "advice"),
    [
        ("s3://bucket/a", "PUT http://169.254.169.254/latest/api/token", "set AWS_ACCESS_KEY_ID and"),
        ("s3://bucket/a", "GET http://169.254.170.2/v2/credentials", "set AWS_ACCESS_KEY_ID and"),
        (
            "gs://bucket/a",
            "GET http://169.254.169.254/computeMetadata/v1/instance",
            "set GOOGLE_APPLICATION_CREDENTIALS,",
        ),
        (
            "gs://bucket/a",
            "GET http://metadata.google.internal/computeMetadata/v1/",
            "set GOOGLE_APPLICATION_CREDENTIALS,",
        ),
    ],
)
def test_without_credentials_the_variables_are_named(storage: Storage, monkeypatch, url, asked, advice) -> None:
    """A machine of the cloud's own has some: what obstore says then names only where it asked."""

    def fails(*_arguments: object) -> None:
        raise GenericError(f"Generic error: Error performing {asked} in 5.0 s - HTTP error: error sending request")

    monkeypatch.setattr("batchd.data.storage.objects.obstore.head", fails)
    with pytest.raises(
        ObjectUnreadable, match=f"^there are no credentials for it .*, and this machine has none: {advice}"
    ):
        storage.client.head(url, storage.limits.deadline_s)


def test_hosts_that_are_not_there_are_said_to_be(web: FileServer, storage: Storage) -> None:
    """The host has no address, no listener or no TLS, or the name is invalid for an object."""
    storage.limits = StorageLimits(timeout_s=PATIENCE_S, retries=0, deadline_s=PATIENCE_S)
    urls = [
        "http://nobody.invalid/a",
        "http://127.0.0.1:1/a",
        web.url.replace("http:", "https:") + "/a",
        f"{web.url}/a/../b",
    ]

    reasons = [str(reason) for reason in storage.client.heads(urls)]
    assert reasons == [
        "its host has no address that could be found (DNS)",
        "no server listens at its host and port",
        "its server does not speak TLS; is it http?",
        "its name is none that an object can have",
    ]


def test_two_storages_of_one_process_share_nothing(web: FileServer, storage: Storage) -> None:
    """Each has its own limits, deadlines and connections."""
    web.files["a"] = CONTENT
    with Storage(StorageLimits(deadline_s=0.0)) as other:
        other.begin_sample()
        assert other.sample_s <= 0 < storage.sample_s
        other.client.head(f"{web.url}/a")
    assert read(storage, web) == CONTENT[5:105]


def test_a_deadline_ends_all_that_is_asked_again(web: FileServer, storage: Storage) -> None:
    """The deadline includes requests that wait for others."""
    web.files["a"] = CONTENT
    web.faults["*"] = [Stall()] * 100
    wanted = [Wanted(f"{web.url}/a", start, 10) for start in range(40)]

    reasons = [str(reason) for reason in storage.client.read_many(wanted, 0.4)]
    assert all(reason.startswith("it was not read within 0.4 s") for reason in reasons)
    assert "it was not read within 0.4 s: its server does not answer" in "\n".join(reasons)
    assert len(web.asked) <= 16


def test_a_server_that_is_gone_is_left_alone_for_a_moment(web: FileServer, storage: Storage) -> None:
    """Thirty substitutes must not each wait as long. A successful answer resets the count."""
    web.files.update(a=CONTENT, b=CONTENT)
    web.faults["a"] = [Status(500)] * 5 * TRIES
    for name in "aabaa":
        if name == "b":
            read(storage, web, name="b")
        else:
            with pytest.raises(ObjectUnreadable, match=r"^its server answers 500 \(asked 3 times\)$"):
                read(storage, web)
    with pytest.raises(ObjectUnreadable, match="asked 3 times"):
        read(storage, web)
    asked = len(web.asked)
    with pytest.raises(
        ObjectUnreadable, match=r"^its server answers 500 \(asked 3 times\); it is left alone for a moment$"
    ):
        read(storage, web)
    assert len(web.asked) == asked == 5 * TRIES + 1

    def is_well() -> bool:
        with suppress(ObjectUnreadable):
            return read(storage, web) == CONTENT[5:105]
        return False

    wait_until(is_well, "the server is asked again")


def test_requests_with_little_time_left_do_not_tell_that_a_server_is_gone(web: FileServer, storage: Storage) -> None:
    """The last request of a sample may have little time; other samples have their full time."""
    web.files["a"] = CONTENT
    web.faults["a"] = [Stall()] * 5
    for _ in range(5):
        with pytest.raises(ObjectUnreadable, match=r"^it was not read within 0.02 s"):
            storage.client.read(Wanted(f"{web.url}/a", 5, 100), 0.02)

    web.faults["a"] = []
    assert read(storage, web) == CONTENT[5:105]


def test_a_short_deadline_for_every_sample_tells_that_a_server_is_gone(web: FileServer, storage: Storage) -> None:
    """A short deadline counts as the usual one if every sample has it."""
    storage.limits = StorageLimits(timeout_s=5.0, retries=0, deadline_s=0.2)
    web.files["a"] = CONTENT
    web.faults["a"] = [Stall()] * 5
    reasons = []
    for _ in range(5):
        with pytest.raises(ObjectUnreadable) as problem:
            read(storage, web)
        reasons.append(str(problem.value))

    assert [reason.endswith("it is left alone for a moment") for reason in reasons] == [False] * 3 + [True] * 2


@pytest.mark.parametrize("honours_if_match", [True, False])
def test_an_object_of_another_version_is_refused(web: FileServer, honours_if_match: bool, storage: Storage) -> None:
    """The server rejects it, or batchd does where the server ignores the condition."""
    web.files["a"] = CONTENT
    web.honours_if_match = honours_if_match
    version = storage.client.head(f"{web.url}/a")
    wanted = Wanted(f"{web.url}/a", 0, 3, version)
    assert bytes(storage.client.read(wanted)) == CONTENT[:3]

    web.files["a"] = CONTENT[::-1]
    with pytest.raises(ObjectUnreadable, match=r"^it has changed since the source was scanned"):
        storage.client.read(wanted)


def test_versions_without_etags_differ_by_size_and_time() -> None:
    """An ETag takes precedence over a time."""
    one = Version(10, None, 5)

    assert one.differs_from(Version(11, None, 5)) == "it had 10 bytes, and has 11"
    assert one.differs_from(Version(10, None, 6)) == "it was modified"
    assert one.differs_from(Version(10, '"x"', 5)) == ""
    assert Version(10, '"x"', 5).differs_from(Version(10, '"x"', 6)) == ""
    assert Version(10, '"x"', 5).differs_from(Version(10, '"y"', 5)) == "its ETag is another"


def test_an_object_that_is_too_long_is_not_downloaded(web: FileServer, storage: Storage) -> None:
    """The server sends the length before the first byte."""
    web.files["a"] = CONTENT
    web.faults["a"] = [Stall(after=0)]

    with pytest.raises(ObjectUnreadable, match="has 10240 bytes, more than max_bytes = 9"):
        storage.client.read(Wanted(f"{web.url}/a", bytes_max=9))


def test_bytes_behind_the_end_are_missing(web: FileServer, storage: Storage) -> None:
    """Some of the bytes or all of them may be missing."""
    web.files["a"] = CONTENT

    assert read(storage, web, len(CONTENT) - 3, 10) == CONTENT[-3:]
    with pytest.raises(ObjectUnreadable, match=r"it ends before the bytes that were asked for \(416\)"):
        read(storage, web, len(CONTENT) + 3, 10)


def test_long_ranges_are_read_in_parts_at_once(
    web: FileServer, monkeypatch: pytest.MonkeyPatch, storage: Storage
) -> None:
    """Each part may fail and be retried by itself."""
    monkeypatch.setattr("batchd.data.storage.objects.BLOCK_BYTES", 1000)
    web.files["a"] = CONTENT
    web.faults["a"] = [Status(500), Cut(3)]

    assert read(storage, web, 10, 9999) == CONTENT[10 : 10 + 9999]
    assert len(web.asked) == 10 + 2


class TestReadingAhead:
    """Requests that a worker sends at the start of a chunk."""

    def extents(self, web: FileServer, *places: tuple[int, int], name: str = "a") -> list[Extent]:
        return [Extent(f"{web.url}/{name}".encode(), start, size) for start, size in places]

    def test_near_extents_are_one_request_and_nothing_is_asked_twice(self, web: FileServer, storage: Storage) -> None:
        """Distant extents, and extents of other files, need separate requests."""
        web.files.update(a=bytes(range(256)) * 4096, b=CONTENT)
        wanted = [
            *self.extents(web, (500, 20), (0, 10), (900_000, 7), (0, 10), (505, 5)),
            *self.extents(web, (3, 4), name="b"),
        ]
        remote = RemoteBytes(storage, b"http://", {})
        remote.fetch(wanted)
        assert storage.requested.wait(10)
        assert sorted(one.span or "" for one in web.asked) == ["bytes=0-519", "bytes=3-6", "bytes=900000-900006"]

        for one in wanted:
            assert one.size is not None
            content = web.files[one.path.decode()[-1]]
            assert bytes(remote.read(one, 1 << 20)) == content[one.start : one.start + one.size]
        assert len(web.asked) == 3

    def test_whole_objects_are_fetched_at_once_and_long_ones_later(self, web: FileServer, storage: Storage) -> None:
        """A long object would delay the others and fill the memory."""
        web.files.update(a=CONTENT, b=bytes(WHOLE_BYTES_MAX + 1))
        remote = RemoteBytes(storage, b"http://", {})
        both = [Extent(f"{web.url}/{name}".encode(), 0, None) for name in "ab"]
        remote.fetch(both)

        assert [len(remote.read(one, 1 << 30)) for one in both] == [len(CONTENT), WHOLE_BYTES_MAX + 1]
        assert [one.name for one in web.asked].count("a") == 1

    def test_what_fails_is_the_reason_of_its_samples_alone(self, web: FileServer, storage: Storage) -> None:
        """The failed request is not repeated for each of its samples."""
        web.files["a"] = CONTENT
        web.faults["b"] = [Status(404)]
        remote = RemoteBytes(storage, b"http://", {})
        good, bad = [*self.extents(web, (0, 3)), *self.extents(web, (0, 3), name="b")]
        remote.fetch([good, bad])

        assert bytes(remote.read(good, 10)) == CONTENT[:3]
        with pytest.raises(ObjectUnreadable, match="404"):
            remote.read(bad, 10)
        assert len(web.asked) == 2

    def test_there_is_a_limit_to_what_is_fetched(
        self, web: FileServer, monkeypatch: pytest.MonkeyPatch, storage: Storage
    ) -> None:
        """The rest is read on demand, and what is forgotten is read again."""
        assert FETCHED_BYTES_MAX < 1 << 26
        monkeypatch.setattr("batchd.data.storage.reader.GAP_BYTES_MAX", 0)
        web.files["a"] = bytes(100 * 1000)
        wanted = self.extents(web, *[(1000 * number, 500) for number in range(100)])
        remote, room = RemoteBytes(storage, b"http://", {}), RequestBudget(1000)
        requested = storage.requested = Requested(room)
        remote.fetch(wanted)
        assert requested.wait(10)
        assert len(web.asked) == 2
        assert not requested.is_whole

        assert all(len(remote.read(one, 1 << 20)) == 500 for one in wanted)
        assert len(web.asked) == 100
        requested.forget()
        assert room.has(1000)
        for one in wanted:
            remote.read(one, 1 << 20)
        assert len(web.asked) == 200

    def test_all_that_is_read_ahead_together_takes_no_longer_than_one_sample(
        self, web: FileServer, storage: Storage
    ) -> None:
        """A worker with several sources could count as hung. The rest is read on demand."""
        web.files["a"] = CONTENT
        storage.limits = StorageLimits(timeout_s=0.2, retries=0, deadline_s=0.0)
        storage.begin_reading_ahead()
        storage.limits = StorageLimits(timeout_s=1.0, retries=0, deadline_s=5.0)
        remote, (wanted,) = RemoteBytes(storage, b"http://", {}), self.extents(web, (0, 3))
        remote.fetch([wanted])
        assert web.asked == []

        assert bytes(remote.read(wanted, 10)) == CONTENT[:3]
        requested = storage.begin_reading_ahead()
        remote.fetch([wanted])
        assert requested.wait(10)
        assert len(web.asked) == 2

    def test_chunk_after_chunk_uses_the_same_connections(self, web: FileServer, storage: Storage) -> None:
        """This holds for any remaining time of a chunk when a request starts."""
        web.files["a"] = CONTENT
        remote = RemoteBytes(storage, b"http://", {})
        for number in range(30):
            requested = storage.begin_reading_ahead()
            remote.fetch([Extent(f"{web.url}/a".encode(), number, 10)])
            assert requested.wait(10)
        assert len(web.asked) == 30
        assert web.connections < 10  # a connection becomes free a moment after its answer was read

    def test_what_is_too_long_to_be_read_ahead_is_not_asked_for(self, web: FileServer, storage: Storage) -> None:
        """It is requested when a sample needs it."""
        web.files["a"] = bytes(WHOLE_BYTES_MAX + 1)
        remote, extent = RemoteBytes(storage, b"http://", {}), Extent(f"{web.url}/a".encode(), 0, WHOLE_BYTES_MAX + 1)
        remote.fetch([extent])
        assert web.asked == []
        assert len(remote.read(extent, 1 << 30)) == WHOLE_BYTES_MAX + 1

    def test_all_that_one_sample_needs_takes_no_longer_than_it_may(self, web: FileServer, storage: Storage) -> None:
        """The limit covers any number of requests: a later request has the time that is left."""
        web.files["a"] = CONTENT
        remote = RemoteBytes(storage, b"http://", {})
        storage.begin_sample()
        assert len(remote.read(Extent(f"{web.url}/a".encode(), 0, 5), 5)) == 5
        patience = storage.limits
        storage.limits = patience._replace(deadline_s=0.0)
        storage.begin_sample()
        storage.limits = patience
        with pytest.raises(ObjectUnreadable, match="it was not read within 10 s"):
            remote.read(Extent(f"{web.url}/a".encode(), 5, 5), 5)
        assert len(web.asked) == 1

    def test_a_name_that_is_no_text_is_a_bad_one(self, storage: Storage) -> None:
        """No server has an object with such a name."""
        remote = RemoteBytes(storage, b"http://", {})
        odd = Extent(b"http://127.0.0.1:1/\xff", 0, 3)
        remote.fetch([odd])
        with pytest.raises(ObjectUnreadable, match="its name is not UTF-8"):
            remote.read(odd, 10)


def slices(content: bytes, asked: list[tuple[int, int]]) -> Callable[[int, int], memoryview]:
    """Read ranges of bytes, and record them."""

    def read_range(start: int, size: int) -> memoryview:
        asked.append((start, size))
        return memoryview(content)[start : start + size]

    return read_range


@given(
    st.lists(st.tuples(st.sampled_from(["seek", "end", "read", "expect"]), st.integers(0, 5000)), max_size=30),
    st.integers(1, 64),
)
def test_a_stream_reads_what_a_file_reads(does: list[tuple[str, int]], first: int) -> None:
    """This holds for any seek position, block size and cached part."""
    content = CONTENT[:4321]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(access, "FIRST_BYTES", first)
        patch.setattr(access, "LENGTH_MAX", 16 * first)
        patch.setattr(access, "GAP_BYTES_MAX", 100)
        raw = ObjectStream("a", len(content), slices(content, []))
        stream, file = io.BufferedReader(raw, 32), io.BytesIO(content)
        for what, number in does:
            if what == "read":
                assert stream.read(number) == file.read(number)
            elif what == "expect":
                raw.expect(number, number)
            else:
                offset, whence = (number, io.SEEK_SET) if what == "seek" else (-min(number, len(content)), io.SEEK_END)
                assert stream.seek(offset, whence) == file.seek(offset, whence)


def test_a_stream_reads_on_in_growing_blocks_and_here_and_there_in_small_ones() -> None:
    """A gap that is shorter than the wait for an answer is read and skipped."""
    content, asked = bytes(64 << 20), list[tuple[int, int]]()
    stream = ObjectStream("a", len(content), slices(content, asked))
    while stream.read(1 << 20):
        pass
    assert len(asked) <= 8
    assert max(size for _, size in asked) == access.LENGTH_MAX

    asked.clear()
    for start in range(0, len(content), 8 << 20):
        stream.seek(start)
        stream.read(512)
    assert sum(size for _, size in asked) <= 9 * access.FIRST_BYTES


def test_a_stream_that_cannot_be_read_says_where() -> None:
    """This includes an answer with fewer bytes than before."""

    def fails(_start: int, _size: int) -> memoryview:
        raise ObjectUnreadable("its server answers 500")

    stream = ObjectStream("http://h/a", 10, fails)
    stream.seek(7)
    with pytest.raises(SourceInvalid, match=r"^http://h/a cannot be read at byte 7: its server answers 500$"):
        stream.read(1)
    with pytest.raises(SourceInvalid, match=r"^http://h/a ends at byte 3 of 10: it has changed$"):
        ObjectStream("http://h/a", 10, lambda _start, _size: memoryview(b"abc")).read(5)
