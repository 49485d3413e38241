"""The compiled parts of batchd; everything else of the distribution is in pyproject.toml.

They are optional: without a compiler an installation succeeds, and numpy resamples, in more time;
without the headers of libjpeg-turbo the wheels of simplejpeg and OpenCV decode whole JPEGs. One
build is for all versions of Python from 3.11 on.
"""

from setuptools import Extension, setup

FLAGS = ["-std=c11", "-Wall", "-Wextra", "-fvisibility=hidden"]

setup(
    ext_modules=[
        Extension(
            "batchd.pipeline._jpeg",
            [
                f"batchd/pipeline/_jpeg{part}.c"
                for part in ("", "_cut", "_probe", "_scan", "_splice", "_transcode", "_walk")
            ],
            depends=[f"batchd/pipeline/{name}.h" for name in ("_jpeg", "_jpeg_scan", "_pixels")],
            libraries=["jpeg"],
            extra_compile_args=FLAGS,
            py_limited_api=True,
            optional=True,
        ),
        Extension(
            "batchd.pipeline._pixels",
            ["batchd/pipeline/_pixels.c"],
            depends=["batchd/pipeline/_pixels.h"],
            extra_compile_args=[*FLAGS, "-O3"],
            py_limited_api=True,
            optional=True,
        ),
        Extension(
            "batchd.storage._rows",
            ["batchd/storage/_rows.c"],
            extra_compile_args=FLAGS,
            py_limited_api=True,
            optional=True,
        ),
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
