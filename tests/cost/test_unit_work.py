"""What a block computes and what that costs, against closed forms and plain sums."""

from dataclasses import replace

import pytest

from planner.cost.collective import all_reduce_s
from planner.cost.node_pricing import RankSpec, comm_s
from planner.cost.op import op_s
from planner.cost.unit_pricing import price_unit
from planner.cost.unit_work import NO_WORK
from planner.framework.spec import KernelForms
from planner.hardware.profiles import load_cluster
from planner.hardware.topology import MeshAxis, comm_group
from planner.validation.pricing.models import ModelShape
from planner.validation.pricing.workbook import WorkBook, WorkKey

HIDDEN, HEADS, VOCAB, SEQ, BATCH = 1024, 16, 1024, 512, 3
TOKENS = BATCH * SEQ

SHAPE = ModelShape(
    layers=4,
    hidden=HIDDEN,
    ffn=4 * HIDDEN,
    heads=HEADS,
    kv_heads=HEADS,
    vocab_size=VOCAB,
    seq_len=SEQ,
    gated=False,
    biases=True,
    learned_positions=True,
    tied=True,
    dropout=0.0,
)

MATMUL_FLOP = 24 * TOKENS * HIDDEN**2
"""Forward products of a block: 12 h^2 weights, a multiplication and an addition each."""

ATTENTION_FLOP = 4 * BATCH * SEQ**2 * HIDDEN
"""Scores and weighted sum, all of them: what the mask spares is noted beside."""

BOOK = WorkBook()


def counted(**change):
    key = WorkKey(
        shape=SHAPE,
        dtype="bfloat16",
        kernels=KernelForms(),
        tp=1,
        sequence_parallel=False,
        microbatch_size=BATCH,
    )
    return BOOK.work(replace(key, **change))


def flop(work, kind):
    return sum(op.flop for op in work.ops if op.kind == kind)


def rank_of(*, tp=1, host_s=0.0, collective_host_s=0.0):
    cluster = load_cluster("a100-80gb-sxm", gpus=8)
    return RankSpec(
        device=replace(cluster.device, host_dispatch_s=host_s),
        dtype="bfloat16",
        tp_group=comm_group(cluster, MeshAxis(size=tp, stride=1)),
        collective_host_s=collective_host_s,
    )


def issues(work):
    """Kernels and collectives."""
    return len(work.ops) + len(work.comm)


def issues_on_parts(work):
    """Those on parts of tensors."""
    return sum(op.is_split for op in work.ops) + len(work.comm)


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_a_block_computes_the_closed_form(tp):
    block = counted(tp=tp).units[2]
    assert flop(block.forward, "matmul") == MATMUL_FLOP / tp
    assert flop(block.forward, "attention") == ATTENTION_FLOP / tp
    assert flop(block.input_backward, "matmul") == MATMUL_FLOP / tp
    assert flop(block.weight_backward, "matmul") == MATMUL_FLOP / tp
    # A fused kernel computes the scores again: five products instead of two.
    assert flop(block.input_backward, "attention") == 2.5 * ATTENTION_FLOP / tp
    assert flop(block.weight_backward, "attention") == 0


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("tp", [2, 4, 8])
def test_the_sizes_of_a_product_are_those_of_its_flop(tp, sequence_parallel):
    """Its rate follows from the one, and its least time from the other."""
    for unit in counted(tp=tp, sequence_parallel=sequence_parallel).units:
        for work in (unit.forward, unit.input_backward, unit.weight_backward):
            for op in work.ops:
                if op.kind == "matmul":
                    assert op.flop == 2 * op.batch * op.m * op.n * op.k


def test_a_causal_mask_spares_all_but_half_of_the_diagonal():
    (attention,) = (op for op in counted().units[2].forward.ops if op.kind == "attention")
    assert attention.masked_flop == ATTENTION_FLOP * (SEQ - 1) / (2 * SEQ)


def test_the_head_computes_the_logits_once_forward_and_twice_backward():
    head = counted().units[-1]
    logits = 2 * TOKENS * HIDDEN * VOCAB
    assert flop(head.forward, "matmul") == logits
    assert flop(head.input_backward, "matmul") + flop(head.weight_backward, "matmul") == 2 * logits


def test_work_grows_with_the_microbatch():
    one, three = (counted(microbatch_size=size).units[2] for size in (2, 6))
    for part in ("forward", "input_backward", "weight_backward"):
        assert flop(getattr(three, part), "matmul") == 3 * flop(getattr(one, part), "matmul")


def test_full_recomputation_is_the_forward_pass_or_stops_with_the_last_needed_tensor():
    whole = counted(kernels=KernelForms(recompute_stops_early=False)).units[2]
    assert whole.recompute["full"].ops == whole.forward.ops
    early = counted().units[2]
    last_projection = 2 * TOKENS * HIDDEN * 4 * HIDDEN
    assert flop(early.recompute["full"], "matmul") == MATMUL_FLOP - last_projection
    assert early.recompute["none"] == NO_WORK


def test_a_split_block_has_an_all_reduce_or_its_halves_for_attention_and_mlp():
    stream_bytes = 2 * TOKENS * HIDDEN
    plain, split = (counted(tp=4, sequence_parallel=split).units[2] for split in (False, True))
    for part in (plain.forward, plain.input_backward):
        assert [each.kind for each in part.comm] == ["all_reduce"] * 2
        assert all(each.num_bytes == stream_bytes for each in part.comm)
    for part in (split.forward, split.input_backward):
        kinds = sorted(each.kind for each in part.comm)
        assert kinds[:4] == ["all_gather"] * 2 + ["reduce_scatter"] * 2
        assert all(each.num_bytes == stream_bytes for each in part.comm)


