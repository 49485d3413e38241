"""The torch loader against a real daemon: the bare client's batches, as tensors."""

from functools import partial
from itertools import islice

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed; `make test-torch` installs it")

import batchd_client  # noqa: E402
from batchd.core.erasing import RowErasing  # noqa: E402
from batchd.core.mixing import RowMixing  # noqa: E402
from batchd_client.erasing import erased, write_noise  # noqa: E402
from batchd_client.errors import (  # noqa: E402
    RankInvalid,
    TensorsInvalid,
)
from batchd_client.mixing import MIX_FIELDS, Mixing, mixed, mixed_at_once  # noqa: E402
from batchd_client.pixels import channels_first  # noqa: E402
from batchd_client.torch import BatchdLoader  # noqa: E402
from batchd_wire.position import Position  # noqa: E402
from support.loader_suite import LoaderSuite  # noqa: E402
from support.loaders import loading  # noqa: E402
from support.reference import run_programs  # noqa: E402
from support.settings import folder_stream  # noqa: E402

EPOCH = 40
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@pytest.fixture(scope="module")
def daemon(start_shared_daemon, photos):
    """Serve streams of images: unchanged, as floats, and with channels first."""
    return start_shared_daemon(
        {
            "photos": folder_stream(photos),
            "repeated": folder_stream(photos, repeats=3),
            "mixed": folder_stream(photos, mix={"mixup": 0.8, "cutmix": 1.0, "by": "row"}),
            "one-hot": folder_stream(
                photos,
                mix={"mixup": 0.8},
                pipeline=[*folder_stream(photos)["pipeline"], {"op": "one_hot", "classes": 9}],
            ),
            "erased": folder_stream(
                photos, mix={"mixup": 0.8}, erase={"probability": 0.7, "count": 2, "fill": "noise"}, on_error="mask"
            ),
            "unnamed": folder_stream(
                photos, mix={"mixup": 0.8}, source={"type": "glob", "root": str(photos), "patterns": ["**/*.jpg"]}
            ),
            "floats": folder_stream(photos, pipeline=[*folder_stream(photos)["pipeline"], {"op": "normalize"}]),
            "first": folder_stream(
                photos, pipeline=[*folder_stream(photos)["pipeline"], {"op": "layout", "order": "nchw"}]
            ),
        }
    )


load = pytest.fixture(loading(BatchdLoader))


def test_a_loader_mixes_images_and_labels(daemon, load):
    """It gives what the numbers of the bare client's batches say; the loop does not see these."""
    with batchd_client.connect(daemon.address) as connection:
        for batch, (images, targets) in zip(
            connection.stream("mixed", epochs=1), load("mixed", mix=Mixing(smoothing=0.1)), strict=False
        ):
            wanted, soft = mixed(dict(batch), 4, Mixing(smoothing=0.1))
            assert images.dtype == torch.uint8
            assert np.abs(images.permute(0, 2, 3, 1).numpy().astype(int) - wanted).max() <= 1
            assert np.allclose(targets.numpy(), soft)
    loader = load("mixed", mix=True, normalize=(MEAN, STD), as_dict=True)
    floats = next(iter(loader))
    assert set(floats) == {"image", "label", "index"}
    assert {name: (tensor.dtype, tensor.shape[1:], None) for name, tensor in floats.items()} == loader.schema
    assert floats["image"].dtype == floats["label"].dtype == torch.float32
    loader = load("one-hot", mix=True)
    assert next(iter(loader))[1].shape[1:] == loader.schema["label"].shape == (9,)
    for wrong, text in (("photos", "no field 'mix_row'"), ("unnamed", r"mix=Mixing\(classes=1000\)")):
        with pytest.raises(TensorsInvalid, match=text):
            load(wrong, mix=True)


def test_a_loader_counts_and_resumes_repeats(load):
    """Its length is that of all copies, and its state may be between two of them."""
    loader = load("repeated", epochs=2, as_dict=True)
    assert len(loader) == 3 * EPOCH // loader.batch_size == 15
    numbers = [batch["index"].tolist() for batch in islice(loader, 4)]
    state = loader.state_dict()
    assert (state["epoch"], state["step"]) == (0, 4)
    numbers += [batch["index"].tolist() for batch in load("repeated", epochs=2, as_dict=True, state=state)]
    assert numbers[::3] == numbers[1::3] == numbers[2::3]
    assert sorted(number for batch in numbers[::3] for number in batch) == list(range(EPOCH))


