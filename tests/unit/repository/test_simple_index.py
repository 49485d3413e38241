"""The pages of a package index, written for a folder of distributions."""

import io
import subprocess
import sys
import tarfile
from hashlib import sha256
from pathlib import Path
from zipfile import ZipFile

SCRIPT = Path(__file__).parents[3] / "deploy/simple_index.py"


def metadata(name: str, python: str = "") -> str:
    requires = f"Requires-Python: {python}\n" if python else ""
    return f"Metadata-Version: 2.4\nName: {name}\nVersion: 1.0\n{requires}\nName: not-a-header\n"


def wheel(folder: Path, name: str, python: str = "") -> str:
    """Write a wheel; return the digest of its file."""
    stem = f"{name.replace('-', '_')}-1.0"
    file = folder / f"{stem}-py3-none-any.whl"
    with ZipFile(file, "w") as archive:
        archive.writestr(f"{stem}.dist-info/METADATA", metadata(name, python))
        archive.writestr(f"vendored/{stem}.dist-info/METADATA", metadata("other"))
    return sha256(file.read_bytes()).hexdigest()


def sdist(folder: Path, name: str) -> str:
    """Write a source distribution; return the digest of its file."""
    stem, text = f"{name}-1.0", metadata(name, ">=3.11").encode()
    with tarfile.open(folder / f"{stem}.tar.gz", "w:gz") as archive:
        member = tarfile.TarInfo(f"{stem}/PKG-INFO")
        member.size = len(text)
        archive.addfile(member, io.BytesIO(text))
    return sha256((folder / f"{stem}.tar.gz").read_bytes()).hexdigest()


def link(file: str, digest: str, requires: str = "") -> str:
    return f'<a href="../../{file}#sha256={digest}"{requires}>{file}</a><br>'


def test_each_project_has_a_page_with_its_files_digests_and_pythons(tmp_path) -> None:
    """The names of pages are normalised; links lead back to the files; others are ignored."""
    of_wheel, of_sdist = wheel(tmp_path, "Some.Thing", ">=3.11"), sdist(tmp_path, "some_thing")
    other = wheel(tmp_path, "other")
    (tmp_path / "notes.txt").touch()

    subprocess.run([sys.executable, SCRIPT, tmp_path], check=True)

    pages = {file.parent.name: file.read_text() for file in (tmp_path / "simple").rglob("index.html")}
    links = {name: [line for line in text.splitlines() if line.startswith("<a ")] for name, text in pages.items()}
    some = ' data-requires-python="&gt;=3.11"'
    assert links == {
        "simple": ['<a href="other/">other</a><br>', '<a href="some-thing/">some-thing</a><br>'],
        "some-thing": [
            link("Some.Thing-1.0-py3-none-any.whl", of_wheel, some),
            link("some_thing-1.0.tar.gz", of_sdist, some),
        ],
        "other": [link("other-1.0-py3-none-any.whl", other)],
    }
