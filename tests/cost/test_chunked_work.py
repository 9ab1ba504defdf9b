"""The work of a loss in chunks, held to counts by hand."""

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
def works():
    """The end of a llama with its loss whole, and in chunks."""
    graphs = trace_family(load_model(str(LLAMA)), dtype="bfloat16")
    pricer = ModelPricer(graphs, load_cluster("h100-sxm", gpus=8), "bfloat16")
    choice = {"tp": 1, "sequence_parallel": False, "split_tables": False, "microbatch_size": SIZE}
    return [
        pricer.work(ShardingChoice(**choice, loss_chunks=chunks)).units[-1]
        for chunks in (1, CHUNKS)
    ]


def products(*passes):
    return [op for each in passes for op in each.ops if op.kind == "matmul"]


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
