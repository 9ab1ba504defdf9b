"""Modules that are split over the ranks of the tp axis."""

import contextlib
import functools
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication
from torch.distributed.tensor.parallel import loss_parallel
from torch.distributed.tensor.placement_types import Placement

from .dtensor_rules import install_dtensor_rules
from .part import Part
from .trees import Args, Kwargs, Tree, alias_of, first_tensor, stream_of, with_stream, with_tensors


@dataclass(frozen=True, slots=True)
class ModuleSharding:
    """How one module that owns parameters runs; layouts are spelled as torch spells them."""

    module: str
    """Path in its block, or in the model for modules outside the blocks."""
    style: str
    """"column", "row", "vocab_embedding", "replicate" or "sequence" (whole parameters on the
    rank's part of the sequence)."""
    input_layout: str = "Replicate"
    """Layout that the first input must have."""
    output_layout: str = "Replicate"
    """Layout that the output leaves with."""
    output_is_local: bool = True
    """The output goes on as a plain local tensor, else as a DTensor."""
    fused: int = 1
    """Equal projections held in one weight along the output features."""


def placement(layout: str) -> Placement:
    """Read "Replicate" or "Shard(dim)".

    Raises:
        ValueError: Another text.
    """
    if layout == "Replicate":
        return Replicate()
    if layout.startswith("Shard(") and layout.endswith(")"):
        return Shard(int(layout[len("Shard(") : -1]))
    raise ValueError(f"{layout!r} is no layout: write Replicate or Shard(dim)")


