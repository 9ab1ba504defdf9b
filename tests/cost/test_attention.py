from dataclasses import replace

import pytest

from planner.cost.attention import attention_works, score_bytes
from planner.cost.op import OpWork, op_s
from planner.framework.spec import TORCH_KERNELS, KernelForms
from planner.hardware.profiles import load_device

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
