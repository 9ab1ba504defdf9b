"""Emitted scripts communicate exactly what the layout needs, no hidden collective."""

import json

import pytest
from count_collectives import count_collectives
from driver import run_ranks
from example_plans import SHALLOW_GPT, SHALLOW_LLAMA, make_plan
from launch import write_script

pytestmark = pytest.mark.run

LAYERS, MICROBATCHES = 4, 2
LOSS = 3  # maximum, sum of exponentials, picked logit: of one number per token
ENDS = 2  # embedding output forward, head input backward
STEP = 3  # loss, gradient norm, slowest rank for the log: one or two numbers each
PLAIN_STEP = {"allreduce_": 2, "all_reduce": 1}  # the same, the norm by torch's own function
AGREED = 2  # the ranks agree that each has built the model, say: sizes, then messages

TP = {"tp": 2, "microbatch_size": 8}
DP = {"dp_shard": 2, "microbatch_size": 4}
EXPECTED = {
    "tp": (
        TP,
        {"allreduce_": MICROBATCHES * (4 * LAYERS + ENDS + LOSS) + STEP},
    ),
    "tp_full": (  # recomputation stops before the second all-reduce of a layer
        {**TP, "recompute": "full"},
        {"allreduce_": MICROBATCHES * (5 * LAYERS + ENDS + LOSS) + STEP},
    ),
    "tp_selective": (
        {**TP, "recompute": "selective"},
        {"allreduce_": MICROBATCHES * (5 * LAYERS + ENDS + LOSS) + STEP},
    ),
    "tp_sequence": (  # the stream is scattered before the blocks and gathered after them
        {**TP, "sequence_parallel": True},
        {
            "_allgather_base_": MICROBATCHES * (4 * LAYERS + 2),
            "_reduce_scatter_base_": MICROBATCHES * 4 * LAYERS,
            # gradients of all norms in one
            "allreduce_": MICROBATCHES * (ENDS + LOSS) + STEP + 1,
        },
    ),
    "zero_3": (  # blocks are gathered forward and backward, the rest once a microbatch
        DP,
        {
            "_allgather_base_": MICROBATCHES * (2 * LAYERS + 1),
            "_reduce_scatter_base_": MICROBATCHES * (LAYERS + 1),
            **PLAIN_STEP,
        },
    ),
    "zero_2": (  # gathered in the first microbatch, reduced in the last
        {**DP, "reshard_after_forward": False},
        {
            "_allgather_base_": LAYERS + 1,
            "_reduce_scatter_base_": LAYERS + 1,
            **PLAIN_STEP,
        },
    ),
}


@pytest.fixture(scope="module")
def counted(tmp_path_factory):
    root = tmp_path_factory.mktemp("communication")
    folders = [
        write_script(root / f"{case.name}-{name}", make_plan(case, **layout))
        for case in (SHALLOW_GPT, SHALLOW_LLAMA)
        for name, (layout, _) in EXPECTED.items()
    ]
    run_ranks(count_collectives, [str(folder) for folder in folders], num_processes=2)
    return root


@pytest.mark.parametrize("model", ["shallow_gpt", "shallow_llama"])
@pytest.mark.parametrize("name", EXPECTED)
def test_collectives_are_those_of_the_layout(counted, model, name):
    counts = json.loads((counted / f"{model}-{name}" / "collectives.json").read_text())
    counts.pop("_wrap_tensor_autograd", None)  # marks a result, moves nothing
    agreements = 3 if "tp" in name else 2  # model, data, and whether the layout runs
    assert counts == {**EXPECTED[name][1], "allgather_": agreements * AGREED}
