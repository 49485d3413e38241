"""What a source leaves out, and what it takes for granted, is noted wherever users look."""

from pathlib import Path

import pytest
import structlog
from structlog.testing import capture_logs

from batchd.cli.first_config import comments_on, look_at
from batchd.config.load import parse_config
from batchd.data.sources.composed.options import ConcatSource, SubsetSource
from batchd.data.sources.csv.options import CsvSource
from batchd.data.sources.recognise import recognise
from batchd.data.storage import index_cache
from batchd.data.storage.access import Storage
from batchd.data.storage.index_cache import IndexCache
from batchd.data.storage.survey import Survey
from batchd.stream.rings import plan_rings
from batchd.stream.served import open_stream
from support.samples import scan
from support.source_files import as_shared, nothing

BROKEN = 'a,b\n"x\ny",1\n"z\n",2\n3,4\n'


def table(folder: Path, name: str = "t.csv", content: str = BROKEN) -> CsvSource:
    (folder / name).write_text(content)
    return CsvSource(path=folder / name, fields={"b": "int64"})


def test_a_note_has_the_first_place_and_a_count() -> None:
    """Each thing is one note, however many there are."""
    survey = Survey(nothing)
    for number in range(3):
        survey.note("hidden members", f"a.tar: .{number}")
    survey.note("empty folders", "dog", "fill it", count=2)

    assert survey.notes == ["hidden members: a.tar: .0 and 2 more", "empty folders: dog and 1 more; fill it"]
    assert survey.place() == {"notes": survey.notes}
    assert Survey(nothing).place() == {}


def test_notes_stay_with_an_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are in the memory for workers, in a kept index, and in the index of composed sources."""
    source = table(tmp_path)
    (note,) = scan(source).notes
    assert as_shared(scan(source)).notes == (note,)
    whole = ConcatSource(sources=(SubsetSource(of=source, stop=1), table(tmp_path, "u.csv", "a,b\n1,2\n"), source))
    assert scan(whole).notes == (note, note)

    monkeypatch.setattr(index_cache, "SAMPLES_MIN", 1)
    monkeypatch.setattr(index_cache, "SETTLED_NS", -(10**12))
    cache, survey = IndexCache(tmp_path / "kept"), Survey(nothing)
    survey.open(source.path or tmp_path).__enter__().close()
    cache.keep({}, scan(source), survey)
    kept = cache.load({}, Storage())
    assert kept is not None
    assert kept.notes == (note,)


def test_a_note_changes_no_digest(tmp_path: Path) -> None:
    """It says where something is, and a position does not depend on this."""
    source = table(tmp_path)
    index, survey = scan(source), Survey(nothing)
    survey.note("something", str(tmp_path))
    assert index.digest == type(index).build(len(index), index.facts, index.arrays, survey.place()).digest


def test_the_log_and_a_first_configuration_have_the_notes(tmp_path: Path) -> None:
    """So users read them where the data is looked at, and at each start."""
    source = table(tmp_path)
    (note,) = scan(source).notes
    text = (
        f'[streams.t]\nbatch_size = 1\nsource = {{ type = "csv", path = "{source.path}", fields = {{ b = "int64" }} }}'
    )
    config = parse_config(text, tmp_path / "batchd.toml").config
    assert config is not None
    ring = plan_rings(config, Storage())["t"]
    structlog.reset_defaults()
    with capture_logs() as lines:
        open_stream(1, "t", config, ring, Storage(), IndexCache(None), nothing).close()
    assert {"event": "note on a source", "log_level": "warning", "stream": "t", "note": note} in lines
    assert note in comments_on(recognise(tmp_path, Survey(nothing)), look_at(source, scan(source), Storage()))
