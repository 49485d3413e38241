"""The torch loader against a real daemon: the bare client's batches, as tensors."""

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed; `make test-torch` installs it")

import batchd_client  # noqa: E402
from batchd_client.errors import (  # noqa: E402
    PrefetchInvalid,
    RankInvalid,
    StateMismatch,
    StreamClosed,
    StreamUnknown,
    TensorsInvalid,
)
from batchd_client.torch import BatchdLoader  # noqa: E402
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
            "floats": folder_stream(photos, pipeline=[*folder_stream(photos)["pipeline"], {"op": "normalize"}]),
            "first": folder_stream(
                photos, pipeline=[*folder_stream(photos)["pipeline"], {"op": "layout", "order": "nchw"}]
            ),
        }
    )


load = pytest.fixture(loading(BatchdLoader))


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


def test_two_epochs_are_two_loops(daemon, load):
    """A DataLoader does the same; the second epoch has another order."""
    loader = load(as_dict=True)
    epochs = [torch.cat([batch["index"] for batch in loader]).tolist() for _ in range(2)]
    expected = np.concatenate([batch["index"] for batch in bare(daemon, epochs=2)]).tolist()
    assert epochs == [expected[:EPOCH], expected[EPOCH:]]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(EPOCH))
    assert epochs[0] != epochs[1]
    assert loader.epoch == 2


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


def test_it_says_how_long_it_is_and_where(load):
    """``len`` is one rank's batches in an epoch; the position works until the end."""
    loader = load()
    iterator = iter(loader)
    assert (len(loader), loader.batch_size, loader.stream.classes) == (5, 8, ("cat", "dog", "owl", "yak"))
    assert repr(loader) == "<BatchdLoader photos rank=0/1 device=cpu epoch=0 step=0>"
    next(iterator)
    assert repr(loader) == "<BatchdLoader photos rank=0/1 device=cpu epoch=0 step=1>"
    statistics = loader.statistics()
    assert statistics.batches == 1
    assert 0 < statistics.wait_s < statistics.next_s
    loader.close()
    assert repr(loader).endswith("[closed]>")
    assert loader.state_dict()["step"] == 1
    for use in (lambda: next(iterator), lambda: iter(loader)):
        with pytest.raises(StreamClosed, match="loader of stream 'photos' has been closed"):
            use()
    loader.close()


def indices(loader, batches=None):
    """Return the samples' numbers of the rest of the epoch, or of so many batches of it."""
    iterator = iter(loader)
    taken = []
    while (batches is None or len(taken) < batches) and (batch := next(iterator, None)) is not None:
        taken.append(batch["index"].tolist())
    return taken


@pytest.mark.parametrize("taken", [0, 1, 4, 5, 7])
def test_a_saved_state_goes_on_with_the_next_batch(load, taken):
    """Another loader gets it when it is made or later; the seam of two epochs works as well."""
    whole = load(as_dict=True)
    expected = indices(whole) + indices(whole) + indices(whole)
    first = load(as_dict=True)
    seen = indices(first, taken) if taken <= 5 else indices(first) + indices(first, taken - 5)
    state = first.state_dict()
    born = load(as_dict=True, state=state)
    told = load(as_dict=True)
    told.load_state_dict(state)
    for second in (born, told):
        assert second.state_dict() == state
        with_card = second.state_dict(card=True)
        assert (with_card.pop("card")["fingerprint"], with_card) == (state["fingerprint"], state)
        assert seen + indices(second) + indices(second) == expected[: taken + 10 - taken % 5]


def test_another_streams_state_is_refused(load):
    """The loader keeps its position."""
    loader = load(as_dict=True)
    indices(loader, 2)
    before = loader.state_dict()
    with pytest.raises(StateMismatch, match="other files or other settings"):
        loader.load_state_dict(before | {"fingerprint": "0" * 32})
    assert loader.state_dict() == before


def test_setting_the_epoch_moves_to_its_beginning_and_never_back_within_it(load):
    """The usual loop may call it each time, also right after a resume."""
    expected = load(as_dict=True)
    epochs = [indices(expected) for _ in range(4)]
    loader = load(as_dict=True)
    loader.set_epoch(2)
    assert indices(loader, 3) == epochs[2][:3]
    loader.set_epoch(2)
    assert indices(loader) == epochs[2][3:]
    loader.set_epoch(3)
    assert indices(loader, 1) == epochs[3][:1]
    loader.set_epoch(0)
    assert indices(loader) == epochs[0]


def test_a_loop_that_was_left_continues_unless_it_shall_restart(load):
    """Training needs the first, validation the second."""
    going_on, restarted = load(as_dict=True), load(as_dict=True, restart=True)
    whole = indices(load(as_dict=True))
    assert [indices(going_on, 2), indices(going_on)] == [whole[:2], whole[2:]]
    assert [indices(restarted, 2), indices(restarted)] == [whole[:2], whole]


def test_after_the_last_epoch_there_is_nothing(load):
    """The training has that many epochs."""
    loader = load(as_dict=True, epochs=1)
    assert len(indices(loader)) == 5
    assert indices(loader) == []


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_share_an_epoch(load, world_size):
    """Each sample goes to one of them, and all have the same number of batches."""
    shares = [indices(load(as_dict=True, rank=rank, world_size=world_size)) for rank in range(world_size)]
    assert len({len(share) for share in shares}) == 1
    assert sorted(number for share in shares for batch in share for number in batch) == list(range(EPOCH))


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
        ("photos", {"fields": ["picture"]}, "no field 'picture'; it has image, label, index"),
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


def test_other_mistakes_are_those_of_the_client(load):
    """Examples are a stream that does not exist, and an invalid number."""
    with pytest.raises(StreamUnknown):
        load("fotos")
    with pytest.raises(PrefetchInvalid, match="prefetch=-1"):
        load(prefetch=-1)


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
