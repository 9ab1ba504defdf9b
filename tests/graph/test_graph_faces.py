"""The operator graph as users meet it: a networkx graph, a table, a line of words."""

import subprocess
import sys
from io import BytesIO

import networkx as nx
import pytest
import torch
from graph_models import EagerBlock, example, mean_square, vectors, wrap
from torch import nn

from planner.graph.analysis.ops import dataflow_graph, ops_table
from planner.graph.analysis.summary import cut_groups, summary_html, summary_words
from planner.graph.operator_graph import Phase
from planner.graph.trace import trace_model
from planner.units import DTYPE_BYTES


@pytest.fixture(scope="module")
def gpt():
    return trace_model(example("gpt.py"), microbatch_size=2, dtype="float32")


@pytest.fixture(scope="module")
def flow(gpt):
    return dataflow_graph(gpt)


def test_the_networkx_graph_has_all_ops_and_says_what_they_are(gpt, flow):
    assert isinstance(flow, nx.DiGraph)
    assert nx.is_directed_acyclic_graph(flow)
    assert list(flow.nodes) == [op.id for op in gpt.nodes]
    product = next(op for op in gpt.nodes if op.name == "addmm")
    assert flow.nodes[product.id] == {
        "name": "addmm",
        "module": "transformer.h.0.attn.c_attn",
        "phase": "forward",
        "flop": 2 * (2 * 64) * 64 * 192,
        "bytes": product.read_bytes + product.write_bytes,
        "unit": "transformer.h.0",
    }


def test_edges_carry_the_value_and_its_bytes(gpt, flow):
    for source, target, edge in flow.edges(data=True):
        assert edge["value"] in gpt.nodes[source].outputs
        assert edge["value"] in gpt.nodes[target].inputs
    between = {
        (source, target): {*gpt.nodes[source].outputs} & {*gpt.nodes[target].inputs}
        for source, target in flow.edges
    }
    assert max(len(values) for values in between.values()) > 1
    for pair, values in between.items():
        elements = sum(torch.Size(gpt.values[value].shape).numel() for value in values)
        dtypes = {gpt.values[value].dtype for value in values}
        if dtypes == {"float32"}:
            assert flow.edges[pair]["bytes"] == 4 * elements


def test_networkx_can_write_it_to_a_file(gpt, flow):
    buffer = BytesIO()
    nx.write_graphml(flow, buffer)
    buffer.seek(0)
    assert len(nx.read_graphml(buffer)) == len(gpt.nodes)


def test_the_table_has_one_row_per_op(gpt):
    table = ops_table(gpt)
    assert list(table.index) == [op.id for op in gpt.nodes]
    assert list(table.columns) == [
        *("name", "module", "unit", "phase", "flop", "read_bytes", "write_bytes", "saved_bytes"),
        *("shape", "dtype", "is_view", "forward_op"),
    ]
    by_phase = table.groupby("phase").flop.sum()
    assert by_phase["forward"] == gpt.forward_flop
    assert by_phase["backward"] == gpt.backward_flop
    assert table.forward_op[table.phase == "forward"].isna().all()
    per_unit = table[table.phase == "forward"].groupby("unit", sort=False).flop.sum()
    assert list(per_unit.index) == [unit.name for unit in gpt.units]
    (product,) = table[(table.name == "addmm") & (table.module == "transformer.h.7.mlp.c_fc")].index
    assert table.loc[product, "shape"] == "128 x 256"
    assert table.loc[product, "unit"] == "transformer.h.7"


def test_every_op_is_in_its_unit(gpt):
    for unit in gpt.units:
        for op in (*unit.forward_ops, *unit.backward_ops):
            assert gpt.unit_of_op[op] == unit.index
    assert len(gpt.unit_of_op) == len(gpt.nodes)


def test_bytes_of_values_are_those_of_torch(gpt):
    for name, size_bytes in DTYPE_BYTES.items():
        assert getattr(torch, name).itemsize == size_bytes
    for value in gpt.values:
        tensor = torch.empty(value.shape, dtype=getattr(torch, value.dtype), device="meta")
        assert value.size_bytes == tensor.nbytes


def test_it_is_told_in_one_line(gpt):
    assert summary_words(gpt) == (
        f"'{gpt.model}', microbatch 2 x 64 tokens, float32: parameters 412 k, "
        f"forward 120 MFLOP, backward 247 MFLOP, saved for backward 4.2 MiB, "
        f"operators {len(gpt.nodes)}, blocks 8 A, cuts 9"
    )
    assert gpt.model.endswith("gpt.py:build_model")
    assert repr(gpt) == f"OperatorGraph('{gpt.model}', {len(gpt.nodes):,} operators in 10 units)"


def test_frozen_parameters_are_told_apart():
    def build():
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        model[0].requires_grad_(False)
        return model

    graph = trace_model(wrap(build, vectors(8), mean_square), microbatch_size=2, dtype="float32")
    assert graph.num_parameters == 144
    assert graph.num_trainable_parameters == 72
    assert "parameters 144, 72 of them trained" in summary_words(graph)


def test_in_a_notebook_it_is_a_small_escaped_table(gpt):
    html = summary_html(gpt)
    assert len(html) < 4096
    assert "<td>transformer.h.0</td>" in html

    def build_a_b():
        return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))

    build_a_b.__name__ = "a<b"
    model = wrap(build_a_b, vectors(8), mean_square)
    graph = trace_model(model, microbatch_size=2, dtype="float32")
    assert "a&lt;b" in summary_html(graph)
    assert "a<b" not in summary_html(graph)


def test_cuts_across_which_the_same_is_sent_are_grouped(gpt):
    (group,) = cut_groups(gpt)
    assert group.place == "after prologue to transformer.h.7"
    assert group.count == 9
    assert group.crossing_bytes == 2 * 64 * 64 * 4
    assert group.tensors == ("float32 2 x 64 x 64",)


def test_cuts_of_different_sizes_are_told_apart():
    def build():
        return nn.Sequential(*(nn.Linear(a, b) for a, b in ((8, 4), (4, 4), (4, 4), (4, 8))))

    graph = trace_model(wrap(build, vectors(8), mean_square), microbatch_size=2, dtype="float32")
    groups = cut_groups(graph)
    assert [(group.place, group.count, group.crossing_bytes) for group in groups] == [
        ("after 0 to 2", 3, 32),
        ("after 3", 1, 64),
    ]


def test_a_model_that_cannot_be_cut_has_no_groups():
    graph = trace_model(
        wrap(lambda: EagerBlock(8, 2), lambda size: (torch.randn(size, 3, 8), None), mean_square),
        microbatch_size=2,
        dtype="float32",
    )
    assert cut_groups(graph) == ()
    assert graph.no_cut_reason
    assert "blocks none, cuts 0" in summary_words(graph)
    assert {op.phase for op in graph.nodes} == set(Phase)


def test_pandas_and_networkx_are_imported_on_demand():
    code = (
        "import sys, planner.graph.trace\n"
        "heavy = {'pandas', 'networkx'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
