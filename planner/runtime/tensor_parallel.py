"""Modules that are split over the ranks of the tp, the cp or the ep axis, or several of them.

Where a module begins and ends, its input and its output are brought into the layouts that the plan
says; what lies between follows by the rules of ``op_rules``. Parameters that are split are DTensors
(for FSDP2 and checkpoints), and are seen by the user's code as split tensors.

Over cp parameters are whole, and so is what depends on no parameter: token ids, masks, rotary
tables. Each rank has a part of the sequence from its token ids to the loss. FSDP2 takes the mean of
gradients over the ranks of cp as over those of dp_shard.

Over tp and cp, tp splits what a rank of cp has. Its shardings are applied first: inputs come into
their layout over tp first, and outputs over cp.

Over ep ranks have samples of their own, and modules of experts alone are split (``experts``). The
ranks of tp and cp may be among those of ep: each then takes its part of the rows of their samples.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from .experts import Experts
from .fused import RankOrder
from .layout import PARTIAL, REPLICATE, Layout, SplitAxis, shard
from .meshes import copy_all, local_tensor
from .module_edge import BlockShardings, ModuleEdge, ModuleSharding, Stream, holder_of
from .split_attention import allow_split_tokens
from .split_loss import allow_split_vocabulary
from .split_part import SplitPart
from .split_tensor import (
    Ranks,
    changed,
    layout_of,
    unwrapped,
    wrapped,
)
from .streams import first_tensor, give_again, stream_of, with_stream, with_tensors
from .trees import Args, Kwargs, Tree
from .unread import SplitError


class Distribute(Protocol):
    """Gives a rank its part of a parameter."""

    def __call__(self, whole: Tensor, dim: int) -> Tensor:
        """Return it, for a dim that is split evenly over the ranks."""


@dataclass(frozen=True, slots=True)
class Shared:
    """Ranks of an axis, and what each has of a parameter."""

    ranks: Ranks
    """The ranks."""
    distribute: Distribute
    """Gives each rank its part of a parameter."""

    @classmethod
    def over(cls, mesh: DeviceMesh, level: int = 0) -> "Shared":
        """Return it for a mesh of one axis, of a level (``Ranks``)."""
        group = mesh.get_group()
        ranks = Ranks(rank=mesh.get_local_rank(), size=mesh.size(), group=group, level=level)

        def distribute(whole: Tensor, dim: int) -> Tensor:
            return distribute_tensor(whole, mesh, [Shard(dim)], src_data_rank=None)

        return cls(ranks, distribute)


@dataclass(slots=True)
class TensorParallel:
    """Applies shardings to the modules of the model or of one stage."""

    part: SplitPart
    """What is sharded, in place."""
    axis: SplitAxis
    """The axis."""
    shared: Shared
    """Its ranks."""
    sequence_dim: int | None
    """Dim of the stream that is split between regions of blocks (over cp everywhere), None where it
    is whole."""
    experts: Shared
    """The ranks that share experts: those of the axis over ep."""
    _made: dict[int, nn.Parameter] = field(default_factory=dict)
    """New parameter by the old one's id: tied parameters stay tied."""
    _done: set[int] = field(default_factory=set)
    """Modules that are sharded, by id: one may be listed under each of its names."""
    _stream: Stream = field(default_factory=Stream)

    @classmethod
    def over(
        cls,
        part: SplitPart,
        mesh: DeviceMesh,
        sequence_dim: int | None,
        experts: DeviceMesh | None = None,
    ) -> "TensorParallel":
        """Make it for a mesh of one axis.

        Args:
            part: What is sharded.
            mesh: The axis.
            sequence_dim: Dim of the stream that is split, None where it is whole.
            experts: The axis of the ranks that share experts, where it is another.
        """
        name = (mesh.mesh_dim_names or ("tp",))[0]
        shared = Shared.over(mesh, int(name == "cp"))
        of_experts = shared if experts is None else Shared.over(experts)
        axis = SplitAxis(name, mesh.size(), 1 if experts is None else experts.size())
        return cls(part, axis, shared, sequence_dim, of_experts)

    @property
    def ranks(self) -> Ranks:
        """The ranks of the axis."""
        return self.shared.ranks

    def apply(
        self,
        block_shardings: BlockShardings,
        outer_shardings: Sequence[ModuleSharding],
    ) -> None:
        """Shard the blocks and outer modules, and split the stream between them.

        Args:
            block_shardings: What holds for blocks.
            outer_shardings: What holds for modules outside the blocks.
        """
        allow_split_vocabulary()
        allow_split_tokens()
        by_block = {block: mods for blocks, mods in block_shardings for block in blocks}
        for index, (path, block) in enumerate(self.part.block_items(), self.part.first_block):
            if block not in self.part.given_again:  # by an axis inside
                self.part.given_again.append(block)
                block.register_forward_pre_hook(give_again, with_kwargs=True)
            for sharding in by_block.get(index, ()):
                self._shard(block.get_submodule(sharding.module), f"{path}.", sharding)
            block.register_forward_hook(self._stream.forget, always_call=True)
        for sharding in outer_shardings:
            module = self.part.model.get_submodule(sharding.module)
            if self.part.holds(module) and any(True for _ in module.parameters()):
                self._shard(module, "", sharding)
        self._tie_containers()
        self._check_ties()
        self._made.clear()  # FSDP2 keeps its own shards: these would live on beside them
        inside = self.part.make_whole
        self.part.make_whole = lambda tensor: inside(changed(tensor, REPLICATE, self.ranks))
        if self.sequence_dim is not None:
            self._split_stream(shard(self.sequence_dim))

    def _shard(self, module: nn.Module, prefix: str, sharding: ModuleSharding) -> None:
        if id(module) in self._done:
            return
        self._done.add(id(module))
        if module in self.part.expert_modules:  # of which the axis inside has left a rank its own
            edge = ModuleEdge(sharding, self.axis, self.ranks, {}, self._stream)
            self.part.expert_modules[module].append(edge)
            return
        if sharding.style == "on_part" and not self.axis.is_context:
            self.part.sequence_modules.append(module)
        parts = {name: shard(dim, fused) for name, dim, fused in sharding.split}
        shared = self.experts if sharding.style == "experts" else self.shared
        layouts: dict[str, Layout] = {}
        number = next((p.shape[0] for p in module.parameters()), 0)
        for name, parameter in list(module.named_parameters(remove_duplicate=False)):
            if name in parts:
                layouts[name] = parts[name]
                holder, last = holder_of(module, name)
                holder._parameters[last] = self._distributed(parameter, parts[name], shared)
            else:
                layouts[name] = PARTIAL if sharding.style == "on_part" else REPLICATE
        path = f"{prefix}{sharding.module}".removesuffix(".")
        for name, layout in parts.items():
            if layout.outer > 1:
                first = self.part.first_names.get(f"{path}.{name}", f"{path}.{name}")
                self.part.orders[first] = RankOrder(layout, shared.ranks.size)
        edge = ModuleEdge(sharding, self.axis, self.ranks, layouts, self._stream)
        if sharding.style == "experts":
            edges = [] if self.axis.is_inside_blocks else [edge]
            self.part.expert_modules[module] = edges
            Experts(path, tuple(parts), number, shared.ranks, edges).register(module)
            return
        # Parts over tp lie inside those over cp: they are made last, and made whole first.
        is_around = self.axis.is_context
        module.register_forward_pre_hook(edge.enter, with_kwargs=True)
        module.register_forward_hook(edge.leave, prepend=is_around)
        module.register_forward_hook(edge.uncover, always_call=True)

    def _distributed(self, parameter: nn.Parameter, layout: Layout, shared: Shared) -> nn.Parameter:
        """Give this rank its part of a parameter, once for all of its names."""
        made = self._made.get(id(parameter))
        if made is None:
            order = RankOrder(layout, shared.ranks.size)
            local = shared.distribute(order.by_rank(parameter.detach()), layout.dim)
            made = nn.Parameter(local, requires_grad=parameter.requires_grad)
            self._made[id(parameter)] = self._made[id(made)] = made
        return made

    def _tie_containers(self) -> None:
        """Give a sharded parameter to a module around the one that runs with it.

        A head's bias, say, that its container registers under a name of its own.
        """
        names = self.part.first_names
        for name, parameter in list(self.part.model.named_parameters(remove_duplicate=False)):
            path, _, last = name.rpartition(".")
            made = self._made.get(id(parameter), parameter)
            inner = (
                n for n in names if n.startswith(f"{path}.") and n.count(".") > name.count(".")
            )
            if made is not parameter and any(names[n] == names[name] for n in inner):
                self.part.model.get_submodule(path)._parameters[last] = made

    def _check_ties(self) -> None:
        """Check that tied parameters still are one parameter.

        Raises:
            ValueError: The names of one parameter were sharded in different ways.
        """
        seen: dict[str, nn.Parameter] = {}
        for name, parameter in self.part.model.named_parameters(remove_duplicate=False):
            first = self.part.first_names.get(name, name)
            if seen.setdefault(first, parameter) is not parameter:
                raise ValueError(
                    f"{name} and {first} are one parameter, but are sharded in different ways: "
                    "give both modules the same split of their weight"
                )

    def split_output(self, path: str, dim: int) -> None:
        """Split what a module returns, which stands for one that would."""

        def split(_: nn.Module, __: Args, output: Tree) -> Tree:
            return with_tensors(output, {0: changed(first_tensor(output), shard(dim), self.ranks)})

        self.part.model.get_submodule(path).register_forward_hook(split)

    def _split_stream(self, layout: Layout) -> None:
        """Split the stream where it enters the first block, make it whole after the last over tp.

        Stages hand over this rank's part of it.
        """
        part, ranks = self.part, self.ranks

        def scatter(_: nn.Module, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
            return with_stream(args, kwargs, changed(stream_of(args, kwargs), layout, ranks))

        def check(path: str, _: nn.Module, __: Args, output: Tree) -> Tree:
            stream = first_tensor(output)
            if (found := layout_of(stream, ranks)) != layout:
                raise SplitError(f"{path} returns its stream as {found}, not as {layout}")
            if stream._is_view():  # FSDP2 warns of outputs that are views
                stream = changed(stream, layout, ranks, gradient=layout)
            return with_tensors(output, {0: stream})

        def gather(_: nn.Module, __: Args, output: Tree) -> Tree:
            return with_tensors(output, {0: changed(first_tensor(output), REPLICATE, ranks)})

        def look(_: nn.Module, args: Args, kwargs: Kwargs) -> None:
            self._stream.before = prod(stream_of(args, kwargs).shape[: layout.dim])

        for path, block in part.block_items():
            block.register_forward_pre_hook(look, with_kwargs=True)
            block.register_forward_hook(functools.partial(check, path))
        if part.is_first and part.blocks:
            first = part.model.get_submodule(part.blocks[0])
            is_around = self.axis.is_context
            first.register_forward_pre_hook(scatter, with_kwargs=True, prepend=is_around)
        if not self.axis.is_context:
            part.after_blocks = gather
        receive, send = part.receive, part.send
        part.receive = lambda local: wrapped(receive(local), layout, ranks)
        part.send = lambda stream: send(unwrapped(changed(stream, layout, ranks)))


def sum_sequence_gradients(parts: Sequence[SplitPart], mesh: DeviceMesh) -> None:
    """Sum over tp the gradients of modules that saw a part of their input only."""
    grads = [
        local_tensor(parameter.grad)
        for part in parts
        for module in part.sequence_modules
        for parameter in module.parameters()
        if parameter.grad is not None
    ]
    if not grads:
        return
    flat = torch.cat([grad.flatten() for grad in grads])
    dist.all_reduce(flat, group=mesh["tp"].get_group())
    summed = torch.split(flat, [grad.numel() for grad in grads])
    copy_all(grads, [each.view_as(grad) for grad, each in zip(grads, summed, strict=True)])
