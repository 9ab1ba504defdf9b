"""The work of a loss in chunks, held to counts by hand."""

from dataclasses import replace
from pathlib import Path

import pytest

from planner.graph.loading.load import load_model
from planner.graph.sizes.family import trace_family
from planner.hardware.profiles import load_cluster
from planner.pricing.choice import ShardingChoice
from planner.pricing.model_pricing import ModelPricer

LLAMA = Path(__file__).parents[2] / "examples" / "llama.py"
SIZE, CHUNKS = 4, 8
ROWS, DIM, CLASSES = SIZE * 64, 64, 128
BFLOAT16, FLOAT32 = 2, 4
STATES, TABLE, LOGITS = ROWS * DIM, CLASSES * DIM, ROWS * CLASSES


@pytest.fixture(scope="module")
def graphs():
    return trace_family(load_model(str(LLAMA)), dtype="bfloat16")


@pytest.fixture(scope="module")
def works(graphs):
    """The end of a llama with its loss whole, and in chunks."""
    pricer = ModelPricer(graphs, load_cluster("h100-sxm", gpus=8), "bfloat16")
    choice = {"tp": 1, "sequence_parallel": False, "split_tables": False, "microbatch_size": SIZE}
    return [
        pricer.work(ShardingChoice(**choice, loss_chunks=chunks)).units[-1]
        for chunks in (1, CHUNKS)
    ]


@pytest.fixture(scope="module")
def pricer_of_fast_links(graphs):
    """Over them it pays to split the smallest table."""
    cluster = load_cluster("h100-sxm", gpus=8)
    fast = {"bandwidth_bytes_per_s": 1e15, "latency_s": 0.0, "base_latency_s": 0.0}
    links = tuple(replace(link, **fast) for link in cluster.links)
    return ModelPricer(graphs, replace(cluster, links=links), "bfloat16")


@pytest.fixture(scope="module", params=[(2, 1), (1, 2), (2, 2)], ids="tp {0[0]} cp {0[1]}".format)
def split(request, pricer_of_fast_links):
    """Ranks, and its works where ranks have some of the classes or of the rows each."""
    tp, cp = request.param
    choice = ShardingChoice(
        tp=tp, cp=cp, sequence_parallel=tp > 1, split_tables=tp > 1, microbatch_size=SIZE
    )
    return (
        tp,
        cp,
        [
            pricer_of_fast_links.work(replace(choice, loss_chunks=chunks)).units[-1]
            for chunks in (1, CHUNKS)
        ],
    )


def products(*passes):
    return [op for each in passes for op in each.ops if op.kind == "matmul"]


def test_chunks_are_no_parts_that_ranks_share(works, split):
    """Products are on parts where ranks share the classes or the rows, chunked or not."""
    for work in works:
        assert not any(op.is_split for op in (*work.forward.ops, *work.input_backward.ops))
    for work in split[2]:
        found = products(work.forward, work.input_backward, work.weight_backward)
        assert found
        assert all(op.is_split for op in found)


def test_chunks_compute_what_the_whole_computes(works):
    chunked = works[1]
    passes = [(each.forward, each.input_backward, each.weight_backward) for each in works]
    flop = [sum(op.flop for op in products(*each)) for each in passes]
    assert flop[0] == flop[1] == 3 * 2 * STATES * CLASSES
    assert len(products(chunked.forward)) == 3 * CHUNKS
    assert products(chunked.input_backward, chunked.weight_backward) == []
    assert {(op.m, op.n, op.k) for op in products(chunked.forward)} == {
        (ROWS // CHUNKS, CLASSES, DIM),
        (ROWS // CHUNKS, DIM, CLASSES),
        (CLASSES, DIM, ROWS // CHUNKS),
    }


def test_each_chunk_reads_the_table_and_adds_to_its_gradient(works):
    moved = sum(op.read_bytes + op.write_bytes for op in products(works[1].forward))
    of_rows = 3 * (STATES + LOGITS)  # once in each product
    of_table = 4 * TABLE * CHUNKS  # read for logits and for states, read and written as a sum
    assert moved == BFLOAT16 * (of_rows + of_table)


def test_gradients_are_kept_instead_of_logits(works):
    whole, chunked = (work.activation_bytes["none"] for work in works)
    statistics = ROWS * FLOAT32
    assert whole == pytest.approx(BFLOAT16 * 2 * STATES + statistics + FLOAT32 * LOGITS, rel=0.02)
    assert chunked == pytest.approx(BFLOAT16 * (2 * STATES + TABLE) + statistics, rel=0.05)
    assert works[1].lasting_bytes == BFLOAT16 * TABLE
    assert works[0].lasting_bytes == 0


def test_the_fullest_moment_has_one_chunk(works):
    """Float32 probabilities, their gradient and that of the logits, with the logits themselves."""
    chunked = works[1]
    of_chunk = (3 * FLOAT32 + BFLOAT16) * LOGITS // CHUNKS
    assert chunked.temporary_bytes["none"] == pytest.approx(of_chunk + BFLOAT16 * STATES, rel=0.05)
    assert chunked.temporary_bytes["none"] < works[0].temporary_bytes["none"]


def test_ranks_share_the_products_of_a_chunk(split):
    tp, cp, (_, chunked) = split
    found = products(chunked.forward)
    assert len(found) == 3 * CHUNKS
    assert sum(op.flop for op in found) == 3 * 2 * STATES * CLASSES / (tp * cp)
    rows, classes = ROWS // CHUNKS // cp, CLASSES // tp
    assert {(op.m, op.n, op.k) for op in found} == {
        (rows, classes, DIM), (rows, DIM, classes), (classes, DIM, rows),
    }  # fmt: skip


def test_a_rank_keeps_its_part_of_the_gradients(split):
    """All features of its rows: what classes of other ranks add to them is summed in backward."""
    tp, cp, (whole, chunked) = split
    assert chunked.lasting_bytes == BFLOAT16 * TABLE // tp
    assert whole.trained_elements == chunked.trained_elements == TABLE // tp + DIM
    kept = chunked.activation_bytes["none"] - BFLOAT16 * (STATES // cp + TABLE // tp)
    assert kept == pytest.approx((BFLOAT16 * STATES + ROWS * FLOAT32) / cp, rel=0.05)


def test_sums_over_classes_are_made_for_each_chunk_and_move_the_same_bytes(split):
    """Those of the backward as well, in the forward pass; else no sum moves."""
    tp, cp, (whole, chunked) = split

    def sums(*passes):
        sizes = [c.num_bytes for each in passes for c in each.comm if c.kind == "all_reduce"]
        return {size: sizes.count(size) for size in sizes}

    before, after = sums(whole.forward, whole.input_backward), sums(chunked.forward)
    of_rows = before.pop(FLOAT32 * ROWS / cp, 0)
    assert bool(of_rows) == (tp > 1)
    assert after.pop(FLOAT32 * ROWS / cp / CHUNKS, 0) == CHUNKS * of_rows
    assert after | sums(chunked.input_backward) == before
