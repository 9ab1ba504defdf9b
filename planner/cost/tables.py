"""Measurements of ops and collectives as samples that a price can be held to.

Published ones lie in ``profiles/published``, those that ``tests/bench/gpu/measure.py`` made in
``profiles/measured``, a folder for each device.
"""

import csv
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from planner.cost.op import OpWork
from planner.cost.work import op_kind
from planner.errors import ProfileError
from planner.graph.analysis.causal import masked_pairs
from planner.hardware.profiles import PROFILES_FOLDER
from planner.vocabulary import Dtype

PUBLISHED_FOLDER = PROFILES_FOLDER / "published"
"""Tables of published measurements; each row names its source."""

MEASURED_FOLDER = PROFILES_FOLDER / "measured"
"""Tables of measured devices; a folder is named as the profile of its device."""

KERNELS_TABLE = "kernels.csv"
"""Single ops of a measured device."""

Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "send_recv"]

_HALF_BYTES = 2
_GPT_HIDDEN = {
    "gpt-350M": 1024,
    "gpt-1_3B": 2048,
    "gpt-2_6B": 2560,
    "gpt-6_7B": 4096,
    "gpt-13B": 5120,
}
_GPT_SEQ_LEN = 2048
_HOST_BOUND_S = 300e-6
"""Times of op_times_v100 below this hold 30 us and more of the host's time."""
_LEAST_BUS_BANDWIDTH = 0.1e9
"""Bandwidths below this are printed with too few digits (and include the warm-up)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpSample:
    """One measured op."""

    table: str
    """Table it stands in."""
    gpu: str
    """Device as the table names it."""
    group: str
    """Part of the table: "matmul", "residual add"."""
    works: tuple[OpWork, ...]
    """Kernels that ran, one after the other."""
    dtype: str
    """Compute dtype."""
    measured_s: float
    """Its time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveSample:
    """One measured collective or transfer."""

    table: str
    """Table it stands in."""
    system: str
    """Cluster or device as the table names it."""
    collective: Collective
    """What ran."""
    num_ranks: int
    """Ranks that took part."""
    num_nodes: int
    """Nodes they are on, equally many on each."""
    payload_bytes: float
    """Whole tensor on one rank."""
    setting: str
    """Algorithm as the table states it, "" where it says nothing."""
    measured_s: float
    """Its time."""


def half_matmul(*, m: int, n: int, k: int) -> OpWork:
    """Describe an (m, k) @ (k, n) matmul in a 2-byte dtype."""
    return OpWork(
        kind="matmul",
        flop=2 * m * n * k,
        read_bytes=_HALF_BYTES * (m * k + k * n),
        write_bytes=_HALF_BYTES * m * n,
        m=m,
        n=n,
        k=k,
    )


def matmul_samples() -> Iterator[OpSample]:
    """Read the matmuls of transformer layers on A100, H100 and A40."""
    for row in _rows("gemm_measurements"):
        yield OpSample(
            table="gemm_measurements",
            gpu=row["gpu"],
            group="matmul",
            works=(half_matmul(m=int(row["m"]), n=int(row["n"]), k=int(row["k"])),),
            dtype=Dtype.FLOAT16,
            measured_s=float(row["time_s"]),
        )


def elementwise_samples() -> Iterator[OpSample]:
    """Read norms, activations and residual adds on A100, H100 and A40."""
    for row in _rows("elementwise_measurements"):
        group = row["op"].split(" (")[0]
        yield OpSample(
            table="elementwise_measurements",
            gpu=row["gpu"],
            group=group,
            works=(
                OpWork(
                    kind="reduction" if group == "rms_norm" else "memory",
                    flop=0,
                    read_bytes=float(row["min_bytes_moved"]),
                    write_bytes=0,
                ),
            ),
            dtype=Dtype.FLOAT16,
            measured_s=float(row["time_s"]),
        )


def v100_samples() -> Iterator[OpSample]:
    """Read forward and backward of GPT's ops on V100, without those that communicate.

    Row-parallel projections communicate in forward, column-parallel ones in backward, so that
    these are taken at tp 1 only.
    """
    for row in _rows("op_times_v100_gpt"):
        tp = int(row["tp"])
        tokens = int(row["micro_batch"]) * _GPT_SEQ_LEN
        hidden = _GPT_HIDDEN[row["model"]]
        op = row["op_name"].removeprefix("enc-")
        forward = _v100_forward(op, tokens=tokens, hidden=hidden, tp=tp)
        if forward is None:
            continue
        row_parallel = op in ("attention-dense", "MLP-GEMM-2")
        column_parallel = op in ("attention-qkv", "MLP-GEMM-1")
        times: list[tuple[tuple[OpWork, ...], float]] = []
        if tp == 1 or not row_parallel:
            times.append(((forward,), float(row["forward_us"])))
        if tp == 1 or not column_parallel:
            times.append((_backward(forward), float(row["backward_us"])))
        for works, time_us in times:
            if time_us * 1e-6 >= _HOST_BOUND_S:
                yield OpSample(
                    table="op_times_v100_gpt",
                    gpu=row["gpu"],
                    group={"memory": "gelu", "reduction": "layernorm"}.get(forward.kind, "matmul"),
                    works=works,
                    dtype=Dtype.FLOAT16,
                    measured_s=time_us * 1e-6,
                )


