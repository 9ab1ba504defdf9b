"""Which links the ranks of mesh axes cross.

Ranks are numbered along the nodes, and a link joins units of as many neighbouring ranks as it says
(8 in a node, 72 in a rack); the last unit of a kind may have fewer. An axis has ``size`` ranks that
lie ``stride`` apart. All groups of an axis work at once, so that an axis is as fast as the worst of
them: where units hold different numbers of its ranks, that which holds fewest counts.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product

import numpy as np

from planner.errors import RequestError
from planner.hardware.spec import ClusterSpec, LinkSpec

Ranks = np.ndarray[tuple[int], np.dtype[np.int_]]
"""Numbers of ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshAxis:
    """Where the ranks of a mesh axis lie."""

    size: int
    """Ranks on it."""
    stride: int
    """Distance of neighbours in rank order: the ranks of all axes inside it."""

    def is_even(self, unit: int) -> bool:
        """Whether all units of so many ranks that hold some of a group hold them alike."""
        end = self.size * self.stride
        return (
            unit % end == 0
            or self.stride % unit == 0
            or (unit % self.stride == 0 and end % unit == 0)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Crossing:
    """A link that a group's traffic crosses, and the parts of the group that it joins."""

    link: LinkSpec
    """Its bandwidth is per rank: all groups of an axis use it at once."""
    num_parts: int
    """Parts of the group that lie in units below the link, at the most."""
    ranks_per_part: int = 1
    """Ranks in the smallest of them."""
    in_node: bool = False
    """The link joins the ranks of a node, or it is the innermost of the cluster."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommGroup:
    """The ranks of one or several mesh axes that communicate, and the links between them."""

    num_ranks: int
    """Ranks in the group."""
    crossings: tuple[Crossing, ...]
    """Links between them, the innermost first; that of the cluster for one rank alone."""
    reduces_whole: bool = False
    """A reduce-scatter is an all-reduce of which each rank takes its part, as gloo does it."""

    @property
    def slowest(self) -> LinkSpec:
        """The link that a transfer between neighbours must expect."""
        return self.crossings[-1].link

    @property
    def spans_nodes(self) -> bool:
        """Whether its traffic leaves a node."""
        return self.num_ranks > 1 and not self.crossings[-1].in_node


def comm_group(cluster: ClusterSpec, *axes: MeshAxis) -> CommGroup:
    """Find the links between ranks that differ in their places on some axes alone.

    Args:
        cluster: Links and nodes.
        axes: The axes.

    Raises:
        RequestError: The axes do not fit into the cluster.
    """
    for axis in axes:
        if axis.size < 1 or axis.stride < 1 or axis.size * axis.stride > cluster.num_gpus:
            raise RequestError(
                f"a mesh axis of {axis.size} ranks, {axis.stride} apart, does not fit into "
                f"{cluster.num_gpus} ranks",
                hint="the product of all degrees must equal the number of GPUs",
            )
    units = units_of(cluster)
    return CommGroup(
        num_ranks=math.prod(axis.size for axis in axes),
        crossings=tuple(
            Crossing(
                link=cluster.links[at],
                num_parts=num_parts,
                ranks_per_part=ranks_per_part,
                in_node=at == 0 or units[at] <= cluster.gpus_per_node,
            )
            for at, num_parts, ranks_per_part in crossed_links(units, axes)
        ),
        reduces_whole=not cluster.hides_traffic,
    )


def units_of(cluster: ClusterSpec) -> tuple[int, ...]:
    """Neighbouring ranks that each link joins, the innermost first; the last joins all."""
    return tuple(
        cluster.num_gpus if link.ranks is None else min(link.ranks, cluster.num_gpus)
        for link in cluster.links
    )


@lru_cache(maxsize=2**18)
def crossed_links(
    units: tuple[int, ...], axes: tuple[MeshAxis, ...]
) -> tuple[tuple[int, int, int], ...]:
    """Links that ranks on some axes cross: its place, parts of the group, ranks in the smallest.

    The innermost link stands for none: for one rank alone.
    """
    joined = _joined(axes)
    found = []
    num_parts, ranks_per_part = math.prod(axis.size for axis in joined), 1
    for at, unit in enumerate(units):
        parts = _parts(unit, units[-1], joined)
        if parts[0] < num_parts:
            found.append((at, num_parts, ranks_per_part))
        num_parts, ranks_per_part = parts
    return tuple(found) or ((0, 1, 1),)


def joining_link(units: tuple[int, ...], axis: MeshAxis, first: int, second: int) -> int:
    """Place of the innermost link that joins two places of an axis, whatever those on others.

    Args:
        units: ``units_of`` the cluster.
        axis: The axis.
        first: A place.
        second: Another one.
    """
    return next(
        place for place, unit in enumerate(units) if _joins(unit, units[-1], axis, first, second)
    )


def shares_link(one: CommGroup, other: CommGroup) -> bool:
    """Whether the slowest link of one group is among those that another's traffic crosses."""
    return other.num_ranks > 1 and any(each.link == one.slowest for each in other.crossings)


def _joined(axes: Sequence[MeshAxis]) -> tuple[MeshAxis, ...]:
    """The same ranks by as few axes as possible, the innermost first."""
    found: list[MeshAxis] = []
    for axis in sorted(axes, key=lambda axis: axis.stride):
        if found and axis.stride == found[-1].size * found[-1].stride:
            last = found.pop()
            axis = MeshAxis(size=last.size * axis.size, stride=last.stride)
        if axis.size != 1:
            found.append(axis)
    return tuple(found)


@lru_cache(maxsize=2**16)
def _parts(unit: int, num_gpus: int, axes: tuple[MeshAxis, ...]) -> tuple[int, int]:
    """Units that a group lies in, at the most, and its ranks in the one that holds fewest."""
    if unit >= num_gpus or all(axis.is_even(unit) for axis in axes):
        num_ranks = inside = 1
        for axis in axes:
            num_ranks *= axis.size
            inside *= min(axis.size, max(1, unit // axis.stride))
        return num_ranks // inside, inside
    places = [range(0, axis.size * axis.stride, axis.stride) for axis in axes]
    steps = np.array(sorted(map(sum, product(*places))))
    units = (_origins(num_gpus, axes)[:, None] + steps) // unit
    # Groups that begin at another place of a unit are divided in another way.
    distinct = np.unique(units - units[:, :1], axis=0)
    found = [np.unique(group, return_counts=True)[1] for group in distinct]
    return max(map(len, found)), min(int(counts.min()) for counts in found)


@lru_cache(maxsize=2**16)
def _joins(unit: int, num_gpus: int, axis: MeshAxis, first: int, second: int) -> bool:
    """Whether two places of an axis lie in one unit, for all groups of the axis."""
    if unit >= num_gpus:
        return True
    origins = np.zeros(1, dtype=int) if axis.is_even(unit) else _origins(num_gpus, (axis,))
    units = (origins[:, None] + np.array([first, second]) * axis.stride) // unit
    return bool((units[:, 0] == units[:, 1]).all())


def _origins(num_gpus: int, axes: Sequence[MeshAxis]) -> Ranks:
    """The first rank of each group of some axes."""
    ranks = np.arange(num_gpus)
    for axis in axes:
        ranks = ranks[ranks // axis.stride % axis.size == 0]
    last = sum((axis.size - 1) * axis.stride for axis in axes)
    return ranks[ranks + last < num_gpus]
