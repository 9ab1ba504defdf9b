"""Whether the training script's own runtime can run a layout: tried without weights or ranks."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import nn

from planner.errors import PlannerError
from planner.graph.block_twice import prepare_to_run_twice
from planner.graph.loading.loaded_model import LoadedModel, default_dtype
from planner.graph.operator_graph import DataRead, OperatorGraph, Phase, Unit, UnitKind
from planner.runtime import known_data
from planner.runtime.anatomy import examine
from planner.runtime.dry_run import DryRun
from planner.runtime.failures import DryRunError
from planner.runtime.layout import SplitAxis
from planner.runtime.module_edge import AxisShardings, ModuleSharding
from planner.runtime.split_float8 import multiply_in_float8
from planner.vocabulary import Style

SOME_RANKS = 2
"""Stands for any number of ranks that share experts."""

_SOME_CHUNKS = 2
"""Stands for any number of chunks of a loss above one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TriedModule:
    """How a module is to run; the fields are those of the runtime's ``ModuleSharding``."""

    module: str
    """Path in its block, or in the model."""
    style: str
    """A ``Style``."""
    split: tuple[tuple[str, int, int], ...]
    """Names of split parameters, the dim of each, and projections along it."""
    input_layout: str
    """Layout of its first input."""
    output_layout: str
    """Layout of its output."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TriedLayout:
    """How modules are to run over one axis."""

    over: SplitAxis
    """The axis."""
    sequence_dim: int | None
    """Dim of the stream that is split, None where it is whole."""
    modules: tuple[TriedModule, ...]
    """Instructions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """Why a layout does not run."""

    module: str
    """Path in the model of the innermost module where it failed, "" where that is not known."""
    reason: str
    """What failed."""


