"""The process that scans Parquet and Arrow files: it may be ended, and its parent goes on.

pyarrow ends its process for some wrong bytes of a footer, instead of raising an exception.
"""

from pathlib import Path

import pyarrow as pa
import pytest

from batchd.cli.main import main
from batchd.data.sources import scan as isolated
from batchd.data.sources.interface import kind_of
from batchd.data.sources.parquet import scan as parquet_scan
from batchd.data.sources.parquet.options import ParquetSource
from batchd.data.sources.scan import scan_source
from batchd.data.storage import index_cache as cache_module
from batchd.data.storage.access import Storage
from batchd.data.storage.index_cache import IndexCache
from batchd.data.storage.survey import Survey
from batchd.data.storage.values import USUAL_LIMITS
from batchd.errors import ExitCode, SourceInvalid
from support.http_files import FileServer, Status
from support.parquet_files import FATAL_BYTES, write_arrow, write_fatal_parquet, write_parquet
from support.settings import STILL_PIPELINE, write_settings
from support.source_files import nothing

BOTH = {"image": "image", "label": "int64"}
COLUMNS = {"image": pa.array([b"one", b"two"], pa.binary()), "label": [0, 1]}


def of(root: Path, *shards: str) -> ParquetSource:
    return ParquetSource(root=root, shards=shards or ("*",), fields=BOTH)


@pytest.fixture(params=FATAL_BYTES)
def wrong(request) -> str:
    """Name a byte of a footer that ends pyarrow's process."""
    if request.param == "codec":
        pytest.importorskip("pyarrow", minversion="26", reason="older ones take it for another codec")
    return request.param


def refused(source: ParquetSource) -> str:
    """Return the scan's error message."""
    with pytest.raises(SourceInvalid) as caught:
        kind_of(source).scan(source, Survey(nothing))
    return str(caught.value)


def test_a_scan_in_a_process_of_its_own_finds_the_same(tmp_path) -> None:
    """It records the files that it read, too, and the versions that readers compare."""
    write_parquet(tmp_path / "a.parquet", COLUMNS)
    write_arrow(tmp_path / "b.arrow", COLUMNS)
    survey, here = Survey(nothing), Survey(nothing)

    index = kind_of(of(tmp_path)).scan(of(tmp_path), survey)

    same = parquet_scan.scan(of(tmp_path), here)
    assert (index.digest, index.place) == (same.digest, same.place)
    assert survey.witnesses == here.witnesses
    assert [Path(one.path).name for one in survey.witnesses] == [tmp_path.name, "a.parquet", "b.arrow"]


@pytest.mark.usefixtures("forked_scans")
def test_a_byte_of_a_footer_that_ends_pyarrows_process_is_an_error_that_names_the_file(wrong, tmp_path, capfd) -> None:
    """The message has pyarrow's reason, which does not get into the log by itself."""
    write_parquet(tmp_path / "a.parquet", COLUMNS)
    file = write_fatal_parquet(tmp_path / "b.parquet", wrong)

    problem = refused(of(tmp_path))

    reason = "Unsupported compression codec" if wrong == "codec" else "level histogram size mismatch"
    assert problem.startswith(
        f"{file} is damaged, or was changed while it was scanned: looking at it ended a process by signal 6 (SIGABRT)"
    )
    assert reason in problem
    assert problem.endswith("; copy or write it again, or leave it out")
    assert capfd.readouterr().err == ""


@pytest.mark.usefixtures("forked_scans")
def test_commands_report_such_a_file(wrong, tmp_path, capsys) -> None:
    """The commands `check` and `init` name the file and end with their usual exit statuses."""
    file = write_fatal_parquet(tmp_path / "rows/b.parquet", wrong)
    config = tmp_path / "batchd.toml"
    source = {"type": "parquet", "root": str(file.parent), "shards": ["*"], "fields": {"image": "image"}}
    write_settings(config, {"rows": {"source": source, "batch_size": 1, "pipeline": STILL_PIPELINE}}, {})
    commands = {
        f"{file} is damaged, or was changed": ["check", str(config)],
        f"batchd: {file} ": ["init", str(file.parent), "-o", str(tmp_path / "new.toml")],
    }
    for words, arguments in commands.items():
        with pytest.raises(SystemExit) as ended:
            main(arguments)

        assert ended.value.code == ExitCode.USAGE
        assert words in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "new.toml").exists()


@pytest.mark.usefixtures("forked_scans")
def test_a_scan_that_is_killed_is_not_taken_for_a_damaged_file(tmp_path, monkeypatch) -> None:
    """The kernel kills a process with SIGKILL when there is no memory left."""
    write_parquet(tmp_path / "a.parquet", COLUMNS)
    write_arrow(tmp_path / "b.arrow", COLUMNS)
    monkeypatch.setenv("BATCHD_FAILPOINTS", "scan.parquet.opening=kill@2")

    problem = refused(of(tmp_path))

    assert problem.startswith(f"{tmp_path}/b.arrow was not scanned to its end: the process was killed by signal 9")
    assert "memory" in problem


def test_an_unchanged_index_needs_no_process(tmp_path, monkeypatch) -> None:
    """The cache of indexes has what the process found."""
    monkeypatch.setattr(cache_module, "SAMPLES_MIN", 1)
    monkeypatch.setattr(cache_module, "SETTLED_NS", -(10**12))
    write_parquet(tmp_path / "rows/a.parquet", COLUMNS)
    source, cache = of(tmp_path / "rows"), IndexCache(tmp_path / "cache")
    first = scan_source(source, nothing, cache, Storage())
    monkeypatch.setattr(isolated.children, "start", None)

    assert scan_source(source, nothing, cache, Storage()).digest == first.digest


@pytest.mark.thorough
def test_a_file_of_a_server_is_scanned_with_the_limits_of_its_parent(tmp_path, web: FileServer) -> None:
    """Only a process without retries stops after one request."""
    file = write_parquet(tmp_path / "a.parquet", COLUMNS)
    web.files["a.parquet"] = file.read_bytes()
    source = of(Path(web.url), "a.parquet")
    survey = Survey(nothing, storage=Storage(USUAL_LIMITS._replace(retries=0)))
    assert kind_of(source).scan(source, survey).digest == parquet_scan.scan(of(tmp_path), Survey(nothing)).digest
    web.asked.clear()
    web.faults["a.parquet"] = [Status(503)] * 9

    with pytest.raises(SourceInvalid, match=rf"^{source.root}/a\.parquet cannot be read: .*503"):
        kind_of(source).scan(source, survey)
    assert [one.method for one in web.asked] == ["HEAD"]
