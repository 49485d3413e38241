"""The JAX loader against a real daemon: the bare client's batches, in memory of its own."""

import re
import subprocess
import sys
from functools import partial
from itertools import chain, repeat

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="JAX is not installed: pip install jax")

import jax.numpy as jnp  # noqa: E402
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding  # noqa: E402

import batchd_client  # noqa: E402
from batchd_client.erasing import erased  # noqa: E402
from batchd_client.errors import (  # noqa: E402
    RankInvalid,
    StreamClosed,
    StreamTaken,
    TensorsInvalid,
)
from batchd_client.jax import BatchdLoader, JaxPlacement, JaxTarget, batches  # noqa: E402  # noqa: E402
from batchd_client.mixing import mixed  # noqa: E402
from batchd_client.prefetch import Prefetcher  # noqa: E402
from support.images import encode, photo  # noqa: E402
from support.loader_suite import LoaderSuite  # noqa: E402
from support.loaders import loading  # noqa: E402
from support.reference import run_programs  # noqa: E402
from support.settings import folder_stream  # noqa: E402
from support.waiting import wait_until  # noqa: E402

EPOCH = 40
LARGEST = [30, 40, 3]
DRAWN_SIZES = [[20, 24], [16, 32]]
FILL = 9
LARGE = (1 << 40) + 7
NUMBERS = {
    "float16": np.arange(48, dtype=np.float16),
    "float64": np.arange(48) / 7,
    "uint8": np.arange(48, dtype=np.uint8),
    "int64": np.arange(48) - 20,
    "uint64": np.arange(48, dtype=np.uint64),
    "bool": np.arange(48) % 3 == 0,
    "large": np.arange(48) + LARGE,
}
FILLS = ("mean", "color", "noise")
HALF = {"float64": "float32", "int64": "int32", "uint64": "uint32"}


@pytest.fixture(scope="module")
def daemon(start_shared_daemon, photos, tmp_path_factory):
    """Serve photographs, numbers of all types, and images of different sizes."""
    folder = tmp_path_factory.mktemp("made")
    np.savez(folder / "numbers.npz", **NUMBERS)
    (folder / "sizes" / "one").mkdir(parents=True)
    for number in range(16):
        image = encode(photo(10 + number, 40 - number, number), ".png")
        (folder / "sizes" / "one" / f"{number:02}.png").write_bytes(image)
    arrays = {name: name for name in NUMBERS}
    numbers = {"type": "npz", "path": str(folder / "numbers.npz"), "arrays": arrays}
    pad = {"op": "pad_batch", "max_shape": LARGEST, "fill": FILL}
    ragged = {"op": "ragged", "max_shape": LARGEST}
    return start_shared_daemon(
        {
            "photos": folder_stream(photos),
            "mixed": folder_stream(photos, mix={"mixup": 0.8, "cutmix": 1.0, "by": "row"}),
            **{f"erased-{fill}": folder_stream(photos, erase={"count": 2, "fill": fill}) for fill in FILLS},
            "small": folder_stream(photos, memory="64KiB"),
            "uneven": folder_stream(photos, batch_size=12),
            "repeated": folder_stream(photos, batch_size=12, repeats=2),
            "numbers": {"source": numbers, "batch_size": 8, "pipeline": [], "shuffle": False},
            "padded": folder_stream(folder / "sizes", pipeline=[{"op": "decode"}, pad]),
            "ragged": folder_stream(folder / "sizes", pipeline=[{"op": "decode"}, ragged]),
            "letterboxed": folder_stream(
                folder / "sizes", pipeline=[{"op": "decode"}, {"op": "letterbox", "sizes": DRAWN_SIZES}]
            ),
            "mosaic": folder_stream(folder / "sizes", pipeline=[{"op": "decode"}, {"op": "mosaic", "size": [16, 24]}]),
        }
    )


load = pytest.fixture(loading(BatchdLoader))


def test_a_batch_is_mixed_on_the_device(load):
    """A compiled function gives what numpy gives by the same numbers, rounded once."""
    batch = next(iter(load("mixed")))
    images, targets = jax.jit(partial(mixed, classes=4))(batch)
    wanted, soft = mixed({name: np.asarray(array) for name, array in batch.items()}, 4)
    assert images.dtype == wanted.dtype == np.uint8
    assert np.abs(np.asarray(images).astype(int) - wanted).max() <= 1
    assert np.allclose(targets, soft)


