"""From a plan to the text of ``train.py``.

The script is this plan and nothing else: constants, mesh, stages, loop. What it calls is in
``codegen/runtime/parallel.py``, which is copied beside it.
"""

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from planner.errors import CodegenError
from planner.graph.operator_graph import ModuleOutput
from planner.plan.types import ModelRef, Plan, StagePlan
from planner.strategy.mesh import ParallelDegrees
from planner.strategy.sharding import ModuleSharding
from planner.units import format_bytes, format_count, format_s
from planner.vocabulary import MESH_ORDER, PLANNED_SCHEDULES, Axis, Recomputation, Style

MODEL_NAME = "model.py"
"""Model file beside the script of a Hugging Face config."""

_LINE_LENGTH = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class _BlockGroup:
    """Tensor-parallel instructions of blocks of one structure, as source text."""

    blocks: str
    modules: tuple[str, ...]


def emit_script(plan: Plan, *, folder: Path | None = None) -> str:
    """Write the training script of a plan.

    Args:
        plan: What to run.
        folder: Where the script will lie: the model file is then named relative to it, so that
            both can be moved together. None names it by its absolute path.

    Returns:
        Python source, the same for equal arguments.

    Raises:
        CodegenError: The plan cannot be expressed as a script.
    """
    _check(plan)
    blocks = _block_names(plan)
    has_tp = plan.degrees.tp > 1
    sharded = [m for group in plan.shardings for m in group.modules] if has_tp else []
    return (
        _environment()
        .get_template("train.py.j2")
        .render(
            plan=plan,
            world_size=plan.degrees.world_size,
            model_words=_model_words(plan.model),
            summary=_summary(plan),
            parallel_names=", ".join(
                sorted({"StageSpec", "UserModel", *(["ModuleSharding"] if sharded else [])})
            ),
            model_arguments=_model_arguments(plan.model, folder),
            mesh=_mesh(plan),
            blocks=_blocks_source(blocks),
            stages=[_stage_source(plan, stage) for stage in plan.stages],
            carries=any(stage.carried or stage.stream_output for stage in plan.stages),
            has_tp=has_tp,
            block_groups=_block_groups(plan) if has_tp else [],
            outer_modules=_outer_modules(plan) if has_tp else [],
            sequence_dim=plan.sequence_dim if plan.sequence_parallel else None,
            splits_vocabulary=_splits_vocabulary(plan),
        )
    )


