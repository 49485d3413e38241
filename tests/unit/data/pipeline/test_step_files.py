"""The files that steps read, from ``batchd check`` to a worker that starts late."""

import os
from pathlib import Path

import numpy as np
import pytest

from batchd.config.load import load_config
from batchd.config.tree import StreamConfig
from batchd.data.pipeline.cache_split import plan_pipeline
from batchd.data.pipeline.sample_fields import sample_fields
from batchd.data.pipeline.step_files import changed_file, digest_of
from batchd.data.pipeline.text.options import Lookup, Lowercase, RemoveStopwords, TextBytes, Tokenize
from batchd.data.samples.columns import Column
from batchd.data.sources.files.options import FolderSource
from batchd.data.storage.access import Storage
from batchd.data.storage.index import SourceIndex
from batchd.stream.plan import StreamCode, StreamPlan
from batchd.worker import loop, sample_maker
from batchd.worker.messages import NOTE_BYTES, Chunk, FillChunks, ServeStream
from batchd.worker.process import NoteMemory
from batchd_wire.fields import place_fields
from support.steps import check_steps
from support.texts import save, word_level, word_table

ROWS = 4
TEXT = [Column("text", "text")]
TEXTS = ["the cat", "a cat", "the old cat", "sat"]


def test_every_file_of_a_step_is_among_its_files():
    """Only files that a step lists are part of the stream's digest."""
    assert Tokenize(file=Path("a"), max_length=1).files == {"file": Path("a")}
    assert Lookup(words=Path("a"), table=Path("b"), max_words=1).files == {"words": Path("a"), "table": Path("b")}
    assert Lowercase().files == {}


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda _path: None, "there is no file {path}"),
        (lambda path: path.mkdir(), "{path} is not a regular file"),
        (os.mkfifo, "{path} is not a regular file"),
        (lambda path: path.symlink_to(path), "{path} cannot be read: Too many levels of symbolic links"),
    ],
)
def test_a_file_that_is_not_there_is_named_once(tmp_path, make, problem):
    """The steps after it report no further problem, and the check does not wait for a FIFO."""
    path = tmp_path / "words"
    make(path)
    steps = [RemoveStopwords(file=path), Lowercase(), TextBytes(length=5)]

    assert check_steps(TEXT, steps) == [problem.format(path=path)]


def test_all_files_that_are_wrong_are_named(tmp_path):
    """Files of steps that come after an impossible one are named, too."""
    steps = [RemoveStopwords(file=tmp_path / "a"), Lookup(words=tmp_path / "b", table=tmp_path / "c", max_words=1)]

    assert check_steps(TEXT, steps) == [f"there is no file {tmp_path / name}" for name in "abc"]


def test_paths_are_relative_to_the_configuration(tmp_path):
    """Steps are treated as sources are. Other values stay, even under a key such as "file"."""
    (tmp_path / "batchd.toml").write_text(
        """
        [streams.a]
        source = { type = "folder", path = "photos" }
        batch_size = 4
        pipeline = [
            { op = "tokenize", file = "t.json", max_length = 8, field = "file" },
            { op = "lookup", words = "w.txt", table = "~/t.npy", max_words = 8, to = "words" },
            { op = "drop", fields = ["table", "path"] },
            { op = "rename", field = "path", to = "file" },
        ]
        [streams.c]
        source = { type = "plugin", name = "mine", options = { path = "x", deep = [ { root = "y" } ], z = "x" } }
        batch_size = 4
        """
    )
    config = load_config(tmp_path / "batchd.toml", {"streams.b.source.path": "elsewhere"} | OTHER, {})
    tokenize, lookup, drop, rename = config.streams["a"].pipeline

    assert (tokenize.file, tokenize.field) == (tmp_path / "t.json", "file")
    assert (lookup.words, lookup.table, lookup.to) == (tmp_path / "w.txt", Path.home() / "t.npy", "words")
    assert (drop.fields, rename.field, rename.to) == (("table", "path"), "path", "file")
    assert config.streams["b"].source.path == Path.cwd() / "elsewhere"
    assert config.streams["c"].source.options == {
        "path": str(tmp_path / "x"),
        "deep": [{"root": str(tmp_path / "y")}],
        "z": "x",
    }
    assert config.streams["b"].pipeline[0].file == Path.cwd() / "words"


OTHER = {
    "streams.b.source.type": "folder",
    "streams.b.batch_size": "4",
    "streams.b.pipeline": '[{ op = "remove_stopwords", file = "words", field = "path" }]',
}


def test_a_file_that_changes_is_found_by_its_content(tmp_path):
    """A change of the file's times has no effect."""
    file = tmp_path / "words"
    file.write_text("the")
    told = [(str(file), digest_of(file))]

    os.utime(file, (0, 0))
    assert changed_file(told) is None
    file.write_text("and")
    assert changed_file(told) == (
        f"{file} has changed since the daemon started; restart the daemon to serve what it is now, as another stream"
    )
    file.unlink()
    assert changed_file(told) == f"there is no file {file}; it was there when the daemon started"


