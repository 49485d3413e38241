"""What the tests of a loader for a GPU share: the stand-in for CUDA, and images of many sizes."""

import os

import pytest

from support.device_streams import write_sizes

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # before torch loads: its threads would spin beside other lanes


@pytest.fixture(scope="module")
def sizes(tmp_path_factory):
    """Twenty-two images, each of another size."""
    folder = tmp_path_factory.mktemp("sizes")
    write_sizes(folder / "one")
    return folder


@pytest.fixture
def cuda(monkeypatch):
    """The stand-in, which any loader of the test uses; in the end it has met no fault, and reads no memory of ours any more."""
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
    """A loader for the stand-in, which is closed with the test."""
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