@pytest.mark.parametrize("fill", FILLS)
def test_a_batch_is_erased_on_the_device(load, fill):
    """A compiled function covers what numpy covers, with the same noise."""
    batch = next(iter(load(f"erased-{fill}")))
    batch["image"] = batch["image"].astype(jnp.float32) / 255
    images = jax.jit(erased)(batch)
    wanted = erased({name: np.asarray(array) for name, array in batch.items()})
    assert np.array_equal(images, wanted)
    assert (wanted != batch["image"]).any()


class TestLoader(LoaderSuite):
    """Of arrays on the CPU."""

    place = "platform=cpu"


@pytest.fixture
def connection(daemon):
    """Connect for streams that a test opens itself."""
    with batchd_client.connect(daemon.address) as connection:
        yield connection


def bare(daemon, stream="photos", epochs=1):
    """Return copies of all batches from the bare client, with the whole room of every field."""
    with batchd_client.connect(daemon.address) as connection:
        claim = connection.stream(stream, epochs=epochs)
        return [{name: batch.room(name).array.copy() for name in batch} for _ in range(epochs) for batch in claim]


def assert_same(given, expected):
    """Check that fields, types (except for those that JAX lacks) and numbers are equal."""
    assert len(given) == len(expected) > 0
    for batch, other in zip(given, expected, strict=True):
        assert list(batch) == list(other)
        for name, array in batch.items():
            assert isinstance(array, jax.Array)
            assert array.dtype == HALF.get(other[name].dtype.name, other[name].dtype)
            assert np.array_equal(np.asarray(array), other[name].astype(array.dtype))


def test_batches_are_those_of_the_stream(daemon, load):
    """All fields are unchanged; a label of int64 becomes JAX's int32, without a warning."""
    assert_same(list(load()), bare(daemon))


def test_an_array_never_changes(daemon, load):
    """Arrays are kept while the ring is reused many times, and equal the bare client's."""
    kept = []
    loader = load(window=1)
    for _ in range(40):
        kept += loader
    assert_same(kept, bare(daemon, epochs=40))
    assert daemon.stream_status()["slots"] < len(kept) / 4
    assert loader.statistics().batches_held == 0


def test_without_the_copy_arrays_of_the_cpu_would_change(daemon, connection, monkeypatch):
    """Such arrays are the slots, which is the fault that the test before looks for."""
    monkeypatch.setattr(JaxTarget, "keeps_host_memory", lambda _self: False)
    prefetcher = Prefetcher(connection.stream("photos", window=1), JaxPlacement(["image"], JaxTarget(None, 8, 1)), 0)
    kept = [prefetcher.take(epoch) for epoch in range(20) for _ in range(5)]
    with pytest.raises(AssertionError):
        assert_same(kept, [{"image": batch["image"]} for batch in bare(daemon, epochs=20)])


@pytest.mark.parametrize("prefetch", [0, 1, 2, 9])
@pytest.mark.parametrize("stream", ["photos", "small"])
def test_batches_are_under_way_ahead_of_the_loop_to_a_device_with_memory_of_its_own(
    daemon, load, stream, prefetch, monkeypatch
):
    """The number allowed, or the ring's slots, here two, are under way; the state is the loop's."""
    monkeypatch.setattr(JaxTarget, "keeps_host_memory", lambda _self: False)
    monkeypatch.setattr(JaxTarget, "put", lambda _self, local: jnp.array(local, copy=True))
    expected = bare(daemon, stream, epochs=4)
    loader = load(stream, prefetch=prefetch)
    assert daemon.stream_status(stream)["slots"] == 2 or stream != "small"
    given, held = [], []
    for epoch in range(4):
        for step, batch in enumerate(loader, start=1):
            given.append(batch)
            held.append(loader.statistics().batches_held)
            state = loader.state_dict()
            assert (state["epoch"], state["step"]) == ((epoch, step) if step < 5 else (epoch + 1, 0))
    assert max(held) <= prefetch
    assert_same(given, expected)


