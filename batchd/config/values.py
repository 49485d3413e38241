"""The values of a sample, as sources give them and steps change them. Workers; the one module of ``config`` with numpy."""

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Value: TypeAlias = memoryview | str | npt.NDArray[Any] | np.generic | int | float | bool
"""A column of one sample: the bytes of an ``encoded`` one, a ``text``, or an ``array`` (a number where its shape is [])."""
