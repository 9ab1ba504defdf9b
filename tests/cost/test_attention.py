"""Unfused attention against Korthikanti et al. 2022 (2205.05198), sections 4.1 and 4.2."""

from dataclasses import replace

import pytest

from planner.cost.attention import attention_works, score_bytes
from planner.cost.op import OpWork, op_s
from planner.cost.unit_work import UnitWork
from planner.framework.spec import TORCH_KERNELS, KernelForms
from planner.hardware.profiles import load_device
from planner.validation.pricing.models import ModelShape
from planner.validation.pricing.workbook import WorkBook, WorkKey

A100 = load_device("a100-80gb-sxm")
UNFUSED = KernelForms(attention="unfused", attention_dropout=True)
FLOAT16 = 2


def fused(*, head_dim: int = 128, backward: bool = False) -> OpWork:
    """Attention of 64 heads over 2,048 tokens."""
    stream_bytes = 64 * 2048 * head_dim * FLOAT16
    return OpWork(
        kind="attention",
        flop=4.0 * 64 * 2048**2 * head_dim * (2.5 if backward else 1),
        read_bytes=3.0 * stream_bytes,
        write_bytes=float(stream_bytes),
        batch=64,
        m=2048,
        n=2048,
        k=head_dim,
        backward=backward,
    )


def seconds(head_dim: int) -> float:
    works = attention_works(fused(head_dim=head_dim), UNFUSED, FLOAT16)
    return sum(op_s(work, A100, "float16") for work in works)


def test_unfused_attention_has_two_matmuls_forward_and_four_backward() -> None:
    for backward, matmuls in ((False, 2), (True, 4)):
        works = attention_works(fused(backward=backward), UNFUSED, FLOAT16)
        flop = sum(work.flop for work in works)
        assert flop == 2.0 * matmuls * 64 * 2048**2 * 128
        assert sum(work.kind == "matmul" for work in works) == matmuls


def test_heads_are_copied_beside_one_another_forward() -> None:
    stream_bytes = FLOAT16 * 64 * 2048 * 128
    copy = attention_works(fused(), UNFUSED, FLOAT16)[-1]
    assert copy.kind == "memory"
    assert copy.read_bytes == copy.write_bytes == stream_bytes


def test_fused_attention_stays_one_kernel_and_keeps_no_scores() -> None:
    assert attention_works(fused(), TORCH_KERNELS, FLOAT16) == [fused()]
    assert score_bytes(fused(), TORCH_KERNELS, FLOAT16) == 0


def test_scores_are_kept_with_the_dropped_ones_and_the_mask() -> None:
    # 5 a s^2 b bytes, Korthikanti et al. 2022, section 4.1.
    assert score_bytes(fused(), UNFUSED, FLOAT16) == 5 * 64 * 2048**2
    plain = replace(UNFUSED, attention_dropout=False)
    assert score_bytes(fused(), plain, FLOAT16) == 2 * 64 * 2048**2


def test_heads_whose_rows_are_not_16_byte_multiples_are_many_times_slower() -> None:
    assert seconds(108) > 5 * seconds(104)
    assert seconds(104) == pytest.approx(seconds(112), rel=0.1)


def test_a_causal_softmax_does_not_read_what_is_masked() -> None:
    causal = replace(fused(), masked_flop=fused().flop / 2)
    whole, masked = (attention_works(work, UNFUSED, FLOAT16)[1] for work in (fused(), causal))
    assert masked.read_bytes == whole.read_bytes / 2
    assert masked.write_bytes == whole.write_bytes


def test_each_product_reads_two_operands_and_writes_the_third() -> None:
    stream_bytes, scores_bytes = FLOAT16 * 64 * 2048 * 128, FLOAT16 * 64 * 2048**2
    for backward in (False, True):
        for work in attention_works(fused(backward=backward), UNFUSED, FLOAT16):
            if work.kind == "matmul":
                assert work.read_bytes + work.write_bytes == 2 * stream_bytes + scores_bytes
                assert work.flop == 2 * work.batch * work.m * work.n * work.k


def test_dropout_is_one_kernel_more_that_writes_a_mask_of_a_byte() -> None:
    plain = attention_works(fused(), replace(UNFUSED, attention_dropout=False), FLOAT16)
    (added,) = [w for w in attention_works(fused(), UNFUSED, FLOAT16) if w not in plain]
    assert (added.read_bytes, added.write_bytes) == (2 * 64 * 2048**2, 3 * 64 * 2048**2)


def test_kernels_of_other_kinds_stay_as_they_are() -> None:
    for work in (replace(fused(), kind="memory"), replace(fused(), m=0)):
        assert attention_works(work, UNFUSED, FLOAT16) == [work]


HEADS, HIDDEN, SEQ, BATCH = 16, 1024, 512, 2
TOKENS = BATCH * SEQ
BOOK = WorkBook()


def block(kernels: KernelForms) -> UnitWork:
    """A block of a GPT with dropout."""
    shape = ModelShape(
        layers=4,
        hidden=HIDDEN,
        ffn=4 * HIDDEN,
        heads=HEADS,
        kv_heads=HEADS,
        vocab_size=1024,
        seq_len=SEQ,
        gated=False,
        biases=True,
        learned_positions=True,
        tied=True,
        dropout=0.1,
    )
    key = WorkKey(
        shape=shape,
        dtype="float16",
        kernels=kernels,
        tp=1,
        sequence_parallel=False,
        microbatch_size=BATCH,
    )
    return BOOK.work(key).units[2]


def test_a_block_keeps_34_and_5_a_s_over_h_bytes_per_element() -> None:
    formula = TOKENS * HIDDEN * (34 + 5 * HEADS * SEQ / HIDDEN)
    # Not counted there: float32 statistics of two norms and of the softmax.
    statistics = 4 * 4 * TOKENS + 4 * TOKENS * HEADS
    kept_bytes = block(UNFUSED).activation_bytes["none"]
    assert kept_bytes == pytest.approx(formula + statistics, rel=1e-4)


def test_selective_recomputation_keeps_34_bytes_and_runs_attention_again() -> None:
    found = block(replace(UNFUSED, selective="attention"))
    assert found.activation_bytes["selective"] == pytest.approx(34 * TOKENS * HIDDEN, rel=0.01)
    again = found.recompute["selective"]
    assert sum(op.flop for op in again.ops) == 4 * BATCH * SEQ**2 * HIDDEN
    assert again.comm == ()


def test_unfused_kernels_take_the_place_of_the_fused_one_in_a_block() -> None:
    fused_block = block(replace(UNFUSED, attention="fused"))
    assert [op.kind for op in fused_block.forward.ops].count("attention") == 1
    kinds = [op.kind for op in block(UNFUSED).forward.ops]
    assert kinds.count("attention") == 0
    assert len(kinds) == len(fused_block.forward.ops) + 4
