"""What the script of a plan imports of the runtime."""

from dataclasses import dataclass

from planner.codegen.reads import chooses_parameters, read_sources
from planner.plan.types import Plan
from planner.vocabulary import MESH_ORDER, Axis, Style

_ALWAYS = {
    "checkpoint_folders": {"keep_newest", "newest_checkpoint"},
    "log": {"Expected", "Log"},
    "model": {"UserModel", "build_model", "cast_parameters"},
    "options": {"DTYPES", "Options", "parse_options"},
    "parallel_model": {"ParallelModel"},
    "part": {"reference_part", "shard_parameters"},
    "processes": {"StopRequest", "agreed", "exit_code", "process_group", "run_and_leave"},
}
"""What every script imports."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What a script needs beside its layout."""

    recomputes: bool
    """Blocks of a plan without pipeline are recomputed."""
    is_large: bool
    """The model is drawn shard by shard."""
    loads_data: bool
    """The model file may have a ``data_loader``."""
    spans_nodes: bool
    """Ranks lie on several nodes: where one is gone, torchrun ends those of its own node alone."""
    allocator: str
    """How torch's allocator keeps the memory of GPUs; "" for CPUs."""
    kinds: tuple[tuple[str, int], ...] = ()
    """Kinds of device with their ranks, where there are several."""


def runtime_imports(plan: Plan, needs: Needs) -> list[tuple[str, str]]:
    """Modules of the runtime, each with the names that the script uses of it.

    Args:
        plan: What the script runs.
        needs: What it needs beside its layout.
    """
    names = dict(_ALWAYS) | _needed_imports(plan, needs)
    names["processes"] = {*_ALWAYS["processes"], *(() if needs.loads_data else ("RunError",))}
    if not is_usual_mesh(plan):
        names["mesh_order"] = {"device_mesh"}
    if plan.degrees.pp > 1:
        names |= {
            "anatomy": set() if plan.degrees.splits_modules else {"examine"},
            "pipeline": {"PipelineModel", "pipeline_schedule"},
            "recompute": {"recompute_activations"},
            "shared_parameters": {"SharedParameters"},
            "stages": {"Stage", "StageSpec", "stages_of_rank"},
        }
    else:
        if plan.degrees.splits_modules:
            names["split_part"] = {"SplitPart"}
        else:
            names["part"] = {*_ALWAYS["part"], "Part"}
    if plan.degrees.splits_modules:
        names |= _split_imports(plan)
    if plan.degrees.splits_modules or plan.degrees.pp > 1:
        names["gradients"] = {"clip_gradients"}
    return [(module, ", ".join(sorted(found))) for module, found in sorted(names.items()) if found]


def _needed_imports(plan: Plan, needs: Needs) -> dict[str, set[str]]:
    """What the model and the devices add to them, whatever the layout."""
    data = ("loaders", "Data") if needs.loads_data else ("data", "drawn_microbatches")
    chunks = "split_chunks" if plan.degrees.splits_modules else "chunked_loss"
    products = "split_float8" if plan.degrees.sample_ranks > 1 else "float8"
    compiles_parts = plan.compile and plan.degrees.splits_modules
    wanted = (
        (True, data),
        (needs.recomputes and not compiles_parts, ("recompute", "recompute_activations")),
        (needs.spans_nodes, ("lost_ranks", "lost_ranks_end_all")),
        (bool(needs.kinds), ("device_kinds", "check_devices")),
        (needs.is_large, ("first_weights", "build_deferred", "parameters_on_meta")),
        (plan.model.has_scalars, ("scalars", "hold_scalars_as_vectors")),
        (plan.model.has_groups, ("float64_groups", "allow_float64_groups")),
        (plan.loss_chunks > 1, (chunks, "take_loss_in_chunks")),
        (plan.float8, (products, "multiply_in_float8")),
        (plan.compile and not compiles_parts, ("compiled", "compile_blocks")),
        (compiles_parts, ("split_compiled", "compile_split_blocks")),
        (plan.cpu_offload, ("offload", "keep_on_host")),
        (plan.keeps_inputs_on_host, ("host_inputs", "inputs_on_host")),
        (bool(read_sources(plan)), ("known_data", "DataRead")),
        (chooses_parameters(plan), ("unused", "UnusedParameters")),
    )
    return {module: set(names) for is_wanted, (module, *names) in wanted if is_wanted}


def _split_imports(plan: Plan) -> dict[str, set[str]]:
    """What tensor, context and expert parallelism add to them."""
    used = {"TensorParallel"}
    if sums_gradients(plan):
        used.add("sum_sequence_gradients")
    names = {"tensor_parallel": used, "dry_run": {"DryRun"}, "layout": {"SplitAxis"}}
    names["module_edge"] = {"AxisShardings"}
    if any(group.modules for group in plan.shardings):
        names["module_edge"].add("ModuleSharding")
    if plan.splits_stream:
        names["anatomy"] = {"check_sequence"}
    if plan.degrees.cp > 1:
        names["context_mesh"] = {"merged_mesh", "state_mesh"}
    if plan.degrees.ep > 1:
        names["expert_mesh"] = {"average_experts", "expert_mesh", "shard_experts"}
    return names


def is_usual_mesh(plan: Plan) -> bool:
    """Say whether the axes that are used lie around one another as ``init_device_mesh`` takes them.

    FSDP2 gets the ranks of dp_shard, one or several, so that it counts as used.
    """
    order = [
        axis
        for axis in plan.mesh_order
        if axis == Axis.DP_SHARD or getattr(plan.degrees, axis, 1) > 1
    ]
    return order == [axis for axis in MESH_ORDER if axis in order]


def sums_gradients(plan: Plan) -> bool:
    """Say whether modules see a part of their input only, whose gradients are summed over tp."""
    return plan.degrees.tp > 1 and any(
        module.style == Style.ON_PART
        for each in plan.shardings
        if each.axis == Axis.TP
        for module in each.modules
    )