def test_what_has_come_is_under_way_while_the_loop_works(load, monkeypatch):
    """The number of batches under way is the allowed one."""
    monkeypatch.setattr(JaxTarget, "keeps_host_memory", lambda _self: False)
    monkeypatch.setattr(JaxTarget, "put", lambda _self, local: jnp.array(local, copy=True))
    for prefetch in (1, 3):
        loader = load(prefetch=prefetch)
        for_ever = chain.from_iterable(repeat(loader))

        def under_way(loader=loader, for_ever=for_ever):
            next(for_ever)
            return loader.statistics().batches - loader.state_dict()["step"] - 5 * loader.epoch

        wait_until(lambda under_way=under_way, prefetch=prefetch: under_way() == prefetch, "so many are under way")


def test_the_memory_of_an_array_is_that_of_the_one_copy(connection):
    """The copy is aligned, so JAX makes no second one."""
    array = next(iter(batches(connection.stream("photos"))))["image"]
    assert array.unsafe_buffer_pointer() % 64 == 0
    assert np.asarray(array).ctypes.data == array.unsafe_buffer_pointer()


def test_numbers_of_64_bits_come_as_jax_has_them(load):
    """JAX's numbers are half as wide."""
    loader = load("numbers", fields=[name for name in NUMBERS if name != "large"])
    for step, batch in enumerate(loader):
        rows = slice(8 * step, 8 * step + 8)
        for name, array in batch.items():
            assert array.dtype == loader.schema[name].dtype == HALF.get(name, name)
            assert np.array_equal(np.asarray(array), NUMBERS[name][rows].astype(array.dtype))


def test_with_x64_they_stay_as_they_are(load):
    """Large numbers stay as well."""
    with jax.enable_x64(True):
        loader = load("numbers")
        batch = next(iter(loader))
    for name, numbers in NUMBERS.items():
        assert batch[name].dtype == loader.schema[name].dtype == numbers.dtype
        assert np.array_equal(np.asarray(batch[name]), numbers[:8])


def test_a_number_that_does_not_fit_is_an_error(load):
    """JAX would give another number; the loader stays before that batch."""
    loader = load("numbers", fields=["large"])
    for _ in range(2):
        with pytest.raises(
            TensorsInvalid, match=f"'large' has the number {LARGE}, which is no int32: set jax_enable_x64"
        ):
            next(iter(loader))
        assert loader.state_dict()["step"] == 0


@pytest.mark.parametrize(("stream", "behind"), [("padded", FILL), ("ragged", 0)])
def test_samples_of_different_shapes_come_with_all_their_room(daemon, load, stream, behind):
    """All batches have one shape, so a function compiles once; another field has the sizes."""
    traces = []

    @jax.jit
    def largest(images, sizes):
        traces.append(images.shape)
        is_row = jnp.arange(LARGEST[0]) < sizes[:, :1]
        is_column = jnp.arange(LARGEST[1]) < sizes[:, 1:]
        return jnp.max(jnp.where(is_row[:, :, None, None] & is_column[:, None, :, None], images, 0), axis=(1, 2, 3))

    loader = load(stream)
    given = [batch | {"largest": largest(batch["image"], batch["image_shape"])} for batch in loader]
    assert traces == [(8, *LARGEST)]
    assert loader.schema["image"].shape == (8, *LARGEST)
    for batch, room in zip(given, bare(daemon, stream), strict=True):
        assert np.array_equal(np.asarray(batch["image"]), room["image"])
    if stream == "padded":
        for batch in given:
            for image, (height, width), number, top in zip(
                np.asarray(batch["image"]),
                batch["image_shape"].tolist(),
                batch["index"].tolist(),
                batch["largest"].tolist(),
                strict=True,
            ):
                expected = photo(10 + number, 40 - number, number)
                assert (height, width) == expected.shape[:2]
                assert np.array_equal(image[:height, :width], expected)
                assert (image[height:] == behind).all()
                assert (image[:, width:] == behind).all()
                assert top == expected.max()


@pytest.mark.thorough(after_first=True)
@pytest.mark.parametrize(
    ("stream", "sizes"), [("letterboxed", {tuple(size) for size in DRAWN_SIZES}), ("mosaic", {(32, 48)})]
)
def test_batches_have_the_size_that_each_draws_and_images_of_several_samples(daemon, load, stream, sizes):
    """A function compiles once for each size. All arrays are kept."""
    expected = bare(daemon, stream, epochs=8)
    loader = load(stream, prefetch=2)
    given = [batch for _ in range(8) for batch in loader]
    assert_same(given, expected)
    assert {batch["image"].shape[1:3] for batch in given} == sizes


