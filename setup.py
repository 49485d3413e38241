"""The one part of batchd that is compiled; everything else of the distribution is said in pyproject.toml.

It is optional: without a compiler or the headers of libjpeg-turbo an installation succeeds, and the wheels of simplejpeg and
OpenCV decode whole JPEGs. One build is for all versions of Python from 3.11 on.
"""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "batchd.pipeline._jpeg",
            [f"batchd/pipeline/_jpeg{part}.c" for part in ("", "_cut", "_transcode")],
            depends=["batchd/pipeline/_jpeg.h"],
            libraries=["jpeg"],
            extra_compile_args=["-std=c11", "-Wall", "-Wextra", "-fvisibility=hidden"],
            py_limited_api=True,
            optional=True,
        )
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
