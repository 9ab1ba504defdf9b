"""What the divisibility rules need to know of a model."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from operator import attrgetter

from planner.graph.analysis.changed_buffers import changed_parameters
from planner.graph.analysis.float8 import is_float8_product
from planner.graph.analysis.loss_rows import LossRows, loss_rows
from planner.graph.analysis.retained import recompute_refusals
from planner.graph.analysis.shared import passes_gradients
from planner.graph.operator_graph import OperatorGraph, OpNode, StorageKind, UnitKind
from planner.graph.sizes.family import GraphFamily
from planner.runtime.op_rules import ATTENTIONS
from planner.strategy.expert_strategies import experts_of
from planner.strategy.nodes import NodeKind, fold_unit
from planner.vocabulary import RECOMPUTATIONS

SEQUENCE_DIM = 1
"""Tensor dim of the stream that holds the sequence: (batch, sequence, features)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """Sizes that degrees must divide."""

    heads: tuple[int, ...]
    """Query heads of the attention kernels, each number once."""
    kv_heads: tuple[int, ...]
    """Key and value heads before they are repeated, each number once."""
    vocabularies: tuple[int, ...]
    """Rows of the tables that token ids index."""
    sequence: int | None
    """Size of the stream's sequence dim, None where the stream is not (batch, sequence,
    features) or not handed from block to block as it is."""
    experts: tuple[int, ...]
    """Experts of the modules that have some, each number once."""
    max_stages: int
    """Pipeline stages that the legal cuts allow."""
    recompute_refusals: Mapping[str, str]
    """Recomputations under which the model would fail, with the reason."""
    no_cut_reason: str = ""
    """Why there is but one stage, as a sentence; "" where there may be more."""
    autocast: str = ""
    """Line of the model that uses ``torch.autocast``, "" where none does."""
    changed_parameters: tuple[str, ...] = ()
    """Parameters that a forward writes into."""
    complex_parameters: tuple[str, ...] = ()
    """Parameters of complex numbers."""
    has_float8_products: bool = False
    """Whether blocks have products that may be in float8."""
    passes_gradients: bool = False
    """Whether blocks read what has a gradient from further back than the unit before them."""
    loss: LossRows | str = "not looked for"
    """What of its end works on rows alone, for one sample; or why there is nothing."""

    def can_split_tables(self, tp: int) -> bool:
        """Whether the rows of all tables divide over tp: they are split all or none."""
        return tp > 1 and all(rows % tp == 0 for rows in self.vocabularies)


def model_facts(graph: OperatorGraph) -> ModelFacts:
    """Read the sizes off the graph."""
    heads: dict[int, None] = {}
    kv_heads: dict[int, None] = {}
    producers = {value: op for op in graph.nodes for value in op.outputs}
    for op in graph.nodes:
        if op.name in ATTENTIONS:
            heads[graph.values[op.inputs[0]].shape[1]] = None
            kv_heads[_heads_before_repeat(graph, op.inputs[1], producers)] = None
    tables = graph.table_storages
    shapes = {parameter.storage: parameter.shape for parameter in graph.parameters}
    crossing = [graph.values[cut.values[0]].shape for cut in graph.cuts]
    streams = {shape[SEQUENCE_DIM] if len(shape) == 3 else None for shape in crossing}
    if not graph.is_chain:
        streams = {None}
    return ModelFacts(
        heads=tuple(heads),
        kv_heads=tuple(kv_heads),
        vocabularies=tuple(sorted({shapes[storage][0] for storage in tables if storage in shapes})),
        sequence=streams.pop() if len(streams) == 1 else None,
        experts=_experts(graph),
        max_stages=len(graph.cuts) + 1,
        recompute_refusals=recompute_refusals(graph),
        autocast=graph.autocast,
        no_cut_reason=graph.no_cut_reason,
        changed_parameters=changed_parameters(graph),
        complex_parameters=_complex_parameters(graph),
        has_float8_products=any(
            is_float8_product(graph, graph.nodes[op])
            for unit in graph.units
            if unit.kind is UnitKind.BLOCK
            for op in unit.forward_ops
        ),
        passes_gradients=passes_gradients(graph),
        loss=_of_one_sample(loss_rows(graph), graph.microbatch_size),
    )


def tried_facts(graphs: GraphFamily, *, may_recompute: bool) -> ModelFacts:
    """Read the sizes off the graph, and try whether blocks may run again in backward.

    Args:
        graphs: The model.
        may_recompute: Whether blocks may at all.
    """
    graph = graphs.smallest
    facts = model_facts(graph)
    trial = graphs.trial(graphs.size_of_trial(graph.microbatch_size))
    kinds = {unit.structure: unit for unit in reversed(graph.units) if unit.block is not None}
    blocks = sorted(kinds.values(), key=attrgetter("block"))
    refusal = trial.run_again(blocks) if blocks and may_recompute else None
    if refusal is None:
        return facts
    reason = f"{refusal.module} does not do in backward what it did before: {refusal.reason}"
    return replace(facts, recompute_refusals=dict.fromkeys(RECOMPUTATIONS[1:], reason))


def _complex_parameters(graph: OperatorGraph) -> tuple[str, ...]:
    """Those that are complex themselves, not a view of them."""
    seen = {(v.storage, v.shape) for v in graph.values if "complex" in v.dtype}
    return tuple(p.names[0] for p in graph.parameters if (p.storage, p.shape) in seen)


def _of_one_sample(found: LossRows | str, samples: int) -> LossRows | str:
    """The rows of one sample of several."""
    if isinstance(found, str) or samples == 1:
        return found
    if found.rows % samples:
        return "its rows do not belong to samples"
    return replace(found, rows=found.rows // samples)


def _experts(graph: OperatorGraph) -> tuple[int, ...]:
    """Numbers of experts of the blocks' modules."""
    blocks = {unit.structure: unit for unit in graph.units if unit.kind is UnitKind.BLOCK}
    nodes = (node for unit in blocks.values() for node in fold_unit(graph, unit).nodes)
    found = (experts_of(node, graph) for node in nodes if node.kind is NodeKind.MODULE)
    return tuple(dict.fromkeys(each.number for each in found if each is not None))


def _heads_before_repeat(graph: OperatorGraph, value: int, producers: Mapping[int, OpNode]) -> int:
    """Heads of a key or value tensor before grouped-query attention repeats them.

    Walks back through views and copies to the narrowest tensor that still has (batch, heads,
    tokens, head_dim) or (batch, tokens, heads, head_dim).
    """
    shape = graph.values[value].shape
    batch, tokens, head_dim = shape[0], shape[2], shape[3]
    least = shape[1]
    while (op := producers.get(value)) is not None and op.inputs:
        if not (op.is_view or op.name in ("clone", "_to_copy", "_repeat_heads")):
            break
        value = op.inputs[0]
        tensor = graph.values[value]
        if graph.storages[tensor.storage].kind is StorageKind.PARAMETER:
            break
        if len(tensor.shape) == 4 and tensor.shape[0] == batch and tensor.shape[3] == head_dim:
            middle = list(tensor.shape[1:3])
            if tokens in middle:
                middle.remove(tokens)
                least = min(least, middle[0])
    return least
