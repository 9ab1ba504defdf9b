"""Hand-made plans, clusters and search outcomes for tests of what is shown and written."""

from dataclasses import replace
from functools import partial
from pathlib import Path

from planner.cost.breakdown import CostBreakdown, MemoryBreakdown
from planner.hardware.profiles import load_cluster
from planner.plan.record import ModelSummary, OpRow, PlanRecord
from planner.plan.types import (
    ModelRef,
    Plan,
    Reason,
    Rejection,
    SearchOutcome,
    SolverReport,
    StagePlan,
)
from planner.request import PlanRequest
from planner.strategy.mesh import ParallelDegrees
from planner.strategy.sharding import ModuleSharding, SplitParameter, UnitSharding
from planner.units import GIB

GPT_FILE = Path(__file__).parents[1] / "examples" / "gpt.py"

NUM_BLOCKS = 12
SEQ_LEN = 1024
GLOBAL_BATCH_SIZE = 64


def make_memory(activations_gib=34.2, **overrides):
    """Memory of one rank; 57 GiB unless told otherwise."""
    parts = {
        "params_bytes": round(3.7 * GIB),
        "grads_bytes": round(3.7 * GIB),
        "optimizer_bytes": round(7.5 * GIB),
        "activations_bytes": round(activations_gib * GIB),
        "buffers_bytes": round(2.1 * GIB),
        "temporary_bytes": round(0.9 * GIB),
        "reserve_bytes": round(5.0 * GIB),
    }
    return MemoryBreakdown(**{**parts, **overrides})


def make_costs(**overrides):
    """Costs of a step of 412 ms."""
    parts = {
        "compute_s": 0.340,
        "recompute_s": 0.0,
        "tp_comm_s": 0.031,
        "pp_comm_s": 0.0,
        "dp_comm_s": 0.022,
        "bubble_s": 0.0,
        "optimizer_s": 0.019,
    }
    return CostBreakdown(**{**parts, **overrides})


