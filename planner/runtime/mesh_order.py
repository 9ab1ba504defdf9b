"""Device meshes whose axes lie around one another in any order."""

from collections.abc import Mapping, Sequence

from torch.distributed.device_mesh import DeviceMesh

from .meshes import axis_names

_AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""The order in which FSDP2 and DTensor want axes, and in which torch slices them."""

_Ranks = int | list["_Ranks"]


def device_mesh(device_type: str, sizes: Mapping[str, int]) -> DeviceMesh:
    """Return the mesh of all ranks.

    Its axes are those that torch would have in the usual order, whatever lies inside what. All
    ranks ask for it at the same time, since its groups are made here.

    Args:
        device_type: "cuda" or "cpu".
        sizes: Ranks on each axis, the outermost first: the last one varies fastest over ranks.
    """
    strides: dict[str, int] = {}
    stride = 1
    for name, size in reversed([*sizes.items()]):
        strides[name] = stride
        stride *= size
    names = [name for name in _AXES if name in sizes]
    ranks = [0]
    for name in names:
        ranks = [rank + at * strides[name] for rank in ranks for at in range(sizes[name])]
    return _mesh_of(device_type, ranks, {name: sizes[name] for name in names})


def divided_mesh(mesh: DeviceMesh, sizes: Mapping[str, int]) -> DeviceMesh:
    """Return a mesh with the same ranks in other axes: some are in two, or two are one.

    Args:
        mesh: The mesh.
        sizes: Ranks on the axes, in the order of its own; what was two is the last, or lies around
            an axis of its own that is.
    """
    ranks, names = _flat(mesh.mesh.tolist()), [*sizes]
    inside = sizes[names.pop()] if names[-1] in axis_names(mesh) else 1
    length = sizes[names[-1]] * inside
    # Ranks of a group go by their numbers, and so must places on an axis that was two.
    ordered: list[int] = []
    for start in range(0, len(ranks), length):
        rows = [sorted(ranks[start + at : start + length : inside]) for at in range(inside)]
        ordered += [rank for column in zip(*rows, strict=True) for rank in column]
    return _mesh_of(mesh.device_type, ordered, sizes)


def _flat(ranks: _Ranks) -> list[int]:
    if isinstance(ranks, int):
        return [ranks]
    return [rank for part in ranks for rank in _flat(part)]


def _mesh_of(device_type: str, ranks: Sequence[int], sizes: Mapping[str, int]) -> DeviceMesh:
    """Lay ranks out along axes, the last of which varies fastest."""
    nested: list[_Ranks] = list(ranks)
    for size in reversed([*sizes.values()][1:]):
        nested = [nested[at : at + size] for at in range(0, len(nested), size)]
    return DeviceMesh(device_type, nested, mesh_dim_names=tuple(sizes))
