"""A trace of three blocks stands for models of any number of blocks."""

from dataclasses import replace

import pytest
import torch

from planner.cost.node_pricing import RankSpec
from planner.framework.spec import KernelForms
from planner.graph.operator_graph import Phase
from planner.graph.sizes.family import trace_family
from planner.hardware.profiles import load_cluster
from planner.hardware.topology import MeshAxis, comm_group
from planner.pricing.choice import ShardingChoice
from planner.pricing.model_pricing import ModelPricer
from planner.validation.pricing.models import ModelShape, build, loaded
from planner.validation.pricing.workbook import WorkBook, WorkKey

LAYERS, BATCH = 5, 2

GPT = ModelShape(
    layers=LAYERS,
    hidden=256,
    ffn=1024,
    heads=4,
    kv_heads=4,
    vocab_size=1024,
    seq_len=128,
    gated=False,
    biases=True,
    learned_positions=True,
    tied=True,
    dropout=0.1,
)
LLAMA = replace(
    GPT, ffn=512, kv_heads=2, gated=True, biases=False, learned_positions=False, tied=False,
    dropout=0.0,
)  # fmt: skip
SHAPES = {
    "gpt": GPT,
    "llama": LLAMA,
    "plain llama": replace(LLAMA, plain_torch=True),
    "mpt": replace(GPT, biases=False, learned_positions=False, dropout=0.0),
}
BOOK = WorkBook()
CLUSTER = load_cluster("a100-80gb-sxm", gpus=8)


def key(shape, **change):
    plain = WorkKey(
        shape=shape,
        dtype="bfloat16",
        kernels=KernelForms(),
        tp=1,
        sequence_parallel=False,
        microbatch_size=BATCH,
    )
    return replace(plain, **change)


@pytest.fixture(params=SHAPES)
def shape(request):
    return SHAPES[request.param]


def units(work):
    return (work.units[0], *[work.units[2]] * LAYERS, work.units[-1])


def test_blocks_add_up_to_the_traced_model(shape):
    work = BOOK.work(key(shape))
    graph = trace_family(loaded(shape), dtype="bfloat16").at(BATCH)
    for phase, parts in (
        (Phase.FORWARD, ("forward",)),
        (Phase.BACKWARD, ("input_backward", "weight_backward")),
    ):
        traced = sum(op.flop for op in graph.nodes if op.phase is phase)
        counted = sum(
            op.flop for unit in units(work) for part in parts for op in getattr(unit, part).ops
        )
        assert counted == traced > 0


def test_parameters_are_those_of_the_module(shape):
    work = BOOK.work(key(shape))
    with torch.device("meta"):
        counted = sum(parameter.numel() for parameter in build(shape).parameters())
    tied = sum(tied.elements for tied in work.tied)
    assert sum(unit.trained_elements for unit in units(work)) - tied == counted
    assert bool(tied) is shape.tied


def test_the_number_of_layers_asks_no_new_question(shape):
    work = BOOK.work(key(shape))
    assert BOOK.work(key(replace(shape, layers=80))) is work
    assert BOOK.work(key(shape, microbatch_size=1)) is not work


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("hidden", [512, 1024])
def test_small_models_are_split_too(tp, sequence_parallel, hidden):
    """Megatron's columns and rows, though it would be faster not to split them."""
    small = replace(GPT, hidden=hidden, ffn=4 * hidden, heads=8, kv_heads=8)
    work = BOOK.work(
        key(small, tp=tp, sequence_parallel=sequence_parallel, microbatch_size=1)
    ).units[2]
    norms_and_row_biases = 6 * hidden
    split = 12 * hidden**2 + 7 * hidden
    assert work.trained_elements == split // tp + norms_and_row_biases
    kinds = ["all_gather", "reduce_scatter"] if sequence_parallel else ["all_reduce"]
    assert sorted(each.kind for each in work.forward.comm) == sorted(2 * kinds)


def test_a_stage_sends_the_stream_or_a_rank_its_share():
    stream_bytes = 2 * BATCH * GPT.seq_len * GPT.hidden
    assert BOOK.work(key(GPT, tp=4)).entering_bytes[2] == stream_bytes
    split = KernelForms(splits_transfers=True)
    assert BOOK.work(key(GPT, tp=4, kernels=split)).entering_bytes[2] == stream_bytes // 4
    assert BOOK.work(key(GPT, tp=4, sequence_parallel=True)).entering_bytes[2] == stream_bytes // 4


def test_a_stage_of_the_loss_receives_its_share_of_the_logits():
    logits_bytes = 2 * BATCH * GPT.seq_len * GPT.vocab_size
    apart = KernelForms(loss_apart=True)
    assert BOOK.work(key(GPT, kernels=apart)).entering_bytes[-1] == logits_bytes
    assert BOOK.work(key(GPT, kernels=apart, tp=4)).entering_bytes[-1] == logits_bytes // 4


def test_the_loss_apart_is_what_the_epilogue_had_of_it(shape):
    whole = BOOK.work(key(shape)).units[-1]
    apart = BOOK.work(key(shape, kernels=KernelForms(loss_apart=True)))
    head, loss = apart.units[-2:]
    assert apart.epilogue_units == 2
    assert len(head.forward.ops) + len(loss.forward.ops) == len(whole.forward.ops)
    assert head.trained_elements == whole.trained_elements
    assert loss.trained_elements == 0


def test_more_blocks_are_those_of_a_deeper_trace(shape):
    """Unit by unit, with what they share and send."""
    rank = RankSpec(
        device=CLUSTER.device,
        dtype="bfloat16",
        tp_group=comm_group(CLUSTER, MeshAxis(size=1, stride=1)),
    )
    deep = trace_family(loaded(shape), dtype="bfloat16")
    pricer = ModelPricer(deep, CLUSTER, "bfloat16", kernels=KernelForms())
    choice = ShardingChoice(
        tp=1, sequence_parallel=False, split_tables=False, microbatch_size=BATCH
    )
    traced = pricer.work(choice).priced(rank)
    stretched = BOOK.work(key(shape)).priced(rank).with_blocks(LAYERS)
    assert stretched.blocks == traced.blocks
    for name in ("units", "entering_bytes", "tied", "matmul_flop"):
        assert getattr(stretched, name) == getattr(traced, name)
    places = [(each.size_bytes, each.units, each.owners) for each in stretched.shared]
    assert places == [(each.size_bytes, each.units, each.owners) for each in traced.shared]


def test_dropout_costs_kernels_and_masks():
    plain = BOOK.work(key(replace(GPT, dropout=0.0))).units[2]
    dropped = BOOK.work(key(GPT)).units[2]
    assert len(dropped.forward.ops) == len(plain.forward.ops) + 2
    masks_bytes = 2 * BATCH * GPT.seq_len * GPT.hidden
    assert dropped.activation_bytes["none"] - plain.activation_bytes["none"] == masks_bytes
