"""What the workers of a stream have to reach, by its configuration."""

from pathlib import Path

import pytest

from batchd.config.load import load_config
from batchd.runtime.sandbox import NOTHING, Access, joined
from batchd.stream.access import access_of
from batchd.stream.plan import plan_stream
from support.settings import write_settings

CODE = Path("/srv/code")
FOLDER = {"type": "folder", "path": "/data/photos"}
TABLE = {"type": "csv", "path": "/data/train/table.csv", "fields": {"x": "int64"}, "image": "file"}
OWN = {"type": "python", "function": "mine:Data", "fields": {"x": "int64"}}
CALL = {"op": "call", "function": "mine:fn", "outputs": {"x": "int64"}}
MAP_IDS = {"op": "map_ids", "field": "x", "file": "/srv/tables/t.npy"}


@pytest.fixture
def access(tmp_path, monkeypatch):
    """Work out the access of a stream with these keys."""
    for name in ("http_proxy", "HTTPS_PROXY", "HTTP_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)

    def of(**keys):
        file = write_settings(tmp_path / "batchd.toml", {"one": {"batch_size": 1, **keys}}, {})
        return access_of(load_config(file).streams["one"], [CODE])

    return of


@pytest.mark.parametrize(
    ("keys", "read"),
    [
        ({"source": FOLDER}, ["/data/photos"]),
        ({"source": TABLE}, ["/data/train"]),
        ({"source": {**TABLE, "image_root": "/data/images"}}, ["/data/images", "/data/train/table.csv"]),
        ({"source": {"type": "list", "path": "/data/train.txt"}}, ["/data"]),
        ({"source": {**FOLDER, "allow_outside_root": True}}, ["/"]),
        ({"source": FOLDER, "pipeline": [MAP_IDS]}, ["/data/photos", "/srv/tables/t.npy"]),
        (
            {"source": {"type": "concat", "sources": [FOLDER, {**FOLDER, "path": "/data/photos/more"}]}},
            ["/data/photos"],
        ),
        ({"source": FOLDER, "pipeline": [CALL], "read": []}, ["/data/photos", "/srv/code"]),
        ({"source": OWN, "read": ["/lexicon"]}, ["/lexicon", "/srv/code"]),
    ],
)
def test_a_worker_reaches_the_places_of_its_stream_and_no_other(access, keys, read):
    """A table's folder is one, if that is where the files are that the table names."""
    assert access(**keys) == NOTHING._replace(read=read)


def test_a_place_is_where_its_link_leads(access, tmp_path):
    """It may lead out of another place of the stream."""
    (tmp_path / "images").mkdir()
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "images").symlink_to(tmp_path / "images")
    source = {"type": "jsonl", "root": str(tmp_path / "root"), "shards": ["*.jsonl"], "fields": {"image": "image"}}

    read = access(source={**source, "image_root": str(tmp_path / "root" / "images")}).read

    assert read == [str(tmp_path / "images"), str(tmp_path / "root")]


def test_functions_whose_files_nobody_knows_leave_all_open(access):
    """Also beside other streams."""
    assert access(source=OWN) is None
    assert access(source=FOLDER, pipeline=[CALL]) is None
    assert joined([NOTHING, None]) is None


def test_a_stores_ports_are_open(access, monkeypatch):
    """The port of a URL, of a proxy and of an endpoint; all with ``network``."""
    url = {**FOLDER, "path": "s3://bucket/photos"}
    assert access(source=url) == Access([], [80, 443], any_port=False, write=[])
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://store:9000")
    monkeypatch.setenv("HTTPS_PROXY", "proxy:3128")
    assert access(source=url).ports == [80, 443, 3128, 9000]
    assert access(source=OWN, read=[], network=True).any_port


def test_sandbox_off_goes_with_the_recipe_to_all_who_make_samples(tmp_path):
    """So workers of commands, replays and worker hosts are enclosed where the daemon's are."""

    def recipe(**daemon):
        stream = {"batch_size": 1, "source": FOLDER}
        config = load_config(write_settings(tmp_path / "batchd.toml", {"one": stream}, daemon))
        return plan_stream("one", config.streams["one"], (), config.daemon).recipe()

    assert recipe().needed == NOTHING._replace(read=["/data/photos"])
    assert recipe(sandbox="off").needed is None


def test_two_streams_together_need_what_either_needs():
    """A place below another is not listed."""
    one, other = Access(["/a", "/b/c"], [80], any_port=False, write=["/w"]), NOTHING._replace(read=["/b"], ports=[443])

    assert joined([one, other]) == Access(["/a", "/b"], [80, 443], any_port=False, write=["/w"])