class LayoutTrial:
    """Tries layouts of one model at one microbatch size; equal questions are answered once."""

    def __init__(
        self,
        model: LoadedModel,
        graph: OperatorGraph,
        dtype: str,
        reads: Sequence[DataRead] = (),
        *,
        float8: bool = False,
        blocks: Mapping[int, int] | None = None,
    ) -> None:
        """Keep the model; nothing runs yet.

        Args:
            model: The model.
            graph: Its graph at the microbatch size.
            dtype: Compute dtype.
            reads: What its lines read without data.
            float8: Linear layers of blocks multiply in it.
            blocks: Where layouts of another model's units are asked for, which has more of the
                same blocks: the block of this one that tells of each, by the unit's index.
        """
        self._float8 = float8
        self._reads = reads
        self._model = model
        self._graph = graph
        self._dtype = dtype
        self._dry_run: DryRun | Refusal | None = None
        self._known: dict[Hashable, Refusal | None] = {}
        self._outside: dict[int, frozenset[tuple[int, ...]]] = {}
        own = {unit.index: unit.block for unit in graph.units if unit.block is not None}
        self._blocks = own if blocks is None else blocks

    def block(self, unit: Unit, layouts: Sequence[TriedLayout]) -> Refusal | None:
        """Try the layout of a block, forward and backward; None where it runs.

        Args:
            unit: A block.
            layouts: How its modules run over each axis, the inner one first.
        """
        return self._answer(layouts, self._blocks[unit.index])

    def run_again(self, units: Sequence[Unit]) -> Refusal | None:
        """Try whether blocks do the same when they run again in backward; None where they do.

        A block that does not run once without data tells nothing.

        Args:
            units: Blocks in execution order.

        Returns:
            The first that does not.
        """
        # What lines read without data is told call by call: all blocks but one are left out then.
        together = partial(self._prepared, units, prepare_to_run_twice)
        if len(units) > 1 and not self._reads and together() is None:
            return None
        for unit in units:
            refusal = self._prepared([unit], prepare_to_run_twice)
            if refusal is not None and self._prepared([unit], _as_it_is) is None:
                return replace(refusal, module=refusal.module or unit.name)
        return None

    def _prepared(
        self, units: Sequence[Unit], prepare: Callable[[nn.Module, known_data.KnownData], None]
    ) -> Refusal | None:
        """Try blocks with nothing split, each prepared before."""
        positions = sorted(self._blocks[unit.index] for unit in units)
        return self._tried(partial(DryRun.prepared, positions=positions, prepare=prepare))

    def ends(self, layouts: Sequence[TriedLayout], logits: str = "") -> Refusal | None:
        """Try the layout of what lies around the blocks; None where it runs.

        There the stream is whole, but over cp.

        Args:
            layouts: How modules run over each axis, the inner one first.
            logits: Path of the module that makes them where the loss is taken in chunks.
        """
        around = [
            each if each.over.is_context else replace(each, sequence_dim=None) for each in layouts
        ]
        return self._answer(around, None, logits)

    def _answer(
        self, layouts: Sequence[TriedLayout], block: int | None, logits: str = ""
    ) -> Refusal | None:
        """What comes of a try, made once."""
        heard = tuple(replace(each, over=_heard(each.over, each.modules)) for each in layouts)
        key = (block, heard, logits)
        if key not in self._known:
            self._known[key] = self._try(heard, block, logits)
        return self._known[key]

    def loss(self, logits: str) -> Refusal | None:
        """Try a loss in chunks of rows, with nothing split; None where it runs.

        Args:
            logits: Path of the module that makes them.
        """
        if logits not in self._known:
            loss = (logits, _SOME_CHUNKS)
            self._known[logits] = self._tried(lambda dry_run: dry_run.loss(loss))
        return self._known[logits]

    def _try(
        self, layouts: Sequence[TriedLayout], block: int | None, logits: str
    ) -> Refusal | None:
        axes = [_as_run(each, block) for each in layouts]
        if block is None:
            loss = (logits, _SOME_CHUNKS) if logits else None
            return self._tried(lambda dry_run: dry_run.ends(axes, loss))
        if block not in self._outside:
            self._outside[block] = self._read_outside(block)
        outside = self._outside[block]
        return self._tried(lambda dry_run: dry_run.block(block, axes, outside))

    def _read_outside(self, block: int) -> frozenset[tuple[int, ...]]:
        """Shapes of what a block makes and code outside of it reads, whatever way it takes."""
        graph = self._graph
        (unit,) = (each for each in graph.units if each.block == block)
        own = frozenset(unit.forward_ops[: unit.num_block_ops])
        made = {value for op in own for value in graph.nodes[op].outputs}
        others = (op for op in graph.nodes if op.phase is Phase.FORWARD and op.id not in own)
        read = (value for op in others for value in op.inputs)
        return frozenset(graph.values[value].shape for value in made.intersection(read))

    def _tried(self, run: Callable[[DryRun], None]) -> Refusal | None:
        """Run something of the runtime's dry run."""
        dry_run = self._ready()
        if isinstance(dry_run, Refusal):
            return dry_run
        try:
            with self._model.import_scope(), default_dtype(getattr(torch, self._dtype)):
                run(dry_run)
        except DryRunError as error:
            return Refusal(module=error.module, reason=error.reason)
        except Exception as error:  # of user code, or of torch under it
            return Refusal(module="", reason=_first_line(error))
        return None

    def _ready(self) -> DryRun | Refusal:
        """Look at the model once."""
        if self._dry_run is None:
            try:
                self._dry_run = self._looked_at()
            except PlannerError:
                raise
            except Exception as error:
                reason = f"the model cannot be run on the meta device: {_first_line(error)}"
                self._dry_run = Refusal(module="", reason=reason)
        return self._dry_run

    def _runtime_reads(self) -> list[known_data.DataRead]:
        return [
            known_data.DataRead(
                each.file, each.line, tuple(zip(each.answers, each.repeats, strict=True))
            )
            for each in self._reads
        ]

    def _looked_at(self) -> DryRun:
        model = self._model.build_meta(self._dtype).module
        batch = self._model.example_batch(self._graph.microbatch_size)
        blocks = [unit.name for unit in self._graph.units if unit.kind is UnitKind.BLOCK]
        inputs = batch.kwargs or batch.args
        dtype = getattr(torch, self._dtype)
        reads = self._runtime_reads()
        with self._model.import_scope(), default_dtype(dtype):
            anatomy = examine(model, blocks, inputs, dtype, reads)
            if self._float8:
                multiply_in_float8(model, blocks, dtype)
            microbatch = inputs, batch.targets
            return DryRun.looked_at(model, anatomy, self._model, microbatch, dtype, reads)


def _as_it_is(block: nn.Module, known: known_data.KnownData) -> None:
    """Change nothing about how a block runs."""


def _as_run(layout: TriedLayout, block: int | None) -> AxisShardings:
    """A layout of a block, or of what lies around the blocks, as the runtime takes it."""
    modules = [
        ModuleSharding(each.module, each.style, each.split, each.input_layout, each.output_layout)
        for each in layout.modules
    ]
    if block is None:
        return AxisShardings(layout.over, layout.sequence_dim, outer=modules)
    return AxisShardings(layout.over, layout.sequence_dim, blocks=[((block,), modules)])


def _heard(over: SplitAxis, modules: Sequence[TriedModule]) -> SplitAxis:
    """The axis as modules hear of it, so that fewer of them are tried.

    Those of experts ask how many ranks share them; others at most whether some do.
    """
    if any(each.style == Style.EXPERTS for each in modules):
        return over
    if over.is_inside_blocks:
        return replace(over, size=min(over.size, SOME_RANKS))
    return replace(over, experts=min(over.experts, SOME_RANKS))


def _first_line(error: BaseException) -> str:
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"
