"""Functions that have the same bits everywhere: sums, products, quotients, roots. Worker process.

A C library may compute an exponential, a logarithm or a sine to another last bit than the next one,
and a generator of normal numbers may draw another count of them.
"""

from math import ceil, frexp, fsum, ldexp, sqrt
from typing import Final

import numpy as np
import numpy.typing as npt

from batchd.data.pipeline.image.geometry import RandomNumber
from batchd.data.pipeline.image.resample import sine_and_cosine

KEY_BITS: Final = 53
"""Of a key of noise: what one random number has."""
_EXPONENT_TERMS = 12
_LOG_TERMS = 24
_LOG_2: Final = 0.6931471805599453
_REACH = 4
_TURN_DEGREES = 360


def exponential(number: float) -> float:
    """E to the power of a number that is not positive: sums and products, so equal everywhere."""
    halvings = max(0, frexp(number)[1] + 1)
    part = ldexp(number, -halvings)
    power = 1.0
    for term in range(_EXPONENT_TERMS, 0, -1):  # Horner's rule
        power = 1 + power * part / term
    for _ in range(halvings):
        power *= power
    return power


def logarithm(number: float) -> float:
    """The natural logarithm of a number above 0."""
    part, exponent = frexp(number)
    ratio = (part - 1) / (part + 1)
    square, total = ratio * ratio, 0.0
    for term in range(2 * _LOG_TERMS + 1, 0, -2):
        total = total * square + 1 / term
    return exponent * _LOG_2 + 2 * ratio * total


def normal(random: RandomNumber) -> float:
    """A number from the normal distribution, made of two even ones (Box and Muller 1958)."""
    radius = sqrt(-2 * logarithm(1 - random()))
    return radius * sine_and_cosine(_TURN_DEGREES * random() - _TURN_DEGREES / 2)[1]


def gaussian_weights(sigma: float) -> list[float]:
    """The weights of a Gaussian from its centre as far as four times sigma; both sides add to 1."""
    reach = max(1, ceil(_REACH * sigma))
    exact = [exponential(-(place * place) / (2 * sigma * sigma)) for place in range(reach + 1)]
    whole = exact[0] + 2 * fsum(exact[1:])
    return [weight / whole for weight in exact]


def random_words(key: int, top: int, left: int, height: int, width: int) -> npt.NDArray[np.uint64]:
    """64 random bits for each pixel of a box of an image, by its place: uint64 [height, width].

    SplitMix64 of (key, row, column): https://prng.di.unimi.it/splitmix64.c
    """
    rows = np.arange(top, top + height, dtype=np.uint64)[:, np.newaxis] << np.uint64(32)
    mixed = (rows | np.arange(left, left + width, dtype=np.uint64)) + np.uint64(key << 64 - KEY_BITS)
    mixed *= np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed ^= mixed >> np.uint64(shift)
        mixed *= np.uint64(factor)
    mixed ^= mixed >> np.uint64(31)
    return mixed
