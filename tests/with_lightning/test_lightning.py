"""The Lightning data module against a real daemon: samples, epochs, and checkpoints."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed; `make test-frameworks` installs it")
lightning = pytest.importorskip(
    "lightning.pytorch", reason="Lightning is not installed; `make test-frameworks` installs it"
)

import torch  # noqa: E402

from batchd_client.errors import StreamUnknown  # noqa: E402
from batchd_client.lightning import BatchdDataModule  # noqa: E402
from batchd_client.torch import BatchdLoader  # noqa: E402
from support.garbage import CYCLES, collected  # noqa: E402
from support.lightning_model import SaveAfter, StopAfter, Witness  # noqa: E402
from support.programs import gone  # noqa: E402
from support.reference import run_programs  # noqa: E402
from support.settings import folder_stream  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning gives its advice as warnings
TESTS = Path(__file__).parents[1]
DEADLINE_S = 120.0
EPOCH = 40
STEPS = 5
EPOCHS = 3


@pytest.fixture(scope="module")
def daemon(start_shared_daemon, photos):
    """Serve a stream to train on, and one to validate on in order."""
    return start_shared_daemon({"photos": folder_stream(photos), "still": folder_stream(photos, shuffle=False)})


@pytest.fixture
def data(daemon):
    """Make data modules of the daemon's streams."""

    def data(*streams, **options):
        return BatchdDataModule(*streams, address=daemon.address, as_dict=True, **options)

    return data


def trainer(**options):
    """Make a trainer that prints and writes nothing by itself."""
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    options = {"max_epochs": EPOCHS, "accelerator": "cpu", "devices": 1, **quiet, **options}
    return lightning.Trainer(**options)


def fit(data, checkpoint=None, **options):
    """Train; return the samples of each batch that the model got."""
    model = Witness()
    trainer(**options).fit(model, datamodule=data, ckpt_path=checkpoint)
    return model


def position_in(checkpoint):
    """Return the position in a Lightning checkpoint: stream, epoch and step."""
    loops = torch.load(checkpoint, weights_only=True)["loops"]
    (state,) = loops["fit_loop"]["state_dict"]["combined_loader"]
    return state["stream"], state["epoch"], state["step"]


@pytest.fixture(scope="module")
def epochs(daemon):
    """Return the batches of each epoch of the stream from a bare loader."""
    with BatchdLoader("photos", address=daemon.address, as_dict=True) as loader:
        return [[batch["index"].tolist() for batch in loader] for _ in range(EPOCHS)]


def told(epochs, *, steps=STEPS):
    """Return the batches that a model saw of these epochs."""
    return [(epoch, batch) for epoch, batches in enumerate(epochs) for batch in batches[:steps]]


def test_a_model_is_given_every_epoch_of_its_stream(data, epochs):
    """Batches are in the stream's order, on the CPU."""
    assert fit(data("photos")).seen == told(epochs)


@pytest.mark.parametrize("batches", [1, 2, 4, 5, 6, 10, 12])
def test_a_checkpoint_goes_on_with_the_next_batch(data, epochs, tmp_path, batches):
    """Within an epoch and at its ends, the rest equals that of an uninterrupted training."""
    file = tmp_path / "some.ckpt"
    with pytest.raises(InterruptedError):
        fit(data("photos"), callbacks=[StopAfter(batches, file)])
    assert fit(data("photos"), file).seen == told(epochs)[batches:]


@pytest.mark.parametrize("batches", [3, 5, 7])
def test_a_checkpoint_is_as_good_with_validation_in_between(data, epochs, tmp_path, batches):
    """Validation runs within epochs and at their ends, and has a position of its own."""
    file = tmp_path / "some.ckpt"
    options = {"val_check_interval": 2, "limit_val_batches": 2}
    with pytest.raises(InterruptedError):
        fit(data("photos", "still"), callbacks=[StopAfter(batches, file)], **options)
    assert fit(data("photos", "still"), file, **options).seen == told(epochs)[batches:]


