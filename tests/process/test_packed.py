"""Streams whose rows hold several documents, with real daemons, workers and trainers."""

import io
import json
import os
import signal
import textwrap
from contextlib import closing
from dataclasses import replace
from itertools import chain
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

import batchd_client
from batchd.commands.history.batches import Replayer
from batchd.commands.history.seen import Leg, SampleLookup
from batchd.config.load import load_config
from batchd.config.tree import DaemonConfig, StreamConfig
from batchd.core.packs import Packs
from batchd.data.pipeline.call.options import Call
from batchd.data.pipeline.fields.options import Cast, Rename
from batchd.data.pipeline.shapes.options import Pack
from batchd.data.sources.composed.options import ConcatSource, SubsetSource
from batchd.data.sources.interface import kind_of, open_reader
from batchd.data.sources.parquet.options import ParquetSource
from batchd.data.sources.tokens.options import TokensSource
from batchd.data.sources.webdataset.options import WebDatasetSource
from batchd.data.sources.webdataset.reader import HEAD_BYTES
from batchd.data.storage.access import Storage
from batchd.data.storage.reader import BytesReader
from batchd.runtime import children
from batchd.stream import grouping
from batchd.stream.grouping import MeasureOptions, Size, grouping_of, lengths_in_index, measured
from batchd.stream.plan import plan_stream
from batchd_wire.position import Position
from support.commands import batchd
from support.configs import load
from support.megatron import write_megatron
from support.network import free_port
from support.parquet_files import write_parquet
from support.pools import links, pool_keys, wait_serving, worker_hosts
from support.samples import scan
from support.seen import digest_of
from support.shards import write_shard
from support.waiting import wait_until

pytestmark = pytest.mark.usefixtures("forked_children")

DOCUMENTS = 300
MODULE = """
    import os, time
    import numpy as np
    class Texts:
        def __init__(self, kills=None, hangs=None, fails=None):
            self._kills, self._hangs, self._fails = kills, hangs, fails
        def __len__(self): return 300
        def __getitem__(self, i):
            if i == self._kills: os._exit(7)
            if i == self._hangs: time.sleep(3600)
            if i == self._fails: raise ValueError("no such text")
            length = 1 + i * i % 97
            return {"tokens": 1000 * i + np.arange(length, dtype=np.int32), "label": i}
"""
LENGTHS = [1 + sample * sample % 97 for sample in range(DOCUMENTS)]


def packed(pack=(), **options):
    return {
        "source": {
            "type": "python",
            "function": "texts:Texts",
            "fields": {"tokens": "int32[?]", "label": "int64"},
            "options": options,
        },
        "batch_size": 4,
        "pipeline": [{"op": "pack", "field": "tokens", "length": 64, "fill": -1, **dict(pack)}],
    }


@pytest.fixture
def start_packed(start_daemon, code):
    (code / "texts.py").write_text(textwrap.dedent(MODULE))

    def start(pack=(), *, ready=True, **keys):
        options = {key: keys.pop(key) for key in ("kills", "hangs", "fails") if key in keys}
        return start_daemon({"texts": packed(pack, **options)}, python_path=[str(code)], ready=ready, **keys)

    return start


def documents_of(batch):
    """The documents of a batch: (sample, its tokens). Check that the fields agree."""
    found = []
    for row in range(batch.samples):
        tokens, segments, places = (batch[name][row] for name in ("tokens", "segment_ids", "position_ids"))
        at = 0
        for number, (sample, length) in enumerate(zip(batch["index"][row], batch["lengths"][row], strict=True)):
            assert (sample < 0) == (length == 0)
            if length:
                assert (segments[at : at + length] == number + 1).all()
                assert places[at : at + length].tolist() == list(range(length))
                assert batch["label"][row][number] == sample
                found.append((int(sample), tokens[at : at + length].tolist()))
            at += length
        assert not segments[at:].any()
        assert (tokens[at:] == -1).all()
    return found


def epoch_of(stream):
    """The tokens of each sample in the rest of an epoch, in order, and a digest of each batch."""
    texts: dict[int, list[int]] = {}
    digests = {}
    for batch in stream:
        with batch:
            for sample, tokens in documents_of(batch):
                texts[sample] = sorted([*texts.get(sample, []), *tokens])
            digests[batch.epoch, batch.step] = digest_of(batch.items())
    return texts, digests


