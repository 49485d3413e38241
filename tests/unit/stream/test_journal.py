"""The journal of a push stream: bounded, whole records only, one writer."""

import itertools
import json
import os
from contextlib import closing
from pathlib import Path
from unittest.mock import Mock
from zlib import crc32

import numpy as np
import pytest
from structlog.testing import capture_logs

from batchd.errors import BatchdError
from batchd.stream.cache_file import CacheUnusable
from batchd.stream.journal import HEADER_BYTES, MAGIC, Journal, JournalSpec, read_journal
from batchd_wire.fields import CHECKSUM, Field, place_fields
from batchd_wire.position import Position

ROWS = 2
RECORD_BYTES = 4 + 4 * 8 + 64 + ROWS * (8 + 8 + 4)
"""Its head, and of each row the number of its push, the label and the checksum."""
LAYOUT = place_fields([Field("image", "uint8", (8, 16)), Field("label", "int64", ()), CHECKSUM], ROWS)


@pytest.fixture
def slot():
    """Make the memory of a batch with the labels 5 and 6, and checksums 7 and 8."""
    descriptor = os.memfd_create("batchd-test")
    os.ftruncate(descriptor, LAYOUT.slot_bytes)
    _image, label, sums = LAYOUT.fields
    os.pwrite(descriptor, np.array([5, 6], np.int64).tobytes(), label.offset)
    os.pwrite(descriptor, np.array([7, 8], np.uint32).tobytes(), sums.offset)
    yield descriptor
    os.close(descriptor)


@pytest.fixture
def open_journal(tmp_path):
    """Open the journal of a file, for a context, with room for so many batches."""

    def open_it(places=3, layout=LAYOUT, before=None):
        spec = JournalSpec(str(tmp_path / "a.journal"), HEADER_BYTES + places * RECORD_BYTES)
        return closing(Journal(spec, layout, "f" * 32, before))

    return open_it


def _fill(journal, slot, steps):
    for step in steps:
        journal.add(Position(1, step), (step, step + 1), slot)


def _steps(journal):
    return read_journal(journal.spec.path).records["step"].tolist()


def test_a_record_has_the_small_fields_of_a_batch_and_its_checksums(open_journal, slot):
    """Fields with large rows are left out."""
    with open_journal() as journal:
        _fill(journal, slot, [9])
    (record,) = read_journal(journal.spec.path).records
    assert (record["epoch"], record["step"], record["pushed"].tolist()) == (1, 9, [9, 10])
    assert record["row label"].tolist() == [5, 6]
    assert record["row #crc32"].tolist() == [7, 8]
    assert "row image" not in record.dtype.names


def test_the_oldest_records_make_room_and_the_file_keeps_its_size(open_journal, slot):
    """Of five batches, the last three are there, in the order of their delivery."""
    with open_journal() as journal:
        size = Path(journal.spec.path).stat().st_size
        _fill(journal, slot, range(5))
    assert _steps(journal) == [2, 3, 4]
    assert Path(journal.spec.path).stat().st_size == size == HEADER_BYTES + 3 * RECORD_BYTES


def test_the_next_daemon_continues_with_the_same_or_another_size(open_journal, slot):
    """A smaller journal keeps the newest records, a larger one all of them."""
    for places, steps, kept in (
        (3, [0, 1], [0, 1]),
        (3, [2, 3], [1, 2, 3]),
        (2, [4], [3, 4]),
        (4, [5, 6], [3, 4, 5, 6]),
    ):
        with open_journal(places) as journal:
            _fill(journal, slot, steps)
        assert _steps(journal) == kept


def test_a_torn_record_is_left_out(open_journal, slot):
    """A daemon that died while it wrote, or a disk, has damaged the record in the first place."""
    with open_journal() as journal:
        _fill(journal, slot, range(3))
        with Path(journal.spec.path).open("r+b") as file:
            file.seek(HEADER_BYTES + 40)
            file.write(b"torn")
        assert _steps(journal) == [0, 1]