def test_a_price_is_the_sum_of_kernels_and_of_collectives():
    block, prices = counted(tp=4).units[2], rank_of(tp=4)
    unit = price_unit(block, prices)

    def kernels_s(*parts):
        return sum(op_s(op, prices.device, "bfloat16") for part in parts for op in part.ops)

    assert unit.forward_s == pytest.approx(kernels_s(block.forward))
    assert unit.backward_s == pytest.approx(
        kernels_s(block.input_backward) + kernels_s(block.weight_backward)
    )
    assert unit.weight_backward_s == pytest.approx(kernels_s(block.weight_backward))
    for kind, again in block.recompute.items():
        assert unit.recompute[kind].compute_s == pytest.approx(kernels_s(again))
        assert unit.recompute[kind].comm_s == sum(comm_s(each, prices) for each in again.comm)
    one = all_reduce_s(2 * TOKENS * HIDDEN, prices.tp_group)
    assert unit.forward_comm_s == pytest.approx(2 * one)
    assert unit.trained_bytes == 4 * block.trained_elements
    assert unit.gathered_bytes == 2 * block.trained_elements


@pytest.mark.parametrize("tp", [1, 4])
def test_a_slow_host_sets_the_time_of_a_pass(tp):
    block = counted(tp=tp).units[2]
    unit = price_unit(block, rank_of(tp=tp, host_s=1.0, collective_host_s=0.25))
    backward = (block.input_backward, block.weight_backward)
    # Without a group there is nothing to issue but kernels.
    each_s = 1.25 if tp > 1 else 0.0
    for seconds, parts in (
        (unit.forward_s + unit.forward_comm_s, (block.forward,)),
        (unit.backward_s + unit.backward_comm_s, backward),
        (unit.weight_backward_s, (block.weight_backward,)),
    ):
        issued_s = sum(len(part.ops) + each_s * len(part.comm) for part in parts)
        assert seconds == pytest.approx(issued_s)


def test_ops_on_parts_and_of_selective_blocks_take_the_host_longer():
    block, alone = counted(tp=4).units[2], rank_of(tp=4, host_s=1.0)
    device = replace(alone.device, split_dispatch_s=2.0, selective_dispatch_s=0.5)
    plain = price_unit(block, replace(alone, device=device))
    parts = price_unit(block, replace(alone, device=device, splits_ops=True))
    for unit, split_s in ((plain, 0.0), (parts, 2.0)):

        def issued_s(work, split_s=split_s):
            return issues(work) + split_s * issues_on_parts(work)

        assert unit.forward_s + unit.forward_comm_s == pytest.approx(issued_s(block.forward))
        # The first forward is a selective block's too.
        found, again = unit.recompute["selective"], block.recompute["selective"]
        more_s = 0.5 * (issues(again) + issues(block.forward))
        assert found.compute_s + found.comm_s == pytest.approx(issued_s(again) + more_s)
        full = unit.recompute["full"]
        assert full.compute_s + full.comm_s == pytest.approx(issued_s(block.recompute["full"]))


def test_ops_on_whole_tensors_are_not_on_parts():
    """Of a block without sequence parallelism norms and what is added to the stream."""
    block, alone = counted(tp=4).units[2], counted().units[2]
    split = counted(tp=4, sequence_parallel=True).units[2]
    whole = [op.name for op in block.forward.ops if not op.is_split and op.name]
    assert sorted(whole) == ["add", "add", "native_layer_norm", "native_layer_norm"]
    for unit, on_parts in ((block, True), (alone, False), (split, True)):
        works = (unit.forward, unit.input_backward, unit.weight_backward)
        ops = [op for work in works for op in work.ops if op.kind in ("matmul", "attention")]
        assert {op.is_split for op in ops} == {on_parts}
    assert all(op.is_split for op in split.forward.ops if op.name)


def test_a_host_that_runs_the_ops_itself_takes_what_it_does_for_them_beside_them():
    block, alone = counted(tp=4).units[2], rank_of(tp=4)
    more = {"full_dispatch_s": 1.0, "selective_dispatch_s": 0.5, "split_dispatch_s": 2.0}
    slow = replace(alone, device=replace(alone.device, **more))
    bare, plain, parts = (
        price_unit(block, rank) for rank in (alone, slow, replace(slow, splits_ops=True))
    )

    assert (plain.forward_s, plain.backward_s) == (bare.forward_s, bare.backward_s)
    assert parts.forward_s == pytest.approx(bare.forward_s + 2.0 * issues_on_parts(block.forward))
    for unit, split_s in ((plain, 0.0), (parts, 2.0)):
        for kind, again_s, forward_s in (("full", 1.0, 0.0), ("selective", 0.5, 0.5)):
            work = block.recompute[kind]
            more_s = again_s * issues(work) + forward_s * issues(block.forward)
            more_s += split_s * issues_on_parts(work)
            expected_s = bare.recompute[kind].compute_s + more_s
            assert unit.recompute[kind].compute_s == pytest.approx(expected_s)
    assert price_unit(block, replace(slow, splits_ops=True, compiled=True)) == bare


def test_compiled_blocks_take_the_host_as_long_whatever_is_split_or_kept():
    block, alone = counted(tp=4).units[2], rank_of(tp=4, host_s=1.0)
    device = replace(alone.device, split_dispatch_s=2.0, selective_dispatch_s=0.5)
    unit = price_unit(block, replace(alone, device=device, splits_ops=True, compiled=True))
    assert unit == price_unit(block, alone)


def test_a_fast_host_is_not_waited_for():
    assert price_unit(counted().units[2], rank_of(host_s=1e-9)) == price_unit(
        counted().units[2], rank_of()
    )
