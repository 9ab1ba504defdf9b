"""Orders of the mesh that the search tries, and what it says of them."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import gcd
from typing import Any

from planner.hardware.spec import ClusterSpec
from planner.strategy.configuration import Configuration
from planner.strategy.mesh import ParallelDegrees
from planner.strategy.placement import (
    MeshOrder,
    Strides,
    mesh_orders,
    mesh_strides,
    ranks_per_core,
)
from planner.strategy.rules import BrokenRule
from planner.vocabulary import ORDER_SIGN, Axis


class MeshOrders:
    """Orders of the axes of a mesh on one cluster, one for each choice of links."""

    def __init__(self, cluster: ClusterSpec, kept: Sequence[str]) -> None:
        """Set up.

        Args:
            cluster: Devices and links.
            kept: Axes that the request keeps in this order, from the outermost to the innermost.
        """
        self._cluster = cluster
        self._kept = tuple(kept)

    def of(self, degrees: ParallelDegrees) -> tuple[MeshOrder, ...]:
        """Orders that the request and the runtime take, the most usual one first."""
        return mesh_orders(self._cluster, degrees, self._kept)

    def placed(self, configuration: Configuration, order: MeshOrder) -> Configuration:
        """A configuration in one of its orders."""
        return replace(configuration, **self.placement(configuration.degrees, order))

    def placement(self, degrees: ParallelDegrees, order: MeshOrder | None = None) -> dict[str, Any]:
        """What of configurations of some degrees hangs on an order, by itself the usual one."""
        order = order or self.of(degrees)[0]
        on_core = ranks_per_core(self._cluster, degrees, order)
        return {"mesh_order": order, "ranks_per_core": on_core}

    def strides(self, degrees: ParallelDegrees, order: MeshOrder) -> Strides:
        """Distances of the ranks over which modules are split, the least for their links."""
        return mesh_strides(self._cluster, degrees, order)

    def broken_rule(self, degrees: ParallelDegrees) -> BrokenRule | None:
        """Refuse degrees that have none of the orders that the request asks for.

        Of a cluster of several kinds of device those too whose stages would lie on two of them.
        """
        if mixed := self.on_two_kinds(degrees):
            return mixed
        if self.of(degrees):
            return None
        inside = degrees.sample_axes
        lenders = Axis.DP_SHARD, *inside
        outer = [axis for axis in self._kept if axis not in lenders]
        works = ORDER_SIGN.join([*outer, *(axis for axis in lenders if axis in self._kept)])
        axes = " and ".join(inside)
        ranks = " and ".join(f"{axis} {getattr(degrees, axis)}" for axis in inside)
        return BrokenRule(
            rule=f"mesh_order with ep and {axes}",
            detail=f"mesh_order={ORDER_SIGN.join(self._kept)} with ep {degrees.ep} and {ranks}: "
            f"the ranks of ep are those of {axes} and neighbours on dp_shard, so that "
            f"dp_shard around {axes} lies inside all other axes; mesh_order can be {works}, "
            "or ep 1",
        )

    def on_two_kinds(self, degrees: ParallelDegrees) -> BrokenRule | None:
        """Refuse stages of which some would lie on two kinds of device."""
        parts = self._cluster.parts
        if not parts:
            return None
        ranks, widest = degrees.world_size // degrees.pp, gcd(*(each.num_gpus for each in parts))
        names = " and ".join(f"{each.num_gpus} x {each.device.name}" for each in parts)
        words = f"stages of {ranks} ranks on {names}: each lies on one kind of device"
        if any(part.num_gpus % ranks for part in parts):
            detail = f"{words}; a stage can have as many ranks as divide {widest}"
            return BrokenRule(rule="stages on kinds of device", detail=detail)
        if not self.of(degrees):
            detail = f"{words}, so that pp is the outermost axis; mesh_order can be pp first"
            return BrokenRule(rule="stages on kinds of device", detail=detail)
        return None

    def limits(self, tried: Iterable[ParallelDegrees], near: float) -> tuple[str, ...]:
        """Say which orders were searched, nothing where each layout has one.

        Args:
            tried: Layouts.
            near: Share by which the step of those may be longer than the best that are tried in
                more than one order.
        """
        layouts = dict.fromkeys(tried)
        if all(len(self.of(each)) == 1 for each in layouts):
            return ()
        usual = f"the usual one with {' around '.join(self._kept)}" if self._kept else "the usual"
        words = f"orders of the mesh beside {usual} for layouts within {near:.0%} of the fastest"
        splits = any(len({self.strides(each, o) for o in self.of(each)}) > 1 for each in layouts)
        if splits:
            words += ", modules laid out as on the innermost links"
        if any(each.ep > 1 < each.sample_ranks for each in layouts):
            words += ", ep with tp and cp innermost"
        return (words,)
