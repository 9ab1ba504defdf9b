"""From a plan to the text of ``train.py``.

The script is this plan and nothing else: constants, mesh, stages, loop. What it calls is in the
modules of ``planner/runtime`` that it imports, which are copied beside it.
"""

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from planner.codegen.expected import expected_source
from planner.codegen.imports import Needs, is_usual_mesh, runtime_imports, sums_gradients
from planner.codegen.model_files import ModelFiles, model_files
from planner.codegen.reads import chooses_parameters, read_sources
from planner.codegen.source import (
    LINE_LENGTH,
    call_of,
    quote,
    runs_of,
    wrapped_tuple,
)
from planner.codegen.splits import block_positions, split_source
from planner.errors import CodegenError
from planner.graph.operator_graph import ModuleOutput
from planner.hardware.spec import ClusterSpec
from planner.plan.devices import cluster_of
from planner.plan.types import ModelRef, Plan, StagePlan
from planner.rendering import render
from planner.strategy.mesh import ParallelDegrees
from planner.strategy.schedules import rank_of_stage
from planner.units import format_bytes, format_count, format_s
from planner.vocabulary import (
    PLANNED_SCHEDULES,
    ZERO_BUBBLE_SCHEDULES,
    Axis,
    Recomputation,
)

MOST_BUILT_PARAMETERS = 1_000_000_000
"""Larger models are not built whole on every rank: each draws its own shards."""


ALLOCATOR = "expandable_segments:True"
"""How torch's allocator keeps the memory of a GPU: FSDP2's tensors leave holes in segments of fixed
size, which hold gigabytes that nothing fits into."""


def emit_script(
    plan: Plan, *, cluster: ClusterSpec | None = None, folder: Path | None = None
) -> str:
    """Write the training script of a plan.

    Args:
        plan: What to run.
        cluster: What it was planned for; without it ranks may lie on several nodes.
        folder: Where the script will lie: files outside of it are then named relative to it.

    Returns:
        Python source, the same for equal arguments.

    Raises:
        CodegenError: The plan cannot be expressed as a script, or the model's code is gone.
    """
    _check(plan)
    user = model_files(plan.model, folder)
    recompute = _whole_recompute(plan) if plan.degrees.pp == 1 else ""
    needs = Needs(
        recomputes=bool(recompute),
        is_large=plan.model.num_parameters > MOST_BUILT_PARAMETERS,
        loads_data=user.loads_data,
        spans_nodes=cluster is None or cluster.num_nodes > 1,
        allocator="" if cluster is not None and cluster.host_is_device else ALLOCATOR,
        kinds=_kinds(plan, cluster),
    )
    return render(
        "codegen/train.py.j2",
        plan=plan,
        world_size=plan.degrees.world_size,
        model_words=_model_words(plan.model),
        summary=_summary(plan),
        imports=runtime_imports(plan, needs),
        model_arguments=_model_arguments(plan.model, user),
        copies=user.provenance,
        expected=expected_source(plan, cluster),
        blocks=_blocks_source(block_names(plan)),
        has_pp=plan.degrees.pp > 1,
        data_reads=read_sources(plan),
        has_choices=chooses_parameters(plan),
        stages=[_stage_source(plan, stage) for stage in plan.stages],
        recompute=recompute,
        changed_buffers=plan.model.changed_buffers if recompute or plan.degrees.pp > 1 else (),
        carries=any(stage.carried or stage.stream_output for stage in plan.stages),
        gradient_sums=_gradient_sums(plan),
        needs=needs,
        **_meshes(plan),
        **split_source(plan),
    )


def _kinds(plan: Plan, cluster: ClusterSpec | None) -> tuple[tuple[str, int], ...]:
    """Kinds of device in the order of the plan's ranks, () where all are alike."""
    parts = () if cluster is None else cluster_of(plan, cluster).parts
    return tuple((part.device.name, part.num_gpus) for part in parts)


def _meshes(plan: Plan) -> dict[str, object]:
    """The axes of the mesh, and how it and that of the state are made."""
    return {
        "mesh": _mesh(plan),
        "is_usual_mesh": is_usual_mesh(plan),
        "merges": plan.degrees.cp > 1,
        "state_mesh": "state_mesh(merged)" if plan.degrees.cp > 1 else _data_mesh(plan),
        "data_mesh": _data_mesh(plan) if plan.degrees.cp > 1 else "shards",
    }


