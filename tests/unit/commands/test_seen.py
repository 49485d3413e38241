"""`batchd seen`: every row in which the model saw a sample, computed by the inverse of the plan."""

import json
import re
from collections import defaultdict
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import batchd
from batchd.cli.main import main
from batchd.commands.history.seen import Leg, SampleLookup
from batchd.config.load import load_config
from batchd.core import plan as plan_module
from batchd.core.course import Course
from batchd.core.packs import PackLimits, Packs
from batchd.core.plan import Plan
from batchd.data.sources import finding
from batchd.data.sources.finding import FilePattern, NamedSamples
from batchd.errors import BatchdError, SourceInvalid
from batchd_wire.position import Position
from support.core_plans import KINDS, SAMPLES, plan_of
from support.images import write_photos
from support.settings import folder_stream, write_settings

pytestmark = pytest.mark.usefixtures("forked_children")


def _array_stream(folder, samples, **changes):
    np.save(folder / "x.npy", np.arange(samples, dtype=np.float32))
    source = {"type": "npy", "root": str(folder), "arrays": {"x": "x.npy"}}
    return {"source": source, "batch_size": 4, **changes}


@pytest.fixture(scope="module")
def lookup(tmp_path_factory):
    """Open a stream of numbers, whose plan the tests replace."""
    folder = tmp_path_factory.mktemp("numbers")
    config = write_settings(folder / "batchd.toml", {"numbers": _array_stream(folder, SAMPLES)}, {})
    return SampleLookup(load_config(config), "numbers")


def _contents(plan, packs, bad, position):
    """Yield (row, sample, stands in for, element) of a whole batch, made as workers make it."""
    rows = range(plan.rows(position))
    if packs is not None:
        numbers = position.step // plan.repeats * plan.batch_size + np.array(rows)
        for row, sample, element in packs.contents(position.epoch, numbers, plan.seed, shuffle=plan.shuffle).tolist():
            if sample not in bad:
                yield row, sample, None, element
        return
    for row, wanted in zip(rows, plan.indices(position, 0, len(rows)).tolist(), strict=True):
        tries = [wanted, *(plan.substitute(position.epoch, wanted, attempt) for attempt in range(1, 33))]
        good = next((sample for sample in tries if sample not in bad), None)
        if good is not None:
            yield row, good, None if good == wanted else wanted, None


def _read(plan, packs, bad, legs, until):
    """Return what ranks read from their courses.

    {(sample, epoch, step, row, …): (ranks, their rows)}.
    """
    read = defaultdict(list)
    for leg, stop in zip(legs, [*(leg.begin for leg in legs[1:]), until], strict=True):
        for rank in range(leg.world_size):
            course, sequence = Course(plan, rank, leg.world_size, *leg.begin, None), 0
            while (share := course.at(sequence)).position.epoch <= until.epoch:
                sequence += 1
                if share.position >= stop:
                    continue
                for row, *what in _contents(plan, packs, bad, share.position):
                    if share.first <= row < share.first + share.rows:
                        read[(what[0], *share.position, row, *what[1:])].append((rank, row - share.first))
    return {key: tuple(zip(*sorted(ranks), strict=True)) for key, ranks in read.items()}


@pytest.mark.thorough
@given(
    kind=st.sampled_from(KINDS),
    batch_size=st.integers(1, 6),
    seed=st.integers(0, 1 << 40),
    drop_last=st.booleans(),
    repeats=st.sampled_from([1, 1, 2, 3]),
    bad=st.sets(st.integers(0, SAMPLES - 1), max_size=6),
    data=st.data(),
)
def test_the_places_of_all_samples_are_the_rows_that_ranks_read(
    lookup, kind, batch_size, seed, drop_last, repeats, bad, data
):
    """Any order, packs, repeats, bad samples, drop_last, and runs that go on with other ranks."""
    plan, packs = plan_of(kind, batch_size, seed, drop_last=drop_last, repeats=repeats)
    if plan.steps == 0:
        return
    lookup.plan, lookup.packs, lookup._bad = plan, packs, np.array(sorted(bad), np.int64)
    numbers = st.tuples(st.integers(0, 3), st.integers(0, plan.steps - 1))
    *begins, until = (Position(*one) for one in sorted(data.draw(st.lists(numbers, min_size=2, max_size=4))))
    looks_at_all = data.draw(st.booleans())
    legs = [Leg(begin, data.draw(st.integers(1, min(5, plan.steps)))) for begin in begins]

    with patch.object(plan_module, "PLACES_FOR_A_SAMPLE", 1_000 if looks_at_all else 0):
        seen = lookup.seen(np.arange(SAMPLES), until, legs)
        places = list(seen.places())

    expected = _read(plan, packs, bad, legs, until)
    assert {(*place[:4], *place[5:7]): (place.ranks, place.rank_rows) for place in places} == expected
    assert seen.times == len(expected)
    assert {epoch: times for epoch, times in seen.by_epoch.items() if times} == {
        epoch: sum(key[1] == epoch for key in expected) for epoch in {key[1] for key in expected}
    }
    assert seen.never == SAMPLES - len({key[0] for key in expected})


