"""Parameters that some ranks use in a step and others do not.

Where a model's code goes by its data, an expert may get no rows of one rank's samples, and a layer
may be dropped. FSDP2 reduces the gradients that a rank has, and ranks with others would mix them
up, or wait for each other.
"""

import functools
from collections.abc import Iterator, Sequence

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from .meshes import axis_names
from .part import Part
from .trees import Tree


class UnusedParameters:
    """Reduces zeros for a gradient that a rank does not have, and drops what no rank has."""

    def __init__(self, parts: Sequence[Part], mesh: DeviceMesh) -> None:
        """Watch the parameters of parts that FSDP2 shards; others have the gradients they have.

        Args:
            parts: What this rank trains.
            mesh: The whole mesh.
        """
        self._parts = [part for part in parts if isinstance(part, FSDPModule)]
        self._watched: dict[int, Tensor] = {}
        self._used: set[tuple[nn.Module, str]] = set()
        axes = [axis for axis in ("dp_replicate", "dp_shard") if axis in axis_names(mesh)]
        self._groups = [mesh[axis].get_group() for axis in axes]
        for part in self._parts:
            for module in part.modules():
                if isinstance(module, FSDPModule):
                    module.set_reduce_scatter_unused_params(True, recurse=False)
                    module.register_forward_pre_hook(self._watch)

    def _watch(self, module: nn.Module, _: Tree) -> None:
        """Note when the gathered parameters of a module get a gradient."""
        for holder in _run_with(module):
            for name, parameter in holder._parameters.items():
                if parameter is None or not parameter.requires_grad:
                    continue
                if id(parameter) not in self._watched:  # kept, so that no other gets its id
                    self._watched[id(parameter)] = parameter
                    note = functools.partial(self._note, (holder, name))
                    parameter.register_post_accumulate_grad_hook(note)  # type: ignore[no-untyped-call]

    def _note(self, place: tuple[nn.Module, str], _: Tensor) -> None:
        self._used.add(place)

    def leave_out(self) -> None:
        """Drop gradients of parameters that no rank has used in the step, as one process has none.

        An optimiser then leaves them as they are.
        """
        places: dict[int, list[tuple[nn.Module, str]]] = {}
        trained: dict[int, nn.Parameter] = {}
        for holder in (module for part in self._parts for module in part.modules()):
            for name, parameter in holder._parameters.items():
                if parameter is not None and parameter.requires_grad:
                    trained[id(parameter)] = parameter
                    places.setdefault(id(parameter), []).append((holder, name))
        used = [not self._used.isdisjoint(each) for each in places.values()]
        for group in self._groups:
            of_ranks: list[list[bool]] = [[] for _ in range(dist.get_world_size(group))]
            dist.all_gather_object(of_ranks, used, group=group)
            used = [any(flags) for flags in zip(*of_ranks, strict=True)]
        for parameter, is_used in zip(trained.values(), used, strict=True):
            if not is_used:
                parameter.grad = None
        self._used.clear()


def _run_with(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules whose parameters are gathered together with a module's own."""
    yield module
    for child in module.children():
        if not isinstance(child, FSDPModule):
            yield from _run_with(child)
