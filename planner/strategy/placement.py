"""Which mesh axis lies on which links: orders of the mesh.

The axes of a mesh may lie around one another in any order. What an order decides is which links
each axis crosses, and with how many ranks side by side; orders that agree in this are one.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import permutations

from planner.hardware.mixed import as_if_all
from planner.hardware.spec import ClusterSpec
from planner.hardware.topology import CommGroup, MeshAxis, comm_group, crossed_links, units_of
from planner.strategy.mesh import ParallelDegrees
from planner.vocabulary import MESH_ORDER, Axis

MeshOrder = tuple[str, ...]
"""Every axis of a mesh, from the outermost to the innermost; ranks of ep are
those of tp and cp and neighbours on dp_shard."""


def mesh_axis(degrees: ParallelDegrees, axis: str, order: MeshOrder = MESH_ORDER) -> MeshAxis:
    """Where the ranks of an axis lie; those of ep are the innermost of dp_shard, cp and tp."""
    places: tuple[str, ...] = (axis,)
    if axis == Axis.EP:
        places = degrees.sample_axes or (Axis.DP_SHARD,)
    stride = 1
    for inner in reversed(order):
        if inner in places:
            return MeshAxis(size=getattr(degrees, axis), stride=stride)
        stride *= getattr(degrees, inner)
    raise AssertionError(f"no mesh axis {axis}")


def state_axes(degrees: ParallelDegrees, order: MeshOrder = MESH_ORDER) -> tuple[MeshAxis, ...]:
    """The ranks that share the state of FSDP2: those of dp_shard and cp."""
    return mesh_axis(degrees, Axis.DP_SHARD, order), mesh_axis(degrees, Axis.CP, order)


def expert_axes(degrees: ParallelDegrees, order: MeshOrder = MESH_ORDER) -> tuple[MeshAxis, ...]:
    """The ranks that share the state of the same experts."""
    if degrees.ep == 1:
        return state_axes(degrees, order)
    experts = mesh_axis(degrees, Axis.EP, order)
    return (MeshAxis(size=degrees.expert_shards, stride=experts.stride * degrees.ep),)


def copy_axes(degrees: ParallelDegrees, order: MeshOrder = MESH_ORDER) -> tuple[MeshAxis, ...]:
    """All ranks that hold the same part of the model, shared or not."""
    return mesh_axis(degrees, Axis.DP_REPLICATE, order), *state_axes(degrees, order)


def axis_group(
    cluster: ClusterSpec, degrees: ParallelDegrees, axis: str, order: MeshOrder = MESH_ORDER
) -> CommGroup:
    """The ranks of a mesh axis and the links between them."""
    return comm_group(cluster, mesh_axis(degrees, axis, order))


def ranks_per_core(
    cluster: ClusterSpec, degrees: ParallelDegrees, order: MeshOrder = MESH_ORDER
) -> float:
    """Ranks on a core of a node that has whole pipelines, so that what one leaves others use.

    1 where a pipeline has ranks of several nodes, or of several kinds of device: those of a node
    may all hold one stage, and wait with it.
    """
    if cluster.parts:
        return 1.0
    pipeline = mesh_axis(degrees, Axis.PP, order)
    has_whole = cluster.gpus_per_node % (pipeline.size * pipeline.stride) == 0
    return cluster.ranks_per_core if has_whole and pipeline.size > 1 else 1.0


def mesh_orders(
    cluster: ClusterSpec, degrees: ParallelDegrees, kept: Sequence[str] = ()
) -> tuple[MeshOrder, ...]:
    """Orders of the mesh that differ in the links of some axis, ``MESH_ORDER`` first.

    Stages lie in one part of a cluster each: where it has parts, pp is the outermost axis.

    Args:
        cluster: Devices and links.
        degrees: Size of each axis.
        kept: Axes that are to lie in this order, from the outermost to the innermost.
    """
    kinds = range(len(cluster.kinds))
    units = tuple(units_of(as_if_all(cluster, kind)) for kind in kinds)
    return _mesh_orders(units, degrees, tuple(kept))


@lru_cache(maxsize=2**14)
def _mesh_orders(
    of_kinds: tuple[tuple[int, ...], ...], degrees: ParallelDegrees, kept: tuple[str, ...]
) -> tuple[MeshOrder, ...]:
    found: dict[object, MeshOrder] = {}
    for order in _permutations(degrees):
        used = [axis for axis in order if getattr(degrees, axis) > 1]
        if len(of_kinds) > 1 and used[:1] != [Axis.PP]:
            continue
        if [axis for axis in used if axis in kept] == [axis for axis in kept if axis in used]:
            links = tuple(_links_of_axes(units, degrees, order) for units in of_kinds)
            found.setdefault(links, order)
            if all(units[0] == units[-1] for units in of_kinds):
                break
    return tuple(found.values())


def _permutations(degrees: ParallelDegrees) -> Iterator[MeshOrder]:
    """Orders of the axes that have several ranks; the others stay at their places."""
    used = [axis for axis in MESH_ORDER if getattr(degrees, axis) > 1]
    for permutation in permutations(used):
        if degrees.ep > 1 < degrees.sample_ranks and not _lends(degrees, permutation):
            continue
        left = iter(permutation)
        yield tuple(next(left) if axis in used else axis for axis in MESH_ORDER)


def _lends(degrees: ParallelDegrees, order: MeshOrder) -> bool:
    """Whether ranks of ep, those of tp and cp and neighbours on dp_shard, lie side by side."""
    within = len(degrees.sample_axes)
    around = order[:-within][-1:] if degrees.dp_shard > 1 else (Axis.DP_SHARD,)
    return {*order[-within:]} == {*degrees.sample_axes} and around == (Axis.DP_SHARD,)


def _links_of_axes(
    units: tuple[int, ...], degrees: ParallelDegrees, order: MeshOrder
) -> tuple[object, ...]:
    """What prices depend on of an order."""
    pipeline = mesh_axis(degrees, Axis.PP, order)
    groups = (
        *((mesh_axis(degrees, axis, order),) for axis in degrees.split_axes),
        state_axes(degrees, order),
        expert_axes(degrees, order),
        (mesh_axis(degrees, Axis.DP_REPLICATE, order),),
        copy_axes(degrees, order),
        (pipeline,),
    )
    links = tuple(crossed_links(units, axes) for axes in groups)
    # Between which stages a link lies follows from these where units hold stages alike.
    is_even = all(pipeline.is_even(unit) for unit in units)
    return links if is_even else (*links, pipeline.stride)


@lru_cache(maxsize=2**14)
def _canonical(units: tuple[int, ...], axis: MeshAxis) -> int:
    wanted = crossed_links(units, (axis,))
    return next(
        stride
        for stride in range(1, axis.stride + 1)
        if (units[-1] // axis.size) % stride == 0
        and crossed_links(units, (MeshAxis(size=axis.size, stride=stride),)) == wanted
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Strides:
    """Distances of neighbours on axes that split modules, the least for their links."""

    split: int = 1
    """On the split axis."""
    second: int = 1
    """On cp around it."""


def mesh_strides(cluster: ClusterSpec, degrees: ParallelDegrees, order: MeshOrder) -> Strides:
    """Return them for a mesh."""
    split, *around = (
        canonical_stride(cluster, mesh_axis(degrees, axis, order))
        for axis in degrees.split_axes or (degrees.split_axis,)
    )
    return Strides(split=split, second=around[0] if around else 1)


def canonical_stride(cluster: ClusterSpec, axis: MeshAxis) -> int:
    """The least distance of neighbours under which an axis crosses the same links."""
    return _canonical(units_of(cluster), axis)
