"""The programs of the API reference, docs/site/api.rst, by the titles of its sections.

For tests of processes.
"""

import re
from pathlib import Path
from textwrap import dedent

REFERENCE = Path(__file__).parents[2] / "docs" / "site" / "api.rst"
_TITLE = re.compile(r"^(.+)\n-{3,}$", re.MULTILINE)
_PROGRAM = re.compile(r"^\.\. code-block:: python\n\n((?:   .*\n|\n)+)", re.MULTILINE)


def programs() -> dict[str, list[str]]:
    """Return the programs of each section."""
    text = REFERENCE.read_text()
    titles = [*_TITLE.finditer(text)]
    ends = [one.start() for one in titles[1:]] + [len(text)]
    return {
        title[1]: [dedent(program) for program in _PROGRAM.findall(text[title.end() : end])]
        for title, end in zip(titles, ends, strict=True)
    }


def run_programs(section: str) -> None:
    """Run those of a section; BATCHD_ADDRESS names a daemon with a stream of photographs."""
    for program in programs()[section]:
        exec(compile(program, str(REFERENCE), "exec"), {"__name__": "__main__"})
