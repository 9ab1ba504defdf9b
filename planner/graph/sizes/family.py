"""Operator graphs of one model at every microbatch size, from a few traces.

Traces at two microbatch sizes fix an affine function of every number (``affine.py``), a trace at
another size proves it, and any further size is then evaluated exactly. A deep model is traced
once, and a short one of the same blocks at the others (``fewer_blocks.py``). A batch of one can be
a program of its own; then it has its own trace. A model that is not affine is traced at each size.
There are sizes that a model refuses: batch normalisation of single vectors needs two.
"""

from collections.abc import Hashable, Mapping, Sequence
from itertools import islice

from planner.errors import ModelError, PlannerError, RequestError
from planner.graph.analysis.loss_rows import tell_loss_rows
from planner.graph.division.structure import structure_hashes
from planner.graph.division.units import Layout, assemble, find_layout
from planner.graph.loading.hints import check_hints_used
from planner.graph.loading.loaded_model import LoadedModel
from planner.graph.operator_graph import DataRead, OperatorGraph
from planner.graph.recording.recording import Recording
from planner.graph.sizes.affine import AffineSteps, NotAffineError
from planner.graph.sizes.fewer_blocks import likes, short_model, steps_of_whole
from planner.graph.trace import record_step
from planner.graph.trial import LayoutTrial

_FIRST_SIZES = (1, 2, 4, 8)
"""Microbatches among which is the smallest that a model runs with."""

_OF_NO_SIZE = (
    *("parameter_gradients", "parametric_values", "saved_storages", "table_storages"),
    *("unit_of_op", "whole_gradients", "wiring"),
)
"""What a graph tells of its wiring alone, which is read off one graph for all sizes."""