def test_a_batch_with_other_fields_begins_the_journal_again(open_journal, slot):
    """Records of another form cannot be in one file."""
    with open_journal() as journal:
        _fill(journal, slot, range(2))
    with open_journal(5, place_fields([Field("weight", "float32", ()), CHECKSUM], ROWS)) as changed:
        assert _steps(changed) == []


def test_a_second_daemon_is_refused_and_a_reload_takes_the_file_over(open_journal, slot):
    """The lock ends with the last journal of its process."""
    with open_journal() as journal:
        with pytest.raises(
            CacheUnusable, match=r"another daemon writes .*another cache_dir, or the stream another name"
        ):
            open_journal()
        _fill(journal, slot, [0])
        later = open_journal(before=journal)
    with later as continued:
        _fill(continued, slot, [1])
        with pytest.raises(CacheUnusable, match="another daemon writes"):
            open_journal()
        assert _steps(continued) == [0, 1]


def test_files_that_are_no_journal_and_sizes_without_room_are_errors(open_journal, tmp_path):
    """Each error names the file or the size."""
    with pytest.raises(CacheUnusable, match=f"has no room for one batch: it needs {HEADER_BYTES + RECORD_BYTES} bytes"):
        open_journal(0)
    (tmp_path / "b.journal").write_bytes(b"something else" * 1000)
    with pytest.raises(BatchdError, match=r"b\.journal is damaged, or no journal"):
        read_journal(tmp_path / "b.journal")
    with pytest.raises(BatchdError, match=r"c\.journal cannot be read: No such file"):
        read_journal(tmp_path / "c.journal")


def test_a_disk_that_fails_costs_records_and_no_batch(open_journal, slot, monkeypatch):
    """The trainer gets the batch, the log counts what is missing, and the next record is there."""
    with open_journal() as journal, capture_logs() as logged:
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", Mock(side_effect=OSError(5, "Input/output error")))
            _fill(journal, slot, [0])
        _fill(journal, slot, [1])
    assert _steps(journal) == [1]
    assert [(one["event"], one["missing"]) for one in logged] == [("a batch is missing in the journal", 1)]


def test_what_a_batch_has_that_no_record_can_hold_costs_the_record_alone(open_journal, slot):
    """A number beyond the field, another count of rows, a slot that is cut.

    The next one is there.
    """
    with open_journal() as journal, capture_logs() as logged:
        journal.add(Position(1 << 63, 0), (1, 2), slot)
        journal.add(Position(0, 0), (1, 2, 3), slot)
        journal.add(Position(0, 0), (1, 1 << 64), slot)
        with Path(os.devnull).open("rb") as cut:
            journal.add(Position(0, 0), (1, 2), cut.fileno())
        _fill(journal, slot, [1])
    assert _steps(journal) == [1]
    assert journal._lost == 4
    assert [one["event"] for one in logged] == ["a batch is missing in the journal"]


def test_a_short_write_is_a_missing_record(open_journal, slot, monkeypatch):
    """A full disk, or a limit of the file's size, takes a part of a record."""
    with open_journal() as journal, capture_logs() as logged:
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", lambda _file, data, _at: len(data) - 1)
            _fill(journal, slot, [0])
        _fill(journal, slot, [1])
    assert _steps(journal) == [1]
    assert logged[0]["reason"] == "No space left on device"


def _reread(content, path):
    """Read bytes as a journal; None if they are damaged, as the error says."""
    path.write_bytes(content)
    try:
        return read_journal(path)
    except BatchdError as error:
        assert "is damaged, or no journal: remove it" in str(error)  # noqa: PT017  either outcome is right
        return None


@pytest.mark.thorough
def test_each_cut_and_each_flipped_byte_is_damage_or_leaves_whole_records(open_journal, slot, tmp_path):
    """No content of a file raises anything else."""
    with open_journal() as journal:
        _fill(journal, slot, range(3))
    content = Path(journal.spec.path).read_bytes()
    meaningful = [*range(content.index(b"\0")), *range(HEADER_BYTES, len(content))]
    for at, value in itertools.product(meaningful, (1, 0xFF)):
        flipped = bytearray(content)
        flipped[at] ^= value
        found = _reread(flipped, tmp_path / "damaged")
        assert at < HEADER_BYTES or (found is not None and len(found.records) == 2)
    for length in (*range(0, HEADER_BYTES, 7), *range(HEADER_BYTES, len(content))):
        _reread(content[:length], tmp_path / "damaged")


