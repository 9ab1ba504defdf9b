"""The operator graph as a table."""

import pandas as pd

from planner.graph.analysis.summary import shape_words
from planner.graph.operator_graph import OperatorGraph


def ops_frame(graph: OperatorGraph) -> pd.DataFrame:
    """Tabulate all ops in execution order, one row each, indexed by id.

    Columns: name, module, unit, phase, flop, read_bytes, write_bytes, saved_bytes (values that
    autograd keeps on behalf of this op; what several ops save counts at each of them), shape and
    dtype of the first output, is_view, forward_op (of a backward op, where known).
    """
    ops, values = graph.nodes, graph.values
    unit_names = [unit.name for unit in graph.units]
    outputs = [values[op.outputs[0]] if op.outputs else None for op in ops]
    return pd.DataFrame(
        {
            "name": [op.name for op in ops],
            "module": [op.module for op in ops],
            "unit": [unit_names[unit] for unit in graph.unit_of_op],
            "phase": [op.phase.value for op in ops],
            "flop": [op.flop for op in ops],
            "read_bytes": [op.read_bytes for op in ops],
            "write_bytes": [op.write_bytes for op in ops],
            "saved_bytes": [
                sum(values[value].size_bytes for value in (*op.saved_inputs, *op.saved_outputs))
                for op in ops
            ],
            "shape": ["" if each is None else shape_words(each.shape) for each in outputs],
            "dtype": ["" if each is None else each.dtype for each in outputs],
            "is_view": [op.is_view for op in ops],
            "forward_op": pd.array([op.forward_op for op in ops], dtype="Int64"),
        },
        index=pd.RangeIndex(len(ops), name="id"),
    )
