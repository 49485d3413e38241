"""What `batchd init` looks at: each name once, and few files."""

from pathlib import Path

import pytest

from batchd.data.sources import recognise
from batchd.data.storage.survey import Survey
from support.source_files import nothing


def test_each_name_is_looked_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many kinds of sources there are: a folder may have a million files."""
    for number in range(50):
        (tmp_path / f"{number}.jpg").touch()
    seen: list[bytes] = []
    ending_of = recognise.ending_of
    monkeypatch.setattr(recognise, "ending_of", lambda name: (seen.append(name), ending_of(name))[1])

    found = recognise.recognise(tmp_path, Survey(nothing))

    assert sorted(found.recognised.names) == sorted(seen)
    assert len(seen) == 50


def test_few_texts_are_read_to_find_a_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A list of images lies above them, and captions beside them are not opened one by one."""
    (tmp_path / "all").mkdir()
    for number in range(100):
        (tmp_path / f"all/{number}.jpg").touch()
        (tmp_path / f"all/{number}.txt").write_text("a caption")
    (tmp_path / "train.txt").write_text("all/1.jpg 7\n" * 9)
    opened: list[Path] = []
    survey_open = Survey.open
    monkeypatch.setattr(Survey, "open", lambda survey, file: (opened.append(file), survey_open(survey, file))[1])

    found = recognise.recognise(tmp_path, Survey(nothing))

    assert found.recognised.source.place == str(tmp_path / "train.txt")
    assert len(set(opened)) <= 2 * recognise.LOOKED_AT  # lists, and boxes beside images
