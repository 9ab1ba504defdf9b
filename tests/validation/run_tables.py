"""Hand-made tables of runs, and predictions for them."""

import pandas as pd

from planner.cost.breakdown import CostBreakdown, MemoryBreakdown
from planner.units import GIB
from planner.validation.reading.table import read_table
from planner.validation.types import Prediction

ROW = {
    "source": "own log",
    "framework": "nanotron",
    "arch": "llama",
    "model": "Llama 1.3B",
    "params_b": 1.34,
    "layers": 16,
    "hidden": 2048,
    "ffn": 8192,
    "heads": 32,
    "kv_heads": 32,
    "vocab": 131072,
    "seq_len": 4096,
    "gpu": "H100-80GB-SXM",
    "num_gpus": 8,
    "tp": 2,
    "cp": 1,
    "ep": 1,
    "pp": 2,
    "vpp": 1,
    "dp": 2,
    "zero_stage_or_fsdp": "1",
    "micro_batch": 4,
    "global_batch": 256,
    "recompute": "none",
    "seq_parallel": "yes",
    "precision": "bf16",
    "schedule": "1F1B",
    "step_time_s": 4.0,
    "tokens_per_s_per_gpu": 32768.0,
    "tflops_per_gpu": None,
    "mfu": 0.4,
    "peak_mem_gib": 40.0,
    "notes": "",
}
"""A sound row: 256 x 4096 tokens on 8 GPUs in 4 s are 32,768 tokens per second and GPU."""


def make_table(*changes):
    """A table with one row per change to ``ROW``; None leaves a cell empty.

    A row whose step time is changed alone keeps no rate beside it that would contradict.
    """
    rows = []
    for change in changes or ({},):
        row = {**ROW, **change}
        if "step_time_s" in change and "tokens_per_s_per_gpu" not in change:
            row["tokens_per_s_per_gpu"] = None
        rows.append(row)
    return pd.DataFrame(rows)


def make_prediction(row, step_time_s, *, peak_gib=40, feasible=True, assumptions=()):
    """A prediction whose parts add up to its totals."""
    return Prediction(
        row=row,
        step_time_s=step_time_s,
        peak_mem_bytes=peak_gib * GIB,
        feasible=feasible,
        costs=CostBreakdown(
            compute_s=step_time_s / 2,
            recompute_s=0.0,
            tp_comm_s=step_time_s / 4,
            pp_comm_s=0.0,
            dp_comm_s=0.0,
            bubble_s=step_time_s / 8,
            optimizer_s=step_time_s / 8,
        ),
        memory=MemoryBreakdown(
            params_bytes=peak_gib * GIB // 2,
            grads_bytes=0,
            optimizer_bytes=0,
            activations_bytes=peak_gib * GIB // 2,
            buffers_bytes=0,
            temporary_bytes=0,
            reserve_bytes=0,
        ),
        assumptions=assumptions,
    )


def make_runs(*changes):
    """The rows of ``make_table`` as runs; all must be sound. No rate contradicts a change."""
    open_rates = {"tokens_per_s_per_gpu": None, "mfu": None}
    return read_table(make_table(*({**open_rates, **change} for change in changes))).runs
