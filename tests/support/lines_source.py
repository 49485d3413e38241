"""A source like one from another package: its samples are lines of a file, ``label TAB text``.

``install`` makes this module a plugin called "lines". For tests.
"""

from pathlib import Path

import numpy as np

from batchd.plugin import Column, SourceIndex, SourceKind

ABOUT = {
    "METADATA": "Metadata-Version: 2.1\nName: batchd-lines\nVersion: 1\n",
    "entry_points.txt": "[batchd.sources]\nlines = batchd_lines:KIND\n",
}


def install(site: Path) -> Path:
    """Write the module, and the metadata that pip would write, into a folder of packages."""
    about = site / "batchd_lines-1.dist-info"
    about.mkdir(parents=True)
    for name, text in ABOUT.items():
        (about / name).write_text(text)
    (site / "batchd_lines.py").write_bytes(Path(__file__).read_bytes())
    return site


def _lines(source):
    return Path(source.options["path"]).read_text().splitlines()


class _Reader:
    def __init__(self, source, _index, _max_bytes):
        self._samples = [line.split("\t") for line in _lines(source)]

    def read(self, sample):
        return {**self.known(sample), "text": self._samples[sample][1]}

    def known(self, sample):
        return {"label": int(self._samples[sample][0])}

    def name(self, sample):
        return f"line {sample + 1}"

    def close(self):
        pass


def _scan(source, _survey):
    return SourceIndex.build(len(_lines(source)), {}, {"lengths": np.array([len(one) for one in _lines(source)])}, {})


KIND = SourceKind(
    problems=lambda _source: [],
    columns=lambda _source: (Column("text", "text"), Column("label", dtype="int64")),
    scan=_scan,
    open=_Reader,
)
