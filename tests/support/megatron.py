"""Files of tokens with an index, as Megatron writes them."""

from collections.abc import Sequence
from pathlib import Path
from struct import pack

import numpy as np

from batchd.data.sources.tokens.scan import DTYPES


def write_megatron(path: Path, documents: Sequence[Sequence[Sequence[int]]], dtype: str) -> Path:
    """Write documents of sequences of tokens to ``path``, and their index beside it."""
    sequences = [np.array(one, dtype) for document in documents for one in document]
    lengths = [len(one) for one in sequences]
    sizes = [one.nbytes for one in sequences]
    pointers = [sum(sizes[:number]) for number in range(len(sizes))]
    firsts = [0]
    for document in documents:
        firsts.append(firsts[-1] + len(document))
    code = next(number for number, name in DTYPES.items() if name == dtype)
    path.write_bytes(b"".join(one.tobytes() for one in sequences))
    index = [b"MMIDIDX\0\0", pack("<QBQQ", 1, code, len(sequences), len(firsts))]
    numbers = [np.array(lengths, "<i4"), np.array(pointers, "<i8"), np.array(firsts, "<i8")]
    path.with_suffix(".idx").write_bytes(b"".join([*index, *(one.tobytes() for one in numbers)]))
    return path
