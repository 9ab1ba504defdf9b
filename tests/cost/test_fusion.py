"""Fused kernels and selective recomputation of a Llama block, against bytes counted by hand."""

from dataclasses import replace
from functools import cache

import pytest

from planner.framework.spec import KernelForms
from planner.validation.pricing.models import ModelShape
from planner.validation.pricing.workbook import WorkBook, WorkKey

BATCH, SEQ, HIDDEN, FFN, HEADS, VOCAB = 2, 512, 1024, 4096, 8, 5120
TOKENS = BATCH * SEQ
SHAPE = ModelShape(
    layers=0,
    hidden=HIDDEN,
    ffn=FFN,
    heads=HEADS,
    kv_heads=HEADS,
    vocab_size=VOCAB,
    seq_len=SEQ,
    gated=True,
    biases=False,
    learned_positions=False,
    tied=False,
    dropout=0.0,
    plain_torch=True,
)
BOOK = WorkBook()


@cache
def model(shape=SHAPE, **forms):
    kernels = KernelForms(loss_apart=True, **forms)
    key = WorkKey(
        shape=shape, dtype="bfloat16", kernels=kernels, tp=1, sequence_parallel=False,
        microbatch_size=BATCH,
    )  # fmt: skip
    return BOOK.work(key)


def norms_as_kernels(**forms):
    return model(replace(SHAPE, plain_torch=False), **forms)


def light(ops):
    return [op for op in ops if op.kind in ("memory", "reduction")]


def moved(ops):
    return sum(op.read_bytes + op.write_bytes for op in ops)


def flop(ops):
    return sum(op.flop for op in ops if op.kind == "matmul")


def test_compiled_block_moves_what_enters_and_leaves_its_chains():
    """Norm, two of rotary, add and norm, gate, add: what each reads and writes, in bf16."""
    stream, wide = 2 * TOKENS * HIDDEN, 2 * TOKENS * FFN
    angles = 2 * 4 * SEQ * HIDDEN // HEADS
    weights = 2 * 2 * HIDDEN
    streams = 2 + 4 + 4 + 3
    ops = light(model(pointwise="compiled").units[2].forward.ops)
    assert len(ops) == 6
    assert moved(ops) == streams * stream + 3 * wide + angles + weights


def test_kernels_written_by_hand_have_norms_apart():
    """The second norm, and its gradient, read and write what a compiler keeps inside a kernel."""
    stream = 2 * TOKENS * HIDDEN
    by_hand, compiled = (
        norms_as_kernels(pointwise=each).units[2] for each in ("by_hand", "compiled")
    )
    assert len(light(by_hand.forward.ops)) == len(light(compiled.forward.ops)) + 1
    more = moved(light(by_hand.forward.ops)) - moved(light(compiled.forward.ops))
    assert more == pytest.approx(stream, rel=0.01)
    backward = [
        (*each.input_backward.ops, *each.weight_backward.ops) for each in (by_hand, compiled)
    ]
    assert len(light(backward[0])) > len(light(backward[1]))


def test_compiled_backward_moves_less_and_its_matmuls_stay():
    eager, compiled = model(), model(pointwise="compiled")
    before, after = (
        (*each.units[2].input_backward.ops, *each.units[2].weight_backward.ops)
        for each in (eager, compiled)
    )
    assert flop(after) == flop(before) > 0
    assert moved(light(after)) < moved(light(before)) / 2
    # Every kernel reads a gradient and writes one, of the stream, or of the MLP's three.
    assert moved(light(after)) > 2 * TOKENS * (6 * HIDDEN + 5 * FFN)


def test_fused_loss_reads_logits_and_writes_their_gradient():
    logits = 2 * TOKENS * VOCAB
    loss = model(fuses_loss=True).units[-1]
    assert moved(loss.forward.ops) == pytest.approx(logits, rel=0.01)
    backward = (*loss.input_backward.ops, *loss.weight_backward.ops)
    assert moved(backward) == pytest.approx(2 * logits, rel=0.01)
    assert moved(model().units[-1].forward.ops) > 5 * logits


def test_every_second_matmul_runs_again():
    """Of query, key, value, out, gate, up and down the second, fourth and sixth."""
    again = model(selective="every_second_matmul").units[2].recompute["selective"]
    assert flop(again.ops) == 2 * TOKENS * HIDDEN * (2 * HIDDEN + FFN)
    assert not flop(model().units[2].recompute["selective"].ops)


def test_every_second_matmul_keeps_less():
    kept, all_kept = (
        model(selective=each).units[2].activation_bytes["selective"]
        for each in ("every_second_matmul", "matmul_outputs")
    )
    assert all_kept - kept == 2 * TOKENS * (2 * HIDDEN + FFN)


def test_fused_loss_keeps_the_logits_alone():
    """Otherwise float32 logarithms of the softmax are kept, with two of their size in backward."""
    fused, written = model(fuses_loss=True).units[-1], model().units[-1]
    logits = 2 * TOKENS * VOCAB
    assert fused.activation_bytes["none"] == pytest.approx(logits, rel=0.01)
    assert fused.temporary_bytes["none"] <= logits
    assert written.activation_bytes["none"] == pytest.approx(2 * logits, rel=0.01)
    assert written.temporary_bytes["none"] >= 3.9 * logits
