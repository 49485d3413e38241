"""Batches of samples that are alike have the same bytes everywhere, and positions keep them."""

import re
from itertools import islice
from textwrap import dedent

import numpy as np
import pytest

import batchd_client
from batchd.commands.history.batches import replay
from batchd.errors import SourceInvalid
from batchd.stream import grouping
from batchd_client.errors import BatchSizeInvalid
from batchd_wire.position import Position
from support.commands import batchd as run_batchd
from support.expected import Expected
from support.images import SIDES, jpeg, photo, write_aspects
from support.megatron import write_megatron
from support.network import free_port
from support.pools import links, pool_keys, wait_serving, worker_hosts
from support.seen import rows_of, samples, see
from support.settings import folder_stream, write_settings

pytestmark = pytest.mark.usefixtures("forked_children")
LENGTHS = [1 + 7 * place % 61 for place in range(83)]


@pytest.fixture
def texts(tmp_path):
    """Documents whose lengths are in the index of their file: 83, of 1 to 61 tokens."""
    write_megatron(tmp_path / "texts.bin", [[[place] * length] for place, length in enumerate(LENGTHS)], "uint16")
    return {
        "source": {
            "type": "tokens",
            "path": str(tmp_path / "texts.bin"),
            "format": "megatron",
            "dtype": "uint16",
            "field": "t",
        },
        "batch_size": 4,
        "pipeline": [{"op": "pad_batch", "field": "t", "max_shape": [64]}],
        "bucket": {"field": "t", "bounds": [15, 30, 45]},
    }


@pytest.fixture
def pictures(tmp_path):
    """Forty pictures of four aspects; every second one is stored on its side, with a tag."""
    folder = write_aspects(tmp_path / "pictures")
    return folder_stream(folder, bucket={"field": "image", "by": "aspect", "count": 4}, batch_size=5)


def test_a_batch_is_cut_to_the_longest_of_its_bucket(start_daemon, texts):
    """Only the last batch of an epoch has fewer rows."""
    daemon = start_daemon({"photos": texts})
    rows, widths, spreads = [], set(), []
    with batchd_client.connect(daemon.address) as connection:
        for batch in connection.stream("photos", epochs=1):
            with batch:
                rows.append(batch.samples)
                widths.add(batch["t"].shape[1])
                spreads.append(np.ptp(batch["t_length"]))
                assert all(
                    (batch["t"][row, : LENGTHS[sample]] == sample).all() for row, sample in enumerate(batch["index"])
                )

    assert rows == [4] * 20 + [3]
    assert min(widths) <= 15
    assert max(widths) == 61
    assert max(spreads) <= 15 + 3


@pytest.mark.thorough(after_first=True)
@pytest.mark.parametrize("by", ["aspect", "pixels"])
def test_pictures_are_sorted_by_what_is_asked_for(start_daemon, pictures, by):
    """Without a shuffle the smallest are first."""
    keys = {"bucket": {"field": "image", "by": by}, "shuffle": False}
    daemon = start_daemon({"photos": {**pictures, **keys}})

    with batchd_client.connect(daemon.address) as connection:
        seen = see(connection.stream("photos", epochs=1))

    size = {"aspect": lambda height, width: width / height, "pixels": lambda height, width: width * height}[by]
    sizes = [size(*SIDES[sample % 4]) for batch in seen for sample in batch.samples]
    assert sizes == sorted(sizes)


def test_ranks_of_a_step_read_one_bucket_and_others_resume(start_daemon, texts):
    """Three steps of two ranks, then one rank, then four: together each sample once."""
    daemon = start_daemon({"photos": {**texts, "balance": 4, "bucket": {"field": "t", "bounds": [15, 45]}}})
    starts = Expected(daemon.config).plan.order.starts.tolist()
    place = np.argsort(np.argsort(LENGTHS, kind="stable"), kind="stable")
    seen = []
    with batchd_client.connect(daemon.address) as connection:
        state = None
        for world_size, count in ((2, 2), (1, 4), (4, None)):
            ranks = [connection.stream("photos", rank, world_size, epochs=1, state=state) for rank in range(world_size)]
            read = [see(rank, count) for rank in ranks]
            for step in zip(*(batches for batches in read), strict=True):
                buckets = {int(np.searchsorted(starts, place[one], "right")) for batch in step for one in batch.samples}
                assert len(buckets) == 1
            seen += [batch for batches in read for batch in batches]
            state = ranks[0].state_dict()
            for rank in ranks:
                rank.close()

    assert set(samples(seen)) == set(range(83))


