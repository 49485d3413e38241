"""Text, served: tokens, vectors and bytes, and streams whose files change."""

import os
import signal

import numpy as np
import pytest

import batchd_client
from support.commands import batchd
from support.lines_source import install
from support.seen import see
from support.settings import write_settings
from support.texts import WORDS, save, word_level, word_table
from support.waiting import wait_until

TEXTS = [f"the {['cat', 'dog', 'mat'][number % 3]} sat on {number}" for number in range(60)]
MAX_LENGTH = 6


STOPWORDS = {"one": "on\n", "other": "on\nthe\n", "same": "on\n"}
"""Streams of vectors, and the file of their words to leave out."""


def write_files(folder):
    """Write a file of texts, and the files that the steps on them read."""
    lines = folder / "lines.tsv"
    lines.write_text("".join(f"{number % 4}\t{text}\n" for number, text in enumerate(TEXTS)))
    (folder / "stop.txt").write_text("on\n")
    table, _array = word_table(folder, list(WORDS))
    return {"lines": lines, "tokenizer": save(word_level(), folder), "stop": folder / "stop.txt", **table}


@pytest.fixture
def files(tmp_path, monkeypatch):
    """Make files that the test may change."""
    monkeypatch.setenv("PYTHONPATH", str(install(tmp_path / "site")))
    return write_files(tmp_path)


@pytest.fixture(scope="module")
def daemon(start_shared_daemon, tmp_path_factory):
    """Start a daemon with two workers, and a stream for each test."""
    folder = tmp_path_factory.mktemp("texts")
    files = write_files(folder)
    streams = streams_of(files)
    for name, words in STOPWORDS.items():
        (folder / name).write_text(words)
        streams[name] = streams_of({**files, "stop": folder / name})["vectors"]
    long = {**files, "lines": folder / "long.tsv"}
    long["lines"].write_text("0\tthe cat\n1\tthe cat sat on the mat\n")
    steps = tokens(long, truncation=False)
    streams["texts"] = stream_of(long, steps, on_error="mask", shuffle=False, max_bad_fraction=1.0)
    return start_shared_daemon(streams, environment={"PYTHONPATH": str(install(folder / "site"))})


def stream_of(files, *steps, **changes):
    source = {"type": "plugin", "name": "lines", "options": {"path": str(files["lines"])}}
    return {"source": source, "batch_size": 7, "window": 4, "pipeline": list(steps), **changes}


def tokens(files, **changes):
    return {"op": "tokenize", "file": str(files["tokenizer"]), "max_length": MAX_LENGTH, **changes}


def streams_of(files):
    vectors = {"op": "lookup", "words": str(files["words"]), "table": str(files["table"]), "max_words": 4}
    return {
        "tokens": stream_of(files, {"op": "lowercase"}, tokens(files), {"op": "one_hot", "classes": 4}),
        "vectors": stream_of(files, {"op": "remove_stopwords", "file": str(files["stop"])}, vectors),
        "bytes": stream_of(files, {"op": "text_bytes", "length": 12}, {"op": "rename", "field": "label", "to": "kind"}),
    }


@pytest.mark.thorough
def test_texts_are_the_same_on_any_number_of_workers(start_daemon, daemon, files):
    """All three kinds of texts are equal: shuffled, over epochs, with a worker killed meanwhile."""
    seen = []
    for each in (daemon, start_daemon(streams_of(files), workers=1)):
        with batchd_client.connect(each.address) as connection:
            streams = [connection.stream(name, epochs=2) for name in streams_of(files)]
            first = [see(stream) for stream in streams]
            each.kill_a_worker()
            seen.append([first, [see(stream) for stream in streams], [stream.fingerprint for stream in streams]])
    assert seen[0] == seen[1]


def test_a_trainer_gets_what_plain_python_makes(daemon):
    """Every sample is equal."""
    with batchd_client.connect(daemon.address) as connection:
        for batch in connection.stream("tokens", epochs=1):
            for row, sample in enumerate(batch["index"].tolist()):
                numbers = [WORDS.get(word, 0) for word in TEXTS[sample].split()]
                expected = [1, *numbers[: MAX_LENGTH - 2], 2]
                assert batch["tokens"][row].tolist() == expected
                assert batch["tokens_length"][row] == len(expected)
                assert np.array_equal(batch["label"][row], np.eye(4)[sample % 4])
        for batch in connection.stream("bytes", epochs=1):
            assert batchd_client.text(batch["text"]) == [TEXTS[sample][:12] for sample in batch["index"].tolist()]
            assert batch["kind"].tolist() == [sample % 4 for sample in batch["index"].tolist()]


def test_a_text_that_is_too_long_is_a_bad_sample_by_the_streams_policy(daemon):
    """The sample is masked, and the reason has both lengths."""
    with batchd_client.connect(daemon.address) as connection:
        (batch,) = connection.stream("texts", epochs=1)
        assert batch["valid"].tolist() == [True, False]
        assert batch["tokens"].tolist() == [[1, 3, 4, 2, 0, 0], [0] * MAX_LENGTH]
        assert batch["label"].tolist() == [0, 1]
        wait_until(lambda: connection.bad("texts").total > 0, "the sample is listed")
        (bad,) = connection.bad("texts").samples
    assert (bad.path, bad.reason) == ("line 2", "the text has 8 tokens, more than max_length = 6")


def test_a_worker_that_finds_another_tokenizer_stops_the_stream_and_no_other(start_daemon, files):
    """The error names the file and the remedy; the same worker serves the other streams."""
    daemon = start_daemon(streams_of(files), workers=1)
    with batchd_client.connect(daemon.address) as connection:
        reads = iter(connection.stream("tokens"))
        next(reads)
        tokenizer = word_level()
        tokenizer.add_tokens(["dog"])
        tokenizer.save(str(files["tokenizer"]))
        os.kill(daemon.status()["workers"][0]["pid"], signal.SIGKILL)
        with pytest.raises(
            batchd_client.errors.StreamStopped, match=r"tokenizer.json has changed .* restart the daemon"
        ):
            for _batch in reads:
                pass
        assert sum(len(one.samples) for one in see(connection.stream("bytes", epochs=1))) == len(TEXTS)


def test_other_content_of_a_file_is_another_stream(daemon):
    """The daemon rejects a saved position. The path of the file does not matter."""
    with batchd_client.connect(daemon.address) as connection:
        one, other, same = (connection.stream(name).fingerprint for name in STOPWORDS)
    assert one == same != other


def test_check_names_the_file_that_is_missing(files, tmp_path):
    """The message has its path and the line."""
    files["tokenizer"].unlink()
    settings = write_settings(tmp_path / "batchd.toml", {"texts": stream_of(files, tokens(files))}, {})

    done = batchd("check", settings, status=2)
    assert f"streams.texts.pipeline[0].file: there is no file {files['tokenizer']}" in done.stderr
