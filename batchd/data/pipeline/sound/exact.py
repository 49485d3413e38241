"""Functions of arrays of float64 that have the same bits everywhere. Worker process.

They are sums, products and quotients of two numbers each; a C library, or numpy on another
processor, may compute a sine to another last bit. ``augment.exact`` has some for single numbers.
"""

from math import pi
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

Numbers: TypeAlias = NDArray[np.float64]

_SINE_TERMS: Final = 9
_BESSEL_TERMS: Final = 48


def sine(turns: Numbers) -> Numbers:
    """The sine of an angle in turns, within 2**-52."""
    quarters = np.rint(4 * turns)
    angle = (turns - quarters / 4) * (2 * pi)
    square = angle * angle
    sines, cosines = np.zeros_like(angle), np.zeros_like(angle)
    for term in range(2 * _SINE_TERMS, 0, -2):  # Taylor's series by Horner's rule
        sines = -(1 + sines) * square / (term * (term + 1))
        cosines = -(1 + cosines) * square / (term * (term - 1))
    sines, cosines = angle + angle * sines, 1 + cosines
    quarter = quarters.astype(np.int64) & 3
    return np.where(quarter & 1, cosines, sines) * np.where(quarter & 2, -1.0, 1.0)


def cosine(turns: Numbers) -> Numbers:
    """The cosine of an angle in turns."""
    return sine(turns + 0.25)


def bessel(square: Numbers) -> Numbers:
    """The modified Bessel function of order 0 of x, where ``square`` is (x / 2)**2, to 40."""
    total = np.zeros_like(square)
    for term in range(_BESSEL_TERMS, 0, -1):
        total = (1 + total) * square / (term * term)
    return 1 + total
