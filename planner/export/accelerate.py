"""Plans as the YAML of Hugging Face Accelerate, which axolotl, TRL and LLaMA-Factory take too.

Keys are those of ``ClusterConfig``, of the ``--fsdp_*`` options and of ``ParallelismConfig`` of
1.15.0.
"""

from collections.abc import Iterator

from planner.errors import CodegenError
from planner.export.facts import recompute_modes, recompute_words, refuse_other_axes, whole_blocks
from planner.export.own_models import (
    chunk_losses,
    compile_losses,
    dtype_losses,
    float8_losses,
    input_losses,
    order_losses,
)
from planner.export.terms import Loss, Terms, header_lines
from planner.hardware.nodes import smaller_nodes
from planner.hardware.spec import ClusterSpec
from planner.plan.serialize import SavedPlan
from planner.plan.types import Plan
from planner.rendering import render
from planner.vocabulary import Dtype, Recomputation

NAME = "accelerate"
VERSION = "accelerate 1.15.0"
FILE_NAME = "accelerate.yaml"


def express(saved: SavedPlan) -> Terms:
    """Put a plan in Accelerate's terms.

    Raises:
        CodegenError: It has no axis for a degree of the plan, or no words for its nodes.
    """
    plan = saved.plan
    _check(plan, saved.cluster)
    return Terms(
        values={
            "degrees": plan.degrees,
            "cluster": saved.cluster,
            "kind": _kind(plan),
            "mixed_precision": "bf16" if plan.dtype == Dtype.BFLOAT16 else "no",
            "reshard": plan.reshard_after_forward,
            "cpu_offload": plan.cpu_offload,
            "recomputes": set(recompute_modes(plan)) != {Recomputation.NONE},
            "is_transformers": plan.model.is_config,
        },
        losses=tuple(_losses(plan)),
        notes=tuple(_notes(plan)),
    )


def text(saved: SavedPlan, terms: Terms) -> str:
    """Write the file."""
    run = f"accelerate launch --config_file {FILE_NAME} your_script.py"
    if saved.cluster.num_nodes > 1:
        nodes = "--machine_rank RANK --main_process_ip HOST --main_process_port 29500"
        run = (
            f"on each of {saved.cluster.num_nodes} nodes:\n{run.replace(' your', f' {nodes} your')}"
        )
    check = (
        'python -c "from accelerate.commands.config.config_args import load_config_from_file; '
        f"print(load_config_from_file('{FILE_NAME}'))\""
    )
    header = header_lines(saved, terms, version=VERSION, run=run, check=check)
    return render("export/accelerate.yaml.j2", header=header, **terms.values)


def _kind(plan: Plan) -> str:
    """Choose Accelerate's word for what the ranks share."""
    if plan.degrees.dp_shard > 1 or plan.cpu_offload:
        return "FSDP"
    return "NO" if plan.degrees.world_size == 1 else "MULTI_GPU"


def _check(plan: Plan, cluster: ClusterSpec) -> None:
    """Refuse degrees and nodes for which there is no file at all.

    Raises:
        CodegenError: With what would work.
    """
    degrees = plan.degrees
    if degrees.pp > 1:
        raise CodegenError(
            f"the plan has {degrees.pp} pipeline ranks, and {VERSION} has no pipeline axis",
            hint="plan with --fix pp=1, or export --to torchtitan or megatron",
        )
    if smaller_nodes(cluster):
        raise CodegenError(
            f"the plan has {cluster.nodes_words} devices, and {VERSION} starts as many processes "
            "on all nodes",
            hint="plan with --gpus-per-node N, N a divisor of "
            f"{cluster.num_gpus}, or export --to torchtitan, megatron or deepspeed",
        )
    refuse_other_axes(plan, VERSION)
    if degrees.tp > 1 and degrees.dp_shard == 1:
        raise CodegenError(
            f"the plan has tp {degrees.tp} and dp_shard 1, and {VERSION} takes tp beside FSDP only",
            hint="plan with --fix tp=1, or with --fix dp_shard=N, N above 1",
        )


def _losses(plan: Plan) -> Iterator[Loss]:
    yield from dtype_losses(plan)
    yield from compile_losses(plan)
    yield from float8_losses(plan)
    yield from chunk_losses(plan)
    yield from input_losses(plan)
    yield from order_losses(plan)
    if plan.sequence_parallel:
        yield Loss(
            asked=f"the stream split over the sequence on {plan.degrees.tp} ranks",
            instead="what the model's tp_plan in transformers says, by default the whole stream",
        )
    if whole := whole_blocks(plan):
        yield Loss(
            asked=f"{whole} blocks whole on each of {plan.degrees.tp} tensor-parallel ranks",
            instead="what the model's tp_plan splits",
        )
    modes = recompute_modes(plan)
    if modes[Recomputation.SELECTIVE] or len(modes) > 1:
        yield Loss(
            asked=f"recomputation {recompute_words(plan)}",
            instead="all blocks in full",
        )
    elif modes[Recomputation.FULL] and plan.degrees.dp_shard == 1:
        yield Loss(
            asked=f"recomputation {recompute_words(plan)}",
            instead="none in this file: without FSDP it is model.gradient_checkpointing_enable()",
        )


def _notes(plan: Plan) -> Iterator[str]:
    yield (
        f"batches are those of your DataLoader: batch_size={plan.microbatch_size}, and "
        f"Accelerator(gradient_accumulation_steps={plan.num_microbatches}), for "
        f"{plan.global_batch_size} samples a step"
    )
    if plan.dtype == Dtype.BFLOAT16 and plan.degrees.dp_shard > 1:
        yield "gradients are reduced in bfloat16, in half the traffic; the plan reduces float32"
    if plan.degrees.tp > 1:
        yield 'tensor parallelism is that of a transformers model, loaded with tp_plan="auto"'