@pytest.mark.parametrize("workers", [1, 5])
def test_ranks_resume_in_a_budget_with_another_world_size(start_daemon, texts, workers):
    """One rank, then four, three, sixteen: together each sample once, in equal steps."""
    texts = {**texts, "batch_size": 16, "bucket": {"field": "t", "bounds": [15, 30, 45], "budget": 122}}
    daemon = start_daemon({"photos": texts}, workers=workers)
    expected = Expected(daemon.config)
    seen, state = [], None
    with batchd_client.connect(daemon.address) as connection:
        for world_size, count in ((1, 3), (4, 2), (3, 2), (16, None)):
            ranks = [connection.stream("photos", rank, world_size, epochs=1, state=state) for rank in range(world_size)]
            read = [see(rank, count) for rank in ranks]
            assert len(set(map(len, read))) == 1
            seen += [batch for batches in read for batch in batches]
            state = ranks[0].state_dict()
            for rank in ranks:
                rank.close()

    assert set(samples(seen)) == set(range(83))
    whole = {one.position: one.samples for one in expected.epoch(0)}
    assert len({len(rows) for rows in whole.values()}) > 3
    assert all(set(one.samples) <= set(whole[one.position]) for one in seen)


COSTS = """
    import numpy as np

    class Clips:
        costs = [2.5, 1.0, 0.5, {cost}] + [0.25] * 20

        def __len__(self):
            return len(self.costs)

        def __getitem__(self, sample):
            return {{"x": np.float32(sample)}}

    def seconds(sample, rng):
        return {{"seconds": np.float32(Clips.costs[int(sample["x"])])}}
"""


def costly(tmp_path, cost, **bucket):
    """A stream of clips whose seconds the user's own function says."""
    (tmp_path / "clips.py").write_text(dedent(COSTS).format(cost=cost))
    return {
        "source": {"type": "python", "function": "clips:Clips", "fields": {"x": "float32"}},
        "batch_size": 12,
        "shuffle": False,
        "pipeline": [{"op": "call", "function": "clips:seconds", "outputs": {"seconds": "float32"}, "random": False}],
        "bucket": {"field": "seconds", "by": "value", "bounds": [0.25, 1], "budget": 5, **bucket},
    }


def test_a_function_of_the_user_says_what_samples_cost(start_daemon, tmp_path):
    """Of 0.25 s a batch has twelve, as batch_size says; of up to 1 s five, of 2.5 s two."""
    daemon = start_daemon({"photos": costly(tmp_path, 1.0)}, python_path=[str(tmp_path)])

    with batchd_client.connect(daemon.address) as connection:
        seen = see(connection.stream("photos", epochs=1))

    assert [one.samples for one in seen] == [tuple(range(4, 16)), tuple(range(16, 21)), (21, 22, 23, 2, 1), (3, 0)]


@pytest.mark.thorough(after_first=True)
@pytest.mark.parametrize(
    ("cost", "problem"),
    [
        ("float('nan')", "clips:Clips[3]: 'seconds' is nan: a size is a number above 0"),
        ("-1.0", "clips:Clips[3]: 'seconds' is -1: a size is a number above 0"),
        ("0.0", "clips:Clips[3]: 'seconds' is 0: a size is a number above 0"),
        (
            "5.5",
            "sample 3 has 5.5 by 'value' of 'seconds', more than the whole budget = 5 of a batch: raise the budget",
        ),
    ],
)
def test_a_cost_that_cannot_be_one_is_refused(tmp_path, cost, problem):
    config = write_settings(
        tmp_path / "batchd.toml", {"photos": costly(tmp_path, cost)}, {"python_path": [str(tmp_path)]}
    )

    with pytest.raises(SourceInvalid, match=re.escape(problem)):
        Expected(config, python_path=[tmp_path])


