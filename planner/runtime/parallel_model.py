"""A model that is trained as a plan says, for any training loop."""

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.profiler import record_function

from .checkpoint import load_state, load_weights, state_of
from .checkpoint_folders import CheckpointWriter, newest_checkpoint
from .data import given_back, mixed_seed, seed_draws, split_batch
from .log import UPDATE
from .model import UserModel, master_dtype
from .part import Part, named_parameters
from .processes import RankError, RunError
from .trees import Function, Microbatch, Tree


def clip_whole(parts: Sequence[Part], max_norm: float) -> Tensor:
    """Scale gradients of one mesh to a norm of at most ``max_norm``; return what it was, of all."""
    norm = nn.utils.clip_grad_norm_([p for part in parts for p in part.parameters()], max_norm)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


@dataclass(slots=True, kw_only=True)
class ParallelModel:
    """This rank's share of a model, with its optimisers.

    All ranks call ``step``, ``evaluate``, ``save`` and ``load`` together. Ranks that share a
    data-parallel rank give the same batches.
    """

    user: UserModel
    parts: Sequence[Part]  # the model, or this rank's stages in model order
    num_microbatches: int  # per step and data-parallel rank
    replicas: int = 1  # data-parallel ranks whose microbatches one process takes in turn
    microbatch_size: int
    seed: int  # of dropout
    max_grad_norm: float
    configure_optimizer: Function  # where the model file has none
    data_parallel: DeviceMesh | None = None  # ranks that read different samples, with this one
    after_backward: Sequence[Callable[[], None]] = ()  # completes gradients
    clip: Callable[[Sequence[Part], float], Tensor] = clip_whole
    group: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)  # left by ``close``
    writer: CheckpointWriter = field(default_factory=CheckpointWriter)
    optimizers: list[torch.optim.Optimizer] = field(init=False)  # of parts with trained parameters
    grad_norm: Tensor = field(default_factory=lambda: torch.zeros(()))  # before clipping
    data_parallel_rank: int = 0  # among the ranks that read different samples
    data_parallel_size: int = 1
    evaluated_together: int = 1  # microbatches that ``_losses_of`` takes
    steps: int = 0  # taken so far, those before a loaded checkpoint included

    def __post_init__(self) -> None:
        """Make the optimisers."""
        configure = self.user.function("configure_optimizer", self.configure_optimizer)
        trained = [
            [(name, p) for name, p in named_parameters(part) if p.requires_grad]
            for part in self.parts
        ]
        self.optimizers = [configure(named) for named in trained if named]
        if self.data_parallel is not None:
            ranks = self.data_parallel.mesh.flatten().tolist()
            self.data_parallel_rank = ranks.index(dist.get_rank())
            self.data_parallel_size = len(ranks)

    @property
    def device(self) -> torch.device:
        """Where this rank computes."""
        return self.parts[0].device

    @property
    def batch_size(self) -> int:
        """Samples that this rank gives to a step."""
        return self.microbatch_size * self.num_microbatches * self.replicas

    def step(self, batch: Tree) -> Tensor:
        """Take an optimiser step: forward, backward, clipping, learning rates, update.

        Args:
            batch: Inputs and targets of ``batch_size`` samples, this data-parallel rank's own. A
                dict has the keyword arguments of a model that returns its loss.

        Returns:
            Mean loss over the global batch, before the step, the same on every rank.

        Raises:
            RunError: The batch has another size.
        """
        return self.step_over(split_batch(batch, self.microbatch_size))

    def step_over(self, microbatches: Sequence[Microbatch]) -> Tensor:
        """Take a step as ``step`` does, over a batch that comes in microbatches."""
        if not all(part.has_weights for part in self.parts):
            raise RunError("the model was built without weights: load or load_weights comes first")
        count = self.num_microbatches * self.replicas
        if len(microbatches) != count:
            raise RunError(
                f"a step takes {count} microbatches of {self.microbatch_size} samples on each "
                f"rank, not {len(microbatches)}"
            )
        losses = self._run(self._accumulate, microbatches)
        with record_function(UPDATE):
            self._update()
        self.steps += 1
        total = self._summed(losses)
        return total[0] / total[1]

    def _accumulate(self, microbatches: Iterable[Microbatch]) -> list[Tensor]:
        """Accumulate the gradients of the mean loss of a step.

        Under ZeRO-3 gradients and parameters lie sharded between microbatches: the ones are
        reduce-scattered and the others gathered again in each. Else both stay whole until the last
        microbatch. Replicas add up their gradients in the last in any case.

        Returns:
            The loss of each.
        """
        losses: list[Tensor] = []
        (part,) = self.parts
        count = self.num_microbatches * self.replicas
        for inputs, targets in microbatches:
            is_last = len(losses) == count - 1
            if isinstance(part, FSDPModule):  # which fully_shard makes of it
                part.set_requires_gradient_sync(is_last or part.stays_sharded)
                part.set_reshard_after_backward(is_last or part.stays_sharded)
                part.set_requires_all_reduce(is_last)
            self._seed(len(losses) % self.num_microbatches)  # as each replica would by itself
            loss = part(inputs=inputs, targets=targets)
            torch.autograd.backward(loss / count)
            losses.append(loss.detach())
        return losses

    def _losses_of(self, microbatches: Iterable[Microbatch]) -> list[Tensor]:
        """Return the loss of each, without gradients."""
        (part,) = self.parts
        losses: list[Tensor] = []
        for inputs, targets in microbatches:
            self._seed(len(losses))
            losses.append(part(inputs=inputs, targets=targets))
        return losses

    def _update(self) -> None:
        """Complete and clip the gradients, and let the optimisers use them."""
        for complete in self.after_backward:
            complete()
        self.grad_norm = self.clip(self.parts, self.max_grad_norm)
        schedule = self.user.function("lr_schedule")
        for optimizer in self.optimizers:
            for group in optimizer.param_groups if schedule is not None else ():
                group["lr"] = group.setdefault("initial_lr", group["lr"]) * schedule(self.steps)
            optimizer.step()
        for part in self.parts:
            part.zero_grad()

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Tree]) -> float:
        """Return the mean loss over batches of all data-parallel ranks, in eval mode.

        Args:
            batches: Batches of one or several microbatches: a validation loader, say. Ranks may
                have different numbers of them.

        Raises:
            RankError: A rank has none, or one that does not divide into microbatches.
        """
        rest = (piece for batch in batches for piece in split_batch(batch, self.microbatch_size))
        size = self.evaluated_together
        modes = [(module, module.training) for part in self.parts for module in part.modules()]
        for part in self.parts:
            part.eval()
        total = torch.zeros(2, dtype=torch.float64, device=self.device)
        taken: list[Microbatch] = []
        while _total(torch.tensor(len(new := list(islice(rest, size))), device=self.device)):
            if not new and not taken:
                raise RankError("this data-parallel rank has nothing to evaluate")
            taken = ((new + taken) * size)[:size]
            total += self._summed(self._run(self._losses_of, taken)[: len(new)])
        for module, mode in modes:
            module.training = mode
            if isinstance(module, FSDPModule):
                module.reshard()  # else they would outlive a load
        return float(total[0] / total[1])

    def save(
        self, folder: Path | str, extra: Mapping[str, bytes] | None = None, *, wait: bool = True
    ) -> None:
        """Write a checkpoint into a folder of its own below ``folder``.

        Args:
            folder: Gets it, and may hold others; shared by all machines.
            extra: What else this rank keeps, by a name that ranks that keep the same give it.
            wait: Return when it is written; else it is copied to the host's memory and written
                while training goes on, and ``close`` and the next ``save`` wait for it.

        Raises:
            RunError: It, or the one before, cannot be written; earlier ones stay as they are.
        """
        kept = {f"extra.{name}": content for name, content in (extra or {}).items()}
        state = state_of(self.parts, self.optimizers) | kept
        self.writer.write(state, Path(folder) / f"step-{self.steps:08d}", wait=wait)

    def load(self, checkpoint: Path | str) -> int:
        """Go on from a checkpoint, saved under any layout.

        Args:
            checkpoint: Its folder, or the one that holds several: the newest whole one is read.

        Returns:
            The steps that it has seen; 0 where there is none.

        Raises:
            RunError: It is of another model or optimiser.
        """
        self.writer.finish()
        given = Path(checkpoint)
        path = given if (given / ".metadata").is_file() else newest_checkpoint(given)
        if path is not None:
            load_state(self.parts, self.optimizers, path)
            self.steps = int(path.name.removeprefix("step-"))
        return self.steps

    def load_weights(self, path: Path | str) -> None:
        """Read weights alone, from safetensors or a folder of torch.distributed.checkpoint.

        Raises:
            RunError: They do not fit the model.
        """
        load_weights(self.parts, Path(path))

    def close(self) -> None:
        """Complete what is saved and leave the process group, where ``parallelize`` joined it."""
        self.writer.finish()
        self.group.close()

    def _run(self, run: Function, microbatches: Iterable[Microbatch]) -> list[Tensor]:
        """Return the losses; generators and the default dtype are left as they were."""
        usual = torch.get_default_dtype()
        with given_back():
            torch.set_default_dtype(master_dtype(self.parts[0].dtype))
            losses: list[Tensor] = run(microbatches)
            torch.set_default_dtype(usual)
        return losses

    def _seed(self, index: int) -> None:
        """Seed what the microbatch at this place of a step draws."""
        seed = mixed_seed(self.seed, self.steps, index)
        seed_draws(seed, samples=self.data_parallel_rank)

    def _summed(self, losses: Sequence[Tensor]) -> Tensor:
        """Return sum and number of losses on all ranks."""
        total = torch.zeros(2, dtype=torch.float64, device=self.device)
        total[1] += len(losses)
        for loss in losses:
            total[0] += loss.detach()
        return _total(total)


def _total(tensor: Tensor) -> Tensor:
    """Return the sum over all ranks, in place."""
    if dist.is_initialized():
        dist.all_reduce(tensor)
    return tensor