class TextsReader:
    """A reader whose samples are ``TEXTS``."""

    def read(self, sample):
        return {"text": TEXTS[sample]}

    def known(self, _sample):
        return {}

    def name(self, sample):
        return f"text {sample}"

    def close(self):
        pass


@pytest.fixture
def worker(monkeypatch):
    """A function that makes a worker's stream of some steps, as the daemon would describe it."""
    monkeypatch.setattr(sample_maker, "open_reader", lambda *_given: TextsReader())
    descriptor = os.memfd_create("note")
    os.truncate(descriptor, NOTE_BYTES)
    note = NoteMemory(descriptor)
    index = SourceIndex.build(len(TEXTS), {}, {}, {})

    def start(steps, digests):
        config = StreamConfig(source=FolderSource(path=Path("/texts")), pipeline=tuple(steps), batch_size=ROWS)
        files = {Path(path): digest for path, digest in digests}
        pipeline = plan_pipeline(config.pipeline)
        plan = StreamPlan("texts", config, tuple(TEXT), pipeline, files, StreamCode(), runs_own_code=False)
        layout = place_fields(sample_fields(TEXT, steps, "fail"), ROWS)
        told = ServeStream(
            stream=1,
            name="texts",
            recipe=plan.recipe(),
            samples=len(TEXTS),
            batch_size=ROWS,
            shuffle=False,
            on_error="fail",
            storage=(5000, 3, 24000),
            layout=layout.to_wire(),
            cache="off",
            pack={},
        )
        descriptor = index.to_memfd()
        try:
            return loop.WorkerStream(told, descriptor, [], note, Storage())
        finally:
            os.close(descriptor)

    yield start
    note.close()
    os.close(descriptor)


def fill(stream):
    arrays = {field.name: np.full((ROWS, *field.shape), 77, field.dtype) for field in stream.layout.fields}
    slots = {1: (memoryview(bytearray(stream.layout.slot_bytes)), {0: arrays})}
    (done,) = stream.answer(FillChunks(1, [Chunk(1, 1, 0, 0, [(0, ROWS)], [])], is_packed=False), slots)
    return done, arrays


def test_a_worker_makes_rows_of_what_the_daemon_saw(worker, tmp_path):
    """Rows have the content of both files."""
    files, table = word_table(tmp_path, ["the", "cat"])
    steps = [Lookup(**files, max_words=2)]

    done, arrays = fill(worker(steps, [(str(path), digest_of(path)) for path in files.values()]))

    assert (done.hopeless, done.bad) == ("", [])
    assert arrays["vectors_length"].tolist() == [2, 1, 2, 0]
    assert np.array_equal(arrays["vectors"][2], table)


def changed_words(files):
    files["words"].write_text("cat\nthe\n")


def broken_words(files):
    files["words"].write_text("the\n")


def no_words(files):
    files["words"].unlink()


@pytest.mark.parametrize("change", [changed_words, broken_words, no_words])
def test_a_worker_that_starts_after_a_file_has_changed_stops_the_stream(worker, tmp_path, change):
    """The worker makes no row of other content, and survives: it serves other streams, too."""
    files, _table = word_table(tmp_path, ["the", "cat"])
    steps = [Lookup(**files, max_words=2)]
    digests = [(str(path), digest_of(path)) for path in files.values()]
    change(files)

    done, arrays = fill(worker(steps, digests))

    assert str(files["words"]) in done.hopeless
    assert "started" in done.hopeless
    assert not any(array.any() for array in arrays.values())


def test_a_worker_whose_table_is_written_to_stops_the_stream(worker, tmp_path):
    """The next order stops it, and no row of that order is left."""
    files, table = word_table(tmp_path, ["the", "cat"])
    stream = worker([Lookup(**files, max_words=2)], [(str(path), digest_of(path)) for path in files.values()])
    assert fill(stream)[0].hopeless == ""

    np.save(files["table"], table + 1)
    for _ in range(2):
        done, arrays = fill(stream)
        assert f"{files['table']} was written to while it was in use" in done.hopeless
        assert not any(array.any() for array in arrays.values())


def test_a_tokenizer_that_has_changed_stops_the_stream(worker, tmp_path):
    """The new tokenizer is valid, but not the one of the stream."""
    file = save(word_level(), tmp_path)
    digest = digest_of(file)
    tokenizer = word_level()
    tokenizer.add_tokens(["old"])
    save(tokenizer, tmp_path)

    done, _arrays = fill(worker([Tokenize(file=file, max_length=4)], [(str(file), digest)]))
    assert done.hopeless.startswith(f"{file} has changed since the daemon started")
