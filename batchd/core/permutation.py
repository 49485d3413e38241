"""The shuffle: a keyed bijection on [0, length), computed for any few indices without memory for the rest. Nobody's process.

A generalised Feistel network on Z_a x Z_b with a * b >= length, and cycle walking for the few values that land outside:
J. Black, P. Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA 2002. With a near the root of the length, at most
about one value in a walks. The round function is a 64-bit mixer; this is a shuffle, not a cipher.

Invariant: for each key, ``shuffled`` maps [0, length) onto itself, every index once.
"""

from math import isqrt

import numpy as np
from numpy.typing import NDArray

ROUNDS = 8
"""Even, so that both halves come back to their places."""
ROUNDS_SMALL = 24
SMALL_LENGTH = 256
"""Below it the halves are so narrow that a round mixes little: with 8 rounds the orders of 5 samples are visibly uneven."""
WIDTHS_TRIED = 64
LENGTH_MAX = 1 << 62

_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_MASK = (1 << 64) - 1

Indices = NDArray[np.uint64]


class Permutation:
    """One shuffle of [0, length), chosen by ``key`` (any whole numbers, such as a seed and an epoch)."""

    def __init__(self, length: int, key: tuple[int, ...]) -> None:
        if not 0 < length <= LENGTH_MAX:
            raise ValueError(f"a permutation needs 1 to {LENGTH_MAX} indices, not {length}")
        self.length = length
        columns = _columns_for(length)
        self._columns = np.uint64(columns)
        self._rows = np.uint64(-(-length // columns))
        self._round_keys = _round_keys(key, ROUNDS if length >= SMALL_LENGTH else ROUNDS_SMALL)

    def __call__(self, indices: Indices) -> Indices:
        """Where ``indices`` (uint64, each below ``length``) go. Same shape."""
        values = self._permute(indices)
        outside = np.flatnonzero(values >= self.length)
        while outside.size:
            values[outside] = self._permute(values[outside])
            outside = outside[values[outside] >= self.length]
        return values

    def _permute(self, indices: Indices) -> Indices:
        """One walk through the network on [0, columns * rows)."""
        right, left = np.divmod(indices, self._columns)
        for first, second in self._round_keys:
            left, right = right, (left + _mix(right, first)) % self._columns
            left, right = right, (left + _mix(right, second)) % self._rows
        values: Indices = right * self._columns + left
        return values


def _mix(values: Indices, key: np.uint64) -> Indices:
    """Mix 64 bits well (the finaliser of SplitMix64) and keep 32, so that adding a half cannot overflow."""
    mixed = values + key
    mixed ^= mixed >> np.uint64(30)
    mixed *= _MIX_1
    mixed ^= mixed >> np.uint64(27)
    mixed *= _MIX_2
    mixed >>= np.uint64(32)
    return mixed


def _columns_for(length: int) -> int:
    """Choose the width, near the root of the length, that leaves the fewest values outside, so that hardly any walks."""
    root = isqrt(length - 1) + 1
    return min(range(root, max(0, root - WIDTHS_TRIED, root // 2), -1), key=lambda width: -length % width)


def _round_keys(key: tuple[int, ...], rounds: int) -> list[tuple[np.uint64, np.uint64]]:
    state = mixed(key)
    keys = []
    for _ in range(rounds):
        state = (state + _GOLDEN) & _MASK
        keys.append(np.uint64(_mix_number(state)))
    return list(zip(keys[::2], keys[1::2], strict=True))


def mixed(key: tuple[int, ...]) -> int:
    """One well mixed 64-bit number for any whole numbers."""
    state = _GOLDEN
    for word in key:
        state = _mix_number(state ^ (word & _MASK))
    return state


def _mix_number(value: int) -> int:
    """SplitMix64's finaliser for one Python number (Steele, Lea, Flood 2014)."""
    value = (value + _GOLDEN) & _MASK
    value = ((value ^ (value >> 30)) * int(_MIX_1)) & _MASK
    value = ((value ^ (value >> 27)) * int(_MIX_2)) & _MASK
    return value ^ (value >> 31)
