"""Attention as a framework computes it: one fused kernel, or matmul, softmax, matmul.

Unfused, the scores of batch x heads x queries x keys are written and read by every kernel, and
the weights stay in memory for backward: 2 bytes an element, and with dropout the dropped weights
and a mask of 1 byte besides (Korthikanti et al. 2022, 2205.05198, section 4.1). Scaling and
masking are taken as part of the softmax kernel, which reads no masked scores but writes all of
them (Megatron-LM's scaled_upper_triang_masked_softmax). A copy then puts a token's heads, products
of their own, beside one another. A fused kernel skips what a causal mask spares; unfused matmuls
compute all of it, and are slow for heads whose rows are not multiples of 16 bytes.
"""

from planner.cost.op import ROW_ALIGNMENT, OpWork
from planner.framework.spec import KernelForms

_MASK_BYTES = 1

_UNALIGNED_SHARE = 0.05
"""Share of the rate of products whose heads are not multiples of 16 bytes, which finds no kernel
for tensor cores: BigScience's 13,824 wide models took 1.3 to 1.4 times as long with heads of 108
elements as with heads of 216 (chronicles-prequel.md, "NHEADs comparison")."""


def attention_works(work: OpWork, kernels: KernelForms, itemsize: int) -> list[OpWork]:
    """Split fused attention into the kernels that the framework runs; others stay one.

    Args:
        work: Any kernel.
        kernels: Whether attention is fused, and whether it drops weights.
        itemsize: Bytes per element of the scores.
    """
    if work.kind != "attention" or kernels.attention == "fused" or not work.m:
        return [work]
    scores_bytes = _scores(work) * itemsize
    dropped = [_drop(work, itemsize)] if kernels.attention_dropout else []
    query_key = _product(work, work.m, work.n, work.k, itemsize)
    weights_value = _product(work, work.m, work.k, work.n, itemsize)
    read_bytes = scores_bytes * (1 - work.masked_flop / work.flop) if work.flop else scores_bytes
    if not work.backward:
        softmax = _softmax(read_bytes, scores_bytes)
        return [query_key, softmax, *dropped, weights_value, _gathered_heads(work, itemsize)]
    softmax = _softmax(2 * read_bytes, scores_bytes)
    gradients = [_product(work, work.n, work.k, work.m, itemsize)] * 2
    return [query_key, *dropped, softmax, weights_value, *gradients]


def score_bytes(work: OpWork, kernels: KernelForms, itemsize: int) -> float:
    """Bytes that unfused attention keeps for backward beyond what fused attention keeps.

    Args:
        work: Attention's forward kernel.
        kernels: Whether attention is fused, and whether it drops weights.
        itemsize: Bytes per element of the scores.
    """
    if kernels.attention == "fused":
        return 0.0
    per_element = 2 * itemsize + _MASK_BYTES if kernels.attention_dropout else itemsize
    return _scores(work) * per_element


def _scores(work: OpWork) -> float:
    return float(work.batch * work.m * work.n)


def _product(work: OpWork, m: int, n: int, k: int, itemsize: int) -> OpWork:
    """Batched product of (m, k) and (k, n), one per head."""
    return OpWork(
        kind="matmul",
        flop=2.0 * work.batch * m * n * k,
        read_bytes=float(work.batch * (m * k + k * n) * itemsize),
        write_bytes=float(work.batch * m * n * itemsize),
        batch=work.batch,
        m=m,
        n=n,
        k=k,
        alignment_share=_UNALIGNED_SHARE if work.k * itemsize % ROW_ALIGNMENT else 1.0,
    )


def _softmax(read_bytes: float, write_bytes: float) -> OpWork:
    """A kernel that keeps its row in registers streams like a pointwise one."""
    return OpWork(kind="memory", flop=0.0, read_bytes=read_bytes, write_bytes=write_bytes)


def _gathered_heads(work: OpWork, itemsize: int) -> OpWork:
    """The copy that puts a token's heads, products of their own, beside one another."""
    result_bytes = float(work.batch * work.m * work.k * itemsize)
    return OpWork(kind="memory", flop=0.0, read_bytes=result_bytes, write_bytes=result_bytes)


def _drop(work: OpWork, itemsize: int) -> OpWork:
    """Dropout of the weights, forward or backward; the mask is written or read."""
    scores = _scores(work)
    return OpWork(
        kind="memory",
        flop=0.0,
        read_bytes=scores * itemsize,
        write_bytes=scores * (itemsize + _MASK_BYTES),
    )
