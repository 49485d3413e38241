"""Source kinds from other packages: the example, and packages that are broken."""

import sys
import zipfile
from pathlib import Path

import pytest

from batchd.data.samples.errors import SampleUnreadable
from batchd.data.sources.code.options import PluginSource
from batchd.data.sources.interface import kind_of, open_reader
from batchd.data.sources.scan import scan_source
from batchd.data.storage.access import Storage
from batchd.data.storage.index_cache import IndexCache
from batchd.data.storage.survey import Survey
from batchd.errors import SourceInvalid
from support.plugins import install, write_zip
from support.source_files import nothing, source_problems

IMAGES = {"cat/1.jpg": b"one" * 100, "dog/2.PNG": b"two", "notes.txt": b"no image", "cat/3.jpg": b""}


@pytest.fixture
def zip_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Make sources of the example package, which is installed for one test."""
    monkeypatch.syspath_prepend(str(install(tmp_path / "site")))
    monkeypatch.delitem(sys.modules, "batchd_zip", raising=False)
    yield lambda file, **options: PluginSource(name="zip", options={"path": str(file), **options})
    sys.modules.pop("batchd_zip", None)


def reader_of(source: PluginSource, max_bytes: int = 1000):
    return open_reader(source, scan_source(source, nothing, IndexCache(None), Storage()), max_bytes, Storage())


@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_the_example_serves_the_images_of_a_zip_file(compression, tmp_path, zip_source):
    """The images are read in any order, with their classes and readable names."""
    source = zip_source(write_zip(tmp_path / "a.zip", IMAGES, compression))
    index = scan_source(source, nothing, IndexCache(None), Storage())
    reader = reader_of(source)

    assert source_problems(source) == []
    assert [(bytes(reader.read(i)["image"]), int(reader.known(i)["label"])) for i in (2, 0, 1)] == [
        (b"", 0),
        (b"one" * 100, 0),
        (b"two", 1),
    ]
    assert index.class_names == ("cat", "dog")
    assert reader.name(1) == f"{tmp_path}/a.zip: dog/2.PNG"
    reader.close()


def test_what_is_wrong_with_a_member_is_a_bad_sample(tmp_path, zip_source):
    """A flipped byte and a member that is too large are bad samples."""
    file = write_zip(tmp_path / "a.zip", IMAGES, zipfile.ZIP_STORED)
    source = zip_source(file)
    reader = reader_of(source, max_bytes=299)
    file.write_bytes(file.read_bytes().replace(b"two", b"tow", 1))

    with pytest.raises(SampleUnreadable, match="has 300 bytes, more than max_bytes = 299"):
        reader.read(0)
    with pytest.raises(SampleUnreadable, match="not what the archive's checksum says"):
        reader.read(1)
    reader.close()


def test_what_the_package_says_of_its_options_is_passed_on(tmp_path, zip_source):
    """The package's own function returns these problems."""
    assert source_problems(zip_source(tmp_path / "none.zip")) == [f"there is no file {tmp_path}/none.zip"]
    assert "unknown option pth" in source_problems(zip_source(tmp_path, pth=3))[0]
    (tmp_path / "no.zip").write_bytes(b"not a zip file")
    with pytest.raises(SourceInvalid, match=r"no\.zip cannot be read as a zip file"):
        scan_source(zip_source(tmp_path / "no.zip"), nothing, IndexCache(None), Storage())
    with pytest.raises(SourceInvalid, match="holds no sample"):
        scan_source(zip_source(write_zip(tmp_path / "empty.zip", {})), nothing, IndexCache(None), Storage())


def test_another_version_of_the_package_scans_again(tmp_path, zip_source):
    """The package's module is recorded next to the files that the scan saw."""
    survey = Survey(nothing)
    source = zip_source(write_zip(tmp_path / "a.zip", IMAGES))

    kind_of(source).scan(source, survey)

    assert {Path(one.path).name for one in survey.witnesses} == {"batchd_zip.py", "a.zip"}


@pytest.mark.usefixtures("zip_source")
def test_a_package_that_is_not_there_is_named():
    """The error suggests the most similar name, or lists the existing ones."""
    source = PluginSource(name="zp")

    assert source_problems(source) == ["no installed package brings the source 'zp'; did you mean zip?"]
    with pytest.raises(SourceInvalid, match=r"did you mean zip\?"):
        kind_of(source).columns(source, Storage())
    assert source_problems(PluginSource(name="rar")) == ["no installed package brings the source 'rar'; there is zip"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("import nothing_like_this", "cannot be imported: ModuleNotFoundError"),
        ("KIND =", "cannot be imported: SyntaxError"),
        ("", "cannot be imported: AttributeError"),
        ("KIND = 3", "batchd_zip:KIND is int, not a SourceKind of batchd.plugin"),
    ],
)
def test_a_package_that_is_broken_is_named(content, message, tmp_path, zip_source):
    """The error says what is wrong with the package."""
    (tmp_path / "site/batchd_zip.py").write_text(content)

    (problem,) = source_problems(zip_source(tmp_path))

    assert message in problem
