"""All ops of a graph in the forms of other libraries: a DataFrame and a networkx graph."""

import networkx as nx
import pandas as pd

from planner.graph.analysis.summary import shape_words
from planner.graph.operator_graph import OperatorGraph


def ops_table(graph: OperatorGraph) -> pd.DataFrame:
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


def dataflow_graph(graph: OperatorGraph) -> "nx.DiGraph[int]":
    """Build the data flow between ops, forward and backward; views are nodes too.

    Args:
        graph: The operator graph.

    Returns:
        A DAG over op ids. Nodes carry name, module, phase ("forward", "backward"), flop, bytes
        (read and written), unit (its name). Edges carry value, the id of the tensor that goes
        from the one op to the other (the first where there are several), and bytes (of all of
        them). All attributes are numbers and strings, as networkx' file formats need them.
    """
    flow: nx.DiGraph[int] = nx.DiGraph()
    unit_names = [unit.name for unit in graph.units]
    producer: dict[int, int] = {}
    for op in graph.nodes:
        flow.add_node(
            op.id,
            name=op.name,
            module=op.module,
            phase=op.phase.value,
            flop=op.flop,
            bytes=op.read_bytes + op.write_bytes,
            unit=unit_names[graph.unit_of_op[op.id]],
        )
        for value in dict.fromkeys(op.inputs):
            source = producer.get(value)
            if source is None:
                continue
            size_bytes = graph.values[value].size_bytes
            if flow.has_edge(source, op.id):
                flow.edges[source, op.id]["bytes"] += size_bytes
            else:
                flow.add_edge(source, op.id, value=value, bytes=size_bytes)
        producer.update(dict.fromkeys(op.outputs, op.id))
    return flow