def whole_texts(*without):
    return {
        sample: [1000 * sample + place for place in range(length)]
        for sample, length in enumerate(LENGTHS)
        if sample not in without
    }


TOKENS = '{{ type = "tokens", path = "{}", format = "megatron", dtype = "uint16" }}'


@pytest.mark.parametrize(
    "source",
    [
        TOKENS.format("a.bin"),
        '{ type = "tokens", root = ".", files = ["*.bin"], format = "megatron", dtype = "uint16" }',
        f'{{ type = "concat", sources = [ {TOKENS.format("b.bin")}, {TOKENS.format("a.bin")} ] }}',
        f'{{ type = "mix", weights = [2, 1], sources = [ {TOKENS.format("a.bin")}, {TOKENS.format("b.bin")} ] }}',
        f'{{ type = "subset", of = {TOKENS.format("a.bin")}, start = "30%", shuffle_seed = 4 }}',
    ],
    ids=["one file", "files", "concat", "mix", "subset"],
)
def test_lengths_that_an_index_has_are_not_measured_and_make_the_same_rows(tmp_path, monkeypatch, source):
    """No process is started for them. A document above the longest record is in no row."""
    documents = {
        name: [[[7] * (1 + start * place % 23)] for place in range(50)] for name, start in (("a", 5), ("b", 9))
    }
    for name, those in documents.items():
        write_megatron(tmp_path / f"{name}.bin", those, "uint16")
    steps = '[ { op = "cast", field = "tokens", dtype = "int32" }, { op = "pack", field = "tokens", length = 16 } ]'
    config = load(
        tmp_path, f"[streams.texts]\nsource = {source}\nbatch_size = 2\nmax_bad_fraction = 1\npipeline = {steps}"
    ).streams["texts"]
    plan = plan_stream("texts", config, kind_of(config.source).columns(config.source, Storage()), DaemonConfig())
    plan = replace(plan, pipeline=replace(plan.pipeline, record_bytes_max=40))
    index = scan(config.source)
    extension = grouping_of(plan, MeasureOptions(2, 30.0, Storage(), lambda _found: None))
    assert extension is not None
    monkeypatch.setattr(grouping, "lengths_in_index", lambda *_what: None)
    measured = extension.extend(index)
    monkeypatch.undo()
    monkeypatch.setattr(children, "start", lambda *_what, **_options: pytest.fail("it starts a process"))

    known = extension.extend(index)

    assert known.digest == measured.digest
    assert Packs.from_arrays(known.arrays).parts < 3 * len(index)


LISTS = [list(range(place * 5 % 17)) if place != 7 else None for place in range(40)]
"""Lists of numbers, one of which is not there: it is a bad sample."""


@pytest.mark.thorough(after_first=True)
@pytest.mark.parametrize(
    ("kind", "declared", "fields", "is_read"),
    [
        (pa.int32(), "int32[?]", {}, False),
        (pa.int16(), "int64[?]", {"label": "int64"}, False),
        (pa.int64(), "int32[?]", {}, True),
        (pa.int32(), "int32[?]", {"note": "text"}, True),
    ],
    ids=["lists", "safe", "perhaps too large", "two fields"],
)
def test_the_offsets_of_lists_give_the_lengths_that_samples_have(tmp_path, kind, declared, fields, is_read):
    """Only where a list may be a bad sample for another reason, each sample is read."""
    columns = {
        "tokens": pa.array(LISTS, pa.list_(kind)),
        "label": list(range(40)),
        "note": [str(number) for number in range(40)],
    }
    write_parquet(tmp_path / "a.parquet", columns, row_group_size=15)
    source = ParquetSource(root=tmp_path, shards=("a.parquet",), fields={"tokens": declared, **fields})
    index = scan(source)
    with closing(open_reader(source, index, 1 << 20, Storage())) as reader:
        found = reader.lengths(range(3, 40), "tokens")

    lengths = [0 if one is None else len(one) for one in LISTS]
    assert found.tolist() == ([0] * 37 if is_read else lengths[3:])
    assert measured_in(source)[0] == lengths


