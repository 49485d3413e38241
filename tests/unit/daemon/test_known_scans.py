"""Indexes of earlier definitions: for whom, and as long as nothing has changed."""

import os

import pytest

from batchd.daemon.derive import known as known_module
from batchd.daemon.derive.known import KnownScans, OwnScans, owner_of
from batchd.daemon.identity import Identity
from batchd.data.sources import scan as scan_module
from batchd.data.sources.files.options import FolderSource
from batchd.data.sources.scan import scan_source
from batchd.data.storage.access import Storage
from support.source_files import nothing

ANNA = owner_of(Identity(51_234, (51_234,)))


@pytest.fixture
def it(tmp_path, monkeypatch):
    """Return what scans a folder as an owner, and says whether it had to."""
    monkeypatch.setattr(known_module, "SETTLED_NS", -(10**12))
    (tmp_path / "cat").mkdir()
    (tmp_path / "cat" / "1.jpg").touch()
    scans, known = [], KnownScans()
    kind_of = scan_module.kind_of
    monkeypatch.setattr(scan_module, "kind_of", lambda source: scans.append(source) or kind_of(source))

    def scanned(owner=ANNA, folder=tmp_path):
        own = OwnScans(known.of(owner))
        index = scan_source(FolderSource(path=folder), nothing, own, Storage())
        served = index.to_memfd()
        found = own.found(served)
        os.close(served)
        if found is not None:
            known.add(owner, *found)
        return index.samples, index.digest, found is not None

    yield scanned, known, tmp_path
    known.close()


def test_the_second_definition_of_one_owner_scans_nothing(it):
    """Until a file comes: then it is scanned, and the new index is kept instead."""
    scanned, known, folder = it
    samples, digest, is_new = scanned()
    assert (samples, is_new) == (1, True)
    assert scanned() == (1, digest, False)
    (folder / "cat" / "2.jpg").touch()
    assert scanned()[::2] == (2, True)
    assert scanned()[::2] == (2, False)
    assert len(known.of(ANNA)) == 1


def test_what_one_has_scanned_is_not_for_another_nor_for_other_groups(it):
    """Another one may not list the same folders; and a fork keeps those of its owner alone."""
    scanned, known, _folder = it
    scanned()
    others = [Identity(51_235, (51_235,)), Identity(51_234, (51_234, 51_300)), Identity(key="51234", public="p")]
    for other in map(owner_of, others):
        assert scanned(other)[2]
    descriptors = [scan.samples for owner in map(owner_of, others) for scan in known.of(owner).values()]
    known.close(but=ANNA)
    for descriptor in descriptors:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)
    assert not scanned()[2]


def test_memory_that_is_no_index_costs_a_scan(it):
    """A fork that was taken over may have sent it."""
    scanned, known, _folder = it
    whole = scanned()
    (scan,) = known.of(ANNA).values()
    os.ftruncate(scan.witnesses, 3)
    assert scanned() == whole
    (scan,) = known.of(ANNA).values()
    os.dup2(scan.witnesses, scan.samples)
    assert scanned() == whole


def test_of_too_many_the_owner_with_the_most_loses_its_oldest(it, monkeypatch):
    """One who defines much does not cost others a scan."""
    scanned, known, folder = it
    other = owner_of(Identity(key="other", public="p"))
    theirs, *folders = (folder / "sets" / str(number) for number in range(4))
    for one in (theirs, *folders):
        (one / "cat").mkdir(parents=True)
        (one / "cat" / "1.jpg").touch()
    scanned(other, theirs)
    (one,) = known.of(other).values()
    monkeypatch.setattr(known_module, "BYTES_MAX", 7 * one.size_bytes // 2)
    assert [scanned(folder=one)[2] for one in folders] == [True] * 3
    assert not scanned(other, theirs)[2]
    assert [scanned(folder=one)[2] for one in reversed(folders)] == [False, False, True]
    monkeypatch.setattr(known_module, "BYTES_MAX", 1 << 30)
    monkeypatch.setattr(known_module, "SCANS_MAX", 2)
    assert scanned(folder=folder / "sets")[2]
    assert (len(known.of(ANNA)), len(known.of(other))) == (1, 1)
    monkeypatch.setattr(known_module, "SCANS_MAX", 1)
    assert scanned(folder=folder / "sets")[2] is False
    assert scanned(folder=folder / "sets" / "1")[2]
    assert len(known.of(ANNA)) + len(known.of(other)) == 1
