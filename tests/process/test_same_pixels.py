"""Steps give equal pixels with every OpenCV, on every processor, with and without the extension.

Other processors and libraries are child processes that tell their libraries to do without a
feature: see ``support.pixel_sums``.
"""

import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest

from batchd.data.pipeline.image import resample
from support.pixel_sums import write_inputs

TESTS = Path(__file__).parents[1]
CHILD_TIMEOUT_S = 300
WITHOUT_EXTENSION = (
    "import sys; sys.modules |= dict.fromkeys('batchd.data.pipeline.' + name for name in ('_pixels', '_sound'))"
)
RUN = "import runpy; runpy.run_module('support.pixel_sums', run_name='__main__')"
OPENCV = "opencv-python-headless"
OTHER_OPENCVS = ("4.12.0.88", "4.13.0.92", "5.0.0.93")
NUMPY_FEATURES = " ".join(np._core._multiarray_umath.__cpu_dispatch__)
KINDS = {
    "OpenCV without AVX": {"OPENCV_CPU_DISABLE": "AVX,AVX2,FMA3,AVX512_SKX"},
    "OpenCV without SSE4": {"OPENCV_CPU_DISABLE": "SSSE3,SSE4_1,SSE4_2,AVX,AVX2,FMA3,AVX512_SKX"},
    "OpenCV without IPP": {"OPENCV_IPP": "disabled"},
    "libjpeg-turbo without SIMD": {"JSIMD_FORCENONE": "1"},
    "numpy without SIMD": {"NPY_DISABLE_CPU_FEATURES": NUMPY_FEATURES},
    "a C library without FMA": {"GLIBC_TUNABLES": "glibc.cpu.hwcaps=-AVX2,-FMA,-AVX"},
}
BARE = {name: value for kind in KINDS.values() for name, value in kind.items()}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """Save the inputs of all steps in a file."""
    path = tmp_path_factory.mktemp("pixels") / "inputs.npz"
    write_inputs(path)
    return path


@pytest.fixture(scope="module")
def usual(inputs):
    """Return the sums of all steps on this machine without changes."""
    return sums(inputs)


def sums(inputs, environment=None, path="", before="pass"):
    """Return the sums of all steps in a process of another kind."""
    done = subprocess.run(
        [sys.executable, "-c", f"{before}\n{RUN}", inputs],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(path), str(TESTS)])), **(environment or {})},
        capture_output=True,
        timeout=CHILD_TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    return json.loads(done.stdout)


def others(usual, found):
    """Return the steps that gave other pixels."""
    assert usual.keys() == found.keys()
    return [name for name, made in usual.items() if found[name] != made]


@pytest.mark.thorough
def test_steps_make_the_same_on_a_processor_without_anything(inputs, usual):
    """The processor has only the vectors of every x86-64: no IPP, no fused multiply-add."""
    assert others(usual, sums(inputs, BARE)) == []


@pytest.mark.thorough
@pytest.mark.skipif(not resample.IS_BUILT, reason="the extension was not built, so there is nothing to compare with")
def test_steps_make_the_same_without_the_extension(inputs, usual):
    """Steps in numpy replace the extension with equal pixels."""
    assert others(usual, sums(inputs, before=WITHOUT_EXTENSION)) == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_steps_make_the_same_in_each_kind_of_process(inputs, usual, kind):
    """Each process lacks one feature."""
    assert others(usual, sums(inputs, KINDS[kind])) == []


@pytest.mark.slow
@pytest.mark.parametrize("other", OTHER_OPENCVS)
def test_steps_make_the_same_with_another_opencv(inputs, usual, other, tmp_path):
    """The other OpenCV runs with its vectors and IPP, and without."""
    if version(OPENCV) == other:
        pytest.skip("this version is installed already")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", tmp_path, f"{OPENCV}=={other}"]
    done = subprocess.run(pip, capture_output=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"this OpenCV cannot be installed: {done.stderr.decode().strip().splitlines()[-1:]}")

    assert others(usual, sums(inputs, path=tmp_path)) == []
    assert others(usual, sums(inputs, BARE, path=tmp_path)) == []
