"""What decides the order of an epoch beside its seed, in the index that workers get. Pure code.

    a shuffle of blocks         blocks.BlockOrder    the first sample of each block
    a mix whose shares change   mixtures.Mixture     sizes of its parts, segments, rows of an epoch
    buckets, ranks in step      buckets.BucketOrder  the samples by size, the first of each bucket,
                                                     with a budget the rows of batches of each
    weights                     draws.EvenDraws      the end of each sample's stretch
    weights, each sample once   draws.SingleDraws    the weight of each sample

The daemon adds these to the facts and arrays of a source's index, and every process reads them.
"""

from dataclasses import replace

from batchd.core.blocks import BlockOrder
from batchd.core.buckets import BucketOrder
from batchd.core.draws import EvenDraws, SingleDraws
from batchd.core.mixtures import Mixture, Segment
from batchd.core.plan import Draws, EpochOrder, Facts, Plan, Tables

FACT = "batchd.plan"
STARTS, BOUNDS, WEIGHTS = "batchd.plan.blocks", "batchd.plan.bounds", "batchd.plan.weights"


def planned(plan: Plan, facts: Facts, arrays: Tables) -> Plan:
    """Return the plan with the order and the draws that an index describes, if it does."""
    buckets = BucketOrder.from_arrays(arrays, plan.seed if plan.shuffle else None)
    if buckets is not None:
        return replace(plan, order=buckets, row_counts=buckets if buckets.has_budget else None)
    if FACT not in facts:
        return plan
    return replace(plan, order=_order_in(plan, facts[FACT], arrays), draws=_draws_in(plan, arrays))


def _order_in(plan: Plan, facts: Facts, arrays: Tables) -> EpochOrder | None:
    if STARTS in arrays:
        return BlockOrder(arrays[STARTS], facts["open_blocks"], plan.seed)
    if "mixture" not in facts:
        return None
    sizes, segments = facts["mixture"]
    return Mixture(sizes, [Segment(*one) for one in segments], plan.samples, plan.seed, shuffle=plan.shuffle)


def _draws_in(plan: Plan, arrays: Tables) -> Draws | None:
    if BOUNDS in arrays:
        return EvenDraws(arrays[BOUNDS], plan.seed)
    return SingleDraws(arrays[WEIGHTS], plan.samples, plan.seed) if WEIGHTS in arrays else None
