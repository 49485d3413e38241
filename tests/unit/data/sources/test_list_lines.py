"""Lines of a list are read in blocks as they are read one by one."""

import random
from pathlib import Path

import numpy as np
import pytest

from batchd.data.sources.files import scan as scan_module
from batchd.data.sources.files.options import ListSource
from batchd.data.storage.survey import Survey
from batchd.errors import SourceInvalid
from support.source_files import nothing

GOOD = [
    b"a.jpg 1",
    b"b/c d.jpg 22",
    b"e 007",
    b"#no comment? 1",
    b"\xff\xc3\xbc.jpg 123456789012345678",
    b"x" * 300 + b" 5",
]
ODD = [
    *(b"", b"  ", b"# a comment", b" a 1", b"a 1 ", b"a  1", b"a\t1", b"a -1", b"a +7", b"a 1234567890123456789"),
    *(b"/etc/x 1", b"../x 1", b"a..b 1", b"a\0 1", b"a", b"a x", b"a 1x", b"a 1_0", b"a \xd9\xa1", b"1", b"a\r 1"),
    *(b"y" * 5000 + b" 1", b"z" * 4095 + b" 1", b"z" * 4096 + b" 1", b"\xef\xbb\xbfa 1", b"a 99999999999999999999"),
]


def outcome(source: ListSource) -> object:
    """The paths and labels of a list, or its error."""
    try:
        index = scan_module.scan_list(source, Survey(nothing))
    except SourceInvalid as error:
        return str(error)
    arrays = (index.arrays["paths"].tobytes(), index.arrays["offsets"].tolist(), index.arrays["labels"].tolist())
    return (index.digest, *arrays)


@pytest.mark.thorough(after_first=True)
@pytest.mark.parametrize("seed", range(150))
def test_blocks_of_lines_are_read_as_single_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Whatever is in them, wherever a block ends."""
    draw = random.Random(seed)
    odd = [draw.choice(ODD)] if seed % 2 else []
    lines = [draw.choice(GOOD) for _line in range(draw.randint(1, 40))]
    for line in odd:
        lines.insert(draw.randrange(len(lines) + 1), line)
    end = draw.choice([b"\n", b"\n", b"\r\n"])
    content = draw.choice([b"", b"", b"\xef\xbb\xbf"]) + end.join(lines) + draw.choice([b"", end])
    (tmp_path / "list.txt").write_bytes(content)
    monkeypatch.setattr(scan_module, "BLOCK_BYTES", draw.choice([7, 100, 1000, 1 << 18]))
    source = ListSource(
        path=tmp_path / "list.txt", allow_outside_root=draw.random() < 0.3, path_bytes=draw.choice([0, 0, 20, 4095])
    )

    found = outcome(source)

    monkeypatch.setattr(scan_module, "BLOCK_BYTES", 1 << 20)
    monkeypatch.setattr(scan_module, "plain_lines", lambda _block, **_options: None)
    assert found == outcome(source)


def test_usual_lines_are_read_in_blocks() -> None:
    """A list of ten million lines is read in seconds."""
    paths, lengths, labels = scan_module.plain_lines(
        b"".join(line + b"\n" for line in GOOD if not line.startswith(b"#")), allow_outside_root=False
    )

    assert lengths.sum() == len(paths)
    assert np.array_equal(labels, [1, 22, 7, 123456789012345678, 5])
