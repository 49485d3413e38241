"""The devices of JAX: the CPU is the default; GPUs, if JAX has them, are for ``test_jax_gpu``."""

import os
from importlib.util import find_spec
from pathlib import Path

import pytest

HAS_CUDA = any(find_spec(f"jax_cuda{version}_plugin") for version in (12, 13)) and Path("/dev/nvidiactl").exists()

# before JAX is imported, and for the programs that tests start
os.environ.setdefault("JAX_PLATFORMS", "cpu,cuda" if HAS_CUDA else "cpu")
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


@pytest.fixture(scope="session", autouse=True)
def _threads_of_jax():
    """Start JAX's threads and open its descriptors: they live as long as the process."""
    jax = pytest.importorskip("jax", reason="JAX is not installed: pip install jax")
    jax.devices()
    if HAS_CUDA:
        jax.devices("cuda")