def measured_in(source):
    """The lengths that workers find, and an example of a bad sample."""
    config = StreamConfig(source=source, batch_size=2, pipeline=(Pack(field="tokens", length=32),))
    plan = plan_stream("texts", config, kind_of(source).columns(source, Storage()), DaemonConfig())
    pass_ = MeasureOptions(2, 30.0, Storage(), lambda _found: None)
    lengths, example = measured(plan, Size("tokens", "length"), scan(source), pass_)
    return lengths.tolist(), example


def npy(array):
    stream = io.BytesIO()
    np.save(stream, array)
    return stream.getvalue()


ODD_ARRAYS = {
    2: npy(np.arange(5, dtype=np.int64)),
    5: npy(np.zeros((3, 2), np.int32)),
    8: npy(np.arange(4, dtype=np.int32))[:-1],
    9: b"no array",
    11: npy(np.zeros(0, np.int32)),
    12: npy(np.arange(6, dtype=">i2")),
    14: npy(np.array([1 << 40])),
}
"""Of these, the header of sample 12 alone says that the numbers fit, and how many there are."""


@pytest.mark.parametrize("place", ["local", "server", "concat"])
def test_the_headers_of_arrays_in_shards_give_their_lengths(web, storage, tmp_path, monkeypatch, place):
    """No byte behind it is read. Where a header does not suffice, the sample is made."""
    arrays = {number: npy(np.arange(1 + number * 300, dtype=np.int32)) for number in range(20)} | ODD_ARRAYS
    members = [(f"{number:02}.tokens.npy", arrays[number]) for number in range(20)]
    members += [(f"{number:02}.cls", b"seven" if number == 17 else b"7") for number in range(21)]
    write_shard(tmp_path / "a.tar", sorted(members))
    web.files["a.tar"] = (tmp_path / "a.tar").read_bytes()
    root, fields = Path(web.url) if place == "server" else tmp_path, {"tokens": "int32[?]", "label": "int64"}
    source = WebDatasetSource(root=root, shards=("a.tar",), fields=fields)
    if place == "concat":
        source = ConcatSource(sources=(SubsetSource(of=source, stop=9), SubsetSource(of=source, start=9)))
    asked = noted_sizes(monkeypatch)
    with closing(open_reader(source, scan(source), 1 << 20, storage)) as reader:
        storage.begin_sample()
        found = reader.lengths(range(21), "tokens").tolist()
    lengths, example = measured_in(source)

    made = [2, 5, 8, 9, 11, 14, 17, 20]
    assert found == [6 if number == 12 else 0 if number in made else 1 + number * 300 for number in range(21)]
    assert max(asked) == HEAD_BYTES
    assert lengths == [5 if number == 2 else length for number, length in enumerate(found)]
    assert "a.tar: " in example


def noted_sizes(monkeypatch):
    """The sizes of the extents that readers of this process read."""
    read, asked = BytesReader.read_extent, []
    monkeypatch.setattr(
        BytesReader, "read_extent", lambda self, *extent: asked.append(extent[-1]) or read(self, *extent)
    )
    return asked


def test_steps_that_may_change_a_length_have_it_measured(tmp_path):
    write_megatron(tmp_path / "a.bin", [[[1, 2]], [[3]]], "uint16")
    source = TokensSource(path=tmp_path / "a.bin", format="megatron", dtype="uint16")
    columns = kind_of(source).columns(source, Storage())
    rename, cast = Rename(field="tokens", to="words"), Cast(field="tokens", dtype="int64")

    def known(*steps, field="tokens"):
        config = StreamConfig(source=source, batch_size=1, pipeline=(*steps, Pack(field=field, length=8)))
        found = lengths_in_index(plan_stream("texts", config, columns, DaemonConfig()), scan(source), field)
        return found if found is None else found.tolist()

    assert known() == known(cast) == [2, 1]
    assert known(rename, field="words") is None
    assert known(cast, Call(function="json:loads")) is None


def test_each_epoch_has_every_token_of_every_document_once(start_packed):
    """Documents that are longer than a row are in several; steps are the same in each epoch."""
    daemon = start_packed()

    with batchd_client.connect(daemon.address) as connection:
        stream = connection.stream("texts", epochs=2)
        first, first_digests = epoch_of(stream)
        second, second_digests = epoch_of(stream)

    assert first == second == whole_texts()
    assert len(first_digests) == len(second_digests) == len(stream)
    assert set(first_digests.values()).isdisjoint(second_digests.values())


