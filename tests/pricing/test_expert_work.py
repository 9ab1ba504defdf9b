"""The work of experts that ranks share: as much computing for each, on fewer weights."""

import json
from pathlib import Path

import pytest

from planner.graph.loading.load import load_model
from planner.graph.operator_graph import UnitKind
from planner.graph.sizes.family import trace_family
from planner.hardware.profiles import load_cluster
from planner.pricing.choice import ShardingChoice
from planner.pricing.model_pricing import ModelPricer

ROUTED = Path(__file__).parents[1] / "run" / "routed_experts.py"
EP = 4
DIM, EXPERTS, ROWS, TOP = 32, 8, 2 * 16, 2
ELEMENTS = EXPERTS * (DIM * 2 * DIM * 2 + DIM)
"""Of a block's experts."""
MIXTRAL = {
    "model_type": "mixtral",
    "architectures": ["MixtralForCausalLM"],
    **{"vocab_size": 128, "hidden_size": 64, "intermediate_size": 128},
    **{"num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 4},
    **{"num_local_experts": 8, "num_experts_per_tok": 2, "max_position_embeddings": 64},
}


def works_of(graphs):
    """The second block on one rank, and where ranks share its experts."""
    pricer = ModelPricer(graphs, load_cluster("h100-sxm", gpus=8), "float32")
    blocks = [u.index for u in graphs.at(2).units if u.kind is UnitKind.BLOCK]
    choices = [
        ShardingChoice(tp=1, ep=ep, sequence_parallel=False, split_tables=False, microbatch_size=2)
        for ep in (1, EP)
    ]
    return [pricer.work(choice).units[blocks[1]] for choice in choices]


@pytest.fixture(scope="module")
def routed():
    return works_of(trace_family(load_model(str(ROUTED)), dtype="float32"))


@pytest.fixture(scope="module")
def inside():
    """A block of which tp, cp, and both have parts, on the ranks that share its experts."""
    file = ROUTED.with_name("routed_attention.py")
    graphs = trace_family(load_model(str(file)), dtype="float32")
    pricer = ModelPricer(graphs, load_cluster("h100-sxm", gpus=8), "float32")
    (_, block, *_) = [u.index for u in graphs.at(2).units if u.kind is UnitKind.BLOCK]
    layout = {"sequence_parallel": True, "split_tables": False, "microbatch_size": 2}
    return [
        pricer.work(ShardingChoice(ep=EP, tp=tp, cp=cp, **layout)).units[block]
        for tp, cp in ((2, 1), (1, 2), (2, 2))
    ]


def flop_of(*passes):
    return sum(op.flop for each in passes for op in each.ops)


def test_a_rank_computes_as_much(routed):
    whole, shared = routed
    assert flop_of(shared.forward) == flop_of(whole.forward) > 0
    backward = [flop_of(each.input_backward, each.weight_backward) for each in (whole, shared)]
    assert backward[0] == backward[1] > 0


def test_a_rank_has_its_own_experts_alone(routed):
    whole, shared = routed
    assert whole.experts_trained_elements == 0
    assert shared.experts_trained_elements == ELEMENTS // EP
    assert whole.trained_elements - shared.trained_elements == ELEMENTS - ELEMENTS // EP


def test_rows_go_and_come_once_in_each_pass(routed):
    whole, shared = routed
    assert not whole.forward.comm
    rows, weights, counts = ROWS * TOP * DIM * 4, ROWS * TOP * 4, EXPERTS * 8
    sent = sorted(comm.num_bytes for comm in shared.forward.comm)
    assert sent == sorted([counts, rows, weights, rows])
    back = sorted(comm.num_bytes for comm in shared.input_backward.comm)
    assert back == sorted([rows, weights, rows])
    kinds = {comm.kind for each in (shared.forward, shared.input_backward) for comm in each.comm}
    assert kinds == {"all_to_all"}
    assert len(shared.recompute["full"].comm) >= 3
    assert not shared.recompute["none"].comm


def test_rows_that_tp_and_cp_have_in_parts_go_once(inside):
    """Parts of both, to the experts of each rank: not over tp and over cp again."""
    over_tp, over_cp, both = inside
    for part in ("forward", "input_backward"):
        tp, cp, found = (
            sorted(c.num_bytes for c in getattr(each, part).comm if c.beside == "ep")
            for each in (over_tp, over_cp, both)
        )
        assert tp == cp
        counts = [EXPERTS * 8] * (part == "forward")
        halves = [size // 2 for size in tp if [size] != counts]
        assert found == sorted([*counts, *halves])
    assert both.experts_trained_elements == over_tp.experts_trained_elements == ELEMENTS // EP


def test_experts_compute_the_part_of_both(inside):
    over_tp, over_cp, both = (
        [op for op in each.forward.ops if op.name in ("bmm", "index", "_grouped_mm")]
        for each in inside
    )
    assert sum(op.flop for op in both) > 0
    assert sum(op.flop for op in both) == pytest.approx(sum(op.flop for op in over_tp) / 2)
    assert sum(op.flop for op in both) == pytest.approx(sum(op.flop for op in over_cp) / 2)


def test_weights_are_looked_up_as_often(routed):
    """A row's own weights are read, wherever the others lie."""
    read = [sum(op.read_bytes for op in each.forward.ops if op.name == "index") for each in routed]
    assert read[0] == read[1] > 0


def test_grouped_products_read_their_own_weights(tmp_path):
    config = tmp_path / "config.json"
    config.write_text(json.dumps(MIXTRAL))
    graphs = trace_family(load_model(str(config), seq_len=16), dtype="bfloat16")
    whole, shared = works_of(graphs)
    read = [
        sum(op.read_bytes for op in each.forward.ops if op.name == "_grouped_mm")
        for each in (whole, shared)
    ]
    weights = 8 * 3 * 64 * 128 * 2
    assert read[0] - read[1] == pytest.approx(weights * (1 - 1 / EP), rel=0.01)
