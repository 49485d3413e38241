"""Fixtures of the tests of a loader for a GPU: the stand-in for CUDA, and images of many sizes."""

import os

import pytest

from support.device_streams import write_sizes

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # before torch: its threads would spin


@pytest.fixture(scope="session", autouse=True)
def _descriptors_of_cuda():
    """Train once on a GPU, if there is one: CUDA's descriptors stay open until the process ends."""
    torch = pytest.importorskip("torch", reason="PyTorch is not installed; `make test-torch` installs it")
    if torch.cuda.is_available():
        with torch.autocast("cuda", torch.bfloat16), torch.cuda.stream(torch.cuda.Stream()):
            layer = torch.nn.Conv2d(3, 8, 3, device="cuda").to(memory_format=torch.channels_last)
            layer(torch.ones(2, 3, 32, 32, pin_memory=True).to("cuda", non_blocking=True)).sum().backward()
        torch.cuda.synchronize()


@pytest.fixture(scope="module")
def sizes(tmp_path_factory):
    """Make 22 images of different sizes."""
    folder = tmp_path_factory.mktemp("sizes")
    write_sizes(folder / "one")
    return folder


@pytest.fixture
def cuda(monkeypatch):
    """Return the stand-in for CUDA; in the end it saw no fault, and reads none of our memory."""
    import batchd_client.torch  # noqa: PLC0415  only where there is torch
    from support.fake_cuda import FakeCuda  # noqa: PLC0415

    cuda = FakeCuda()
    monkeypatch.setattr(batchd_client.torch, "CudaRuntime", lambda _device: cuda)
    yield cuda
    assert not cuda.faults
    assert not cuda.registered
    assert not [copy for copy in cuda.queue if copy.registration]


@pytest.fixture
def load(cuda):
    """Make a loader for the stand-in; it is closed with the test."""
    from batchd_client.torch import BatchdLoader  # noqa: PLC0415  only where there is torch

    loaders = []

    def load(daemon, stream="photos", **options):
        address = options.pop("address", daemon.address)
        loaders.append(BatchdLoader(stream, address=address, device="cuda", **{"as_dict": True, **options}))
        return loaders[-1]

    yield load
    cuda.interrupt(None)
    for loader in loaders:
        loader.close()
