"""The layout that people take without a planner: the baseline beside every plan.

Tensor parallelism as small as fits inside a node, then pipeline stages, the rest data parallel
with FSDP2 as it comes (parameters resharded after forward, except under a pipeline), the largest
microbatch that fits, and full recomputation only where nothing fits without it.
"""

import math
from collections.abc import Iterator
from dataclasses import replace

from planner.plan.types import Plan
from planner.search.decode import decode_plan
from planner.search.partition import best_partition
from planner.search.space import LayoutSpace
from planner.strategy.configuration import Configuration
from planner.strategy.mesh import ParallelDegrees
from planner.strategy.rules import (
    FixedValues,
    broken_rule,
    configurations,
    divisors,
    heads_rule,
)
from planner.vocabulary import Recomputation


def rule_of_thumb(space: LayoutSpace) -> Plan | None:
    """Find the baseline, None where nothing of its form fits."""
    for degrees in _in_order(space.cluster.num_gpus, space.cluster.gpus_per_node):
        if (
            broken_rule(degrees, space.facts, space.request.global_batch_size)
            or heads_rule(degrees, space.facts, FixedValues())
            or space.orders.on_two_kinds(degrees)
        ):
            continue
        for kind in (Recomputation.NONE, Recomputation.FULL):
            plan = _largest_microbatch(space, degrees, kind)
            if plan is not None:
                return plan
    return None


def _in_order(gpus: int, gpus_per_node: int) -> Iterator[ParallelDegrees]:
    """Smallest tp first, inside a node; then more and more pipeline stages."""
    inside = divisors(math.gcd(gpus, gpus_per_node))
    for tp in inside:
        yield ParallelDegrees(tp=tp, dp_shard=gpus // tp)
    widest = inside[-1]
    for pp in divisors(gpus // widest)[1:]:
        yield ParallelDegrees(tp=widest, pp=pp, dp_shard=gpus // widest // pp)


def _largest_microbatch(space: LayoutSpace, degrees: ParallelDegrees, kind: str) -> Plan | None:
    fixed = FixedValues(
        virtual_stages=1,
        reshard_after_forward=degrees.pp == 1,
        sequence_parallel=degrees.tp > 1,
        compile=space.request.fixed.compile,
        float8=space.request.fixed.float8,
        loss_chunks=space.request.fixed.loss_chunks,
        cpu_offload=space.request.fixed.cpu_offload,
        activation_offload=space.request.fixed.activation_offload,
    )
    found = configurations(degrees, space.facts, space.request.global_batch_size, fixed)
    form = space.state_form(degrees)
    legal = [replace(c, state_form=form) for c in found if isinstance(c, Configuration)]
    for configuration in sorted(legal, key=lambda c: -c.microbatch_size):
        for search in space.searches(configuration, kind=kind):
            partition = best_partition(search)
            if partition is not None:
                return decode_plan(search, partition.columns, space.context)
    return None
