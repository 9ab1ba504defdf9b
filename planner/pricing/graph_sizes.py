"""What prices take from a graph under any layout: each is read off it once."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import takewhile

from planner.graph.analysis.loss_rows import LossRows, loss_rows
from planner.graph.analysis.retained import kept_storages
from planner.graph.analysis.shared import (
    SharedActivation,
    cut_storages,
    held_by_code,
    passing_storages,
    shared_activations,
)
from planner.graph.operator_graph import OperatorGraph, StorageKind, Unit, UnitKind
from planner.runtime.op_rules import MATMULS
from planner.strategy.expert_strategies import experts_of
from planner.strategy.nodes import FoldedUnit, NodeKind, fold_unit
from planner.vocabulary import RECOMPUTATIONS, Recomputation


class GraphSizes:
    """Sizes of one graph by unit, before they are split over any axis.

    Graphs have tens of thousands of ops, and a search asks of each graph under a dozen choices.
    """

    def __init__(self, graph: OperatorGraph) -> None:
        """Keep the graph; nothing is read yet."""
        self.graph = graph
        self._folded: dict[int, FoldedUnit] = {}
        self._with_experts: dict[int, bool] = {}

    def folded(self, unit: Unit) -> FoldedUnit:
        """``fold_unit``."""
        if unit.index not in self._folded:
            self._folded[unit.index] = fold_unit(self.graph, unit)
        return self._folded[unit.index]

    @cached_property
    def representatives(self) -> list[Unit]:
        """One unit of each structure: the second where there are several.

        The first of many often makes what all share.
        """
        found: dict[str, list[Unit]] = {}
        for unit in self.graph.units:
            found.setdefault(unit.structure, []).append(unit)
        return [alike[min(1, len(alike) - 1)] for alike in found.values()]

    def has_table(self, unit: Unit) -> bool:
        """Whether a unit reads a table."""
        tables, parameters = self.graph.table_storages, self.graph.parameters
        return any(parameters[index].storage in tables for index in unit.parameters)

    def has_experts(self, unit: Unit) -> bool:
        """Whether a unit has a module of experts."""
        if unit.index not in self._with_experts:
            modules = (each for each in self.folded(unit).nodes if each.kind is NodeKind.MODULE)
            found = any(experts_of(node, self.graph) is not None for node in modules)
            self._with_experts[unit.index] = found
        return self._with_experts[unit.index]

    @property
    def loss_rows(self) -> LossRows | str:
        """The end of the model that can run some rows at a time, or why there is none."""
        return loss_rows(self.graph)

    @cached_property
    def shared(self) -> tuple[SharedActivation, ...]:
        """Activations that units share."""
        storages, wiring = self.graph.storages, self.graph.wiring
        if "shared" not in wiring:
            sized = {unit.structure: unit for unit in self.representatives}
            wiring["shared"] = shared_activations(self.graph, sized)
        return tuple(
            replace(each, size_bytes=storages[each.storage].size_bytes) for each in wiring["shared"]
        )

    @cached_property
    def crossing_bytes(self) -> tuple[int, ...]:
        """Bytes that enter a stage which begins with each unit, 0 where none can."""
        crossing = [0] * len(self.graph.units)
        for cut in self.graph.cuts:
            crossing[cut.after_unit + 1] = cut.crossing_bytes
        return tuple(crossing)

    @cached_property
    def crossing_tensors(self) -> tuple[int, ...]:
        """Tensors that they are: each is sent by itself."""
        crossing = [0] * len(self.graph.units)
        for cut in self.graph.cuts:
            crossing[cut.after_unit + 1] = len(cut.values)
        return tuple(crossing)

    @cached_property
    def received_bytes(self) -> tuple[tuple[int, ...], ...]:
        """Bytes that each unit counts of what a cut sends it, under each of RECOMPUTATIONS."""
        storages = self.graph.storages
        return tuple(
            tuple(sum(storages[storage].size_bytes for storage in counted) for counted in by_kind)
            for by_kind in self._received
        )

    @property
    def _received(self) -> Sequence[Sequence[frozenset[int]]]:
        """Storages whose bytes these are."""
        if "received" not in self.graph.wiring:
            self.graph.wiring["received"] = self._found_received()
        found: Sequence[Sequence[frozenset[int]]] = self.graph.wiring["received"]
        return found

    def _found_received(self) -> Sequence[Sequence[frozenset[int]]]:
        graph, nothing = self.graph, [frozenset[int]()] * len(RECOMPUTATIONS)
        received = [nothing] * len(graph.units)
        for cut in graph.cuts:
            unit = graph.units[cut.after_unit + 1]
            counted = cut_storages(graph, cut) - passing_storages(graph, unit)
            is_block = unit.kind is UnitKind.BLOCK
            received[unit.index] = [
                counted & kept_storages(graph, unit, kind if is_block else Recomputation.NONE)
                for kind in RECOMPUTATIONS
            ]
        return received

    @cached_property
    def buffer_bytes(self) -> int:
        """Bytes of the model's buffers, which a graph has before all else with the parameters."""
        kinds = (StorageKind.PARAMETER, StorageKind.BUFFER)
        own = takewhile(lambda storage: storage.kind in kinds, self.graph.storages)
        return sum(each.size_bytes for each in own if each.kind is StorageKind.BUFFER)

    @cached_property
    def held_by_code(self) -> tuple[tuple[int, frozenset[int]], ...]:
        """Bytes that every stage's code holds, and the units that keep and count the same."""
        storages, wiring = self.graph.storages, self.graph.wiring
        if "held by code" not in wiring:
            wiring["held by code"] = held_by_code(self.graph, self.shared)
        found: Mapping[frozenset[int], tuple[int, ...]] = wiring["held by code"]
        return tuple(
            (sum(storages[storage].size_bytes for storage in held), keepers)
            for keepers, held in found.items()
        )

    @cached_property
    def matmul_flop(self) -> tuple[int, ...]:
        """FLOPs of each unit's forward products with parameters: as many in all of a structure."""
        flop = {unit.structure: self._matmul_flop(unit) for unit in self.representatives}
        return tuple(flop[unit.structure] for unit in self.graph.units)

    @property
    def num_kernels(self) -> Sequence[int]:
        """Ops of each unit that are kernels, forward and backward, of its representative."""
        if "kernels" not in self.graph.wiring:
            nodes = self.graph.nodes
            counts = {
                unit.structure: sum(
                    not nodes[op].is_view for op in (*unit.forward_ops, *unit.backward_ops)
                )
                for unit in self.representatives
            }
            units = self.graph.units
            self.graph.wiring["kernels"] = tuple(counts[unit.structure] for unit in units)
        found: Sequence[int] = self.graph.wiring["kernels"]
        return found

    @cached_property
    def tied(self) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """Parameters that several units read, with these units."""
        readers: dict[int, list[int]] = {}
        for unit in self.graph.units:
            for index in unit.parameters:
                readers.setdefault(index, []).append(unit.index)
        return tuple(
            (index, tuple(units)) for index, units in sorted(readers.items()) if len(units) > 1
        )

    def _matmul_flop(self, unit: Unit) -> int:
        ops = (self.graph.nodes[op] for op in unit.forward_ops)
        return sum(op.flop for op in ops if op.name in MATMULS and self._reads_parameter(op.inputs))

    def _reads_parameter(self, values: tuple[int, ...]) -> bool:
        storages = (self.graph.storages[self.graph.values[value].storage] for value in values)
        return any(storage.kind is StorageKind.PARAMETER for storage in storages)
