"""The JSON document of a trace: what ``plan trace --json`` prints."""

from planner.graph.analysis.causal import phase_masked_flop
from planner.graph.analysis.patterns import BlockKind, block_pattern, unit_kinds
from planner.graph.analysis.retained import recompute_flop, retained_bytes
from planner.graph.analysis.trace_warnings import trace_warnings
from planner.graph.operator_graph import CutPoint, ModuleOutput, OperatorGraph, Phase
from planner.plan.serialize import JsonValue, dump_json
from planner.version import VERSION
from planner.vocabulary import RECOMPUTATIONS

TRACE_SCHEMA_VERSION = 1
"""Version of the document; raised when a reader of the old form would misread the new one."""


def trace_json(graph: OperatorGraph) -> str:
    """Write a trace as JSON; equal traces give equal bytes.

    All FLOPs and bytes are those of one microbatch; attention counts in full, and what causal masks
    hide of it stands beside it. ``blocks`` has the sizes of one block of each kind and their
    number; with ``outside`` (prologue, epilogue) they make up the whole.
    """
    kinds = unit_kinds(graph)
    num_forward = sum(op.phase is Phase.FORWARD for op in graph.nodes)
    return dump_json(
        {
            "schema_version": TRACE_SCHEMA_VERSION,
            "planner_version": VERSION,
            "model": graph.model,
            "microbatch_size": graph.microbatch_size,
            "tokens_per_sample": graph.tokens_per_sample,
            "dtype": graph.dtype,
            "parameters": graph.num_parameters,
            "trainable_parameters": graph.num_trainable_parameters,
            "forward_flop": graph.forward_flop,
            "backward_flop": graph.backward_flop,
            "forward_masked_flop": phase_masked_flop(graph, Phase.FORWARD),
            "backward_masked_flop": phase_masked_flop(graph, Phase.BACKWARD),
            "saved_bytes": graph.saved_bytes,
            "recomputation": {
                way: {
                    "saved_bytes": retained_bytes(graph, way),
                    "recompute_flop": recompute_flop(graph, way),
                }
                for way in RECOMPUTATIONS
            },
            "ops": len(graph.nodes),
            "forward_ops": num_forward,
            "backward_ops": len(graph.nodes) - num_forward,
            "block_pattern": str(block_pattern(graph)),
            "blocks": [_kind(kind) for kind in kinds if kind.is_block],
            "outside": [_kind(kind) for kind in kinds if not kind.is_block],
            "cuts": [_cut(graph, cut) for cut in graph.cuts],
            "refused_cuts": [
                {"after": graph.units[refused.after_unit].name, "reason": refused.reason}
                for refused in graph.refused_cuts
            ],
            "no_cut_reason": graph.no_cut_reason,
            "warnings": list(trace_warnings(graph)),
        }
    )


def _kind(kind: BlockKind) -> JsonValue:
    return {
        "kind": kind.letter,
        "count": kind.count,
        "first": kind.first,
        "parameters": kind.num_parameters,
        "forward_flop": kind.forward_flop,
        "backward_flop": kind.backward_flop,
        "saved_bytes": kind.saved_bytes,
        "ops": kind.num_ops,
    }


def _cut(graph: OperatorGraph, cut: CutPoint) -> JsonValue:
    makers: list[ModuleOutput | None] = [cut.stream_output, *cut.carried]
    return {
        "after": graph.units[cut.after_unit].name,
        "bytes": cut.crossing_bytes,
        "tensors": [
            {
                "shape": list(graph.values[value].shape),
                "dtype": graph.values[value].dtype,
                "bytes": graph.values[value].size_bytes,
                "made_by": None if maker is None else maker.module,
            }
            for value, maker in zip(cut.values, makers, strict=True)
        ],
        "constants": len(cut.constant_values),
        "tied_parameters": [graph.parameters[each].names[0] for each in cut.tied_parameters],
    }
