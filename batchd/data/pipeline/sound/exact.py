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
_EXPONENTIAL_TERMS: Final = 20
_LOG_TERMS: Final = 12
_LOG_2: Final = 0.6931471805599453
_ROOT_OF_2: Final = 1.4142135623730951


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


def logarithm(numbers: Numbers) -> Numbers:
    """The natural logarithm of numbers from 2**-1022 on, as the extension ``_sound`` makes it."""
    halves, exponents = np.frexp(numbers)
    parts = 2 * halves
    above = np.where(parts > _ROOT_OF_2, 1.0, 0.0)
    parts *= 1 - 0.5 * above
    ratio = (parts - 1) / (parts + 1)
    square, total = ratio * ratio, np.zeros_like(ratio)
    for term in range(2 * _LOG_TERMS + 1, 0, -2):
        total = total * square + 1 / term
    made: Numbers = (exponents.astype(np.float64) - 1 + above) * _LOG_2 + 2 * ratio * total
    return made


def exponential(numbers: Numbers) -> Numbers:
    """E to the power of numbers from -700 to 700."""
    doublings = np.rint(numbers / _LOG_2)
    parts, power = numbers - doublings * _LOG_2, np.ones_like(numbers)
    for term in range(_EXPONENTIAL_TERMS, 0, -1):
        power = 1 + power * parts / term
    return np.ldexp(power, doublings.astype(np.int64))