@dataclass(slots=True)
class TensorParallel:
    """Applies shardings to the modules of the model or of one stage."""

    part: Part
    """What is sharded, in place."""
    mesh: DeviceMesh
    """The tp axis."""
    sequence_dim: int | None
    """Dim of the stream that is split between regions of blocks, None where it is whole."""
    _made: dict[int, nn.Parameter] = field(default_factory=dict)
    """New parameter by the old one's id: tied parameters stay tied."""

    def apply(
        self,
        block_shardings: Sequence[tuple[Sequence[int], Sequence[ModuleSharding]]],
        outer_shardings: Sequence[ModuleSharding],
    ) -> None:
        """Shard this stage's blocks and outer modules, and split the stream between them.

        Args:
            block_shardings: Positions of blocks and what holds for each of them.
            outer_shardings: What holds for modules outside the blocks.
        """
        install_dtensor_rules()
        inside = Replicate() if self.sequence_dim is None else Shard(self.sequence_dim)
        by_block = {block: mods for blocks, mods in block_shardings for block in blocks}
        for index, path, block in self.part.block_items():
            shardings = list(by_block.get(index, ()))
            for sharding in shardings:
                self._shard(block.get_submodule(sharding.module), sharding, inside)
            if self.sequence_dim is not None:
                shardings += self._replicate_others(block, inside)
                self._check_sequence_block(block, path)
                self._gather_at_regions(block, shardings)
        for sharding in outer_shardings:
            module = self.part.model.get_submodule(sharding.module)
            if self.part.holds(module) and module._parameters:
                self._shard(module, sharding, Replicate())
        self._tie_containers()
        self._check_ties()
        self._made.clear()  # FSDP2 keeps its own shards: these would live on beside them
        if self.sequence_dim is not None:
            self._split_stream()
        for path, module in self.part.model.named_modules():
            if hasattr(module, "weight_0"):
                self.part.fused_modules[path] = sum(
                    name.startswith("weight_") for name in module._parameters
                )

    def _shard(self, module: nn.Module, sharding: ModuleSharding, stream: Placement) -> None:
        if sharding.style == "sequence":
            self.part.sequence_modules.append(module)
        elif sharding.style == "column" and sharding.fused > 1:
            self._shard_fused(_linear(module, sharding), sharding, stream)
        elif sharding.style in ("column", "row", "vocab_embedding", "replicate"):
            for name, shard in _parameter_placements(module, sharding).items():
                parameter = module._parameters[name]
                assert parameter is not None
                module._parameters[name] = self._distribute(parameter, shard)
            features = module.in_features if isinstance(module, nn.Linear) else None
            whole = features if sharding.style == "row" else None
            edge = _Edge(self.mesh, sharding, stream, whole)
            module.register_forward_pre_hook(edge.enter)
            module.register_forward_hook(edge.leave)
        else:
            raise ValueError(f"{sharding.module}: unknown style {sharding.style!r}")

    def _distribute(self, parameter: nn.Parameter, shard: Placement) -> nn.Parameter:
        made = self._made.get(id(parameter))
        if made is None:
            local = distribute_tensor(parameter.detach(), self.mesh, [shard], src_data_rank=None)
            made = nn.Parameter(local, requires_grad=parameter.requires_grad)
            self._made[id(parameter)] = self._made[id(made)] = made
        return made

    def _shard_fused(self, module: nn.Linear, sharding: ModuleSharding, stream: Placement) -> None:
        """Hold n fused projections as n parameters, so that each is split by itself.

        The output is their concatenation, labelled such that a split along it stays local.
        """
        count, edge = sharding.fused, _Edge(self.mesh, sharding, stream, None)
        for name in ("weight", "bias"):
            fused = module._parameters.pop(name, None)
            for i, part in enumerate(() if fused is None else fused.detach().chunk(count, 0)):
                local = distribute_tensor(part, self.mesh, [Shard(0)], src_data_rank=None)
                module.register_parameter(f"{name}_{i}", nn.Parameter(local))

        def forward(x: Tensor) -> Tensor:
            outputs = [
                nn.functional.linear(x, getattr(module, f"weight_{i}"), _optional(module, i))
                for i in range(count)
            ]
            if sharding.output_layout == "Replicate":
                outputs = [edge.to_layout(output) for output in outputs]
            return torch.cat(outputs, -1)

        module.forward = forward  # type: ignore[method-assign, assignment]
        module.register_forward_pre_hook(edge.enter)
        module.register_forward_hook(edge.leave)

    def _replicate_others(self, block: nn.Module, stream: Placement) -> list[ModuleSharding]:
        """Run modules without an instruction whole, on the gathered stream."""
        made = []
        for path, module in block.named_modules():
            plain = [p for p in module._parameters.values() if p is not None]
            if not path or not plain or module in self.part.sequence_modules:
                continue
            if any(not isinstance(parameter, DTensor) for parameter in plain):
                made.append(ModuleSharding(path, "replicate", output_is_local=False))
                self._shard(module, made[-1], stream)
        return made

    def _check_sequence_block(self, block: nn.Module, path: str) -> None:
        """Refuse whole parameters that would see a part of the sequence only.

        Raises:
            ValueError: A parameter is neither sharded nor listed as "sequence".
        """
        known = {id(p) for m in self.part.sequence_modules for p in m.parameters()}
        for name, parameter in block.named_parameters():
            if not isinstance(parameter, DTensor) and id(parameter) not in known:
                raise ValueError(
                    f"{path}.{name} runs on a part of the sequence, so its gradient must be "
                    "summed over tp: give its module the style 'sequence'"
                )

    def _gather_at_regions(self, block: nn.Module, shardings: Sequence[ModuleSharding]) -> None:
        """Gather the sequence where a sharded region begins, not at its first projection.

        A region is the largest submodule of the block whose parameters are all DTensors. Its own
        code (views of the input's shape) then sees the whole sequence.

        Raises:
            ValueError: A projection whose output is reshaped lies in no such submodule.
        """
        regions: dict[str, ModuleSharding] = {}
        for sharding in shardings:
            if sharding.style not in ("column", "replicate"):
                continue
            paths = [sharding.module]
            while "." in paths[-1]:
                paths.append(paths[-1].rpartition(".")[0])
            inside = [path for path in paths[1:] if _is_sharded(block.get_submodule(path))]
            if inside:
                regions.setdefault(inside[-1], sharding)
            elif sharding.style == "column" and not sharding.output_is_local:
                raise ValueError(
                    f"{sharding.module} is reshaped by code that also sees a part of the "
                    "sequence only: plan without sequence parallelism"
                )
        for path, sharding in regions.items():
            stream = Shard(self.sequence_dim or 0)
            edge = _Edge(self.mesh, sharding, stream, None)
            block.get_submodule(path).register_forward_pre_hook(edge.enter_region, with_kwargs=True)

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

    def _split_stream(self) -> None:
        """Scatter the stream where it enters the first block, gather it after the last."""
        assert self.sequence_dim is not None
        shard = Shard(self.sequence_dim)
        change = functools.partial(_relayout, mesh=self.mesh)

        def scatter(_: nn.Module, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
            stream = change(stream_of(args, kwargs), old=Replicate(), new=shard)
            return with_stream(args, kwargs, stream)

        def gather(_: nn.Module, __: Args, output: Tree) -> Tree:
            whole = change(first_tensor(output), old=shard, new=Replicate())
            return with_tensors(output, {0: whole})

        if self.part.is_first:
            first = self.part.model.get_submodule(self.part.blocks[0])
            first.register_forward_pre_hook(scatter, with_kwargs=True)
        self.part.after_blocks = gather


def _relayout(stream: Tensor, *, mesh: DeviceMesh, old: Placement, new: Placement) -> Tensor:
    """Change the layout of a local tensor; backward makes the opposite change."""
    distributed = DTensor.from_local(stream, mesh, [old], run_check=False)
    local: Tensor = distributed.redistribute(placements=[new]).to_local()
    return local


def _is_sharded(module: nn.Module) -> bool:
    """Say whether all parameters of a module are DTensors."""
    return all(isinstance(parameter, DTensor) for parameter in module.parameters())


def _linear(module: nn.Module, sharding: ModuleSharding) -> nn.Linear:
    if not isinstance(module, nn.Linear):
        raise TypeError(
            f"{sharding.module} is a {type(module).__name__}: only nn.Linear can be split by "
            f"style {sharding.style!r}"
        )
    return module


def _optional(module: nn.Module, index: int) -> Tensor | None:
    return module._parameters.get(f"bias_{index}")


def _parameter_placements(module: nn.Module, sharding: ModuleSharding) -> dict[str, Placement]:
    """Return the placement of each of a module's own parameters.

    Raises:
        TypeError: The style is not for this kind of module.
    """
    names = [name for name, parameter in module._parameters.items() if parameter is not None]
    if sharding.style == "replicate":
        return {name: Replicate() for name in names}
    if sharding.style == "vocab_embedding":
        if not isinstance(module, nn.Embedding):
            raise TypeError(f"{sharding.module} is a {type(module).__name__}, no nn.Embedding")
        return {"weight": Shard(0)}
    _linear(module, sharding)
    if sharding.style == "column":
        return {name: Shard(0) for name in names}
    return {name: Shard(1) if name == "weight" else Replicate() for name in names}


def _redistribute(x: DTensor, wanted: Placement) -> DTensor:
    """Change the layout, or do nothing: even an idle change would reduce gradients at once."""
    if isinstance(wanted, Shard) and wanted.dim < 0:
        wanted = Shard(wanted.dim % x.ndim)
    return x if x.placements == (wanted,) else x.redistribute(placements=[wanted])


@dataclass(frozen=True, slots=True)
class _Edge:
    """Layout changes where a sharded region begins and ends."""

    mesh: DeviceMesh
    sharding: ModuleSharding
    stream: Placement
    """Layout of a plain local input that is the stream."""
    whole_features: int | None
    """Input features of a row-split linear: a plain input with fewer is a shard of them."""

    def enter(self, _: nn.Module, args: Args) -> Args:
        """Make the first argument a DTensor in the input layout."""
        x = args[0]
        wanted = placement(self.sharding.input_layout)
        if isinstance(x, DTensor):
            return (_redistribute(x, wanted), *args[1:])
        if self.whole_features is not None and x.shape[-1] != self.whole_features:
            return (DTensor.from_local(x, self.mesh, [wanted], run_check=False), *args[1:])
        return (self._shared_view(x, wanted), *args[1:])

    def enter_region(self, _: nn.Module, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        """Make the stream among the arguments a DTensor in the input layout."""
        stream, wanted = stream_of(args, kwargs), placement(self.sharding.input_layout)
        if isinstance(stream, DTensor):  # from a module that ran whole before the region
            return with_stream(args, kwargs, _redistribute(stream, wanted))
        return with_stream(args, kwargs, self._shared_view(stream, wanted))

    def _shared_view(self, x: Tensor, wanted: Placement) -> DTensor:
        """Return the DTensor of a stream tensor, one for all modules that read it.

        So q, k and v (gate and up) share one collective forward and one backward.
        """
        key = (x._version, str(wanted), torch.is_grad_enabled())
        kept = x.__dict__.get("_tensor_parallel_view")
        if kept is not None and kept[0] == key:
            shared: DTensor = kept[1]
            return shared
        # Of an alias: a view of x, which x holds here, would keep x alive for ever.
        view = DTensor.from_local(alias_of(x), self.mesh, [self.stream], run_check=False)
        view = _redistribute(view, wanted)
        x.__dict__["_tensor_parallel_view"] = (key, view)
        return view

    def to_layout(self, output: Tensor) -> Tensor:
        """Change the output's layout."""
        assert isinstance(output, DTensor)
        return _redistribute(output, placement(self.sharding.output_layout))

    def leave(self, _: nn.Module, __: Args, output: DTensor) -> Tensor:
        """Bring the output into its layout, as a local tensor where it goes on as one."""
        result = output if self.sharding.fused > 1 else self.to_layout(output)
        return result.to_local() if self.sharding.output_is_local else result  # type: ignore


@contextlib.contextmanager
def split_regions(*, splits_vocabulary: bool = False) -> Iterator[None]:
    """Run split regions: masks and rotary tables mix with DTensors, and so may logits."""
    with implicit_replication(), loss_parallel() if splits_vocabulary else nullcontext():
        yield