class GraphFamily:
    """The operator graphs of one model by microbatch size; see ``trace_family``."""

    def __init__(
        self, model: LoadedModel, *, dtype: str, of_short: Recording | None = None
    ) -> None:
        """Trace the model; ``of_short`` is a step of one that has no more blocks than it needs."""
        self.model = model
        self.dtype = dtype
        self._graphs: dict[int, OperatorGraph] = {}
        self._recordings = {} if of_short is None else {of_short.microbatch_size: of_short}
        self._refusals: dict[int, ModelError] = {}
        self._layout: Layout | None = None
        self._classes: Sequence[int] = ()
        self._smallest = self._smallest_affine = 1
        self._short: GraphFamily | None = None
        self._blocks_of_short: Mapping[int, int] = {}
        shorter = self._steps_of_fewer_blocks() if of_short is None else None
        self._steps = shorter or self._steps_of_all()
        self._trials: dict[tuple[int, bool], LayoutTrial] = {}
        self._check_hints()
        self._reads_data = any(each.data_reads for each in self._recordings.values())
        if self._steps is not None:
            self._recordings = {
                size: recording
                for size, recording in self._recordings.items()
                if size < self._smallest_affine
            }

    @property
    def is_affine(self) -> bool:
        """Whether sizes above those traced are evaluated instead of traced."""
        return self._steps is not None

    def at(self, microbatch_size: int) -> OperatorGraph:
        """Return the graph at a microbatch size, made on the first call.

        Raises:
            RequestError: The size is below 1.
            ModelError: The model cannot run at this size.
        """
        if microbatch_size < 1:
            raise RequestError(
                f"A microbatch of {microbatch_size} samples was asked for; it has at least 1.",
                hint="Use a microbatch size of 1 or more.",
            )
        graph = self._graphs.get(microbatch_size)
        if graph is None:
            graph = self._graphs[microbatch_size] = self._make(microbatch_size)
        return graph

    @property
    def smallest(self) -> OperatorGraph:
        """The graph at the smallest microbatch that the model was seen to run with."""
        return self.at(self._smallest)

    def refusal(self, microbatch_size: int) -> str:
        """Why the model does not run with a microbatch size, "" where it does.

        A size is asked for only where the model refused another one.
        """
        if self._refusals and not self.evaluates(microbatch_size):
            self._try(microbatch_size)
        error = self._refusals.get(microbatch_size)
        return str(error).splitlines()[0] if error else ""

    def trial(self, microbatch_size: int, *, float8: bool = False) -> LayoutTrial:
        """Return what tries layouts at a microbatch size, with products in float8 or without.

        A short model, where there is one, tells of the blocks of the whole.
        """
        key = microbatch_size, float8
        if key not in self._trials:
            short = self._short if self._is_like_short(microbatch_size) else None
            tells = short or self
            self._trials[key] = LayoutTrial(
                tells.model,
                tells.at(microbatch_size),
                self.dtype,
                tells.data_reads(microbatch_size),
                float8=float8,
                blocks=None if short is None else self._blocks_of_short,
            )
        return self._trials[key]

    def _is_like_short(self, microbatch_size: int) -> bool:
        """Whether units at a size are those of the short model, also where it has its own trace."""
        if self._short is None or self.evaluates(microbatch_size):
            return self._short is not None
        if self._short._try(microbatch_size) is None:
            return False
        units = self._short.at(microbatch_size).units
        like = {unit.block: unit.structure for unit in units if unit.block is not None}
        ends = [unit.structure for unit in units if unit.block is None]
        own = self.at(microbatch_size).units
        blocks = {unit.index: unit.structure for unit in own if unit.block is not None}
        return ends == [unit.structure for unit in own if unit.block is None] and blocks == {
            position: like.get(block) for position, block in self._blocks_of_short.items()
        }

    def size_of_trial(self, microbatch_size: int) -> int:
        """The size at which layouts are tried for those of another.

        One for all whose graphs follow from one another; it is told what blocks do, once.
        """
        return self._smallest_affine if self.evaluates(microbatch_size) else microbatch_size

    def recording(self, microbatch_size: int) -> Recording:
        """Return the step at a microbatch size, evaluated where that is exact.

        Raises:
            ModelError: The model cannot run at this size.
        """
        if self._steps is None or microbatch_size < self._smallest_affine:
            return self._record(microbatch_size)
        return self._steps.at(microbatch_size)

    def data_reads(self, microbatch_size: int) -> tuple[DataRead, ...]:
        """What hints and assumptions answer in the forward pass of a microbatch.

        How many elements a line chooses hangs on the size in steps, so that it is traced at it.

        Raises:
            ModelError: The model cannot run at this size.
        """
        return self._record(microbatch_size).data_reads if self._reads_data else ()

    def evaluates(self, microbatch_size: int) -> bool:
        """Tell whether the graph at a size follows from the traces at others."""
        return self.is_affine and microbatch_size >= self._smallest_affine

    @property
    def work_is_shared(self) -> bool:
        """Whether n times the samples are at most n times the work, where sizes are evaluated."""
        return self._steps is not None and self._steps.shares_work

    def _make(self, microbatch_size: int) -> OperatorGraph:
        recording = self.recording(microbatch_size)
        if not self.evaluates(microbatch_size):
            return assemble(recording, find_layout(recording))
        assert self._layout is not None, "an affine family has a layout"
        graph = assemble(recording, self._layout, self._classes)
        alike = (known for size, known in self._graphs.items() if self.evaluates(size))
        for known in islice(alike, 1):
            vars(graph).update({name: getattr(known, name) for name in _OF_NO_SIZE})
            tell_loss_rows(known, graph)
        return graph

    def _record(self, microbatch_size: int) -> Recording:
        recording = self._recordings.get(microbatch_size)
        if recording is None:
            recording = record_step(self.model, microbatch_size=microbatch_size, dtype=self.dtype)
            self._recordings[microbatch_size] = recording
        return recording

    def _try(self, microbatch_size: int) -> Recording | None:
        """Return the step at a size, None where the model refuses it."""
        if microbatch_size in self._refusals:
            return None
        try:
            return self._record(microbatch_size)
        except ModelError as error:
            self._refusals[microbatch_size] = error
            return None

    def _smallest_size(self) -> int:
        """The smallest microbatch with which the model runs.

        Raises:
            ModelError: It runs with none of those tried.
        """
        if self._try(2) and self._try(1):
            return 1
        for size in _FIRST_SIZES:
            if self._try(size):
                return size
        raise self._refusals[2]

    def _steps_of_fewer_blocks(self) -> AffineSteps | None:
        """How the model grows, told by a short one at all sizes but one.

        None where there is none, or it is another program at some size. What data decide hangs on
        the samples, of which a short model tells nothing.
        """
        whole = self._try(2)
        if whole is None or self.model.hints or whole.asked_places or whole.decisions:
            return None
        layout = find_layout(whole)
        hashes = structure_hashes(whole, dict(enumerate(layout.units)))
        model = short_model(self.model, whole, layout.units, hashes)
        if model is None:
            return None
        try:
            step = record_step(model, microbatch_size=whole.microbatch_size, dtype=self.dtype)
            units = likes(step, find_layout(step), layout.units, hashes)
            if units is None:
                return None
            short = GraphFamily(model, dtype=self.dtype, of_short=step)
            if short._steps is None or len({*short._classes}) != len({*hashes.values()}):
                return None  # some that are alike at one size differ at another
            steps = steps_of_whole(short._steps, whole, zip(layout.units, units, strict=True))
        except (PlannerError, NotAffineError):  # it does not run, or is not the whole one
            return None
        self._short, self._smallest_affine = short, short._smallest_affine
        self._blocks_of_short = {
            position: unit.block for position, unit in enumerate(units) if unit.block is not None
        }
        self._layout, self._classes = layout, _numbered(hashes)
        if self._smallest_affine > 1:
            self._smallest = self._smallest_size()
        return steps

    def _steps_of_all(self) -> AffineSteps | None:
        """How the model grows, told by steps of all of it."""
        self._smallest = self._smallest_size()
        steps = self._fit()
        if steps is not None and not self._matches(steps, 1):
            self._smallest_affine = 2
            if not self._matches(steps, 4):
                steps = None
        if steps is not None:
            self._layout = find_layout(steps.low)
            units = dict(enumerate(self._layout.units))
            at_low, at_high = (structure_hashes(self._record(size), units) for size in (2, 3))
            self._classes = _numbered({each: (at_low[each], at_high[each]) for each in units})
        return steps

    def _fit(self) -> AffineSteps | None:
        low, high = self._try(2), self._try(3)
        try:
            return AffineSteps(low, high) if low and high else None
        except NotAffineError:
            return None

    def _matches(self, steps: AffineSteps, microbatch_size: int) -> bool:
        recording = self._try(microbatch_size)
        return recording is not None and steps.at(microbatch_size) == recording

    def _check_hints(self) -> None:
        """Refuse hints that no line asked for at any of the sizes that were traced."""
        recordings = self._recordings.values()
        check_hints_used(
            self.model.hints,
            [hint for each in recordings for hint in each.used_hints],
            [place for each in recordings for place in each.asked_places],
        )


def _numbered(structures: Mapping[int, Hashable]) -> list[int]:
    """Number the structures of units in their order."""
    number: dict[Hashable, int] = {}
    return [number.setdefault(structure, len(number)) for structure in structures.values()]


def trace_family(model: LoadedModel, *, dtype: str) -> GraphFamily:
    """Trace a model once for all microbatch sizes.

    Args:
        model: The model with its data and loss.
        dtype: Compute dtype: "bfloat16", "float32" or "float64".

    Raises:
        ModelError: The model cannot be built, run or differentiated without data.
        RequestError: A hint does not fit, or no line asked for it.
    """
    return GraphFamily(model, dtype=dtype)
