"""Pipeline stages: the user's model with stand-ins for all that other stages run."""

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from .anatomy import Anatomy, Output, Sketch, copied, lies_in_any, outer_modules, sketches_of
from .meshes import axis_names
from .model import run_model
from .part import OffersLoss
from .split_part import SplitPart
from .stand_ins import (
    AbsentModule,
    EarlierModule,
    StandIn,
    StoppingBlock,
    StreamEnd,
    replace_modules,
    unbacked_zeros,
)
from .streams import first_tensor, with_stream, with_tensors
from .trees import Args, Kwargs, Tree, alias_of, tensors_of


@dataclass(frozen=True, slots=True)
class StageSpec:
    """Blocks of one stage. The first stage also holds the prologue, the last the epilogue."""

    pp_rank: int
    """Pipeline rank that holds it."""
    first_block: int
    """First block, a position in the list of blocks."""
    end_block: int
    """One past the last block."""
    recompute: tuple[str, ...] = ()
    """"none", "selective" or "full" for each of its blocks; empty for none at all."""
    receives: tuple[Output, ...] = ()
    """What the previous stage sends beside the stream, in this order."""
    stream_output: Output | None = None
    """The output that the received stream is, where more than the first block reads it."""


class Stage(SplitPart):
    """The units of one pipeline stage: takes what it receives, returns what it sends or the loss.

    Sent and received is the stream, and beside it the outputs that the receiving stage's spec
    names.
    """

    def __init__(
        self,
        model: nn.Module,
        anatomy: Anatomy,
        user: OffersLoss,
        specs: Sequence[StageSpec],
        index: int,
        changed_buffers: Sequence[str] = (),
    ) -> None:
        """Cut the stage out of a copy of the model that shares its parameters.

        Of a parameter that earlier stages of this rank use too it has a copy: each stage has
        gradients and optimiser states of its own, and buffers of its own where a forward changes
        them. The whole model can be dropped once all stages of the rank are made.

        Raises:
            ValueError: The spec names an output that does not exist, or that this stage can
                neither make nor pass on.
        """
        spec = specs[index]
        mine = [i for i in range(index, -1, -1) if specs[i].pp_rank == spec.pp_rank]
        units, *earlier = (stage_units(specs, i, len(anatomy.blocks)) for i in mine)
        again = {n for n, u in anatomy.users.items() if not all(map(u.isdisjoint, earlier))}
        own = {name for name in again if not anatomy.users[name].isdisjoint(units)}
        super().__init__(
            _copy(model, {*own, *changed_buffers}),
            user,
            blocks=anatomy.blocks[spec.first_block : spec.end_block],
            first_block=spec.first_block,
        )
        self.index = index
        self.last_block = anatomy.blocks[-1] if anatomy.blocks else ""
        self.first_names = anatomy.first_names
        self.is_first = index == 0
        self.is_last = index == len(specs) - 1
        self.spec = spec
        self.sends = () if self.is_last else specs[index + 1].receives
        self.anatomy = anatomy
        self.units = units
        self.seed_draws: Callable[[int], None] = lambda _: None
        self._received: tuple[Tensor, ...] = ()
        self._places = {anatomy.sketch(o): i for i, o in enumerate(self.spec.receives, 1)}
        self._carried: dict[Output, Tensor] | None = None
        self._replace_outer_modules(changed_buffers)
        self._replace_blocks()
        self._earlier = [m for m in self.model.modules() if isinstance(m, EarlierModule)]
        if not self.is_first:
            self._place_received()
        for output in self.sends:
            self._check_sent(output)

    def forward(  # type: ignore[override]
        self, *received: Tensor, inputs: Tree, targets: Tree
    ) -> Tensor | tuple[Tensor, ...]:
        """Run one microbatch.

        Args:
            received: What the previous stage sent, nothing on the first.
            inputs: The model's own inputs: every stage runs the code around its units.
            targets: Targets, used on the last stage.

        Returns:
            What the next stage receives, or on the last stage the scalar loss.
        """
        aliases = [alias_of(tensor) for tensor in received]
        self._received = (*map(self.receive, aliases[:1]), *aliases[1:])
        self._carried = {}
        for module in self._earlier:
            module.restart()
        try:
            output = run_model(self.model, self.taken(inputs))
        except StreamEnd as end:
            sent = [self.send(end.stream), *(self._sent(name) for name in self.sends)]
            # Schedules may detach in place what they get: no view, and nothing that backward reads.
            whole = tuple(alias_of(tensor.contiguous()) for tensor in sent)
            return whole if self.sends else whole[0]
        finally:
            self._received = ()
            self._carried = None
        return self.make_whole(self.user.loss(output, self.here(targets)))

    def holds(self, module: nn.Module) -> bool:
        """Say whether a module runs here, and no stand-in for it."""
        return not isinstance(module, StandIn)

    def move_to(self, device: torch.device, dtype: torch.dtype) -> None:
        """Move parameters and buffers to the device, and what stands for earlier modules."""
        super().move_to(device, dtype)
        for module in self._earlier:
            module.allocate(device)

    def _replace_blocks(self) -> None:
        spec, anatomy = self.spec, self.anatomy
        stand_ins: dict[str, nn.Module] = {}
        for i, path in enumerate(anatomy.blocks):
            block = self.model.get_submodule(path)
            if i < spec.first_block:
                twin = anatomy.twin.get_submodule(path)
                stand_ins[path] = EarlierModule(block, anatomy.calls[path], twin)
            elif i >= spec.end_block and not self.is_last:
                stands = StoppingBlock if i == spec.end_block else AbsentModule
                stand_ins[path] = stands(block)
        replace_modules(self.model, stand_ins)

    def _place_received(self) -> None:
        """Let the first block take the stream, and earlier modules return what is received."""
        spec, anatomy = self.spec, self.anatomy
        stream_output = spec.stream_output
        if spec.first_block < spec.end_block:
            first = self.model.get_submodule(anatomy.blocks[spec.first_block])
            first.register_forward_pre_hook(self._enter_block, with_kwargs=True)
        else:  # the epilogue alone reads what the last block returned
            stream_output = (anatomy.blocks[-1], 0)
        if stream_output is not None:
            self._places[anatomy.sketch(stream_output)] = 0
        modules = dict(self.model.named_modules())
        for path, calls in anatomy.calls.items():
            if len(calls) > 1 or calls[0].unit >= self.units.start or path not in modules:
                continue
            # A tensor that several modules return (one hands on what it got) is placed in each.
            returned = {i: s for i, s in enumerate(sketches_of(calls[0])) if s in self._places}
            if returned:
                hook = functools.partial(self._return_received, returned)
                modules[path].register_forward_hook(hook)
        for earlier in self._earlier:
            earlier.tell_listeners()

    def _check_sent(self, output: Output) -> None:
        """Check that the stage makes an output itself or gets it from the previous stage.

        Raises:
            ValueError: It does neither.
        """
        received = self.anatomy.sketch(output) in self._places
        if not received and self.anatomy.call(output).unit not in self.units:
            raise ValueError(
                f"STAGES does not fit the model: stage {self.index + 1} receives output "
                f"{output[1]} of {output[0]}, which stage {self.index} does not have"
            )

    def register_late_hooks(self) -> None:
        """Register what looks at outputs of modules, after the hooks that FSDP2 put on them.

        There outputs are kept that the next stage receives, there the forward ends where that
        stage holds the epilogue alone, and there the stream is gathered under sequence parallelism.
        """
        for output in self.sends:
            if self.anatomy.sketch(output) not in self._places:
                module = self.model.get_submodule(output[0])
                module.register_forward_hook(functools.partial(self._keep_output, output))
        blocks = self.anatomy.blocks
        if not self.is_last and self.spec.end_block == len(blocks):
            self.model.get_submodule(blocks[-1]).register_forward_hook(self._stop_with_output)
        super().register_late_hooks()

    def _stop_with_output(self, _: nn.Module, __: Args, output: Tree) -> NoReturn:
        raise StreamEnd(first_tensor(output))

    def _enter_block(self, _: nn.Module, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        return with_stream(args, kwargs, self._received[0])

    def _return_received(
        self, returned: Mapping[int, Sketch], _: nn.Module, __: Args, output: Tree
    ) -> Tree:
        new = {}
        for index, sketch in returned.items():
            tensor = self._received[self._places[sketch]]
            new[index] = tensor.clone() if sketch.is_changed else tensor
        return with_tensors(output, new)

    def _keep_output(self, name: Output, _: nn.Module, __: Args, output: Tree) -> None:
        if self._carried is not None:  # else backward runs it again
            tensor = tensors_of(output)[name[1]]
            changes = self.anatomy.sketch(name).is_changed
            self._carried[name] = tensor.clone() if changes else tensor

    def _sent(self, name: Output) -> Tensor:
        """Return an output that the next stage receives: made here, or passed on."""
        assert self._carried is not None
        place = self._places.get(self.anatomy.sketch(name))
        tensor = self._carried[name] if place is None else self._received[place]
        # What modules under tensor parallelism return may still be split.
        return self.make_whole(tensor)

    def _uses(self, name: str) -> bool:
        """Say whether units of this stage use the parameter of that name."""
        users = self.anatomy.users[self.anatomy.first_names[name]]
        return not users.isdisjoint(self.units)

    def _calls(self, path: str) -> bool:
        """Say whether units of this stage call the outer module of that path."""
        return not self.anatomy.runs.get(path, frozenset()).isdisjoint(self.units)

    def _needs(self, name: str) -> bool:
        """Say whether a parameter must be kept though this stage does not call its module.

        That is so where it is used directly, and not through a tied name of a module that runs.
        """
        names = self.anatomy.first_names
        tied = (other for other, first in names.items() if first == names[name])
        return self._uses(name) and not any(self._calls(n.rpartition(".")[0]) for n in tied)

    def _replace_outer_modules(self, changed_buffers: Sequence[str]) -> None:
        """Put stand-ins for modules outside the blocks that other stages run."""
        replaced: list[str] = []
        for path, module in list(outer_modules(self.model, self.anatomy.blocks)):
            runs = self.anatomy.runs[path]
            names = [f"{path}.{name}" for name, _ in module.named_parameters()]
            below = any(path.startswith(f"{outer}.") for outer in replaced)
            is_changed = any(name.startswith(f"{path}.") for name in changed_buffers)
            if below or not (names or is_changed) or not runs or self._calls(path):
                continue
            own = module.named_parameters(recurse=False)
            kept = {name: p for name, p in own if self._needs(f"{path}.{name}")}
            if any(self._needs(name) for name in names if name.count(".") > path.count(".") + 1):
                continue
            if min(runs) >= self.units.stop:
                stand_in: nn.Module = AbsentModule(module)
            else:
                twin = self.anatomy.twin.get_submodule(path)
                stand_in = EarlierModule(module, self.anatomy.calls.get(path, ()), twin)
            for name, parameter in kept.items():
                del stand_in._buffers[name]
                stand_in.register_parameter(name, parameter)
            replace_modules(stand_in, self._run_inside(path, module))
            replace_modules(self.model, {path: stand_in})
            replaced.append(path)
        self._drop_single_parameters()

    def _run_inside(self, path: str, module: nn.Module) -> dict[str, nn.Module]:
        """Modules in an outer module that does not run here, which do: others call them, too."""
        found: dict[str, nn.Module] = {}
        for inner, each in module.named_modules():
            below = any(inner.startswith(f"{outer}.") for outer in found)
            if inner and not below and self._calls(f"{path}.{inner}"):
                found[inner] = each
        return found

    def _drop_single_parameters(self) -> None:
        """Replace single parameters (the root's own, say) that no unit of this stage uses."""
        blocks = frozenset(self.anatomy.blocks)
        for path, module in self.model.named_modules():
            if lies_in_any(path, blocks):
                continue
            for name, parameter in list(module._parameters.items()):
                if parameter is None or self._uses(f"{path}.{name}" if path else name):
                    continue
                del module._parameters[name]
                zeros = unbacked_zeros(parameter, torch.device("cpu"))
                module.register_buffer(name, zeros, persistent=False)


def _copy(model: nn.Module, own: Collection[str]) -> nn.Module:
    """Copy a model that shares all parameters and buffers but some with the copy."""
    named = (*model.named_parameters(), *model.named_buffers())
    shared: dict[int, Any] = {id(tensor): tensor for name, tensor in named if name not in own}
    return copied(model, shared)


def stages_of_rank(specs: Sequence[StageSpec], mesh: DeviceMesh) -> list[int]:
    """Return the positions of this rank's stages."""
    pp_rank = mesh["pp"].get_local_rank() if "pp" in axis_names(mesh) else 0
    return [index for index, spec in enumerate(specs) if spec.pp_rank == pp_rank]


def stage_units(specs: Sequence[StageSpec], index: int, num_blocks: int) -> range:
    """Return the units of a stage; the prologue is unit 0, block i is unit i + 1."""
    first = 0 if index == 0 else specs[index].first_block + 1
    end = num_blocks + 2 if index == len(specs) - 1 else specs[index].end_block + 1
    return range(first, end)