def _gradient_sums(plan: Plan) -> list[str]:
    """What completes gradients after backward."""
    sums = []
    if sums_gradients(plan):
        sums.append("partial(sum_sequence_gradients, parts, mesh)")
    if plan.degrees.ep > 1:
        ranks = plan.degrees.sample_ranks
        batches = f"EXPERT_RANKS // {ranks}" if ranks > 1 else "EXPERT_RANKS"
        sums.append(f"partial(average_experts, parts, {batches})")
    if plan.degrees.pp > 1:
        sums.append("shared.sum_gradients")
    # torch writes gradients of a divided backward itself, so that no hook says which were used.
    if chooses_parameters(plan) and plan.schedule not in ZERO_BUBBLE_SCHEDULES:
        sums.append("unused.leave_out")
    return sums


def _check(plan: Plan) -> None:
    """Refuse what the script cannot express.

    Raises:
        CodegenError: With what would work.
    """
    degrees = plan.degrees
    if plan.model.file is None and plan.model.module is None:
        raise CodegenError(
            "the model was passed as an object, and a script cannot import it",
            hint="put it into a file with build_model() and example_batch(), and plan that file",
        )
    if degrees.pp > 1 and plan.schedule not in PLANNED_SCHEDULES:
        raise CodegenError(
            f"schedule {plan.schedule!r} is not among those that the script can run",
            hint=f"plan with --fix schedule=NAME, one of {', '.join(PLANNED_SCHEDULES)}",
        )
    for stage in plan.stages:
        pp_rank = rank_of_stage(plan.schedule, stage.index, degrees.pp)
        if stage.pp_rank != pp_rank:
            raise CodegenError(
                f"stage {stage.index} is on pipeline rank {stage.pp_rank}, but {plan.schedule} "
                f"places it on rank {pp_rank}",
                hint="give each stage to the rank that its schedule has for it",
            )
    _check_sequence(plan)


def _check_sequence(plan: Plan) -> None:
    """Refuse a split sequence where more than the stream crosses a cut.

    Raises:
        CodegenError: With what would work.
    """
    for stage in plan.stages:
        others = [*stage.carried, *([stage.stream_output] if stage.stream_output else [])]
        if plan.splits_stream and others:
            raise CodegenError(
                f"stage {stage.index} needs the output of {others[0].module} beside its first "
                "block, and where the sequence is split stages hand over their part of the stream "
                "alone",
                hint="plan with --fix sequence_parallel=false --fix cp=1 or --fix pp=1",
            )


def block_names(plan: Plan) -> list[str]:
    """Name the blocks in execution order."""
    return [plan.units[unit] for unit in block_positions(plan)]


def _model_words(model: ModelRef) -> str:
    source = str(model.file or model.module)
    return source if model.is_config else f"{source}:{model.factory}"


def _model_arguments(model: ModelRef, user: ModelFiles) -> str:
    arguments = [*user.arguments, f"factory={quote(model.factory)}"]
    if model.seq_len is not None:
        arguments.append(f"seq_len={model.seq_len}")
    one_line = ", ".join(arguments)
    if len(one_line) + len("MODEL = UserModel()") <= LINE_LENGTH:
        return one_line
    return "\n    " + ",\n    ".join(arguments) + ",\n"


def _mesh(plan: Plan) -> str:
    """Give the axes that are used, and dp_shard, whose ranks FSDP2 gets, one or several."""
    axes = [
        f'"{axis}": {getattr(plan.degrees, axis)}'
        for axis in plan.mesh_order
        if axis != Axis.EP and (axis == Axis.DP_SHARD or getattr(plan.degrees, axis) > 1)
    ]
    return "{" + ", ".join(axes) + "}"


def _data_mesh(plan: Plan) -> str:
    """Take the ranks that read different samples from the mesh."""
    axes = (Axis.DP_REPLICATE, Axis.DP_SHARD) if plan.degrees.dp_replicate > 1 else (Axis.DP_SHARD,)
    return f"mesh[{', '.join(map(quote, axes))}]"


def _blocks_source(blocks: Sequence[str]) -> str:
    """Name the blocks, as ranges where they are numbered."""
    items = []
    for parent, group in groupby(blocks, lambda block: block.rpartition(".")[0]):
        prefix, names = f"{parent}." if parent else "", list(group)
        if len(names) > 2 and names == [f"{prefix}{i}" for i in range(len(names))]:
            items.append(f'*(f"{prefix}{{i}}" for i in range({len(names)}))')
        else:
            items += map(quote, names)
    if len(items) == 1 and items[0].startswith("*"):
        return f"tuple{items[0].removeprefix('*')}"
    return wrapped_tuple(items, column=len("BLOCKS = "), indent=0)


def blocks_of_stage(plan: Plan, stage: StagePlan) -> range:
    """Positions among the blocks of those that a stage runs."""
    positions = block_positions(plan)
    held = _held(plan, stage)
    before = [b for u, b in positions.items() if u < stage.first_unit]
    first = positions[held[0]] if held else (max(before) + 1 if before else 0)
    return range(first, first + len(held))