CUT = {"method": "concat-split", "documents": 40}


@pytest.mark.thorough(after_first=True)
@pytest.mark.parametrize("pack", [{}, CUT], ids=["best-fit", "concat-split"])
@pytest.mark.parametrize("workers", [1, 5])
def test_workers_that_are_killed_give_the_bytes_that_a_remote_trainer_gets(start_packed, workers, pack):
    """One daemon loses its workers, one or five; another has two, and sends batches by TCP."""
    one = start_packed(pack, workers=workers, chunk_rows=1)
    other = start_packed(pack, workers=2, tcp=f"127.0.0.1:{free_port()}")

    with batchd_client.connect(one.address) as first, batchd_client.connect(other.tcp_address) as second:
        batches = after_kills(one, first.stream("texts", epochs=1), kills=4)
        assert epoch_of(batches) == epoch_of(second.stream("texts", epochs=1))
        assert one.status()["daemon"]["worker_deaths"] == 4


def after_kills(daemon, stream, kills):
    """The batches of a stream; after each of the first ones a worker is killed."""
    killed = set()
    for batch in stream:
        yield batch
        if len(killed) < kills:
            victim = min(wait_until(lambda: daemon.worker_pids() - killed, "a worker lives"))
            os.kill(victim, signal.SIGKILL)
            killed.add(victim)


def test_ranks_have_equal_steps_and_other_ranks_go_on_in_the_middle(start_packed):
    """Two ranks read a part of an epoch, and three the rest: together every token.

    Some ranks read the same row of a last batch that has fewer rows than there are ranks.
    """
    daemon = start_packed()
    taken = []
    with batchd_client.connect(daemon.address) as connection:
        streams = [connection.stream("texts", rank=rank, world_size=2, epochs=1) for rank in range(2)]
        assert len({len(stream) for stream in streams}) == 1
        for _round in range(5):
            for stream in streams:
                with next(iter(stream)) as batch:
                    taken += documents_of(batch)
        state = streams[0].state_dict()
        for stream in streams:
            stream.close()
        rest = [connection.stream("texts", rank=rank, world_size=3, epochs=1, state=state) for rank in range(3)]
        for stream in rest:
            for batch in stream:
                with batch:
                    taken += documents_of(batch)

    texts: dict[int, set[int]] = {}
    for sample, tokens in taken:
        texts.setdefault(sample, set()).update(tokens)
    assert {sample: sorted(tokens) for sample, tokens in texts.items()} == whole_texts()


