"""The compiled parts of batchd; everything else of the distribution is in pyproject.toml.

They are optional: without a compiler an installation succeeds, and numpy computes pixels and sound,
in more time;
without the headers of libjpeg-turbo the wheels of simplejpeg and OpenCV decode whole JPEGs. One
build is for all versions of Python from 3.11 on. The build ID of each is the digest of its sources:
see batchd/runtime/compiled.py.
"""

from pathlib import Path
from runpy import run_path

from setuptools import Extension, setup

FLAGS = ["-std=c11", "-Wall", "-Wextra", "-fvisibility=hidden"]
sources_digest = run_path("batchd/runtime/compiled.py")["sources_digest"]


def build_id(folder: str, name: str) -> list[str]:
    """Options of the linker."""
    return [f"-Wl,--build-id=0x{sources_digest(Path(folder), name)}"]


setup(
    ext_modules=[
        Extension(
            "batchd.data.pipeline._jpeg",
            [
                f"batchd/data/pipeline/_jpeg{part}.c"
                for part in ("", "_cut", "_probe", "_scan", "_splice", "_transcode", "_walk")
            ],
            depends=[
                *(f"batchd/data/pipeline/{name}.h" for name in ("_jpeg", "_jpeg_scan", "_pixels")),
                "batchd/data/storage/_rows.h",
            ],
            libraries=["jpeg"],
            extra_compile_args=FLAGS,
            extra_link_args=build_id("batchd/data/pipeline", "_jpeg"),
            py_limited_api=True,
            optional=True,
        ),
        Extension(
            "batchd.data.pipeline._pixels",
            [f"batchd/data/pipeline/_pixels{part}.c" for part in ("", "_color", "_outline", "_tone", "_warp")],
            depends=[f"batchd/data/pipeline/{name}.h" for name in ("_pixels", "_pixels_parts")],
            extra_compile_args=[*FLAGS, "-O3", "-ffp-contract=off"],
            extra_link_args=build_id("batchd/data/pipeline", "_pixels"),
            py_limited_api=True,
            optional=True,
        ),
        Extension(
            "batchd.data.pipeline._sound",
            [f"batchd/data/pipeline/_sound{part}.c" for part in ("", "_spectra")],
            depends=["batchd/data/pipeline/_sound_parts.h"],
            extra_compile_args=[*FLAGS, "-O3", "-ffp-contract=off", "-fno-math-errno"],
            extra_link_args=build_id("batchd/data/pipeline", "_sound"),
            py_limited_api=True,
            optional=True,
        ),
        Extension(
            "batchd.data.pipeline._words",
            ["batchd/data/pipeline/_words.c"],
            extra_compile_args=[*FLAGS, "-O3"],
            extra_link_args=build_id("batchd/data/pipeline", "_words"),
            py_limited_api=True,
            optional=True,
        ),
        Extension(
            "batchd.data.storage._rows",
            ["batchd/data/storage/_rows.c"],
            depends=["batchd/data/storage/_rows.h"],
            extra_compile_args=FLAGS,
            extra_link_args=build_id("batchd/data/storage", "_rows"),
            py_limited_api=True,
            optional=True,
        ),
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
