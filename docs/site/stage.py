"""Lays the documentation out for Sphinx: ``make site`` runs it on the way to build/site.

    docs/README.md  ->  index.md, behind front.md, with the sidebar: its headings, and the pages
                        that each links to
    api.rst         ->  api.rst, the reference that Sphinx makes of docstrings, in the sidebar
    docs/X.md       ->  X.md
    Y/Z.md          ->  Y/Z.md, where a page links to it: ARCHITECTURE.md, SECURITY.md, ...
    Y/Z             ->  files/Y/Z.md: a file, or a folder, that a page links to, unchanged
    Y/Z.png, .svg   ->  files/Y/Z.png, .svg: a picture of a page

Pages are written for who reads them as they are in the repository, so their links are those of the
repository, and are rewritten here. Standard library only. Invariant: a link that leads nowhere ends
it, with the page and the link.
"""

import posixpath
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parents[2]
INDEX = PurePosixPath("docs/README.md")
FRONT = PurePosixPath("docs/site/front.md")
API = PurePosixPath("docs/site/api.rst")
API_CAPTION = "Reference"
"""The heading of the index under which the sidebar has it."""
LINK = re.compile(r"(?<!`)(!?\[(?:[^\[\]]|\[[^\]]*\])*\])\(([^()\s]+)\)")
FENCE = re.compile(r"^\s*(`{3,}|~{3,})")
TITLE = re.compile(r"^# (.+)$", re.MULTILINE)
HEADING = re.compile(r"^## (.+)$")
LANGUAGES = {".py": "python", ".toml": "toml", ".yaml": "yaml", ".sh": "bash", ".sbatch": "bash", ".json": "json"}
LANGUAGES |= {".service": "ini", ".conf": "ini"}
PICTURES = (".png", ".svg")


ORPHAN = "---\norphan: true\n---\n\n"
"""On top of a page that the sidebar does not show; Sphinx would miss it there."""


class LinkBroken(Exception):  # noqa: N818  named by what is wrong
    """A page links to what is not there."""


@dataclass(frozen=True, slots=True)
class Link:
    """A link of a page: the line that it is in, and the path and the anchor that it leads to."""

    line: int
    path: str
    anchor: str


def links_of(text: str) -> Iterator[Link]:
    """All links within the repository that stand in a page, outside of blocks of code."""
    for number, line, is_code in numbered(text):
        if is_code:
            continue
        for match in LINK.finditer(line):
            path, _, anchor = match[2].partition("#")
            if "://" not in match[2] and not match[2].startswith("mailto:"):
                yield Link(number, path, anchor)


def numbered(text: str) -> Iterator[tuple[int, str, bool]]:
    """Each line with its number, and whether it is part of a block of code."""
    closing = ""
    for number, line in enumerate(text.splitlines(), 1):
        fence = FENCE.match(line)
        yield number, line, bool(closing or fence)
        if fence and not closing:
            closing = fence[1]
        elif fence and fence[1].startswith(closing):
            closing = ""


def target_of(page: PurePosixPath, path: str) -> PurePosixPath:
    """What a link on a page means, as a path from the root of the repository."""
    return PurePosixPath(posixpath.normpath(page.parent / path)) if path else page


def place_of(target: PurePosixPath) -> PurePosixPath:
    """Where something of the repository is in the site's sources."""
    if target == INDEX:
        return PurePosixPath("index.md")
    if target.suffix in PICTURES:
        return PurePosixPath("files", target)
    if target.suffix == ".md":
        return target.relative_to("docs") if target.is_relative_to("docs") else target
    return PurePosixPath("files", f"{target}.md")