def test_a_loader_erases_what_is_normalised_and_mixed(daemon, load):
    """As timm's prefetching loader does: rows are mixed first, and a rectangle has whole noise."""
    plain = load("erased", normalize=(MEAN, STD), mix=True, fields=["image"])
    covered = load("erased", normalize=(MEAN, STD), mix=True, erase=True, as_dict=True)
    with batchd_client.connect(daemon.address) as connection:
        for batch, (images,), found in zip(connection.stream("erased", epochs=1), plain, covered, strict=False):
            assert set(found) == {"image", "label", "index", "valid"}
            assert torch.equal(found["image"], erased({**batch, "image": images}))
            assert (found["image"] != images).any()
    (alone,) = next(iter(load("erased", fields=["image"], dtype=torch.float16, erase="image")))
    assert alone.dtype == torch.float16
    for wrong, options, text in (
        ("photos", {"normalize": (MEAN, STD)}, "no field 'erase_box'"),
        ("erased", {}, r"images are torch.uint8.*normalize=\(mean, std\)"),
    ):
        with pytest.raises(TensorsInvalid, match=text):
            load(wrong, erase=True, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("fill", ["mean", "color", "noise"])
def test_a_device_erases_as_the_host_does(fill, dtype):
    """A list of pixels is covered with the same numbers as box by box, in any order of memory."""
    boxes, keys = RowErasing(0.8, (0.1, 0.4), (0.3, 3.3), 3, fill, 20, 30).numbers(1, Position(0, 0), 8)
    images = torch.rand(8, 20, 30, 3).to(dtype)
    numbers = {"erase_box": boxes} | ({} if fill == "mean" else {"erase_key": keys})
    wanted = torch.from_numpy(erased({"image": images.float().numpy(), **numbers})).to(dtype)
    for turned in (images.clone(), images.permute(0, 3, 1, 2).contiguous()):
        write_noise(channels_first(turned), *numbers.values())
        assert torch.equal(turned if turned.shape[-1] == 3 else turned.permute(0, 2, 3, 1), wanted)


def test_mixed_images_are_those_of_torchvision():
    """Its formulas for one share and one box, written out: a batch rolled by one, and added."""
    images, labels = torch.rand(6, 3, 8, 8), torch.tensor([0, 1, 2, 3, 0, 1])
    rolled, share, box = torch.roll(torch.arange(6), 1).int(), torch.full((6,), 0.3), torch.tensor([2, 1, 6, 5])
    one_hot = torch.nn.functional.one_hot(labels, 4).float()
    fields = {"image": images, "label": labels, "mix_row": rolled, "mix_lambda": share}
    found, targets = mixed(fields | {"mix_box": torch.zeros(6, 4, dtype=torch.int32)}, 4)
    assert torch.allclose(found, images.roll(1, 0).mul(1 - 0.3).add(images.mul(0.3)))
    assert torch.allclose(targets, one_hot.roll(1, 0).mul(1 - 0.3).add(one_hot.mul(0.3)))
    found, _targets = mixed(fields | {"mix_box": box.repeat(6, 1).int()}, 4)
    wanted = images.clone()
    wanted[..., 1:5, 2:6] = images.roll(1, 0)[..., 1:5, 2:6]
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("by", ["batch", "row"])
@pytest.mark.parametrize("kinds", [(1, 0), (0, 1), (1, 1)])
def test_a_device_mixes_as_the_host_does(by, kinds, dtype, in_place):
    """A few calls for all rows make what numpy makes row by row, whatever the memory's order is."""
    rows, numbers = 6, RowMixing(*kinds, 1.0, 0.5, by == "row", height=8, width=10)
    for step in range(4):
        partners, shares, boxes = numbers.numbers(1, Position(0, step), rows)
        images = (torch.rand(rows, 8, 10, 3) * 255).to(dtype)
        fields = {"image": images.float().numpy(), "label": np.zeros(rows, int)}
        wanted, _ = mixed(fields | dict(zip(MIX_FIELDS, (partners, shares, boxes), strict=True)), 1)
        for given in (images.clone(), images.permute(0, 3, 1, 2).contiguous(), images.clone().permute(0, 3, 1, 2)):
            found = mixed_at_once(given, partners, shares, boxes, in_place=in_place)
            assert found.dtype == dtype
            found = found.permute(0, 2, 3, 1) if found.shape[1] == 3 else found
            assert np.allclose(
                found.float().numpy(), wanted, rtol=2**-7 if dtype == torch.bfloat16 else 2**-10, atol=0.51
            )


class TestLoader(LoaderSuite):
    """Of dicts on the CPU."""

    place = "device=cpu"

    @pytest.fixture
    def load(self, load):
        """Make loaders of dicts."""
        return partial(load, as_dict=True)


def bare(daemon, stream="photos", epochs=1):
    """Return copies of all batches, from the bare client."""
    with batchd_client.connect(daemon.address) as connection:
        claim = connection.stream(stream, epochs=epochs)
        return [{name: array.copy() for name, array in batch.items()} for _ in range(epochs) for batch in claim]


def test_images_and_labels_are_those_of_the_stream(daemon, load):
    """Images are NCHW, in the stream's order; the loop owns the tensors and may write to them."""
    given = list(load())
    expected = bare(daemon)
    assert len(given) == len(expected) == 5
    for (images, labels), batch in zip(given, expected, strict=True):
        assert images.is_contiguous()
        assert np.array_equal(images.numpy(), batch["image"].transpose(0, 3, 1, 2))
        assert np.array_equal(labels.numpy(), batch["label"])
        images.zero_()


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("dtype", [None, torch.float32, torch.float16, torch.bfloat16, torch.uint8])
def test_images_come_in_the_type_and_memory_format_that_is_asked_for(daemon, load, dtype, channels_last):
    """Labels do not change."""
    images, labels = next(iter(load(dtype=dtype, channels_last=channels_last)))
    assert images.dtype == (dtype or torch.uint8)
    assert labels.dtype == torch.int64
    assert images.is_contiguous(memory_format=torch.channels_last if channels_last else torch.contiguous_format)
    expected = torch.from_numpy(bare(daemon)[0]["image"]).permute(0, 3, 1, 2)
    assert torch.equal(images, expected.to(images.dtype))


@pytest.mark.parametrize("dtype", [None, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("channels_last", [False, True])
def test_normalised_images_are_those_of_the_formula(daemon, load, dtype, channels_last):
    """The reference is float64; the tolerance is half a unit of the type and float32's error."""
    images, _ = next(iter(load(normalize=(MEAN, STD), dtype=dtype, channels_last=channels_last)))
    pixels = bare(daemon)[0]["image"].transpose(0, 3, 1, 2).astype(np.float64)
    mean, std = (np.array(numbers).reshape(3, 1, 1) for numbers in (MEAN, STD))
    expected = (pixels / 255 - mean) / std
    assert images.dtype == (dtype or torch.float32)
    tolerance = np.abs(expected) * torch.finfo(images.dtype).eps / 2 + 1e-6
    assert (np.abs(images.double().numpy() - expected) <= tolerance).all()


def test_images_that_are_floats_or_have_channels_first_already_are_left_so(daemon, load):
    """A normalised field only changes layout, and [3, 32, 32] is not [height, width, channels]."""
    images, _ = next(iter(load("floats")))
    assert torch.equal(images, torch.from_numpy(bare(daemon, "floats")[0]["image"]).permute(0, 3, 1, 2))
    images, _ = next(iter(load("first")))
    assert torch.equal(images, torch.from_numpy(bare(daemon, "first")[0]["image"]))


def test_fields_come_as_asked_for(load):
    """Fields have any order, as a tuple or a dict; a dict has the samples' numbers too."""
    labels, images, index = next(iter(load(fields=("label", "image", "index"))))
    batch = next(iter(load(as_dict=True)))
    assert list(batch) == ["image", "label", "index"]
    assert torch.equal(batch["image"], images)
    assert torch.equal(batch["label"], labels)
    assert torch.equal(batch["index"], index)
    (only,) = next(iter(load(fields=["label"])))
    assert torch.equal(only, labels)


def test_a_hook_makes_the_batch_what_it_likes(load):
    """The hook gets the batch that the loop would get."""
    plain = next(iter(load()))
    halves = next(iter(load(transform=lambda batch: (batch[0][:, :, ::2, ::2], batch[1] + 1))))
    assert torch.equal(halves[0], plain[0][:, :, ::2, ::2])
    assert torch.equal(halves[1], plain[1] + 1)


def test_a_hook_that_failed_gets_the_batch_again(load):
    """The hook's changes to the tensors before it failed are not applied twice."""
    fails = [True]

    def hook(batch):
        batch[1].add_(100)
        if fails.pop() if fails else False:
            raise MemoryError
        return batch

    plain = list(load())
    loader = load(transform=hook)
    with pytest.raises(MemoryError):
        next(iter(loader))
    given = list(loader)
    assert len(given) == len(plain)
    for (images, labels), (expected_images, expected_labels) in zip(given, plain, strict=True):
        assert torch.equal(images, expected_images)
        assert torch.equal(labels, expected_labels + 100)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"dtype": torch.float16},
        {"normalize": (MEAN, STD)},
        {"normalize": (MEAN, STD), "dtype": torch.bfloat16, "channels_last": True},
        {"images": []},
    ],
)
def test_the_schema_says_what_tensors_there_are(load, options):
    """Types and shapes equal those of the batches."""
    loader = load(as_dict=True, **options)
    for name, tensor in next(iter(loader)).items():
        assert (tensor.dtype, tuple(tensor.shape[1:])) == loader.schema[name][:2]


