"""Which rows of a batch are mixed, with what: mixup and cutmix by position. Pure code.

    seed, epoch, step --> shift     the partner of row i is row (i + shift) modulo rows, another one
                          λ         drawn from Beta(alpha, alpha)
                          centre    cutmix: of the box that is taken from the partner

    mixup    λ * row + (1 - λ) * partner
             H. Zhang and others, "mixup: Beyond Empirical Risk Minimization", ICLR 2018
    cutmix   the partner's pixels in the box, the row's outside; λ is the row's share of the pixels
             S. Yun and others, "CutMix", ICCV 2019; the box as in torchvision's ``CutMix``

A trainer applies the numbers on its device (``batchd_client.mixing``): workers make rows alone.

Invariant: whole numbers decide everything, so the fields have the same bytes on any machine. λ is a
multiple of 2^-24, by linear interpolation between 1,024 quantiles of its distribution.
"""

from decimal import Context, Decimal, localcontext
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from batchd.core.plan import mixed_each
from batchd_wire.fields import Field
from batchd_wire.position import Position
from batchd_wire.record import frozen

BITS = 24
WHOLE = 1 << BITS
QUANTILE_BITS = 9
"""Of the quantiles below the median; those above it mirror them."""
_SALT = 0x6D6978
TERMS = 64
"""Of a series whose terms fall at least as fast as 2^-n."""
SMALLEST = Decimal(1) / (WHOLE << 6)
_EXACT = Context(prec=20)
_FRACTION_BITS = BITS - 1 - QUANTILE_BITS


class MixNumbers(NamedTuple):
    """Partners int32 ``[rows]``, λ float32 ``[rows]`` and boxes int32 ``[rows, 4]`` of some rows.

    A box is left, top, right and bottom in pixels of the image; all are 0 where there is none.
    """

    mix_row: NDArray[np.int32]
    mix_lambda: NDArray[np.float32]
    mix_box: NDArray[np.int32]


MIX_FIELDS = (Field("mix_row", "int32", ()), Field("mix_lambda", "float32", ()), Field("mix_box", "int32", (4,)))
"""Those of ``MixNumbers`` in a batch."""


@frozen
class RowMixing:
    """How rows are mixed; see ``config.tree.Mix``. ``height`` and ``width``: of an image."""

    mixup: float
    cutmix: float
    probability: float
    switch: float
    by_row: bool
    height: int
    width: int

    def numbers(self, seed: int, position: Position, rows: int) -> MixNumbers:
        """The numbers of all ``rows`` of the batch at ``position``."""
        one = np.arange(rows) if self.by_row else np.zeros(1, np.int64)
        draws = [mixed_each((seed, _SALT, *position, one, number)) >> np.uint64(64 - BITS) for number in range(6)]
        acts, switches, quantiles, across, down, shifts = (draw.astype(np.int64) for draw in draws)
        cuts = (
            switches < round(self.switch * WHOLE)
            if self.mixup and self.cutmix
            else np.full(len(one), bool(self.cutmix))
        )
        shares = np.where(cuts, _shares(self.cutmix, quantiles), _shares(self.mixup, quantiles))
        shares[(acts >= round(self.probability * WHOLE)) | (rows == 1)] = WHOLE
        boxes = np.zeros((len(one), 4), np.int64)
        root = np.sqrt((WHOLE - shares).astype(np.float64))
        for axis, (size, centre) in enumerate([(self.width, across), (self.height, down)]):
            half = np.floor(root * size / (2 << (BITS // 2))).astype(np.int64)
            middle = centre * size >> BITS
            boxes[:, axis] = np.maximum(middle - half, 0)
            boxes[:, axis + 2] = np.minimum(middle + half, size)
        area = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])
        boxes[~cuts | (area == 0)] = 0
        pixels = self.height * self.width
        lambdas = np.where(cuts, (pixels - area) / pixels, shares / WHOLE).astype(np.float32)
        shift = 1 + int(shifts[0]) % max(1, rows - 1)
        partners = (np.arange(rows) + shift) % rows
        return MixNumbers(
            partners.astype(np.int32),
            np.broadcast_to(lambdas, rows),
            np.broadcast_to(boxes.astype(np.int32), (rows, 4)),
        )


def _shares(alpha: float, draws: NDArray[np.int64]) -> NDArray[np.int64]:
    """λ in units of 2^-24 for uniform ``draws`` of 24 bits: int64 of the same shape."""
    if not alpha:
        return np.full(len(draws), WHOLE)
    table = beta_quantiles(alpha)
    is_upper = draws >= WHOLE // 2
    below = np.where(is_upper, WHOLE - 1 - draws, draws)
    at, rest = below >> _FRACTION_BITS, below & ((1 << _FRACTION_BITS) - 1)
    low = table[at]
    share = low + ((table[at + 1] - low) * rest >> _FRACTION_BITS)
    shares: NDArray[np.int64] = np.where(is_upper, WHOLE - share, share)
    return shares


@lru_cache(maxsize=64)
def beta_quantiles(alpha: float) -> NDArray[np.int64]:
    """The quantiles of Beta(alpha, alpha) up to its median, in units of 2^-24.

    Int64 ``[1 + 2^9]``, at equal steps of the probability. Decimal numbers make them, so they are
    the same on every machine. Takes some 0.1 s.
    """
    with localcontext(_EXACT):
        exponent, half = Decimal(alpha), Decimal("0.5")
        terms = _series(exponent)
        median = _below(half, exponent, terms)
        table, x = [0], Decimal(0)
        for step in range(1, 1 << QUANTILE_BITS):
            wanted = median * step / (1 << QUANTILE_BITS)
            x = _solved(wanted, x, exponent, terms)
            table.append(int(x * WHOLE))
    return np.array([*table, WHOLE // 2], np.int64)


def _series(exponent: Decimal) -> list[Decimal]:
    """The factors of the hypergeometric series: (1 - a)(2 - a)...(n - a) / n! / (a + n)."""
    terms, product = [1 / exponent], Decimal(1)
    for number in range(1, TERMS):
        product *= (number - exponent) / number
        terms.append(product / (exponent + number))
    return terms


def _below(x: Decimal, exponent: Decimal, terms: list[Decimal]) -> Decimal:
    """The integral of (t (1 - t))^(a - 1) from 0 to ``x``, at most 1/2."""
    total, power = Decimal(0), Decimal(1)
    for term in terms:
        part = term * power
        total += part
        if abs(part) < SMALLEST * abs(total):
            break
        power *= x
    return total * (exponent * x.ln()).exp() if x else Decimal(0)


def _solved(wanted: Decimal, above: Decimal, exponent: Decimal, terms: list[Decimal]) -> Decimal:
    """The x above another one whose integral is ``wanted``: Newton's method between two bounds."""
    low, high = above, Decimal("0.5")
    x = min(high, ((wanted * exponent).ln() / exponent).exp())
    while high - low > SMALLEST:
        x = x if low < x < high else (low + high) / 2
        off = _below(x, exponent, terms) - wanted
        low, high = (low, x) if off > 0 else (x, high)
        near = x - off * ((1 - exponent) * (x * (1 - x)).ln()).exp()
        if abs(near - x) < SMALLEST:
            return near
        x = near
    return low
