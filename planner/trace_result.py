"""What ``planner.trace`` and ``planner.trace_lengths`` return."""

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from planner.graph.analysis.patterns import BlockKind, BlockPattern, block_kinds, block_pattern
from planner.graph.analysis.summary import summary_html, summary_words
from planner.graph.analysis.trace_warnings import trace_warnings
from planner.graph.operator_graph import CutPoint, OperatorGraph, Unit

if TYPE_CHECKING:
    import networkx as nx
    import pandas as pd

    from planner.graph.sizes.lengths import LengthFamily


@dataclass(frozen=True, repr=False)
class TraceResult:
    """One traced training step of a model, for one microbatch.

    In a notebook it shows as a short table. Results of equal steps are equal.
    """

    graph: OperatorGraph
    """Every op, tensor and parameter as data."""

    @property
    def model(self) -> str:
        """What was traced, as the user named it."""
        return self.graph.model

    @property
    def units(self) -> tuple[Unit, ...]:
        """What a pipeline stage is made of: prologue, blocks, epilogue."""
        return self.graph.units

    @property
    def cuts(self) -> tuple[CutPoint, ...]:
        """Places where the model can be cut into pipeline stages, in order."""
        return self.graph.cuts

    @property
    def num_parameters(self) -> int:
        """Elements of all parameters, tied ones counted once."""
        return self.graph.num_parameters

    @property
    def num_trainable_parameters(self) -> int:
        """Elements of the parameters that are not frozen."""
        return self.graph.num_trainable_parameters

    @property
    def forward_flop(self) -> int:
        """FLOPs of the forward pass."""
        return self.graph.forward_flop

    @property
    def backward_flop(self) -> int:
        """FLOPs of the backward pass."""
        return self.graph.backward_flop

    @cached_property
    def saved_bytes(self) -> int:
        """Bytes of the activations that autograd keeps between forward and backward."""
        return self.graph.saved_bytes

    @cached_property
    def block_kinds(self) -> tuple[BlockKind, ...]:
        """The different kinds of blocks, in order of appearance."""
        return block_kinds(self.graph)

    @cached_property
    def block_pattern(self) -> BlockPattern:
        """How the kinds of blocks follow each other; as a string "3 A + 58 B"."""
        return block_pattern(self.graph)

    @cached_property
    def warnings(self) -> tuple[str, ...]:
        """What the trace assumed, and what speaks against its being what training runs."""
        return trace_warnings(self.graph)

    @cached_property
    def ops(self) -> "pd.DataFrame":
        """All ops as a table, one row each by id; see ``graph.analysis.ops.ops_table``."""
        from planner.graph.analysis.ops import ops_table

        return ops_table(self.graph)

    @cached_property
    def nx(self) -> "nx.DiGraph[int]":
        """The data flow between all ops; see ``graph.analysis.ops.dataflow_graph``."""
        from planner.graph.analysis.ops import dataflow_graph

        return dataflow_graph(self.graph)

    def __repr__(self) -> str:
        return f"TraceResult({summary_words(self.graph)})"

    def _repr_html_(self) -> str:
        return summary_html(self.graph)


class TracedLengths:
    """A model traced for every microbatch size and sequence length."""

    def __init__(self, family: "LengthFamily") -> None:
        """Keep the operator graphs of the model."""
        self._family = family

    def at(self, microbatch_size: int, seq_len: int) -> TraceResult:
        """Return the step at a microbatch size and a length.

        Raises:
            RequestError: A size is below 1, or the model's data has no length.
            ModelError: The model cannot run at this size.
        """
        return TraceResult(self._family.at(microbatch_size, seq_len))