def test_fields_come_as_asked_for(load):
    """Fields have the requested order."""
    assert list(next(iter(load(fields=("label", "image"))))) == ["label", "image"]


def test_the_schema_is_what_a_function_can_be_compiled_for(load):
    """The schema is known before the first batch."""
    loader = load(fields=["image", "label"])
    schema = loader.schema
    compiled = jax.jit(lambda image, label: image.sum(dtype=jnp.int32) + label.sum()).lower(**schema).compile()
    batch = next(iter(loader))
    assert {name: (array.shape, array.dtype) for name, array in batch.items()} == {
        name: (spec.shape, spec.dtype) for name, spec in schema.items()
    }
    expected = np.asarray(batch["image"]).sum() + np.asarray(batch["label"]).sum()
    assert int(compiled(**batch)) == expected


def test_an_array_may_be_donated(daemon, load):
    """The loop owns its arrays."""
    step = jax.jit(lambda images: images + jnp.uint8(1), donate_argnums=0)
    given = [step(batch["image"]) for batch in load()]
    for array, batch in zip(given, bare(daemon), strict=True):
        assert np.array_equal(np.asarray(array), batch["image"] + np.uint8(1))


def test_arrays_lie_as_the_sharding_says(daemon, load):
    """Here is one device; ``test_jax_life`` has several."""
    mesh = jax.make_mesh((1,), ("data",))
    for sharding in (NamedSharding(mesh, PartitionSpec("data")), SingleDeviceSharding(jax.devices()[0])):
        given = list(load(sharding=sharding))
        assert all(array.sharding.is_equivalent_to(sharding, array.ndim) for batch in given for array in batch.values())
        assert_same(given, bare(daemon))


def test_ranks_are_processes_of_jax(load):
    """Here one."""
    assert (load().stream.rank, load().stream.world_size) == (0, 1)


def test_a_stream_of_ones_own_is_brought_to_jax_once(daemon, connection):
    """A second loader would miss the batches under way to the first one."""
    stream = connection.stream("photos")
    train = batches(stream, fields=["image"])
    first = next(iter(train))
    with pytest.raises(StreamTaken, match="before the loop over the epochs"):
        batches(stream)
    assert_same([first, *train], [{"image": batch["image"]} for batch in bare(daemon)])
    train.close()
    with pytest.raises(StreamClosed):
        next(iter(stream))
    assert_same(list(batches(connection.stream("photos"))), bare(daemon))


def test_what_cannot_be_is_said_at_once(load):
    """The error has the remedy."""
    with pytest.raises(RankInvalid, match="both, or neither"):
        load(rank=0)
    with pytest.raises(RankInvalid, match="data_parallel=2 does not divide the 1 ranks"):
        load(data_parallel=2)
    with pytest.raises(RankInvalid, match="data_parallel, or rank and world_size"):
        load(data_parallel=1, rank=0, world_size=1)


@pytest.mark.parametrize(
    ("stream", "devices", "message"),
    [
        ("photos", 3, "field 'image', 8 rows: .* partitioned 3 times"),
        ("uneven", 3, r"field 'image', 4 rows \(the last batch of an epoch; drop_last = true leaves it out\)"),
        ("repeated", 3, r"field 'image', 4 rows \(the last batch of an epoch"),
    ],
)
def test_rows_that_a_sharding_cannot_split_are_said_at_once(daemon, stream, devices, message):
    """The smaller last batch is checked too, before the first batch."""
    program = f"""
import jax
jax.config.update("jax_num_cpu_devices", {devices})
from batchd_client.errors import TensorsInvalid
from batchd_client.jax import BatchdLoader
sharding = jax.sharding.NamedSharding(jax.make_mesh(({devices},), ("data",)), jax.P("data"))
try:
    BatchdLoader({stream!r}, address={daemon.address!r}, sharding=sharding)
except TensorsInvalid as error:
    print(error)
"""
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert re.search(message, said), said


def test_without_jax_it_says_what_to_install():
    """The client itself does not need JAX."""
    program = """
import sys
sys.modules["jax"] = None
import batchd_client
import batchd_client.jax
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert "ImportError: batchd_client.jax needs JAX: pip install jax" in done.stderr


def test_the_program_of_the_reference_runs(daemon, monkeypatch):
    """It finds the daemon by its address in the environment."""
    monkeypatch.setenv("BATCHD_ADDRESS", daemon.address)

    run_programs("JAX")