@pytest.mark.thorough(after_first=True)
@pytest.mark.parametrize("balance", [{}, {"balance": 2}], ids=["alone", "balanced"])
def test_documents_that_are_cut_at_the_end_of_a_row_lose_no_token(start_daemon, code, balance):
    """All rows but one are full, with any number of workers; ranks read the rest of an epoch."""
    (code / "texts.py").write_text(textwrap.dedent(MODULE))
    stream = {"texts": {**packed(CUT), **balance}}
    daemons = [start_daemon(stream, python_path=[str(code)], workers=workers) for workers in (1, 3)]
    seen = []
    for daemon in daemons:
        with batchd_client.connect(daemon.address) as connection, connection.stream("texts", epochs=2) as batches:
            seen.append([epoch_of(batches), epoch_of(batches)])
    (first, second), others = seen

    assert [first, second] == others
    assert first[0] == second[0] == whole_texts()
    assert set(first[1].values()).isdisjoint(second[1].values())
    with batchd_client.connect(daemons[0].address) as connection:
        stream = connection.stream("texts", epochs=1)
        filled = [batch["lengths"].sum(axis=1).tolist() for batch in stream]
        rows = sorted(row for batch in filled for row in batch)
        assert rows[1:] == [64] * (-(-sum(LENGTHS) // 64) - 1)


def test_a_row_with_more_documents_than_allowed_is_refused_with_the_number(start_daemon, code):
    (code / "texts.py").write_text(textwrap.dedent(MODULE))
    daemon = start_daemon({"texts": packed({"method": "concat-split"})}, python_path=[str(code)], ready=False)

    assert daemon.wait() != 0
    assert "documents: set documents = " in daemon.log


@pytest.mark.thorough
def test_rows_that_are_dealt_by_cost_are_those_of_an_epoch(start_packed, start_daemon, code):
    """Other rows come first, and each epoch has every token."""
    plain = start_packed()
    balanced = start_daemon({"texts": {**packed(), "balance": 2}}, python_path=[str(code)])

    with batchd_client.connect(plain.address) as first, batchd_client.connect(balanced.address) as second:
        texts, digests = epoch_of(first.stream("texts", epochs=1))
        ranks = [second.stream("texts", rank=rank, world_size=2, epochs=1) for rank in range(2)]
        mine, theirs = map(epoch_of, ranks)
    joined = {sample: sorted({*mine[0].get(sample, []), *theirs[0].get(sample, [])}) for sample in texts}

    assert joined == texts == whole_texts()
    assert len(mine[1]) == len(theirs[1]) == -(-len(digests) // 2)
    assert digests[0, 0] != mine[1][0, 0]


@pytest.mark.thorough(after_first=True)
@pytest.mark.parametrize("pack", [{}, CUT], ids=["best-fit", "concat-split"])
def test_worker_hosts_fill_rows_of_documents_with_the_same_bytes(start_packed, tmp_path, pack):
    local = start_packed(pack)
    daemon = start_packed(pack, **pool_keys(), chunk_rows=1)
    with worker_hosts(tmp_path) as start_host:
        start_host(daemon, "--name", "one")
        wait_serving(daemon, 1, "texts")
        with batchd_client.connect(local.address) as here, batchd_client.connect(daemon.address) as both:
            known, stream = here.stream("texts", epochs=2), both.stream("texts", epochs=2)
            for _epoch in range(2):
                assert epoch_of(stream) == epoch_of(known)
        (link,) = links(daemon)
    assert link["samples"] > 0
    assert link["disagreements"] == 0


@pytest.mark.thorough(after_first=True)
@pytest.mark.parametrize(
    ("fault", "says"),
    [("fails", "no such text"), ("kills", "exit status 7"), ("hangs", "signal 9 (SIGKILL)")],
)
def test_a_sample_that_cannot_be_measured_is_in_no_row(start_packed, fault, says):
    """Whether it raises an error, ends its process, or hangs: all others are served."""
    daemon = start_packed(**{fault: 17}, sample_timeout_s=3)

    with batchd_client.connect(daemon.address) as connection:
        texts, _digests = epoch_of(connection.stream("texts", epochs=1))

    assert texts == whole_texts(17)
    (line,) = daemon.log_lines("samples in no row")
    assert line["bad_or_empty"] == 1
    assert says in line["example"]


def test_a_sample_that_is_bad_later_leaves_its_room_empty(start_packed, code):
    """The other documents of its row are where they always are."""
    daemon = start_packed()
    with batchd_client.connect(daemon.address) as connection, connection.stream("texts", epochs=1) as stream:
        before = [documents_of(batch) for batch in stream]
    worker = "if i == 17 and os.path.exists(os.path.dirname(__file__) + '/damaged'): raise ValueError('gone')"
    (code / "texts.py").write_text(textwrap.dedent(MODULE).replace("if i == self._kills: os._exit(7)", worker))
    daemon = start_packed()
    (code / "damaged").touch()

    with batchd_client.connect(daemon.address) as connection, connection.stream("texts", epochs=1) as stream:
        after = [documents_of(batch) for batch in stream]
        bad = wait_until(lambda: connection.bad("texts").samples, "the bad sample is listed")

    assert after == [[one for one in batch if one[0] != 17] for batch in before]
    assert [one.reason.partition(":")[0] for one in bad] == ["ValueError"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_processes_that_measure_end_with_their_daemon(start_packed, number):
    daemon = start_packed(hangs=17, ready=False)
    wait_until(lambda: len(daemon.offspring()) >= 2, "it measures")

    daemon.send(number)

    assert daemon.wait() == -number


def test_a_function_that_cannot_be_measured_is_said_at_the_start(start_daemon, code):
    (code / "texts.py").write_text("class Texts:\n    def __len__(self): return 300\n    __getitem__ = None\n")
    daemon = start_daemon({"texts": packed()}, python_path=[str(code)], ready=False)

    assert daemon.wait() != 0
    assert "300 of 300 samples are bad" in daemon.log


def test_a_packed_field_is_one_array_for_attention_over_its_documents(start_packed):
    """The pieces cover all values: documents, and what is left of each row."""
    daemon = start_packed()
    with (
        batchd_client.connect(daemon.address) as connection,
        connection.stream("texts", epochs=1) as stream,
        next(iter(stream)) as batch,
    ):
        found = batch.packed("tokens")
        pieces = np.split(found.values, found.row_splits[1:-1])
        documents = [piece.tolist() for piece, is_one in zip(pieces, found.is_document, strict=True) if is_one]

        assert documents == [tokens for _sample, tokens in documents_of(batch)]
        assert not found.values.flags.writeable
        assert found.row_splits[-1] == len(found.values) == 4 * 64
        assert found.max_length == max(map(len, pieces))
        with pytest.raises(KeyError, match="'label' is not a packed field"):
            batch.packed("label")


@pytest.mark.thorough
def test_a_replay_names_the_documents_of_each_row_as_the_trainer_got_them(start_packed, monkeypatch):
    """Sample, first element, place in the row; one that kills workers leaves its room empty."""
    fault = {"worker.sample.begin:60": "segv"}
    daemon = start_packed(lasting_faults=fault)
    monkeypatch.setenv("BATCHD_FAILPOINTS", "worker.sample.begin:60=segv")
    config = load_config(daemon.config)
    with batchd_client.connect(daemon.address) as connection, connection.stream("texts") as stream:
        crcs = {}
        for batch in stream:
            with batch:
                crcs[batch.epoch, batch.step] = batch.crc32(), batch["tokens"].copy(), batch["index"].copy()
    bad, kept = [], 0
    with Replayer(config, "texts") as replayer:
        for (epoch, step), (crc, tokens, indices) in crcs.items():
            made = replayer.at(Position(epoch, step))
            assert made.crc32 == crc
            for row, index, values in zip(made.rows, indices, tokens, strict=True):
                good = [one for one in row.documents if not one.reason]
                assert index[: len(good)].tolist() == [one.sample for one in good]
                assert (index[len(good) :] == -1).all()
                for one in good:
                    first = 1000 * one.sample + one.first
                    assert values[one.offset : one.offset + one.length].tolist() == list(
                        range(first, first + one.length)
                    )
                    assert one.name == f"texts:Texts[{one.sample}]"
                kept += sum(one.length for one in good)
                bad += [one for one in row.documents if one.reason]
    assert kept == sum(length for sample, length in enumerate(LENGTHS) if sample != 60)
    assert [(one.sample, one.length, one.reason) for one in bad] == [(60, 0, "quarantined")]

    monkeypatch.delenv("BATCHD_FAILPOINTS")
    text = batchd("replay", "texts", "0:0", "--config", daemon.config).stdout
    assert " documents, CRC " in text
    assert "  elements 0 to " in text


@pytest.mark.thorough(after_first=True)
@pytest.mark.parametrize("pack", [{}, CUT], ids=["packs", "cut"])
def test_the_rows_of_a_document_are_those_in_which_trainers_got_it(start_packed, pack):
    """Two ranks read two epochs; each part of each sample is where `seen` says."""
    daemon = start_packed(pack)
    got = set()
    with batchd_client.connect(daemon.address) as connection:
        streams = [connection.stream("texts", rank, 2, epochs=2) for rank in range(2)]
        for _epoch in range(2):
            for rank, stream in enumerate(streams):
                for batch in stream:
                    with batch:
                        for row, (index, lengths, values) in enumerate(
                            zip(batch["index"], batch["lengths"], batch["tokens"], strict=True), batch._first
                        ):
                            offsets = np.cumsum(lengths) - lengths
                            for sample, offset in zip(index[index >= 0], offsets, strict=False):
                                place = batch.epoch, batch.step, row, rank
                                got.add((int(sample), *place, int(values[offset]) - 1000 * int(sample)))
    lookup = SampleLookup(load_config(daemon.config), "texts")

    seen = lookup.seen(np.arange(DOCUMENTS), Position(2, 0), [Leg(Position(0, 0), 2)])

    assert {(*one[:4], *one.ranks, one.element) for one in seen.places()} == got
    assert seen.times == len(got)

    made = batchd("seen", "texts", "--index", "5", "--config", daemon.config, "--epochs", "1", "--rows").stdout
    assert "    elements " in made
    assert made.count("  epoch 0, step ") == sum(place[:2] == (5, 0) for place in got) > 0


@pytest.mark.thorough(after_first=True)
@pytest.mark.parametrize("method", ["best-fit", "concat-split"])
def test_a_mix_whose_weights_change_is_packed_by_its_parts(start_daemon, code, method):
    """A row has documents of one part, rows have the shares, and are found by their samples."""
    (code / "texts.py").write_text(textwrap.dedent(MODULE))
    stream = packed({"method": method, "documents": 64})
    weights = {"0": [1, 0], "2": [1, 3]}
    stream["source"] = {
        "type": "mix",
        "sources": [stream["source"]] * 2,
        "weights": weights,
        "samples": 24,
        "source_field": "part",
    }
    daemon = start_daemon({"texts": stream}, python_path=[str(code)])
    parts, got = [], set()
    with batchd_client.connect(daemon.address) as client, client.stream("texts") as read:
        for batch in chain(read, read):
            for row, (index, lengths) in enumerate(zip(batch["index"], batch["lengths"], strict=True)):
                (part,) = set(batch["part"][row][index >= 0].tolist())
                parts.append(part)
                for sample, end, length in zip(index, np.cumsum(lengths), lengths, strict=True):
                    if sample >= 0:
                        text = batch["tokens"][row, end - length : end] - 1000 * (sample - part * DOCUMENTS)
                        assert np.array_equal(text, text[0] + np.arange(length))
                        got.add((int(sample), batch.epoch, batch.step, row, int(text[0])))

    seen = SampleLookup(load_config(daemon.config), "texts").seen(
        np.arange(2 * DOCUMENTS), Position(2, 0), [Leg(Position(0, 0), 1)]
    )

    assert parts[:8] == [0] * 8
    assert 0 < parts[8:].count(0) < parts[8:].count(1)
    assert {(*one[:4], one.element) for one in seen.places()} == got


@pytest.mark.thorough
def test_losses_of_packed_rows_are_kept_and_not_blamed(start_packed):
    """A row has several documents, so no sample has its loss; the command names what shows them."""
    daemon = start_packed()
    with batchd_client.connect(daemon.address) as client, client.stream("texts") as stream:
        for batch in stream:
            stream.report([1.0] * batch.samples)

    said = batchd("blame", "texts", address=daemon.address, status=1).stderr
    assert 'has several samples in a row ("pack")' in said
    assert "`batchd replay` shows the documents of a batch" in said


def test_tokens_that_measuring_made_are_what_the_first_epoch_gets(start_daemon, tmp_path):
    """Their cache is full when the daemon is ready, but for bad samples; batches are the same."""
    golden = json.loads((Path(__file__).parents[1] / "golden" / "chats.json").read_text())
    (tmp_path / "tokenizer.json").write_text(json.dumps(golden["tokenizer"]))
    good = {"messages": [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "one two"}]}
    chats = [good] * 20 + [{"messages": []}] + [good] * 20
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    chat = {"op": "chat", "tokenizer": str(tmp_path / "tokenizer.json"), "template": "chatml", "max_length": 64}
    source = {"type": "jsonl", "root": str(tmp_path), "shards": ["chats.jsonl"], "fields": {"messages": "json"}}
    stream = {"source": source, "batch_size": 2, "pipeline": [chat, {"op": "pack", "field": "tokens", "length": 64}]}
    kept = {**stream, "cache": "decoded", "cache_memory": "16MiB"}

    daemon = start_daemon({"plain": stream, "kept": kept, "again": kept}, workers=2)

    assert daemon.stream_status("kept")["cache"]["held_samples"] == 40
    assert daemon.stream_status("kept")["cache"]["streams"] == 2
    found = {}
    for name in ("plain", "kept", "again"):
        with batchd_client.connect(daemon.address) as connection, connection.stream(name, epochs=1) as batches:
            found[name] = [digest_of(batch.items()) for batch in batches]
    assert found["plain"] == found["kept"] == found["again"]
    work = daemon.stream_status("kept")["work"]
    assert (work["cache_hits"], work["cache_misses"]) == (40, 0)