def make_stages(degrees, virtual_stages, policy, microbatch_s):
    """Stages of nearly equal length over prologue, blocks and epilogue.

    Each rank computes for ``microbatch_s`` per microbatch.
    """
    num_units, num_stages = NUM_BLOCKS + 2, degrees.pp * virtual_stages
    edges = [round(i * num_units / num_stages) for i in range(num_stages + 1)]
    stages = []
    for index in range(num_stages):
        first, end = edges[index], edges[index + 1]
        alone = make_memory(activations_gib=34.2 - index % degrees.pp)
        stages.append(
            StagePlan(
                index=index,
                pp_rank=index % degrees.pp,
                first_unit=first,
                end_unit=end,
                activation_checkpointing=tuple(
                    policy if 0 < unit < num_units - 1 else "none" for unit in range(first, end)
                ),
                forward_s=microbatch_s / virtual_stages / 3,
                backward_s=microbatch_s / virtual_stages * 2 / 3,
                memory=replace(alone, params_bytes=alone.params_bytes // virtual_stages),
            )
        )
    return tuple(stages)


def make_plan(degrees=None, *, virtual_stages=1, policy="none", **overrides):
    """A plan for a GPT of 12 blocks."""
    degrees = degrees or ParallelDegrees(dp_shard=4, tp=2)
    schedule = "none" if degrees.pp == 1 else "1F1B"
    microbatch_size = overrides.pop("microbatch_size", 2)
    num_microbatches = GLOBAL_BATCH_SIZE // degrees.dp // microbatch_size
    costs = make_costs() if degrees.tp > 1 else make_costs(compute_s=0.371, tp_comm_s=0.0)
    costs = overrides.pop("costs", costs)
    busy_s = costs.compute_s + costs.recompute_s + costs.tp_comm_s + costs.pp_comm_s
    plan = Plan(
        model=ModelRef(
            file=str(GPT_FILE), module=None, factory="build_model", seq_len=None, num_parameters=0
        ),
        degrees=degrees,
        mesh_order=("pp", "dp_replicate", "dp_shard", "cp", "tp"),
        schedule="Interleaved1F1B" if virtual_stages > 1 else schedule,
        virtual_stages=virtual_stages,
        microbatch_size=microbatch_size,
        num_microbatches=num_microbatches,
        global_batch_size=GLOBAL_BATCH_SIZE,
        dtype="bfloat16",
        reshard_after_forward=True,
        sequence_parallel=degrees.tp > 1,
        sequence_dim=1,
        units=("prologue", *(f"layers.{i}" for i in range(NUM_BLOCKS)), "epilogue"),
        tied_parameters=(("wte.weight", "lm_head.weight"),),
        shardings=make_shardings() if degrees.tp > 1 else (),
        stages=make_stages(degrees, virtual_stages, policy, busy_s / num_microbatches),
        memory_by_rank=tuple(
            make_memory(activations_gib=34.2 - rank) for rank in range(degrees.pp)
        ),
        costs=costs,
        tokens_per_step=GLOBAL_BATCH_SIZE * SEQ_LEN,
        flop_per_step=6 * 124_000_000 * GLOBAL_BATCH_SIZE * SEQ_LEN,
    )
    return replace(plan, **overrides)


def make_shardings():
    """A column-row pair in every block."""
    column = ModuleSharding(
        module="mlp.c_fc",
        style="column",
        input_layout="Replicate",
        output_layout="Shard(-1)",
        split=(SplitParameter(name="weight", dim=0),),
    )
    row = replace(
        column,
        module="mlp.c_proj",
        style="row",
        split=(SplitParameter(name="weight", dim=1),),
        input_layout="Shard(-1)",
    )
    return (UnitSharding(axis="tp", units=tuple(range(1, NUM_BLOCKS + 1)), modules=(column, row)),)


def make_cluster(num_gpus=8, gpus_per_node=8):
    """Nodes of 8 devices of 79.1 GiB and 989 TFLOP/s."""
    cluster = load_cluster("h100-sxm", gpus=num_gpus, gpus_per_node=gpus_per_node)
    device = replace(
        cluster.device,
        memory_bytes=round(79.1 * GIB),
        peak_flop_per_s={"bfloat16": 989e12, "float32": 67e12},
    )
    return replace(cluster, device=device)


def make_rejections():
    """Refusals by two rules."""
    memory = tuple(
        Rejection(
            degrees=ParallelDegrees(dp_replicate=8),
            rule="memory",
            why=partial(
                Reason,
                detail=f"needs 91.0 GiB of 79.1 GiB with microbatch {size}; dp_shard 2 would fit",
                peak_memory_bytes=91 * GIB,
            ),
            microbatch_size=size,
        )
        for size in (2, 4, 8)
    )
    heads = tuple(
        Rejection(
            degrees=ParallelDegrees(tp=8),
            rule="kv_heads % tp",
            why=partial(
                Reason, detail="kv_heads 4 is not divisible by tp 8; tp 1, 2, 4 would work"
            ),
        )
        for _ in range(2)
    )
    return (*heads, *memory)


def make_outcome(best=None, **overrides):
    """A best plan, a runner-up, a third and a rule of thumb."""
    best = best or make_plan()
    second = make_plan(
        ParallelDegrees(dp_shard=8),
        model=best.model,
        costs=make_costs(tp_comm_s=0.0, dp_comm_s=0.090),
    )
    third = make_plan(
        ParallelDegrees(dp_shard=4, pp=2),
        model=best.model,
        costs=make_costs(tp_comm_s=0.0, bubble_s=0.060, pp_comm_s=0.010),
    )
    thumb = make_plan(
        ParallelDegrees(dp_shard=8),
        model=best.model,
        policy="full",
        microbatch_size=8,
        costs=make_costs(tp_comm_s=0.0, recompute_s=0.095),
    )
    outcome = SearchOutcome(
        best=best,
        candidates=(best, second, third),
        rule_of_thumb=thumb,
        rejections=make_rejections(),
        solver=SolverReport(
            status="optimal", objective_s=best.costs.step_time_s, bound_s=best.costs.step_time_s
        ),
    )
    return replace(outcome, **overrides)


def make_record(outcome=None, *, cluster=None, **request):
    """A finished run for 8 devices."""
    outcome = outcome or make_outcome()
    fields = {"model": "examples/gpt.py", "gpus": outcome.best.degrees.world_size, **request}
    return PlanRecord(
        request=PlanRequest(**fields),
        model=ModelSummary(name="examples/gpt.py", num_parameters=124_475_904, seq_len=SEQ_LEN),
        cluster=cluster or make_cluster(outcome.best.degrees.world_size),
        outcome=outcome,
        op_rows=(
            OpRow(
                op="mm",
                unit="layers.0",
                module="layers.0.mlp.c_fc",
                stage=0,
                placement="Shard(-1)",
                compute_s=1e-4,
                comm_s=0.0,
                bytes=1_000_000,
            ),
        ),
    )