def collective_samples() -> Iterator[CollectiveSample]:
    """Read all-reduce, all-gather, reduce-scatter and send/recv, inside and across nodes."""
    for row in _rows("collective_times"):
        yield CollectiveSample(
            table="collective_times",
            system=row["cluster"],
            collective=_collective(row["collective"]),
            num_ranks=int(row["num_ranks"]),
            num_nodes=int(row["num_nodes"]),
            payload_bytes=float(row["payload_bytes"]),
            setting="",
            measured_s=float(row["time_s"]),
        )
    for row in _rows("collective_bandwidth_measurements"):
        ranks = int(row["num_gpus"])
        bus_bytes_per_s = float(row["busbw_GBps"] or 0) * 1e9
        if bus_bytes_per_s < _LEAST_BUS_BANDWIDTH:
            continue
        payload_bytes = float(row["payload_bytes"])
        rounds = 2 if row["collective"] == "all_reduce" else 1
        yield CollectiveSample(
            table="collective_bandwidth_measurements",
            system=row["gpu"],
            collective=_collective(row["collective"]),
            num_ranks=ranks,
            num_nodes=int(row["num_nodes"]),
            payload_bytes=payload_bytes,
            setting=row["algo_or_setting"],
            measured_s=rounds * payload_bytes * (ranks - 1) / ranks / bus_bytes_per_s,
        )


def measured_folders(parent: Path = MEASURED_FOLDER) -> tuple[Path, ...]:
    """List the folders of measured devices; there may be none."""
    return tuple(sorted(path.parent for path in parent.glob(f"*/{KERNELS_TABLE}")))


def measured_samples(folder: Path) -> Iterator[OpSample]:
    """Read the ops of a measured device.

    Args:
        folder: What ``tests/bench/gpu/measure.py`` wrote, named as the profile of its device.

    Raises:
        ProfileError: A row lacks a column, or has a word where a number belongs.
    """
    path = folder / KERNELS_TABLE
    with path.open(newline="", encoding="utf-8") as file:
        for number, row in enumerate(csv.DictReader(file), start=2):
            try:
                yield _measured_sample(folder.name, row)
            except (KeyError, ValueError, TypeError) as error:
                raise ProfileError(
                    f"{path}, line {number}: {error!r}",
                    hint="A run that was killed can leave half a line at the end: remove it.",
                ) from error


def _measured_sample(device: str, row: dict[str, str]) -> OpSample:
    kernel = row["kernel"]
    kind = op_kind(kernel)
    flop = int(row["flop"])
    batch, m, n, k = (int(row[name]) for name in ("batch", "m", "n", "k"))
    masked_flop = 0
    if int(row["causal"]):
        masked_flop = flop // (m * n) * masked_pairs(m, n)
    seconds = float(row["seconds"])
    if seconds <= 0 or int(row["repeats"]) < 1:  # the last column: the line is whole
        raise ValueError(f"seconds is {row['seconds']} and repeats {row['repeats']}")
    return OpSample(
        table=f"measured/{device}",
        gpu=device,
        group=f"{kernel.removeprefix('_scaled_dot_product_')} {row['dtype']}",
        works=(
            OpWork(
                kind=kind,
                flop=flop,
                masked_flop=masked_flop,
                read_bytes=float(row["read_bytes"]),
                write_bytes=float(row["write_bytes"]),
                batch=batch,
                m=m,
                n=n,
                k=k,
                backward=row["phase"] == "backward",
            ),
        ),
        dtype=row["dtype"],
        measured_s=seconds,
    )


def _rows(table: str) -> Iterator[dict[str, str]]:
    with (PUBLISHED_FOLDER / f"{table}.csv").open(newline="", encoding="utf-8") as file:
        yield from csv.DictReader(file)


def _collective(name: str) -> Collective:
    for known in ("all_reduce", "all_gather", "reduce_scatter", "send_recv"):
        if name == known:
            return known
    raise ValueError(f"unknown collective {name!r} in a published table")


def _v100_forward(op: str, *, tokens: int, hidden: int, tp: int) -> OpWork | None:
    """Describe the forward work of one op of GPT, None for those that are not used."""
    if op == "attention-qkv":
        return half_matmul(m=tokens, n=3 * hidden // tp, k=hidden)
    if op == "attention-dense":
        return half_matmul(m=tokens, n=hidden, k=hidden // tp)
    if op == "MLP-GEMM-1":
        return half_matmul(m=tokens, n=4 * hidden // tp, k=hidden)
    if op == "MLP-GEMM-2":
        return half_matmul(m=tokens, n=hidden, k=4 * hidden // tp)
    if op == "MLP-gelu":
        size_bytes = _HALF_BYTES * tokens * 4 * hidden // tp
        return OpWork(kind="memory", flop=0, read_bytes=size_bytes, write_bytes=size_bytes)
    if op == "1st-layernorm":
        size_bytes = _HALF_BYTES * tokens * hidden
        return OpWork(kind="reduction", flop=0, read_bytes=size_bytes, write_bytes=size_bytes)
    return None


def _backward(forward: OpWork) -> tuple[OpWork, ...]:
    """Describe the backward of an op: two matmuls, or one kernel that reads one tensor more."""
    if forward.kind == "matmul":
        m, n, k = forward.m, forward.n, forward.k
        return half_matmul(m=m, n=k, k=n), half_matmul(m=k, n=n, k=m)
    return (replace(forward, read_bytes=2 * forward.read_bytes),)
