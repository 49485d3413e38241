"""Plans of all kinds of orders, small enough to look at each of their rows."""

from dataclasses import replace

import numpy as np

from batchd.core.blocks import BlockOrder
from batchd.core.buckets import buckets_of
from batchd.core.draws import EvenDraws, SingleDraws, bounds_of
from batchd.core.epochs import planned
from batchd.core.mixtures import Mixture, Segment
from batchd.core.packs import PackLimits, Packs
from batchd.core.plan import Plan

SAMPLES = 23
KINDS = [
    *("shuffled", "in order", "blocks", "packs", "packs in order"),
    *("weights", "weights in order", "weights in blocks", "single", "mixture", "mixture in order"),
    *("buckets", "budget", "budget in order"),
]


def plan_of(kind, batch_size, seed, *, drop_last, repeats=1):
    """Return the plan of a kind of order, and the packs if it is packed."""
    plan, packs = _plan(kind, batch_size, seed, drop_last=drop_last)
    return replace(plan, repeats=repeats), packs


def _plan(kind, batch_size, seed, *, drop_last):
    if kind.startswith("packs"):
        lengths = np.random.default_rng(seed).integers(0, 25, SAMPLES)
        lengths[0] = 25
        packs = Packs.plan(lengths, PackLimits(10, 4, 6, "split"))
        return Plan(len(packs), batch_size, seed, kind == "packs", drop_last, SAMPLES), packs
    shuffle = not kind.endswith("in order")
    if kind.startswith("mixture"):
        mixture = Mixture([8, 15], [Segment(0, [1, 2]), Segment(31, [3, 0])], 19, seed, shuffle=shuffle)
        return Plan(19, batch_size, seed, shuffle, drop_last, None, mixture), None
    if kind.startswith("bu"):
        sizes = np.random.default_rng(seed).integers(0, 25, SAMPLES)
        budget = None if kind == "buckets" else 40
        arrays = buckets_of(sizes, 3, batch_size, 1 + seed % 3, budget)
        return planned(Plan(SAMPLES, batch_size, seed, shuffle, drop_last), {}, arrays), None
    order = BlockOrder(np.array([0, 3, 4, 11, 16, SAMPLES]), 2, seed) if kind.endswith("blocks") else None
    plan = Plan(SAMPLES, batch_size, seed, shuffle, drop_last, None, order)
    weights = np.random.default_rng(seed).integers(0, 4, SAMPLES).astype(np.float64) + (np.arange(SAMPLES) < 9)
    if kind.startswith("weights"):
        return replace(plan, draws=EvenDraws(bounds_of(weights, SAMPLES), seed)), None
    if kind == "single":
        return replace(plan, samples=9, draws=SingleDraws(weights, 9, seed)), None
    return plan, None