class Stage:
    """The pages that are laid out, found from the index by their links."""

    def __init__(self, root: Path = ROOT) -> None:
        self._root = root
        self._waiting = [INDEX]
        self._seen = {INDEX}
        self._in_sidebar = {name for _title, names in _blocks((root / INDEX).read_text()) for name in names}

    def pages(self) -> Iterator[tuple[PurePosixPath, str | bytes]]:
        """Each page, and each picture, by its place in the site's sources."""
        while self._waiting:
            target = self._waiting.pop()
            yield place_of(target), self._page(target)
        yield PurePosixPath(API.name), (self._root / API).read_text()

    def _page(self, target: PurePosixPath) -> str | bytes:
        path = self._root / target
        if target.suffix in PICTURES:
            return path.read_bytes()
        if path.is_dir():
            return self._relinked(target, _folder_page(path, target), target / "any")
        if target.suffix != ".md":
            return _file_page(path, target)
        text = self._relinked(target, path.read_text(), target)
        if target == INDEX:
            front = self._relinked(target, (self._root / FRONT).read_text(), FRONT)  # replaces it
            return front + TITLE.sub(r"## \1", text, count=1) + _sidebar(path.read_text())
        return text if place_of(target).with_suffix("").as_posix() in self._in_sidebar else f"{ORPHAN}{text}"

    def _relinked(self, target: PurePosixPath, text: str, base: PurePosixPath) -> str:
        place = place_of(target)

        def relink(match: re.Match[str]) -> str:
            path, hash_sign, anchor = match[2].partition("#")
            if not path or "://" in match[2] or match[2].startswith("mailto:"):
                return match[0]
            goal = target_of(base, path)
            if not (self._root / goal).exists():
                raise LinkBroken(f"{target} links to {path}, and there is no {goal}")
            if goal not in self._seen:
                self._seen.add(goal)
                self._waiting.append(goal)
            new = posixpath.relpath(place_of(goal), place.parent)
            return f"{self._said(match[1], goal)}({new}{hash_sign}{anchor})"

        lines = (line if is_code else LINK.sub(relink, line) for _number, line, is_code in numbered(text))
        return "\n".join(lines) + "\n"

    def _said(self, words: str, goal: PurePosixPath) -> str:
        """A link's words; the page's title where they are its file name, as in the repository."""
        title = TITLE.search((self._root / goal).read_text()) if goal.suffix == ".md" else None
        return f"[{title[1]}]" if title and words in (f"[{goal.name}]", f"[{goal}]") else words


def _sidebar(index: str) -> str:
    """What tells Sphinx the sidebar."""
    return "".join(
        f"\n```{{toctree}}\n:hidden:\n:caption: {title}\n\n"
        + "\n".join([*names, API.stem] if title == API_CAPTION else names)
        + "\n```\n"
        for title, names in _blocks(index)
        if names
    )


def _blocks(index: str) -> list[tuple[str, list[str]]]:
    """Each heading of the index, with the pages that are linked under it for the first time."""
    blocks: list[tuple[str, list[str]]] = []
    shown: set[str] = set()
    for _number, line, is_code in numbered(index):
        if heading := HEADING.match(line):
            blocks.append((heading[1], []))
        if is_code or not blocks:
            continue
        for match in LINK.finditer(line):
            goal = target_of(INDEX, match[2].partition("#")[0])
            name = place_of(goal).with_suffix("").as_posix()
            if goal.suffix == ".md" and goal != INDEX and name not in shown:
                shown.add(name)
                blocks[-1][1].append(name)
    return blocks


def _file_page(path: Path, target: PurePosixPath) -> str:
    text = path.read_text()
    longest = max((len(run) for run in re.findall(r"`{3,}", text)), default=2)
    fence = "`" * (longest + 1)
    language = LANGUAGES.get(path.suffix, "text")
    return f"{ORPHAN}# {target}\n\n{fence}{language}\n{text.rstrip()}\n{fence}\n"


def _folder_page(path: Path, target: PurePosixPath) -> str:
    names = sorted(one.name for one in path.iterdir() if not one.name.startswith((".", "__")))
    listed = "\n".join(f"* [{name}]({name})" for name in names)
    return f"{ORPHAN}# {target}\n\n{listed}\n"


def main(folder: Path) -> None:
    """Lay everything out in a new folder."""
    try:
        for place, content in Stage().pages():
            file = folder / place
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content if isinstance(content, bytes) else content.encode())
    except LinkBroken as broken:
        sys.exit(f"stage: {broken}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
