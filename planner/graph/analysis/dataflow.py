"""The operator graph as a networkx graph."""

import networkx as nx

from planner.graph.operator_graph import OperatorGraph


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
