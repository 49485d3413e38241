"""The usual headers of tar files are read as tarfile reads them, and all others by tarfile."""

import io
import random
import tarfile
from pathlib import Path

import pytest

from batchd.data.sources.webdataset import scan
from batchd.data.sources.webdataset.scan import plain_member
from batchd.data.storage.survey import Survey
from batchd.errors import SourceInvalid
from support.source_files import nothing

FORMATS = {"ustar": tarfile.USTAR_FORMAT, "gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT}
LONG = "a/" * 60 + "file.jpg"
VERY_LONG = "b" * 300 + ".jpg"


def member(name: str, size: int = 3, **changes: object) -> tuple[tarfile.TarInfo, bytes]:
    """A member of ``size`` bytes, with other attributes changed."""
    info = tarfile.TarInfo(name)
    info.size = size
    for attribute, value in changes.items():
        setattr(info, attribute, value)
    return info, bytes(size)


USUAL = [
    member("1.jpg"),
    member("a/b/2.png", 0),
    member("a/b/3.x", 512),
    member("4", 513, mtime=7),
    member("." + "5.jpg"),
    member("6.jpg", uid=1000, gid=100, uname="somebody", mode=0o777),
]
UNUSUAL = [
    member("a", 0, type=tarfile.DIRTYPE),
    member("a/old/", 0, type=tarfile.AREGTYPE),
    member("old.jpg", 9, type=tarfile.AREGTYPE),
    member("7.jpg", 100, type=tarfile.CONTTYPE),
    member(LONG),
]
REFUSED = [
    member("8.jpg", 0, type=tarfile.SYMTYPE, linkname="1.jpg"),
    member("9.jpg", 0, type=tarfile.LNKTYPE, linkname="1.jpg"),
    member("10.jpg", 0, type=tarfile.FIFOTYPE),
    member("11.jpg", 600, type=b"?"),
]
EVERY_FORMAT_BUT_USTAR = [
    member("höhe.jpg"),
    member("12.jpg", mtime=1.5),
    member("13.jpg", uid=1 << 40),
    member(VERY_LONG),
    member("ü" * 200 + ".jpg", mtime=-1),
    member("14.jpg", 4, pax_headers={"SCHILY.xattr.user.a": "line\nline", "comment": "20 path=x"}),
    member("15.jpg", 4, pax_headers={"size": "1"}),
    member("16.jpg", 4, pax_headers={"hdrcharset": "BINARY"}),
    member("17.jpg", 4, pax_headers={"path": "other/18.jpg/"}),
    member("18.jpg", 4, pax_headers={"path": ""}),
    member("19.jpg", 4, pax_headers={"GNU.sparse.name": "20.jpg"}),
]


def archive(path: Path, members: list[tuple[tarfile.TarInfo, bytes]], kind: int, **more: object) -> bytes:
    """Write a tar file; returns its bytes."""
    with tarfile.open(path, "w", format=kind, **more) as tar:
        for info, content in members:
            tar.addfile(info, io.BytesIO(content))
    return path.read_bytes()


def found(path: Path) -> list[object]:
    """The members of a tar file, and the error at its end."""
    members: list[object] = []
    try:
        with path.open("rb") as stream:
            members.extend(scan.members_of(path, stream, Survey(nothing)))
    except SourceInvalid as error:
        members.append(str(error))
    return members


def found_by_tarfile(path: Path, patch: pytest.MonkeyPatch) -> list[object]:
    """The same, with every header read by tarfile."""
    with patch.context() as changed:
        changed.setattr(scan, "plain_member", lambda _stream, _offset: None)
        return found(path)


@pytest.mark.parametrize("kind", FORMATS)
def test_members_are_those_of_tarfile(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is in a header, with members of all kinds in front of it and behind it."""
    members = USUAL + UNUSUAL + (EVERY_FORMAT_BUT_USTAR if kind != "ustar" else [])
    members = [one for other in members for one in (USUAL[0], other)]
    for more in ({}, {"pax_headers": {"path": "the name of all"}}):
        for refused in ([], *([one] for one in REFUSED)):
            archive(tmp_path / "a.tar", [*members, *refused, USUAL[0]], FORMATS[kind], **more)

            members_and_error = found(tmp_path / "a.tar")
            assert members_and_error == found_by_tarfile(tmp_path / "a.tar", monkeypatch)
            assert isinstance(members_and_error[-1], str) == bool(refused)


@pytest.mark.thorough(after_first=True)
@pytest.mark.parametrize("kind", FORMATS)
def test_damaged_headers_are_those_of_tarfile(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A header with a wrong byte, with or without a checksum that fits, and a file that is cut."""
    draw = random.Random(kind)
    path = tmp_path / "a.tar"
    whole = archive(path, [*USUAL, *UNUSUAL[:2], *EVERY_FORMAT_BUT_USTAR[1:2], *USUAL], FORMATS[kind])
    headers = [place for place in range(0, len(whole), 512) if whole[place + 257 : place + 262] == b"ustar"]
    for _round in range(300):
        damaged = bytearray(whole)
        place = draw.choice(headers)
        for _byte in range(draw.randint(1, 3)):
            damaged[place + draw.choice([draw.randrange(512), draw.randrange(100, 160)])] = draw.choice(
                b"\0 /.x017891\x80\xff_-"
            )
        if draw.random() < 0.8:
            header = bytearray(damaged[place : place + 512])
            header[148:156] = b" " * 8
            damaged[place + 148 : place + 156] = b"%06o\0 " % sum(header)
        path.write_bytes(damaged[: draw.randrange(len(damaged))] if draw.random() < 0.1 else damaged)

        assert found(path) == found_by_tarfile(path, monkeypatch)


@pytest.mark.parametrize("kind", FORMATS)
def test_usual_members_need_no_tarfile(tmp_path: Path, kind: str) -> None:
    """Plain files do, and files with times and names in pax records, as webdataset writes them."""
    members = USUAL + (EVERY_FORMAT_BUT_USTAR[:2] if kind == "pax" else [])
    path = tmp_path / "a.tar"
    archive(path, members, FORMATS[kind])
    names, offset = [], 0
    with path.open("rb") as stream:
        while (one := plain_member(stream, offset)) is not None:
            names.append(one.name)
            offset = one.end

    assert names == [info.name for info, _content in members]


@pytest.mark.parametrize("kind", [tarfile.REGTYPE, tarfile.XHDTYPE, tarfile.GNUTYPE_LONGNAME])
@pytest.mark.parametrize("size", [-512, -1024, -(1 << 40)])
def test_a_negative_size_ends_the_scan(tmp_path: Path, kind: bytes, size: int) -> None:
    """It is damage: with it the next header is the same one, or one before it, again and again."""
    path = tmp_path / "a.tar"
    content = archive(path, [*USUAL, member("bad.jpg", 0, type=kind), *USUAL], tarfile.GNU_FORMAT)
    place = content.index(b"bad.jpg")
    header = bytearray(content[place : place + 512])
    header[124:136] = (size % (1 << 96)).to_bytes(12, "big")
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    path.write_bytes(content[:place] + header + content[place + 512 :])

    assert "is damaged" in str(found(path)[-1])