@cache
def _environment() -> Environment:
    return Environment(
        loader=PackageLoader("planner", "codegen"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # Python source, no markup
    )


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
    if degrees.cp > 1 or degrees.ep > 1:
        raise CodegenError(
            f"the script has no context or expert parallelism yet (cp {degrees.cp}, ep "
            f"{degrees.ep})",
            hint="plan with --fix cp=1 --fix ep=1",
        )
    if degrees.pp > 1 and plan.schedule not in PLANNED_SCHEDULES:
        raise CodegenError(
            f"schedule {plan.schedule!r} is not among those that the script can run",
            hint=f"plan with --fix schedule=NAME, one of {', '.join(PLANNED_SCHEDULES)}",
        )
    for stage in plan.stages:
        if stage.pp_rank != stage.index % degrees.pp:
            raise CodegenError(
                f"stage {stage.index} is on pipeline rank {stage.pp_rank}, but {plan.schedule} "
                f"places it on rank {stage.index % degrees.pp}",
                hint="give stage s to rank s modulo pp",
            )
    _check_sequence(plan)
    inner = (Axis.DP_REPLICATE, Axis.DP_SHARD, Axis.TP)
    order = [axis for axis in plan.mesh_order if axis in inner]
    if degrees.tp > 1 and order[-1:] != [Axis.TP]:
        raise CodegenError(
            f"mesh order {' x '.join(plan.mesh_order)} has tp outside of data parallelism, which "
            "FSDP2 does not take",
            hint="order the axes so that tp comes after dp_replicate and dp_shard",
        )


def _check_sequence(plan: Plan) -> None:
    """Refuse a split sequence where more than the stream crosses a cut.

    Raises:
        CodegenError: With what would work.
    """
    for stage in plan.stages:
        others = [*stage.carried, *([stage.stream_output] if stage.stream_output else [])]
        if plan.sequence_parallel and others:
            raise CodegenError(
                f"stage {stage.index} needs the output of {others[0].module} beside its first "
                "block, and under sequence parallelism stages hand over the split stream alone",
                hint="plan with --fix sequence_parallel=false or --fix pp=1",
            )


def _block_names(plan: Plan) -> list[str]:
    return [plan.units[unit] for unit in _block_positions(plan)]


def _block_positions(plan: Plan) -> dict[int, int]:
    """Map the position of a unit to the position of its block."""
    units = [i for i, unit in enumerate(plan.units) if unit not in ("prologue", "epilogue")]
    return {} if plan.units == ("model",) else {unit: block for block, unit in enumerate(units)}


def _model_words(model: ModelRef) -> str:
    source = str(model.file or model.module)
    return source if model.is_config else f"{source}:{model.factory}"


def _model_arguments(model: ModelRef, folder: Path | None) -> str:
    arguments = []
    if model.is_config:
        arguments.append(f"file=Path(__file__).resolve().parent / {_quote(MODEL_NAME)}")
    elif model.file is not None:
        path = Path(model.file).resolve()
        if folder is None:
            arguments.append(f"file=Path({_quote(path.as_posix())})")
        else:
            relative = Path(os.path.relpath(path, folder.resolve())).as_posix()
            arguments.append(f"file=Path(__file__).resolve().parent / {_quote(relative)}")
    else:
        arguments.append(f"module={_quote(str(model.module))}")
    arguments.append(f"factory={_quote(model.factory)}")
    if model.seq_len is not None:
        arguments.append(f"seq_len={model.seq_len}")
    one_line = ", ".join(arguments)
    if len(one_line) + len("MODEL = UserModel()") <= _LINE_LENGTH:
        return one_line
    return "\n    " + ",\n    ".join(arguments) + ",\n"


def _quote(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _mesh(plan: Plan) -> str:
    """Give the axes that are used; dp_shard is kept at 1, since FSDP2 is always applied."""
    axes = [
        f'"{axis}": {getattr(plan.degrees, axis)}'
        for axis in plan.mesh_order
        if axis != Axis.EP and (axis == Axis.DP_SHARD or getattr(plan.degrees, axis) > 1)
    ]
    return "{" + ", ".join(axes) + "}"


def _blocks_source(blocks: Sequence[str]) -> str:
    """Name the blocks, as ranges where they are numbered."""
    items = []
    for parent, group in groupby(blocks, lambda block: block.rpartition(".")[0]):
        prefix, names = f"{parent}." if parent else "", list(group)
        if len(names) > 2 and names == [f"{prefix}{i}" for i in range(len(names))]:
            items.append(f'*(f"{prefix}{{i}}" for i in range({len(names)}))')
        else:
            items += map(_quote, names)
    if len(items) == 1 and items[0].startswith("*"):
        return f"tuple{items[0].removeprefix('*')}"
    return _wrapped_tuple(items, column=len("BLOCKS = "), indent=0)


def _tuple(items: Iterable[str]) -> str:
    listed = list(items)
    return f"({listed[0]},)" if len(listed) == 1 else f"({', '.join(listed)})"


def _stage_source(plan: Plan, stage: StagePlan) -> str:
    positions = _block_positions(plan)
    held = [u for u in range(stage.first_unit, stage.end_unit) if u in positions]
    before = [b for u, b in positions.items() if u < stage.first_unit]
    first = positions[held[0]] if held else (max(before) + 1 if before else 0)
    recompute = _recompute(plan, stage, held)
    arguments = [str(stage.pp_rank), str(first), str(first + len(held))]
    if any(mode != Recomputation.NONE for mode in recompute):
        arguments.append(_runs(recompute))
    if stage.carried:
        outputs = [_output(output) for output in stage.carried]
        received = _wrapped_tuple(outputs, column=8 + len("receives="), indent=8)
        arguments.append(f"receives={received}")
    if stage.stream_output is not None:
        arguments.append(f"stream_output={_output(stage.stream_output)}")
    return _call("StageSpec", arguments, indent=4)


def _output(output: ModuleOutput) -> str:
    return f"({_quote(output.module)}, {output.index})"


def _wrapped_tuple(items: Sequence[str], *, column: int, indent: int) -> str:
    """Write a tuple that starts at a column, an item a line where it does not fit on one.

    Args:
        items: Its items.
        column: Where it starts; at most one character follows it.
        indent: Where its last line starts if it takes several.
    """
    one_line = _tuple(items)
    if column + len(one_line) + 1 <= _LINE_LENGTH:
        return one_line
    inner = "".join(f"{' ' * (indent + 4)}{item},\n" for item in items)
    return f"(\n{inner}{' ' * indent})"


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


def _runs(words: Sequence[str]) -> str:
    """Write a tuple of words as a sum of repetitions."""
    runs = [(word, len(list(group))) for word, group in groupby(words)]
    parts = [f'("{word}",)' + (f" * {count}" if count > 1 else "") for word, count in runs]
    return " + ".join(parts)


def _block_groups(plan: Plan) -> list[_BlockGroup]:
    positions = _block_positions(plan)
    groups = []
    for sharding in plan.shardings:
        blocks = [positions[unit] for unit in sharding.units if unit in positions]
        if blocks and sharding.modules:
            modules = tuple(_module_source(module, indent=12) for module in sharding.modules)
            groups.append(_BlockGroup(blocks=_range(blocks), modules=modules))
    return groups


def _range(numbers: Sequence[int]) -> str:
    first, end = numbers[0], numbers[-1] + 1
    if list(numbers) == list(range(first, end)):
        return f"range({end})" if first == 0 else f"range({first}, {end})"
    return _tuple(str(number) for number in numbers)


def _outer_modules(plan: Plan) -> list[str]:
    positions = _block_positions(plan)
    return [
        _module_source(module, indent=4)
        for sharding in plan.shardings
        if any(unit not in positions for unit in sharding.units)
        for module in sharding.modules
    ]


def _module_source(module: ModuleSharding, *, indent: int) -> str:
    """Write one instruction; what is the default of the runtime's own class is left out."""
    arguments = [_quote(module.module), _quote(module.style)]
    if module.style != Style.SEQUENCE:
        if module.input_layout != "Replicate":
            arguments.append(f"input_layout={_quote(module.input_layout)}")
        if module.output_layout != "Replicate":
            arguments.append(f"output_layout={_quote(module.output_layout)}")
        if not module.output_is_local:
            arguments.append("output_is_local=False")
        if module.fused != 1:
            arguments.append(f"fused={module.fused}")
    return _call("ModuleSharding", arguments, indent=indent)


def _call(name: str, arguments: Sequence[str], *, indent: int) -> str:
    """Write a call that starts at a column and is followed by a comma, on one line if it fits."""
    one_line = f"{name}({', '.join(arguments)})"
    if indent + len(one_line) + 1 <= _LINE_LENGTH:
        return one_line
    inner = "".join(f"{' ' * (indent + 4)}{argument},\n" for argument in arguments)
    return f"{name}(\n{inner}{' ' * indent})"


def _splits_vocabulary(plan: Plan) -> bool:
    """Say whether the logits leave the model split over tp, so that the loss is too."""
    positions = _block_positions(plan)
    return plan.degrees.tp > 1 and any(
        module.style == Style.COLUMN
        and module.output_layout.startswith("Shard")
        and not module.output_is_local
        for sharding in plan.shardings
        if any(unit not in positions for unit in sharding.units)
        for module in sharding.modules
    )


def _summary(plan: Plan) -> list[str]:
    modes = [mode for stage in plan.stages for mode in stage.activation_checkpointing]
    counts = {
        mode: modes.count(mode)
        for mode in (Recomputation.FULL, Recomputation.SELECTIVE)
        if mode in modes
    }
    recompute = ", ".join(f"{count} blocks {mode}" for mode, count in counts.items()) or "none"
    batch = (
        f"{plan.global_batch_size} samples ({format_count(plan.tokens_per_step)} tokens): "
        f"{plan.num_microbatches} microbatches of {plan.microbatch_size} on "
        f"{plan.degrees.dp} data-parallel ranks"
    )
    sharding = "ZeRO-3" if plan.reshard_after_forward else "ZeRO-2"
    lines = [
        ("Layout", _layout_words(plan.degrees)),
        ("Batch", batch),
        ("Schedule", f"{plan.schedule}, {len(plan.stages)} stages" if plan.stages[1:] else ""),
        ("Tensor", "sequence parallel between regions" if plan.sequence_parallel else ""),
        ("Sharding", f"FSDP2, {sharding}" if plan.degrees.dp > 1 else ""),
        ("Recompute", recompute),
        ("Dtype", plan.dtype),
        (
            "Predicted",
            f"{format_s(plan.costs.step_time_s)} a step, "
            f"{format_bytes(plan.peak_memory_bytes)} on the fullest rank",
        ),
    ]
    return [f"{name:10} {words}" for name, words in lines if words]


def _layout_words(degrees: ParallelDegrees) -> str:
    used = [f"{axis} {getattr(degrees, axis)}" for axis in MESH_ORDER if getattr(degrees, axis) > 1]
    return " x ".join(used) or "one device"
