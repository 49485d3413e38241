"""The index of a source that is made of others. Daemon and workers; ``scan`` has its arrays.

Invariant: a part's own arrays are in the whole index, each under the part's number and a slash.
"""

from batchd.data.storage.index import SourceIndex


def part_of(index: SourceIndex, number: int) -> SourceIndex:
    """The index of one part, over the same memory; it has no digest of its own."""
    samples, facts = index.facts["parts"][number]
    prefix = f"{number}/"
    arrays = {name.removeprefix(prefix): array for name, array in index.arrays.items() if name.startswith(prefix)}
    return SourceIndex(samples, facts, arrays, index.place["parts"][number], "")