def _held(plan: Plan, stage: StagePlan) -> list[int]:
    """Units of a stage that are blocks."""
    positions = block_positions(plan)
    return [u for u in range(stage.first_unit, stage.end_unit) if u in positions]


def _stage_source(plan: Plan, stage: StagePlan) -> str:
    blocks = blocks_of_stage(plan, stage)
    recompute = _recompute(plan, stage, _held(plan, stage))
    arguments = [str(stage.pp_rank), str(blocks.start), str(blocks.stop)]
    if any(mode != Recomputation.NONE for mode in recompute):
        arguments.append(runs_of(recompute))
    if stage.carried:
        outputs = [_output(output) for output in stage.carried]
        received = wrapped_tuple(outputs, column=8 + len("receives="), indent=8)
        arguments.append(f"receives={received}")
    if stage.stream_output is not None:
        arguments.append(f"stream_output={_output(stage.stream_output)}")
    return call_of("StageSpec", arguments, indent=4)


def _output(output: ModuleOutput) -> str:
    return f"({quote(output.module)}, {output.index})"


def _whole_recompute(plan: Plan) -> str:
    """Recomputation of all blocks of a plan without pipeline, "" for none at all."""
    (stage,) = plan.stages
    positions = block_positions(plan)
    modes = _recompute(plan, stage, [u for u in range(stage.end_unit) if u in positions])
    return runs_of(modes) if any(mode != "none" for mode in modes) else ""


def _recompute(plan: Plan, stage: StagePlan, held: Sequence[int]) -> list[str]:
    modes = stage.activation_checkpointing
    for offset, mode in enumerate(modes):
        unit = stage.first_unit + offset
        if mode != Recomputation.NONE and unit not in held:
            raise CodegenError(
                f"{plan.units[unit]} is to be recomputed ({mode}), but the script can recompute "
                "blocks only",
                hint="plan with --fix activation_checkpointing=none",
            )
    return [modes[unit - stage.first_unit] for unit in held]


def _summary(plan: Plan) -> list[str]:
    modes = [mode for stage in plan.stages for mode in stage.activation_checkpointing]
    counts = {
        mode: modes.count(mode)
        for mode in (Recomputation.FULL, Recomputation.SELECTIVE)
        if mode in modes
    }
    recompute = ", ".join(f"{count} blocks {mode}" for mode, count in counts.items()) or "none"
    has_tokens = plan.tokens_per_step > plan.global_batch_size
    tokens = f" ({format_count(plan.tokens_per_step)} tokens)" if has_tokens else ""
    batch = (
        f"{plan.global_batch_size} samples{tokens}: "
        f"{_counted(plan.num_microbatches, 'microbatch', 'es')} of {plan.microbatch_size} on "
        f"{_counted(plan.degrees.dp, 'data-parallel rank', 's')}"
    )
    sharding = "ZeRO-3" if plan.reshard_after_forward else "ZeRO-2"
    lines = [
        ("Layout", _layout_words(plan.degrees, plan.mesh_order)),
        ("Batch", batch),
        ("Schedule", f"{plan.schedule}, {len(plan.stages)} stages" if plan.stages[1:] else ""),
        ("Tensor", "sequence parallel between regions" if plan.sequence_parallel else ""),
        ("Sharding", f"FSDP2, {sharding}" if plan.degrees.dp > 1 else ""),
        ("State", "in host memory" if plan.cpu_offload else ""),
        ("Recompute", recompute),
        ("Inputs", "of blocks in host memory" if plan.keeps_inputs_on_host else ""),
        ("Float8", "products of linear layers of blocks" if plan.float8 else ""),
        ("Compile", "blocks by torch.compile" if plan.compile else ""),
        ("Loss", f"in {plan.loss_chunks} chunks of rows" if plan.loss_chunks > 1 else ""),
        ("Dtype", plan.dtype),
        (
            "Predicted",
            f"{format_s(plan.costs.step_time_s)} a step, "
            f"{format_bytes(plan.peak_memory_bytes)} on the fullest rank",
        ),
    ]
    return [f"{name:10} {words}" for name, words in lines if words]


def _counted(count: int, one: str, ending: str) -> str:
    return f"{count} {one}" if count == 1 else f"{count} {one}{ending}"


def _layout_words(degrees: ParallelDegrees, order: Sequence[str]) -> str:
    used = [f"{axis} {getattr(degrees, axis)}" for axis in order if getattr(degrees, axis) > 1]
    if degrees.ep > 1:
        lenders = (Axis.DP_SHARD, *degrees.sample_axes)
        used.append(f"ep {degrees.ep} (of {' and '.join(lenders)})")
    return " x ".join(used) or "one device"
