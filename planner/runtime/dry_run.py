"""Modules under their layout in one process, on the meta device: no weights, no other ranks.

One block of each kind, or what lies around the blocks, runs forward and backward as on the first
rank of the tp axis. What cannot run fails here as it would there.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.fx.experimental import _config

from .anatomy import Anatomy, copied, examine, kept_by, meta_twin
from .failures import DryRunError, first_line, naming_modules
from .known_data import DataRead, KnownData
from .layout import REPLICATE, SplitAxis
from .model import run_model
from .module_edge import AxisShardings
from .part import OffersLoss
from .split_chunks import take_loss_in_chunks
from .split_part import SplitPart
from .split_tensor import Ranks, SplitTensor
from .stand_ins import EarlierModule
from .streams import stream_of
from .tensor_parallel import Shared, TensorParallel
from .trees import Args, Kwargs, Tree, cast_floats, tensors_of

ChunkedLoss: TypeAlias = tuple[str, int]
"""Path of the module that makes the logits, and chunks of their rows."""


class _Done(Exception):  # noqa: N818 - no error: the block has run
    pass


class _Source(EarlierModule):
    """A block that is left out: what it returned, with a gradient where it had one."""

    def forward(self, *args: Tree, **kwargs: Tree) -> Tree:
        """Return tensors like those that the block returned."""
        self.restart()
        return super().forward(*args, **kwargs)

    def allocate(self, device: torch.device) -> None:
        """Make the tensors."""
        super().allocate(torch.device("meta"))
        for sketch, zeros in self._zeros.items():
            if sketch.requires_grad:
                self._zeros[sketch] = zeros.requires_grad_()


@dataclass
class DryRun:
    """Runs parts of one model under layouts."""

    model: nn.Module
    """The model on the meta device, its floating-point parameters in the compute dtype."""
    anatomy: Anatomy
    """What it consists of."""
    user: OffersLoss
    """Offers the loss."""
    inputs: Tree
    """Inputs of one microbatch, on the meta device."""
    targets: Tree
    """Targets, on the meta device."""
    dtype: torch.dtype
    """Compute dtype."""
    real: Tree
    """Inputs with data."""
    reads: Sequence[DataRead]
    """What lines of the model read that have data in training only."""

    @classmethod
    def of(
        cls,
        model: nn.Module,
        user: OffersLoss,
        blocks: Sequence[str],
        microbatch: tuple[Tree, Tree],
        dtype: torch.dtype,
        reads: Sequence[DataRead] = (),
    ) -> "DryRun":
        """Look at a model once.

        Args:
            model: The whole model, which is not changed.
            user: Offers the loss.
            blocks: Paths of the blocks in execution order.
            microbatch: Inputs and targets of one microbatch, with data.
            dtype: Compute dtype.
            reads: What lines of the model read that have data in training only.
        """
        anatomy = examine(model, blocks, microbatch[0], dtype, reads)
        return cls.looked_at(model, anatomy, user, microbatch, dtype, reads)

    @classmethod
    def looked_at(
        cls,
        model: nn.Module,
        anatomy: Anatomy,
        user: OffersLoss,
        microbatch: tuple[Tree, Tree],
        dtype: torch.dtype,
        reads: Sequence[DataRead] = (),
    ) -> "DryRun":
        """Take a model that was looked at; arguments as for ``of``."""
        inputs, targets = microbatch
        given, wanted = _on_meta(cast_floats(inputs, dtype)), _on_meta(targets)
        twin = meta_twin(model, dtype)
        return cls(twin, anatomy, user, given, wanted, dtype, inputs, reads)

    def run(self, *axes: AxisShardings, loss: ChunkedLoss | None = None) -> None:
        """Run one block of each kind, and what lies around the blocks.

        Args:
            axes: How modules run over each axis, the inner one first.
            loss: Chunks of the loss, where it is taken in several.

        Raises:
            DryRunError: Something does not run.
        """
        kinds: dict[tuple[int, ...], list[int]] = {}
        for position in range(len(self.anatomy.blocks)):
            kind = tuple(id(each.of_block(position)) for each in axes)
            kinds.setdefault(kind, []).append(position)
        for positions in kinds.values():
            self.block(positions[min(1, len(positions) - 1)], axes)
        if not any(each.axis.is_inside_blocks for each in axes):
            self.ends(axes, loss)

    def block(
        self,
        position: int,
        axes: Sequence[AxisShardings],
        read_outside: Collection[tuple[int, ...]] = (),
        *,
        prepare: Callable[[nn.Module, KnownData], None] | None = None,
    ) -> None:
        """Run one block under its layout, the others left out.

        Args:
            position: Which.
            axes: How modules run over each axis, the inner one first.
            read_outside: Shapes of what it makes and code outside of it reads.
            prepare: Gets the block, and what it reads, before it runs.

        Raises:
            DryRunError: It does not run, or leaves a part where others read all of it.
        """
        path = self.anatomy.blocks[position]
        part = self._part((position,), self._sources)
        part.first_block, part.blocks, part.last_block = position, (path,), path
        part.is_last = False
        for each in axes:
            shardings = [((position,), each.of_block(position))]
            _parallel(part, each.axis, each.sequence_dim).apply(shardings, ())
        seen: list[Tree] = []

        def note(_: nn.Module, __: Args, output: Tree) -> None:
            seen.append(output)
            raise _Done

        block = part.model.get_submodule(path)
        noting = block.register_forward_hook(note)
        with self._known_data() as known:
            if prepare is not None:
                prepare(block, known)
            with naming_modules(part.model, path), suppress(_Done):
                run_model(part.model, self.inputs)
            _backward(tensors_of(seen))
        _check_gradients(block)
        noting.remove()
        _check_left(part.model, path, read_outside)

    def prepared(
        self, positions: Sequence[int], prepare: Callable[[nn.Module, KnownData], None]
    ) -> None:
        """Run some blocks in one go, with nothing split and the others left out.

        Args:
            positions: Which, in execution order.
            prepare: Gets each of them, and what they read, before they run.

        Raises:
            DryRunError: They do not run.
        """
        part = self._part(positions, self._sources)
        chosen = [part.model.get_submodule(self.anatomy.blocks[each]) for each in positions]
        seen: list[Tree] = []

        def note(block: nn.Module, _: Args, output: Tree) -> None:
            seen.append(output)
            if block is chosen[-1]:
                raise _Done

        with self._known_data() as known:
            for block in chosen:
                prepare(block, known)
                block.register_forward_hook(note)
            with naming_modules(part.model, ""), suppress(_Done):
                run_model(part.model, self.inputs)
            _backward_from(tensors_of(seen))

    def ends(self, axes: Sequence[AxisShardings], loss: ChunkedLoss | None = None) -> None:
        """Run what lies around the blocks under its layout, all blocks left out.

        Args:
            axes: How modules run over each axis, the inner one first.
            loss: Chunks of the loss, where it is taken in several.

        Raises:
            DryRunError: It does not run.
        """
        part = self._part(())
        for each in axes:
            parallel = _parallel(part, each.axis, None)
            parallel.apply((), each.outer)
            dim = each.sequence_dim if each.axis.is_context else None
            if dim is not None and self.anatomy.blocks:
                parallel.split_output(self.anatomy.blocks[-1], dim)
        if loss is not None:
            take_loss_in_chunks(part, *loss)
        self._run_ends(part)

    def loss(self, loss: ChunkedLoss) -> None:
        """Run what lies around the blocks with its loss in chunks.

        All blocks are left out where that goes; it does not where more is read of them than what
        they return (router logits that hooks collect).

        Raises:
            DryRunError: It does not run.
        """
        try:
            self._run_loss(loss, ())
        except DryRunError:
            self._run_loss(loss, range(len(self.anatomy.blocks)))

    def _run_loss(self, loss: ChunkedLoss, kept: Sequence[int]) -> None:
        part = self._part(kept)
        take_loss_in_chunks(part, *loss)
        self._run_ends(part)

    def _run_ends(self, part: SplitPart) -> None:
        entering: list[Tensor] = []
        if self.anatomy.blocks:
            first = part.model.get_submodule(self.anatomy.blocks[0])

            def note(_: nn.Module, args: Args, kwargs: Kwargs) -> None:
                entering.append(stream_of(args, kwargs))

            first.register_forward_pre_hook(note, with_kwargs=True)
        with self._known_data():
            with naming_modules(part.model, ""):
                loss = part(inputs=self.inputs, targets=self.targets)
            _backward([loss, *entering])

    @cached_property
    def _sources(self) -> dict[str, _Source]:
        """Stand-ins that nothing changes."""
        return self._new_sources()

    def _new_sources(self) -> dict[str, _Source]:
        """Stand-ins for all blocks."""
        anatomy, model = self.anatomy, self.model
        return {
            path: _Source(
                model.get_submodule(path), anatomy.calls[path], anatomy.twin.get_submodule(path)
            )
            for path in anatomy.blocks
        }

    def _part(self, kept: Sequence[int], sources: Mapping[str, _Source] | None = None) -> SplitPart:
        """A copy of the model in which stand-ins take the place of all blocks but some."""
        anatomy = self.anatomy
        sources = self._new_sources() if sources is None else sources
        memo: dict[int, Any] = {
            id(self.model.get_submodule(path)): sources[path]
            for position, path in enumerate(anatomy.blocks)
            if position not in kept
        }
        part = SplitPart(copied(self.model, memo), self.user, blocks=anatomy.blocks)
        part.device, part.dtype = torch.device("meta"), self.dtype
        part.first_names = anatomy.first_names
        return part

    @contextmanager
    def _known_data(self) -> Iterator[KnownData]:
        known = KnownData(self.inputs, self.real, self.reads)
        # In backward an assignment to x[mask] asks how many elements a mask has.
        nonzero = _config.patch(meta_nonzero_assume_all_nonzero=True)  # type: ignore[attr-defined]
        with nonzero, known:
            yield known


def _on_meta(tree: Tree) -> Tree:
    return torch.utils._pytree.tree_map_only(Tensor, lambda t: t.to("meta"), tree)


def _parallel(part: SplitPart, over: SplitAxis, sequence_dim: int | None) -> TensorParallel:
    shared = _first_of(over.size, int(over.is_context))
    experts = shared if over.is_inside_blocks else _first_of(over.experts)
    return TensorParallel(part, over, shared, sequence_dim, experts)


def _first_of(size: int, level: int = 0) -> Shared:
    """The first of some ranks, of a level (``Ranks``)."""

    def distribute(whole: Tensor, dim: int) -> Tensor:
        if whole.shape[dim] % size:
            raise DryRunError("", f"{whole.shape[dim]} is no multiple of {size}")
        return whole.narrow(dim, 0, whole.shape[dim] // size).clone()

    return Shared(Ranks(rank=0, size=size, group=None, level=level), distribute)


def _backward(outputs: Sequence[Tensor]) -> None:
    """Run backward from tensors, with any gradient: from all, and where others get none."""
    roots = [each for each in outputs if each.requires_grad]
    for each in roots if len(roots) > 1 else ():
        _backward_from([each])
    _backward_from(roots)


def _backward_from(outputs: Sequence[Tensor]) -> None:
    """Run backward from all of some tensors that have a gradient."""
    roots = [each for each in outputs if each.requires_grad]
    try:
        if roots:
            gradients = [torch.ones_like(each) for each in roots]
            torch.autograd.backward(roots, gradients, retain_graph=True)
    except Exception as error:
        raise DryRunError("", f"backward: {first_line(error)}") from error


def _check_gradients(block: nn.Module) -> None:
    """Check that each gradient lies as its parameter does."""
    for name, parameter in block.named_parameters():
        grad = parameter.grad
        if grad is not None and type(grad) is not Tensor:
            raise DryRunError(name, f"its gradient is {grad!r} and reaches it unsummed")


def _check_left(model: nn.Module, path: str, read_outside: Collection[tuple[int, ...]]) -> None:
    """Check that no part is left, in an attribute or by a hook, where code outside reads all."""
    for tensor in tensors_of(kept_by(model)):
        is_part = isinstance(tensor, SplitTensor) and tensor.layout_over_ranks != REPLICATE
        if is_part and tuple(tensor.shape) in read_outside:
            raise DryRunError(
                path,
                f"it leaves {tuple(tensor.shape)} in an attribute or by a hook for code outside of "
                "it to read, and each rank has a part of that; what a block returns is made whole",
            )
