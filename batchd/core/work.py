"""A worker's time, as it reports it. Workers and the core."""

from typing import NamedTuple


class Work(NamedTuple):
    """A worker's time in one chunk, or in several consecutive ones, in microseconds.

    ``busy_us`` excludes the ``waited_us`` for file servers. ``cpu_us`` of it was on a CPU, and
    ``read_cpu_us`` of that was spent reading; in ``cpu_wait_us`` the worker was runnable without a
    CPU (None if the kernel does not report it). ``parts_us`` is in the order of
    ``StreamMeasured.parts``. ``read_bytes``: bytes of encoded samples. ``usual_us``: the median
    time of the worker's samples. ``slow_rows`` took several times as long, ``slow_us`` together;
    ``slow``: the slowest as (sample index, path, us). ``cache_hits`` samples were in the stream's
    cache, ``cache_misses`` were not. ``shared`` ones were decoded together with those of another
    stream.
    """

    busy_us: int
    waited_us: int
    cpu_us: int
    cpu_wait_us: int | None
    read_cpu_us: int
    parts_us: list[int]
    read_bytes: int
    usual_us: int
    slow_rows: int
    slow_us: int
    slow: list[tuple[int, str, int]]
    cache_hits: int
    cache_misses: int
    shared: int = 0


HOST_WORKERS_MAX = 1_024
"""Of one worker host."""
NO_WORK = Work(0, 0, 0, 0, 0, [], 0, 0, 0, 0, [], 0, 0)