def test_groups_of_ranks_read_one_share_each(load, monkeypatch):
    """Of eight ranks, four compute one model; a rank that is given as well is a contradiction."""
    for rank in (3, 4):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", "8")
        loader = load(data_parallel=2)
        assert (loader.stream.rank, loader.stream.world_size) == (rank // 4, 2)
    for groups in (0, 3, True):
        with pytest.raises(RankInvalid, match=f"data_parallel={groups} does not divide the 8 ranks"):
            load(data_parallel=groups)
    with pytest.raises(RankInvalid, match="data_parallel, or rank and world_size"):
        load(data_parallel=2, rank=0, world_size=2)


def test_the_rank_comes_from_the_launcher(load, monkeypatch):
    """Torchrun sets it in the environment."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert (load().stream.rank, load().stream.world_size) == (1, 2)
    assert load(rank=0, world_size=1).stream.world_size == 1


@pytest.mark.parametrize(
    ("stream", "options", "message"),
    [
        ("photos", {"images": ["picture"]}, "no field 'picture'"),
        ("photos", {"images": ["label"]}, r"the shape \[\], and images have"),
        ("photos", {"normalize": ((0.5,), (0.5,))}, "has 3 channels"),
        ("photos", {"normalize": (MEAN, (0.2, 0.0, 0.2))}, "std above 0"),
        ("photos", {"normalize": (MEAN, STD), "dtype": torch.uint8}, "makes floating-point images"),
        ("floats", {"normalize": (MEAN, STD)}, "is float32"),
        ("first", {"normalize": (MEAN, STD)}, "name them with images="),
        ("photos", {"fields": ["label"], "dtype": torch.float16}, "name them with images="),
    ],
)
def test_what_cannot_be_is_said_at_once(load, stream, options, message):
    """The error comes before the first batch, with the field and the reason."""
    with pytest.raises(TensorsInvalid, match=message):
        load(stream, **options)


def test_a_tensor_never_changes(daemon, load):
    """Tensors are kept while the ring is reused many times, and do not change."""
    kept = []
    loader = load(as_dict=True, window=1)
    for _ in range(20):
        kept += [(batch, batch["image"].double().sum().item(), batch["index"].clone()) for batch in loader]
    for batch, total, numbers in kept:
        assert batch["image"].double().sum().item() == total
        assert torch.equal(batch["index"], numbers)
    assert daemon.stream_status()["slots"] < len(kept) / 4
    assert loader.statistics().batches_held <= 1


def test_the_program_of_the_reference_runs(daemon, monkeypatch):
    """It finds the daemon by its address in the environment."""
    monkeypatch.setenv("BATCHD_ADDRESS", daemon.address)

    run_programs("PyTorch")
