"""What people's functions are called with, by what they are for. Daemon, CLI and workers; standard library only."""

from batchd.functions.signature import Given
from batchd.sources.code.options import GeneratorSource, PythonSource


def call_given() -> Given:
    """What the function of a ``call`` step is called with."""
    return Given(places=("sample", "rng"))


def source_given(source: PythonSource | GeneratorSource) -> Given:
    """What the function of a source is called with."""
    return Given(options=source.options, offered="rng" if isinstance(source, GeneratorSource) else "")