@given(st.lists(st.integers(-1, 60), min_size=1, max_size=300), st.booleans(), st.integers(0, 1 << 62), st.data())
def test_the_packs_of_each_sample_are_those_that_contain_it(lengths, shuffle, seed, data):
    """Parts of long samples, and samples in no pack: the inverse of the contents of all packs."""
    lengths[0] = 61
    packs = Packs.plan(np.array(lengths), PackLimits(20, 6, data.draw(st.integers(1, 99)), "split"))
    epochs = data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=3, unique=True))

    found = packs.places(
        np.repeat(epochs, len(lengths)), np.tile(np.arange(len(lengths)), len(epochs)), seed, shuffle=shuffle
    )

    for number, epoch in enumerate(epochs):
        whole = packs.contents(epoch, np.arange(len(packs)), seed, shuffle=shuffle)
        here = found[found[:, 0] // len(lengths) == number] - [number * len(lengths), 0, 0]
        assert sorted(map(tuple, here[:, [1, 0, 2]].tolist())) == sorted(map(tuple, whole.tolist()))
    assert packs.parts_of(np.arange(len(lengths)), seed).sum() == packs.parts


@given(samples=st.integers(1, 1 << 40), seed=st.integers(0, (1 << 63) - 1), data=st.data())
def test_substitutes_of_many_samples_are_those_of_each(samples, seed, data):
    """Numbers wrap around in arrays as they do in Python."""
    plan = Plan(samples, 1, seed, shuffle=True, drop_last=False)
    pairs = data.draw(st.lists(st.tuples(st.integers(0, 1 << 40), st.integers(0, samples - 1)), min_size=1, max_size=9))
    epochs, bad = np.array(pairs).T

    for attempt in (1, 2, 32):
        expected = [plan.substitute(epoch, sample, attempt) for epoch, sample in pairs]
        assert plan.substitutes(epochs, bad, attempt).tolist() == expected


def test_places_of_a_thousand_million_samples_lead_back():
    """One call finds a sample in a hundred epochs."""
    plan = Plan(10**9, 256, 7, shuffle=True, drop_last=False)
    epochs, places = plan.all_places(np.arange(100), np.full(100, 123_456_789))

    for epoch, place in zip(epochs.tolist(), places.tolist(), strict=True):
        step, row = divmod(place, 256)
        assert plan.indices(Position(epoch, step), row, 1).tolist() == [123_456_789]


NAMES = st.lists(
    st.lists(st.sampled_from(["a", "b", "ab", "b.jpg", "a.jpg", ".h"]), min_size=1, max_size=3).map("/".join),
    min_size=1,
    max_size=30,
)


@given(
    names=NAMES,
    absolute=st.integers(0, 29),
    text=st.sampled_from(
        [
            "a.jpg",
            "a/b.jpg",
            "/r/a/b.jpg",
            "/r/a.jpg",
            "*.jpg",
            "a/*",
            "/r/*/*",
            "/r/**/*.jpg",
            "**/b/*",
            "{a,b}/a*",
            "/r",
        ]
    ),
)
def test_a_search_in_names_finds_those_that_a_look_at_each_finds(names, absolute, text):
    """Paths of files below the root, and one absolute path among them."""
    paths = [f"/r/{name}" for name in names]
    stored = [name if number != absolute else f"/r/{name}" for number, name in enumerate(names)]
    blob = np.frombuffer("".join(stored).encode(), np.uint8)
    index = NamedSamples(np.cumsum([0, *map(len, stored)]), blob, b"/r/")
    pattern = FilePattern(text)

    with patch.object(finding, "FEW", 0):
        found = index.find(pattern).tolist()

    assert found == [number for number, path in enumerate(paths) if FilePattern(text).matches(path.encode())]
    for path in paths:
        assert pattern.matches(path.encode()) == _matches(text, path)


def _matches(text, path):
    """Compare a path with a text by a regular expression that is written another way."""
    regular = ""
    for piece in re.split(r"(\*\*/|\*|\{a,b\})", text):
        hidden = r"(?!\.)" if not regular or regular.endswith("/") else ""
        special = {"**/": r"(?:(?!\.)[^/]+/)*", "*": hidden + "[^/]*", "{a,b}": "(?:a|b)"}
        regular += special.get(piece, re.escape(piece))
    return re.fullmatch(regular if text.startswith("/") else f"(?:.*/)?{regular}", path) is not None


# --- which samples --------------------------------------------------------------------------------


@pytest.fixture
def classes(tmp_path):
    """Write photographs of three classes, and the configuration of streams over them."""
    folder = tmp_path / "photos"
    write_photos(folder, {"cat": 3, "dog": 2, "owl": 4})
    folder_source = {"type": "folder", "path": str(folder)}
    owls = {"type": "subset", "of": folder_source, "start": 5, "stop": 9}
    sources = {
        "photos": folder_source,
        "twice": {"type": "concat", "sources": [folder_source, folder_source]},
        "mixed": {"type": "mix", "sources": [folder_source, owls], "weights": [1, 2], "until": "all"},
        "owls": owls,
    }
    streams = {name: folder_stream(folder, source=source) for name, source in sources.items()}
    return folder, write_settings(tmp_path / "batchd.toml", streams, {})


def _lookup(classes, stream):
    return SampleLookup(load_config(classes[1]), stream)


def test_samples_are_named_by_path_pattern_class_or_number(classes):
    """A path may be its end alone; a pattern without a slash in front is one of ends."""
    folder, _config = classes
    photos = _lookup(classes, "photos")
    files = sorted((folder / "owl").iterdir())
    first = photos.of_file(str(files[0])).tolist()

    assert first == [5]
    assert photos.of_file(f"owl/{files[0].name}").tolist() == first
    assert photos.of_file("owl/*").tolist() == photos.of_file(f"{folder}/**/owl/*").tolist() == [5, 6, 7, 8]
    assert photos.of_file("{cat,dog}/*").tolist() == [0, 1, 2, 3, 4]
    assert photos.of_label("owl").tolist() == photos.of_label("2").tolist() == [5, 6, 7, 8]
    assert photos.of_index(3).tolist() == [3]
    assert photos.name(5) == str(files[0])


def test_samples_of_composed_sources_are_found_in_each_part(classes):
    """A file that is there several times is several samples."""
    for stream in ("twice", "mixed", "owls"):
        lookup = _lookup(classes, stream)
        names = [lookup.name(sample) for sample in range(lookup.plan.samples)]
        for text, part in (("owl/*", "/owl/"), (names[-1], names[-1])):
            expected = [sample for sample, name in enumerate(names) if part in name]
            assert lookup.of_file(text).tolist() == expected
        assert lookup.of_label("owl").tolist() == [sample for sample, name in enumerate(names) if "/owl/" in name]


@pytest.mark.parametrize(
    ("ask", "text"),
    [
        ({"file": "dog/none.jpg"}, "has no sample in a file 'dog/none.jpg'"),
        ({"file": "a{b"}, "the braces of 'a{b' do not match"),
        ({"label": "cats"}, "has no sample with the label 'cats'; did you mean cat?"),
        ({"index": 9}, "has no sample 9: they are numbered 0 to 8"),
        ({}, "by one of file, label and index"),
        ({"index": 1, "legs": [((0, 5), 1), ((0, 1), 2)]}, "has no step 5: an epoch has the steps 0 to 1"),
        ({"index": 1, "legs": [((0, 1), 1), ((0, 0), 2)]}, "give the world sizes in the order of the run"),
        ({"index": 1, "legs": [((0, 0), 3)]}, "has 2 steps in an epoch, and none for 3 ranks"),
        ({"index": 1, "bad": [9]}, "has no sample 9"),
    ],
)
def test_a_question_without_an_answer_is_an_error_that_says_why(classes, ask, text):
    """The library form raises what the command prints."""
    with pytest.raises(BatchdError, match=text.replace("?", r"\?")):
        batchd.seen(classes[1], "photos", (2, 0), **ask)


def test_a_source_whose_index_knows_no_files_or_labels_says_so(tmp_path):
    """Numbers in an array have a file, but no labels; a live stream has nothing to be found in."""
    streams = {
        "numbers": _array_stream(tmp_path, 5),
        "live": {
            "source": {"type": "push", "fields": {"x": "float32"}, "capacity": 8},
            "batch_size": 2,
        },
    }
    config = write_settings(tmp_path / "batchd.toml", streams, {})

    assert batchd.seen(config, "numbers", (1, 0), file="x.npy").times == 5
    with pytest.raises(BatchdError, match="has no labels: they are read with each sample"):
        batchd.seen(config, "numbers", (1, 0), label=0)
    with pytest.raises(BatchdError, match="come once and are not kept"):
        batchd.seen(config, "live", (1, 0), index=0)


def test_the_state_of_other_batches_is_refused(classes):
    """Its positions are of other rows."""
    state = {"stream": "photos", "fingerprint": "5" * 32, "epoch": 1, "step": 0}
    with pytest.raises(SourceInvalid, match="with other files or other settings"):
        batchd.seen(classes[1], "photos", state, index=0)


# --- the command ----------------------------------------------------------------------------------


def _seen(capsys, *words):
    with pytest.raises(SystemExit) as ended:
        main(["seen", *map(str, words)])
    return ended.value.code, capsys.readouterr()


def test_a_row_of_a_shared_batch_has_its_number_in_the_batch_of_its_rank_too(classes, capsys):
    """Two ranks share the last of three batches: each of them has counted its own rows from 0."""
    _folder, config = classes
    words = "photos", "*", "--config", config, "--epochs", 1, "--world-size", 2, "--set", "streams.photos.batch_size=3"

    places = json.loads(_seen(capsys, *words, "--json")[1].out)["places"]
    shared = [(place["row"], place["ranks"], place["rank_rows"]) for place in places if place["step"] == 2]
    assert sorted(shared) == [(0, [0], [0]), (1, [1], [0]), (2, [1], [1])]
    assert all([place["row"]] == place["rank_rows"] for place in places if place["step"] < 2)
    printed = _seen(capsys, *words)[1].out
    assert "  epoch 0, step 2, row 2, rank 1 (row 1 of its batch): sample " in printed
    assert "  epoch 0, step 2, row 0, rank 0: sample " in printed


@pytest.mark.thorough
def test_the_command_lists_places_of_few_samples_and_counts_many(classes, capsys, tmp_path):
    """Text and JSON have the same places; --rows says what was drawn, and which row is bad."""
    folder, config = classes
    bad = sorted((folder / "cat").iterdir())[1]
    bad.write_bytes(b"no image")
    words = "photos", "cat/*", "--config", config, "--epochs", 2, "--world-size", 1, "--world-size", "2@1:0"

    _status, printed = _seen(capsys, *words)
    plain = json.loads(_seen(capsys, *words, "--json")[1].out)
    assert printed.out.startswith("photos, before epoch 2, step 0: 3 samples, seen 6 times\n")
    assert "no bad samples are known: --running asks the daemon" in printed.out
    assert f"sample 1: {bad}\n" in printed.out
    for place in plain["places"]:
        ranks = " and ".join(map(str, place["ranks"]))
        where = f"epoch {place['epoch']}, step {place['step']}, row {place['row']}, rank {ranks}"
        assert f"  {where}: sample {place['sample']}\n" in printed.out
    assert (plain["seen"], plain["epochs"]) == (6, [{"epoch": 0, "seen": 3}, {"epoch": 1, "seen": 3}])

    made = _seen(capsys, *words, "--rows")[1].out
    assert made.count("not seen: not a JPEG, PNG, WebP, BMP or GIF file") == 2
    assert made.count("random_resized_crop: ") >= 4

    listed = tmp_path / "bad.json"
    listed.write_text(json.dumps([{"sample": 1, "path": "", "reason": "", "times": 1}]))
    for sample in range(9):
        known = _seen(capsys, "photos", "--index", sample, *words[2:], "--bad", listed, "--rows")[1].out
        assert "not seen: " not in known
        assert ("never seen: 1 sample" in known) == (sample == 1)

    twice = _seen(capsys, "twice", "**/*.jpg", "--config", config, "--until", "1:1")[1].out
    assert "18 samples, seen 26 times" in twice
    assert twice.endswith("\nepoch 0: 18\nepoch 1: 8\n")


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["photos", "x.jpg"], "say how far the run is: --state FILE, --epochs N or --until EPOCH:STEP"),
        (["photos", "x.jpg", "--index", "1", "--epochs", "1"], "one of FILE, --label and --index"),
        (["photos", "x.jpg", "--epochs", "1", "--until", "1:0"], "several ends of the run"),
        (["photos", "x.jpg", "--epochs", "1", "--world-size", "x"], "'x' is not a number of ranks"),
        (["photos", "x.jpg", "--until", "1"], "'1' is not a position"),
    ],
)
def test_options_that_leave_a_question_open_are_usage_errors(capsys, tmp_path, words, text):
    """Each message names the option to give."""
    config = write_settings(tmp_path / "batchd.toml", {"photos": folder_stream(tmp_path)}, {})
    status, printed = _seen(capsys, *words, "--config", config)
    assert status == 2
    assert text in " ".join(printed.err.split())
