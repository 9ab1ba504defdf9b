"""Microbatches under torch's pipeline schedules."""

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    PipelineScheduleMulti,
    PipelineScheduleSingle,
    get_schedule_class,
)

from .data import joined_batch, mixed_seed
from .parallel_model import ParallelModel
from .processes import RankError
from .stages import Stage
from .trees import Function, Microbatch, Tree, tensors_of

Schedule: TypeAlias = PipelineScheduleSingle | PipelineScheduleMulti


@dataclass(slots=True, kw_only=True)
class PipelineModel(ParallelModel):
    """Runs the microbatches of a step as a schedule of torch says, made for one number of them."""

    schedule: Schedule
    """The schedule with this rank's stages."""

    def _accumulate(self, microbatches: Iterable[Microbatch]) -> list[Tensor]:
        """Accumulate the gradients of the mean loss of a step.

        Returns:
            The loss of each, nothing on ranks without the last stage.
        """
        with _gathered_throughout(self.parts):
            return self._scheduled(self.schedule.step, microbatches)

    def _losses_of(self, microbatches: Iterable[Microbatch]) -> list[Tensor]:
        """Return the loss of each, without gradients; nothing on ranks without the last stage."""
        return self._scheduled(self.schedule.eval, microbatches)

    def _scheduled(self, run: Function, microbatches: Iterable[Microbatch]) -> list[Tensor]:
        for part in self.parts:
            assert isinstance(part, Stage)
            part.seed_draws = self._seed
        inputs, targets = joined_batch(microbatches)
        losses: list[Tensor] = []
        first = tensors_of(inputs)[0]  # the schedule wants a target for each microbatch
        run(inputs=inputs, targets=targets, target=first, losses=losses, return_outputs=False)
        return losses


@contextlib.contextmanager
def _gathered_throughout(stages: Sequence[nn.Module]) -> Iterator[None]:
    """Leave the parameters of several stages gathered until all microbatches are through.

    torch's schedules free those of all but three stages of a rank between two uses, and gather them
    again each time, whatever FSDP2 is told.
    """
    modules = [m for stage in stages for m in stage.modules() if isinstance(m, FSDPModule)]
    modules = modules if len(stages) > 1 else []
    for module in modules:
        module.__dict__["reshard"] = _leave
    try:
        yield
    finally:
        for module in modules:
            del module.__dict__["reshard"]
            module.reshard()


def _leave() -> None:
    """Stands for ``FSDPModule.reshard``."""


class _Sends(list[dist.P2POp]):
    """Sends of a microbatch's gradients, which a stage knows as long as a schedule holds them."""


