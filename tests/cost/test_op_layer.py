"""One transformer layer of the 22B model against Korthikanti et al. 2022, table 4 (not fitted)."""

import pytest

from planner.cost.collective import all_reduce_s
from planner.cost.op import OpKind, OpWork, op_s
from planner.cost.tables import half_matmul
from planner.hardware.profiles import load_cluster
from planner.hardware.topology import MeshAxis, comm_group

CLUSTER = load_cluster("a100-80gb-sxm", gpus=8)
TP, TOKENS, SEQ, HIDDEN, HEADS, MICROBATCH = 8, 4 * 2048, 2048, 6144, 64, 4
LOCAL_HEADS = MICROBATCH * HEADS // TP
HEAD_DIM = HIDDEN // HEADS
STREAM_BYTES = 2 * TOKENS * HIDDEN
SCORES_BYTES = 2 * LOCAL_HEADS * SEQ * SEQ


def seconds(work: OpWork) -> float:
    return op_s(work, CLUSTER.device, "float16")


def batched(m: int, n: int, k: int) -> OpWork:
    return OpWork(
        kind="matmul",
        flop=2 * LOCAL_HEADS * m * n * k,
        read_bytes=2 * LOCAL_HEADS * (m + n) * k,
        write_bytes=2 * LOCAL_HEADS * m * n,
        batch=LOCAL_HEADS,
        m=m,
        n=n,
        k=k,
    )


def moved(read_bytes: float, write_bytes: float, kind: OpKind = "memory") -> OpWork:
    return OpWork(kind=kind, flop=0, read_bytes=read_bytes, write_bytes=write_bytes)


MATMULS = (
    half_matmul(m=TOKENS, n=3 * HIDDEN // TP, k=HIDDEN),
    batched(SEQ, SEQ, HEAD_DIM),
    batched(SEQ, HEAD_DIM, SEQ),
    half_matmul(m=TOKENS, n=HIDDEN, k=HIDDEN // TP),
    half_matmul(m=TOKENS, n=4 * HIDDEN // TP, k=HIDDEN),
    half_matmul(m=TOKENS, n=HIDDEN, k=4 * HIDDEN // TP),
)


def test_forward_of_a_layer() -> None:
    works = [
        *MATMULS,
        moved(SCORES_BYTES, SCORES_BYTES, "reduction"),
        moved(SCORES_BYTES, 1.5 * SCORES_BYTES),
        moved(4 * STREAM_BYTES / TP, 4 * STREAM_BYTES / TP),
        *2 * [moved(STREAM_BYTES, STREAM_BYTES, "reduction")],
        *2 * [moved(2 * STREAM_BYTES, 1.5 * STREAM_BYTES)],
    ]
    group = comm_group(CLUSTER, MeshAxis(size=TP, stride=1))
    total_s = sum(map(seconds, works)) + 2 * all_reduce_s(STREAM_BYTES, group)
    assert total_s == pytest.approx(7.7e-3, rel=0.12)


def test_backward_of_a_layer() -> None:
    works = [
        *2 * MATMULS,
        moved(2 * SCORES_BYTES, SCORES_BYTES, "reduction"),
        moved(1.5 * SCORES_BYTES, SCORES_BYTES),
        moved(8 * STREAM_BYTES / TP, 4 * STREAM_BYTES / TP),
        *2 * [moved(2 * STREAM_BYTES, STREAM_BYTES, "reduction")],
        *2 * [moved(1.5 * STREAM_BYTES, 2 * STREAM_BYTES)],
    ]
    # The all-reduces of backward hide behind the weight gradients there.
    assert sum(map(seconds, works)) == pytest.approx(11.9e-3, rel=0.12)