def test_a_checkpoint_of_lightnings_own_goes_on_with_the_next_epoch(data, epochs, tmp_path):
    """Lightning writes it at the end of an epoch, after the validation."""
    keep = lightning.callbacks.ModelCheckpoint(dirpath=tmp_path, filename="{epoch}", save_top_k=-1)
    fit(data("photos", "still"), callbacks=[keep], enable_checkpointing=True)
    assert fit(data("photos", "still"), tmp_path / "epoch=0.ckpt").seen == told(epochs)[STEPS:]


def test_a_limited_epoch_is_the_beginning_of_each_epoch(data, epochs, tmp_path):
    """The rest of an epoch does not become the next one, not even after a checkpoint."""
    file = tmp_path / "some.ckpt"
    assert fit(data("photos"), limit_train_batches=3).seen == told(epochs, steps=3)
    with pytest.raises(InterruptedError):
        fit(data("photos"), limit_train_batches=3, callbacks=[StopAfter(4, file)])
    assert fit(data("photos"), file, limit_train_batches=3).seen == told(epochs, steps=3)[4:]


def test_loaders_that_are_made_again_each_epoch_change_nothing(data, epochs):
    """The setting is ``reload_dataloaders_every_n_epochs``."""
    assert fit(data("photos"), reload_dataloaders_every_n_epochs=1).seen == told(epochs)


def test_overfitting_sees_the_same_batches_again_and_again(data, epochs):
    """The flag promises that."""
    seen = fit(data("photos"), overfit_batches=2).seen
    assert [batch for _, batch in seen] == epochs[0][:2] * EPOCHS


def test_validation_sees_the_same_from_its_beginning_each_time(data):
    """The sanity check and a limit do not matter: no validation starts with a rest."""
    every = [list(range(start, start + 8)) for start in range(0, EPOCH, 8)]
    whole = fit(data("photos", "still"), num_sanity_val_steps=2)
    assert whole.evaluated == every[:2] + every * EPOCHS
    part = fit(data("photos", "still"), num_sanity_val_steps=1, limit_val_batches=3)
    assert part.evaluated == every[:1] + every[:3] * EPOCHS


def test_shuffled_and_random_streams_validate_on_the_same_too(data, epochs):
    """The epoch is always 0."""
    assert fit(data("photos", "photos"), num_sanity_val_steps=0).evaluated == epochs[0] * EPOCHS


def test_a_stage_may_have_several_streams(data, epochs):
    """Each has a loader."""
    model = Witness()
    trainer().validate(model, datamodule=data(val=["still", "photos"]), verbose=False)
    assert model.evaluated[STEPS:] == epochs[0]


def test_test_and_predict_read_their_streams(data, epochs):
    """Both stages read the same samples twice."""
    module, model, runner = data(test="photos", predict="still"), Witness(), trainer()
    for _ in range(2):
        runner.test(model, datamodule=module, verbose=False)
        assert torch.cat(runner.predict(model, datamodule=module)).tolist() == list(range(EPOCH))
    assert model.evaluated == epochs[0] * 2


def test_a_second_fit_begins_at_the_beginning(data, epochs):
    """The first one may have left half an epoch, with the same data module."""
    module = data("photos")
    fit(module, max_epochs=1, limit_train_batches=2)
    assert fit(module, max_epochs=1).seen == told(epochs[:1])


def test_a_checkpoint_may_be_written_when_all_is_over(data, epochs, tmp_path):
    """The loaders are closed by then, and still know their positions."""
    model, runner = Witness(), trainer(max_steps=7)
    runner.fit(model, datamodule=data("photos"))
    assert model.seen == told(epochs)[:7]
    runner.save_checkpoint(tmp_path / "end.ckpt")
    assert position_in(tmp_path / "end.ckpt") == ("photos", 1, 2)


def test_the_state_is_in_the_checkpoint_once(data, tmp_path):
    """The state has plain numbers, so that Lightning reads it with ``weights_only`` too."""
    file = tmp_path / "some.ckpt"
    fit(data("photos"), max_epochs=1, callbacks=[SaveAfter(2, file)])
    assert position_in(file) == ("photos", 0, 2)
    assert "BatchdDataModule" not in torch.load(file, weights_only=True)


def test_a_loader_says_what_its_stream_is(data):
    """A loader does so without a trainer, before a model is made."""
    module = data("photos")
    loader = module.train_dataloader().loader
    assert loader.stream.classes == ("cat", "dog", "owl", "yak")
    assert tuple(loader.schema["image"].shape) == (3, 32, 32)
    module.teardown("fit")


