"""Write the pages of a package index (PEP 503) for a folder of wheels and source distributions.

    simple_index.py FOLDER          FOLDER/simple/index.html, FOLDER/simple/NAME/index.html

Any static web server can then serve FOLDER: ``pip install --index-url http://HOST/simple/ NAME``.
Each link has the file's SHA-256 digest, and the versions of Python that its metadata requires.
"""

import re
import sys
import tarfile
from collections import defaultdict
from email.parser import HeaderParser
from hashlib import sha256
from html import escape
from pathlib import Path
from urllib.parse import quote
from zipfile import ZipFile

PAGE = '<!DOCTYPE html>\n<html>\n<head><meta charset="utf-8"><title>{title}</title></head>\n<body>\n{links}</body>\n</html>\n'


def metadata(file: Path) -> str:
    """Return the metadata of a wheel or of a source distribution."""
    if file.suffix == ".whl":
        with ZipFile(file) as wheel:
            [name] = [one for one in wheel.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", one)]
            return wheel.read(name).decode()
    with tarfile.open(file) as archive:
        member = archive.extractfile(f"{file.name.removesuffix('.tar.gz')}/PKG-INFO")
        assert member is not None
        return member.read().decode()


def link(file: Path, python: str | None) -> str:
    """Return the line of one file, relative to the page of its project."""
    requires = f' data-requires-python="{escape(python)}"' if python else ""
    digest = sha256(file.read_bytes()).hexdigest()
    return f'<a href="../../{quote(file.name)}#sha256={digest}"{requires}>{escape(file.name)}</a><br>\n'


def write(folder: Path) -> None:
    """Write the page of each project in a folder, and the page of all projects."""
    projects = defaultdict(list)
    for file in sorted([*folder.glob("*.whl"), *folder.glob("*.tar.gz")]):
        facts = HeaderParser().parsestr(metadata(file))
        projects[re.sub(r"[-_.]+", "-", facts["Name"]).lower()].append(link(file, facts["Requires-Python"]))
    for name, links in projects.items():
        (folder / "simple" / name).mkdir(parents=True, exist_ok=True)
        (folder / "simple" / name / "index.html").write_text(PAGE.format(title=name, links="".join(links)))
    names = "".join(f'<a href="{name}/">{name}</a><br>\n' for name in sorted(projects))
    (folder / "simple" / "index.html").write_text(PAGE.format(title="Packages", links=names))


if __name__ == "__main__":
    write(Path(sys.argv[1]))
