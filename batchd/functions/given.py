"""What people's functions are called with, by what they are for. Daemon, CLI and workers; standard library only."""

from batchd.config.code_sources import GeneratorSource, PythonSource
from batchd.functions.signature import Given


def call_given() -> Given:
    """What the function of a ``call`` step is called with."""
    return Given(places=("sample", "rng"))


def source_given(source: PythonSource | GeneratorSource) -> Given:
    """What the function of a source is called with."""
    return Given(options=source.options, offered="rng" if isinstance(source, GeneratorSource) else "")