def test_the_trainer_says_which_share_and_which_device(monkeypatch):
    """The strategy decides: four processes in pairs share a batch, and the last has the rest."""
    asked = []
    monkeypatch.setattr(
        "batchd_client.lightning.BatchdLoader", lambda stream, **options: asked.append((stream, options))
    )
    module = BatchdDataModule("photos", val="still", dtype=torch.float16)
    module.trainer = SimpleNamespace(
        distributed_sampler_kwargs={"rank": 1, "num_replicas": 2},
        global_rank=3,
        world_size=4,
        overfit_batches=0,
        strategy=SimpleNamespace(root_device=torch.device("cuda", 3)),
    )
    for stage in (module.train_dataloader(), module.val_dataloader()):
        _ = stage.loader
    told = {"rank": 1, "world_size": 2, "device": torch.device("cuda", 3), "dtype": torch.float16, "state": None}
    assert asked == [("photos", told), ("still", told | {"restart": True, "epochs": 1})]


def test_a_stage_without_a_stream_is_one_that_lightning_misses(data):
    """Validation may be missing. A stream that does not exist is an error, as usual."""
    for run in (trainer().test, trainer().validate):
        with pytest.raises(lightning.utilities.exceptions.MisconfigurationException, match="_dataloader"):
            run(Witness(), datamodule=data("photos"))
    with pytest.raises(StreamUnknown):
        fit(data("fotos"))


def run_ranks(daemon, *arguments):
    """Run two ranks under Lightning's launcher; return the samples of each, and how they ended."""
    command = [sys.executable, "-m", "support.lightning_program", daemon.address, *map(str, arguments)]
    job = subprocess.run(command, cwd=TESTS, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    said = [json.loads(line) for line in job.stdout.splitlines() if line.startswith("{")]
    return {one["rank"]: [tuple(step) for step in one["seen"]] for one in said}, job


def test_two_ranks_read_every_sample_once_and_go_on_from_a_checkpoint(daemon, tmp_path):
    """With ``strategy="ddp"``, the trainer gives each process its rank."""
    file = tmp_path / "some.ckpt"
    whole, job = run_ranks(daemon, file, 4)
    assert sorted(whole) == [0, 1], job.stderr
    assert len(whole[0]) == len(whole[1]) == 3 * EPOCHS
    for epoch in range(EPOCHS):
        read = [batch for seen in whole.values() for number, batch in seen if number == epoch]
        assert {number for batch in read for number in batch} == set(range(EPOCH))
    rest, job = run_ranks(daemon, file)
    assert rest == {rank: whole[rank][4:] for rank in whole}, job.stderr


@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
def test_it_belongs_to_the_package_that_the_program_uses(package):
    """Both packages have a class of that name, and neither's trainer accepts the other's module."""
    pytest.importorskip(package)
    program = f"import {package} as used; from batchd_client.lightning import BatchdDataModule as M; "
    program += "assert issubclass(M, used.LightningDataModule)"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_without_lightning_it_says_what_to_install():
    """The message comes where torch is installed."""
    program = (
        "import sys; sys.modules['lightning'] = sys.modules['pytorch_lightning'] = None\nimport batchd_client.lightning"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert "ImportError: batchd_client.lightning needs Lightning 2.2 or newer: pip install lightning" in done.stderr


@pytest.mark.parametrize("tie", CYCLES.values(), ids=CYCLES)
def test_a_module_in_a_cycle_ends_with_it(daemon, data, tie):
    """The module's loaders, a trainer and a partly trained model end with it."""

    def make():
        module, model = data("photos", "still"), Witness()
        fitter = trainer(max_steps=2)
        fitter.fit(model, datamodule=module)
        loader = module.train_dataloader()
        batches = iter(loader)
        return module, model, fitter, loader, batches, next(batches)

    collected(make, tie)
    gone(daemon)


def test_the_program_of_the_reference_runs(daemon, monkeypatch):
    """It finds the daemon by its address in the environment."""
    monkeypatch.setenv("BATCHD_ADDRESS", daemon.address)

    run_programs("Lightning")
