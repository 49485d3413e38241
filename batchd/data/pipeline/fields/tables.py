"""The tables of ``map_ids``: the number for each id, from the configuration or a .npy file."""

from io import BytesIO
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from batchd.data.pipeline.effects import WHOLE, StepInvalid
from batchd.data.pipeline.fields.options import ID_MAX, MapIds
from batchd.data.pipeline.step_files import StepFileInvalid, npy_header, read_file
from batchd_wire.wording import counted

_FILE_BYTES_MAX = (ID_MAX + 1) * 8 + (1 << 16)
_NARROW = 256


class IdTable(NamedTuple):
    """``numbers`` of the ids from 0 on, [ids + 1], and which of them are in the table.

    The last ones are those of every other id.
    """

    numbers: NDArray[np.signedinteger | np.unsignedinteger]
    is_known: NDArray[np.bool_]


def id_table(step: MapIds, dtype: str) -> IdTable:
    """The table of a step for numbers of this type. Raises ``StepInvalid``."""
    given = _numbers_of(step.file) if step.file is not None else None
    if given is None:
        ids, chosen = np.array([int(one) for one in step.table]), np.array(list(step.table.values()), object)
    else:
        ids, chosen = np.arange(len(given)), given
    low, high = WHOLE[dtype]
    others = [] if step.ignore is None else [("ignore", step.ignore)]
    ends = [(str(step.file or "table"), int(one)) for one in (chosen.min(), chosen.max())]
    for name, number in (*ends, *others):
        if not low <= number <= high:
            raise StepInvalid(f'"map_ids" has {number} in {name}, and its field is {dtype}: {low} to {high}')
    size = max(int(ids.max()) + 1, _NARROW if dtype == "uint8" else 0)
    numbers = np.full(size + 1, 0 if step.ignore is None else step.ignore, dtype)
    is_known = np.full(size + 1, step.ignore is not None)
    numbers[ids], is_known[ids] = chosen.astype(dtype), True
    return IdTable(numbers, is_known)


def _numbers_of(path: Path) -> NDArray[np.signedinteger | np.unsignedinteger]:
    """The whole numbers [ids] of a .npy file. Raises ``StepFileInvalid``."""
    content = BytesIO(read_file(path, _FILE_BYTES_MAX))
    dtype, shape, _is_fortran = npy_header(content, path)
    if dtype.kind not in "iu" or len(shape) != 1 or not 0 < shape[0] <= ID_MAX + 1:
        raise StepFileInvalid(
            f"{path} holds {dtype}{list(shape)}; it must be whole numbers [ids], the number for each id from 0 on, "
            f"{ID_MAX + 1} at most"
        )
    numbers = np.frombuffer(content.getbuffer(), np.uint8, offset=content.tell())
    if len(numbers) < shape[0] * dtype.itemsize:
        raise StepFileInvalid(
            f"{path} is cut: it has {counted(len(numbers) // dtype.itemsize, 'number')}, not {shape[0]}"
        )
    return numbers[: shape[0] * dtype.itemsize].view(dtype)