def test_files_are_sorted_by_their_bytes(start_daemon, tmp_path, pictures):
    """No batch has more than the budget of encoded bytes."""
    (tmp_path / "pictures" / "39.jpg").write_bytes(jpeg(photo(160, 120)))
    sizes = {number: path.stat().st_size for number, path in enumerate(sorted((tmp_path / "pictures").iterdir()))}
    budget = max(sizes.values())
    keys = {"bucket": {"field": "image", "by": "bytes", "count": 4, "budget": budget}, "batch_size": 9}
    daemon = start_daemon({"photos": {**pictures, **keys}})

    with batchd_client.connect(daemon.address) as connection:
        seen = see(connection.stream("photos", epochs=1))

    assert samples(seen) == list(range(40))
    assert max(sum(sizes[sample] for sample in batch.samples) for batch in seen) <= budget
    assert {len(batch.samples) for batch in seen} >= {1, budget // sorted(sizes.values())[9]}


def test_bytes_that_an_index_tells_are_not_measured(tmp_path, texts, monkeypatch):
    """Two bytes for each token, so buckets and budget are those of the lengths."""
    monkeypatch.setattr(grouping, "_Measuring", None)
    batches = []
    for by, unit in (("length", 1), ("bytes", 2)):
        bucket = {"field": "t", "by": by, "bounds": [unit * 15, unit * 45], "budget": unit * 122}
        config = write_settings(tmp_path / f"{by}.toml", {"photos": {**texts, "bucket": bucket}}, {})
        plan = Expected(config).plan
        batches.append([plan.indices(Position(0, step), 0, plan.rows(Position(0, step))).tolist() for step in range(9)])

    assert batches[0] == batches[1]


def test_a_bad_sample_has_no_size_and_is_treated_by_the_policy(start_daemon, tmp_path, pictures):
    (tmp_path / "pictures" / "07.jpg").write_bytes(b"no picture")
    daemon = start_daemon({"photos": {**pictures, "on_error": "mask"}})

    with batchd_client.connect(daemon.address) as connection:
        for batch in connection.stream("photos", epochs=1):
            with batch:
                assert batch["valid"].tolist() == [sample != 7 for sample in batch["index"]]
    (line,) = daemon.log_lines("samples without a size")
    assert line["bad_or_empty"] == 1
    assert "07.jpg: not a JPEG" in line["example"]


CROPS = {"op": "crop_to_bucket", "sizes": [[48, 32], [40, 40], [32, 48], [16, 64]]}
"""The sizes of the four kinds of pictures."""


@pytest.mark.thorough(after_first=True)
@pytest.mark.parametrize("layout", [[], [{"op": "normalize"}, {"op": "layout"}]], ids=["nhwc", "nchw"])
def test_a_batch_is_one_array_of_images_of_its_size(start_daemon, tmp_path, pictures, layout):
    """Near and far trainers and a worker host have the same bytes; leftovers go further."""
    steps = [{"op": "decode"}, {**CROPS, "random": True}, {"op": "random_flip"}, *layout]
    (tmp_path / "pictures" / "03.jpg").write_bytes(b"no image")
    stream = {**pictures, "pipeline": steps, "batch_size": 4, "max_bad_fraction": 0.5, "verify": True}
    del stream["bucket"]
    daemon = start_daemon({"photos": stream}, **pool_keys(), chunk_rows=2, tcp=f"127.0.0.1:{free_port()}")
    expected, shapes, others = Expected(daemon.config), set(), 0
    with worker_hosts(tmp_path) as start_host:
        start_host(daemon, "--name", "one")
        wait_serving(daemon, 1)
        with batchd_client.connect(daemon.address) as near, batchd_client.connect(daemon.tcp_address) as far:
            local, remote = near.stream("photos", epochs=3), far.stream("photos", epochs=3)
            assert local.schema["image"].varying.kind == "bucketed"
            for epoch in range(2):
                assert see(local) == see(remote) == expected.epoch(epoch)
            for batch in local:
                with batch:
                    image = batch["image"]
                    size = image.shape[2:4] if layout else image.shape[1:3]
                    shapes.add(size)
                    assert image.flags.c_contiguous
                    assert not image.flags.owndata
                    others += sum(CROPS["sizes"][sample % 4] != list(size) for sample in batch["index"])
        (link,) = links(daemon)

    assert shapes == {tuple(size) for size in CROPS["sizes"]}
    assert others == 6  # ten of each kind, of which eight fill batches; then two and eight
    assert link["samples"] > 0
    assert link["disagreements"] == 0


SIZES = {"op": "letterbox", "sizes": [[48, 40], [32, 32], [40, 64]]}
"""Sizes that batches draw from."""


@pytest.mark.thorough(after_first=True)
@pytest.mark.parametrize(
    ("step", "drawn"), [({**CROPS, "random": True}, "crop"), (SIZES, "size")], ids=["crop", "drawn"]
)
def test_batches_of_one_size_are_drawn_and_made_again(start_daemon, pictures, tmp_path, step, drawn):
    """A contact sheet and a replay have what the trainer had."""
    stream = {**pictures, "pipeline": [{"op": "decode"}, step], "balance": 2}
    del stream["bucket"]
    daemon = start_daemon({"photos": stream})
    with batchd_client.connect(daemon.address) as connection:
        (batch,) = islice(connection.stream("photos", 0, 2, epochs=1), 1)
        (other,) = islice(connection.stream("photos", 1, 2, epochs=1), 1)
        assert batch["image"].shape == other["image"].shape
        first = batch["image"].copy()

    replayed = replay(daemon.config, "photos", (0, 0))
    printed = run_batchd("peek", "photos", "-o", str(tmp_path / "sheet.png"), address=daemon.address)

    assert (replayed.fields["image"] == first).all()
    assert drawn in str(replayed.rows[0])
    assert printed.stdout == f"{tmp_path / 'sheet.png'}: epoch 0, step 0, 5 samples\n"


@pytest.mark.thorough(after_first=True)
@pytest.mark.parametrize("step", [CROPS, SIZES], ids=["crop", "drawn"])
def test_own_batches_are_parts_of_batches_of_one_size(start_daemon, pictures, step):
    """A size that divides the stream's joins images of one size alone; others are refused."""
    stream = {**pictures, "pipeline": [{"op": "decode"}, step], "batch_size": 6, "repeats": 2}
    del stream["bucket"]
    daemon = start_daemon({"photos": stream})
    rows, expected = [], Expected(daemon.config)
    with batchd_client.connect(daemon.address) as connection:
        for batch in connection.stream("photos", batch_size=3, epochs=1):
            with batch:
                rows += rows_of(batch.items())
        with pytest.raises(BatchSizeInvalid, match="has to divide 6, and 4 does not"):
            connection.stream("photos", batch_size=4)

    assert rows == expected.all_rows(0)


@pytest.mark.thorough(after_first=True)
@pytest.mark.parametrize("ranks", [1, 2])
def test_all_images_of_a_batch_have_the_size_that_it_draws(start_daemon, tmp_path, pictures, ranks):
    """Dense, padded and from a cache of decoded images; near and far, and from a worker host."""
    decode, resize = {"op": "decode"}, {"op": "resize", "shorter_sides": [24, 32, 40], "max_longer_side": 90}
    room = {"op": "pad_batch", "max_shape": [90, 90, 3]}
    streams = {
        "photos": [decode, {"op": "random_flip"}, SIZES],
        "padded": [decode, resize, room],
        "cached": [decode, resize, {"op": "random_flip"}, room],
    }
    balance = {"balance": ranks} if ranks > 1 else {}
    made = {
        name: {**pictures, **balance, "pipeline": steps, "batch_size": 3, "seed": 1} for name, steps in streams.items()
    }
    made = {name: {key: value for key, value in keys.items() if key != "bucket"} for name, keys in made.items()}
    made["cached"] |= {"cache": "decoded", "cache_memory": "1MiB"}
    daemon = start_daemon(made, **pool_keys(), chunk_rows=2, tcp=f"127.0.0.1:{free_port()}")
    sizes = {}
    with worker_hosts(tmp_path) as start_host:
        start_host(daemon, "--name", "one")
        wait_serving(daemon, 1)
        with batchd_client.connect(daemon.address) as near, batchd_client.connect(daemon.tcp_address) as far:
            for name in streams:
                expected = Expected(daemon.config, name)
                local, remote = near.stream(name, epochs=2), far.stream(name, epochs=2)
                for epoch in range(2):
                    assert see(local) == see(remote) == expected.epoch(epoch)
                plan = expected.plan
                sizes[name] = [plan.size_of(Position(epoch, step)) for epoch in range(2) for step in range(plan.steps)]
        assert all(link["disagreements"] == 0 for link in links(daemon))

    assert sizes["photos"] == sizes["padded"] == sizes["cached"]
    assert set(sizes["photos"]) == {0, 1, 2}
    assert ranks == 1 or sizes["photos"][0:14:2] == sizes["photos"][1:14:2]