class _Stage(PipelineStage):
    """A stage that keeps no gradient which it has handed on, and seeds what a microbatch draws."""

    split: tuple[int, int] | None = None
    """As in ``pipeline_schedule``."""
    _handed_on: Callable[[], _Sends | None] = staticmethod(lambda: None)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Return what sends a microbatch's gradients; some schedules hold it to the next one's."""
        sends = _Sends(super().get_bwd_send_ops(bwd_chunk_id))
        self._handed_on = weakref.ref(sends)
        return sends

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Tree, **kwargs: Tree) -> Tree:
        """Run the forward of a microbatch, which is received in buffers of one size.

        Raises:
            RankError: What it sends has another.
        """
        assert isinstance(self.submod, Stage)
        self.submod.seed_draws(fwd_chunk_id)
        output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        if self.submod.is_last:
            return output
        sent, planned = (
            [tuple(tensor.shape) for tensor in tensors_of(each)]
            for each in (output, examples(self.submod, self.split, after=True))
        )
        if sent != planned:
            raise RankError(
                f"stage {self.stage_index} sends tensors of {sent}, but stages are made for "
                f"{planned}, which samples of example_batch give: let these be like the data, and "
                "plan again"
            )
        return output

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Tree, **kwargs: Tree) -> None:
        """Run the backward of a microbatch, or the part of it for the inputs.

        After the latter, torch leaves the inputs' gradients at the buffers that they were received
        in, to the end of the step, and sends them in the strides in which they were made.
        """
        if (sends := self._handed_on()) is not None:
            sends.clear()  # those that have begun hold what they send themselves
        super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)
        if not self.has_backward:  # of an evaluation
            return
        for received in self.args_recv_info[bwd_chunk_id]:
            if received.buffer is not None:
                received.buffer.grad = None
        made = self.bwd_cache[bwd_chunk_id]
        self.bwd_cache[bwd_chunk_id] = tuple(
            each if each is None else each.contiguous() for each in made
        )

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:  # noqa: FBT001, FBT002
        """Run the part of a microbatch's backward for the weights.

        torch leaves their gradients in the strides in which they were made, which fused optimisers
        read as those of the weights.
        """
        super().backward_weight_one_chunk(bwd_chunk_id, last_backward=last_backward)
        for weight in self.submod.parameters():
            if weight.grad is not None and weight.grad.stride() != weight.stride():
                weight.grad = torch.empty_like(weight).copy_(weight.grad)


def pipeline_schedule(
    stages: Sequence[Stage],
    mesh: DeviceMesh,
    schedule: str,
    num_microbatches: int,
    *,
    split: tuple[int, int] | None = None,
) -> Schedule:
    """Make a schedule with this rank's stages.

    Args:
        stages: This rank's stages.
        mesh: The whole mesh, with a pp axis.
        schedule: Name by which torch knows it.
        num_microbatches: Microbatches per step.
        split: Dim of the stream that is split, and into how many parts; None where it is whole.
    """
    for stage in stages:
        for _, block in stage.block_items()[:1]:
            block.register_forward_pre_hook(functools.partial(_draw_apart, stage.index))
    device, group = stages[0].device, mesh["pp"].get_group()
    dist.all_reduce(torch.zeros(1, device=device), group=group)  # makes the communicator
    made = [
        _Stage(
            stage,
            stage.index,
            mesh["pp"].size() * len(stages),
            device,
            input_args=() if stage.is_first else examples(stage, split, after=False),
            output_args=examples(stage, split, after=True),
            group=group,
        )
        for stage in stages
    ]
    for each in made:
        each.split = split
    return _schedule(schedule, made, num_microbatches)


def _draw_apart(stage: int, *_: Tree) -> None:
    """Let the blocks of a stage draw other numbers on GPUs than those of the others."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed(mixed_seed(torch.cuda.initial_seed(), stage))


def _schedule(name: str, stages: Sequence[PipelineStage], num_microbatches: int) -> Schedule:
    kind = get_schedule_class(name)
    schedule: Schedule

    def loss_of(output: Tensor, _: Tensor) -> Tensor:
        return output

    if issubclass(kind, PipelineScheduleMulti):
        schedule = kind(stages, num_microbatches, loss_fn=loss_of)
    else:
        assert issubclass(kind, PipelineScheduleSingle)
        schedule = kind(stages[0], num_microbatches, loss_fn=loss_of)
    return schedule


def examples(stage: Stage, split: tuple[int, int] | None, *, after: bool) -> tuple[Tensor, ...]:
    """Return meta tensors like what the stage receives or sends (its loss on the last).

    Those that no gradient flows through (a frozen embedding's output) say so, and torch's stages
    send none back for them.

    Args:
        stage: A stage.
        split: Dim of the stream that is split, and into how many parts; None where it is whole.
        after: What it sends, not what it receives.
    """
    anatomy = stage.anatomy
    if after and stage.is_last:
        dtype = torch.promote_types(anatomy.streams[-1].dtype, torch.float32)
        return (torch.empty((), dtype=dtype, device="meta", requires_grad=True),)
    stream = anatomy.streams[(stage.units.stop if after else stage.units.start) - 1].example()
    if split is not None:
        # Made anew: a part of one sample passes for contiguous, with the strides of the whole.
        shape = list(stream.shape)
        shape[split[0]] //= split[1]
        stream = stream.new_empty(shape, requires_grad=stream.requires_grad)
    carried = stage.sends if after else stage.spec.receives
    return (stream, *(anatomy.sketch(output).example() for output in carried))