def _of_number(content, number):
    """The journal with another number in its first record, and the right checksum."""
    changed = bytearray(content)
    record = changed[HEADER_BYTES : HEADER_BYTES + RECORD_BYTES]
    record[4:12] = number.to_bytes(8, "little")
    record[:4] = crc32(record[4:]).to_bytes(4, "little")
    changed[HEADER_BYTES : HEADER_BYTES + RECORD_BYTES] = record
    return changed


@pytest.mark.parametrize("number", [1 << 63, (1 << 64) - 1])
def test_a_number_beyond_all_others_is_damage_and_the_journal_goes_on(open_journal, slot, number):
    """The next number would fit into no record, which must not end the daemon."""
    with open_journal() as journal:
        _fill(journal, slot, range(3))
    path = Path(journal.spec.path)
    path.write_bytes(_of_number(path.read_bytes(), number))
    with open_journal() as journal:
        _fill(journal, slot, [3])
    assert 3 in _steps(journal)


HEAD_JSON = [["crc", "<u4"], ["number", "<u8"], ["time_ns", "<i8"], ["epoch", "<i8"], ["step", "<i8"]]


@pytest.mark.parametrize(
    "header",
    [
        "[" * 2_000 + "]" * 2_000,
        "[[" + "[" * 2_000,
        json.dumps([[], 1]),
        json.dumps([[["number", "<u8"]], 1]),
        json.dumps([[["number", "(2,"]], 1]),
        json.dumps([[*HEAD_JSON, ["fingerprint", "|S64"], ["pushed", "<u8", [0]]], 1 << 70]),
        json.dumps([[*HEAD_JSON, ["fingerprint", "|S64"], ["pushed", "<u8", [1 << 40]]], 1]),
        json.dumps([[*HEAD_JSON, ["fingerprint", "|S64"], ["pushed", "<u8", [2]], ["row x", "|O8"]], 1]),
        json.dumps([[*HEAD_JSON, ["fingerprint", "|S64"], ["pushed", "<u8", [2]], *[["row x", "<u4"]] * 2], 1]),
        json.dumps([[["number", "<u8", 5]], 1]),
        json.dumps({"a": 1}),
        json.dumps([5, 5]),
        "1" * 4_000,
        "",
    ],
)
def test_a_header_that_describes_no_records_is_damage(header, tmp_path):
    """NumPy evaluates texts, divides by sizes and recurses.

    It sees what a journal has, or nothing.
    """
    content = MAGIC + header.encode().ljust(HEADER_BYTES - len(MAGIC), b"\0") + bytes(1_000)

    assert _reread(content, tmp_path / "damaged") is None


def _linked(path):
    path.rename(path.with_suffix(".other"))
    path.symlink_to(path.with_suffix(".other"))


def _piped(path):
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda path: path.chmod(0o666), "can be written by other users, so its content cannot be trusted: remove it"),
        (_linked, "is a link: remove it"),
        (_piped, "is no regular file"),
    ],
    ids=["mode", "link", "pipe"],
)
def test_a_file_that_others_may_have_written_is_refused(open_journal, change, reason):
    """As a cache: one rule for every file of the folder."""
    with open_journal() as journal:
        path = Path(journal.spec.path)
    change(path)
    with pytest.raises(CacheUnusable, match=reason):
        open_journal()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_a_file_of_another_user_is_refused(open_journal):
    """It names the user, and what to do."""
    with open_journal() as journal:
        os.chown(journal.spec.path, 1234, 1234)
    with pytest.raises(CacheUnusable, match="belongs to user 1234, so its content cannot be trusted"):
        open_journal()
