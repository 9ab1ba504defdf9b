"""Plans as options of Megatron-LM's ``pretrain_gpt.py``.

Options are those of ``megatron/training/arguments.py``; the pipeline layout is the grammar of
``PipelineParallelLayerLayout`` ("Et*4|t*4L"), the HSDP of Megatron-FSDP that of its
``num_distributed_optimizer_instances``.
"""

from collections.abc import Iterator

from planner.export.facts import (
    block_positions,
    blocks_per_stage,
    recompute_modes,
    recompute_words,
    recomputed_per_stage,
    spread,
)
from planner.export.own_models import (
    chunk_losses,
    compile_losses,
    float8_losses,
    input_losses,
    model_losses,
    offload_losses,
    order_losses,
)
from planner.export.terms import Loss, Terms, header_lines, torchrun
from planner.plan.serialize import SavedPlan
from planner.plan.types import Plan
from planner.rendering import render
from planner.vocabulary import ZERO_BUBBLE_SCHEDULES, Dtype, Recomputation, Schedule

NAME = "megatron"
VERSION = "Megatron-LM core_v0.16.1"
FILE_NAME = "megatron.sh"

_WITH_DISTRIBUTED_OPTIMIZER = (
    "--use-distributed-optimizer",
    "--overlap-grad-reduce",
    "--overlap-param-gather",
)
_WITH_FSDP = (
    *_WITH_DISTRIBUTED_OPTIMIZER,
    "--use-megatron-fsdp",
    "--data-parallel-sharding-strategy optim_grads_params",
    "--no-gradient-accumulation-fusion",
    "--ckpt-format fsdp_dtensor",
)


def express(saved: SavedPlan) -> Terms:
    """Put a plan in Megatron's terms."""
    plan = saved.plan
    degrees = plan.degrees
    options = [
        f"--tensor-model-parallel-size {degrees.tp}",
        f"--pipeline-model-parallel-size {degrees.pp}",
        f"--num-layers {len(block_positions(plan))}",
        f"--micro-batch-size {plan.microbatch_size}",
        f"--global-batch-size {plan.global_batch_size}",
    ]
    if saved.model.seq_len is not None:
        options.append(f"--seq-length {saved.model.seq_len}")
    if plan.dtype == Dtype.BFLOAT16:
        options.append("--bf16")
    if plan.sequence_parallel:
        options.append("--sequence-parallel")
    if degrees.cp > 1:
        options.append(f"--context-parallel-size {degrees.cp} --cp-comm-type a2a")
    if degrees.ep > 1:
        options.append(f"--expert-model-parallel-size {degrees.ep}")
        if degrees.tp > 1:
            options.append("--expert-tensor-parallel-size 1")
        options.append("--moe-token-dispatcher-type alltoall")
    if degrees.pp > 1:
        options.append(f"--pipeline-model-parallel-layout '{_pipeline_layout(plan)}'")
    options += _data_parallel(plan)
    options += _recompute(plan)
    return Terms(
        values={
            "options": options,
            "launch": torchrun(saved),
            # Tensor parallelism of Megatron relies on one queue, its FSDP on several.
            "one_connection": degrees.tp > 1 and not _uses_fsdp(plan),
        },
        losses=tuple(_losses(plan)),
        notes=tuple(_notes(plan)),
    )


def text(saved: SavedPlan, terms: Terms) -> str:
    """Write the file."""
    own = "--hidden-size ... (the model's, data's and optimiser's options)"
    run = f"MEGATRON=path/to/Megatron-LM bash {FILE_NAME} {own}"
    if saved.cluster.num_nodes > 1:
        run = f"on each of {saved.cluster.num_nodes} nodes:\nHOST=one-of-them {run}"
    check = (
        f"MEGATRON=path/to/Megatron-LM bash {FILE_NAME} {own} --mock-data --train-iters 2\n"
        "python path/to/Megatron-LM/tools/report_theoretical_memory.py (the same options)"
    )
    header = header_lines(saved, terms, version=VERSION, run=run, check=check)
    return render("export/megatron.sh.j2", header=header, **terms.values)


def _pipeline_layout(plan: Plan) -> str:
    """Write the blocks of each stage: chunk i is on pipeline rank i modulo pp, as in the plan."""
    parts = [f"t*{count}" if count else "" for count in blocks_per_stage(plan)]
    return f"E{'|'.join(parts)}L"


def _uses_fsdp(plan: Plan) -> bool:
    """Megatron-FSDP is documented with tp, cp and ep, not with a pipeline."""
    return plan.degrees.shards > 1 and plan.reshard_after_forward and plan.degrees.pp == 1


def _data_parallel(plan: Plan) -> list[str]:
    if plan.degrees.shards == 1:
        return []
    options = list(_WITH_FSDP if _uses_fsdp(plan) else _WITH_DISTRIBUTED_OPTIMIZER)
    if plan.degrees.dp_replicate > 1:
        options.append(f"--num-distributed-optimizer-instances {plan.degrees.dp_replicate}")
    return options


def _recompute(plan: Plan) -> list[str]:
    """Recompute the first blocks of each stage, as many on each: a stage of fewer, all of its."""
    most = max(recomputed_per_stage(plan))
    if not most:
        return []
    return [
        "--recompute-granularity full",
        "--recompute-method block",
        f"--recompute-num-layers {most}",
    ]


def _losses(plan: Plan) -> Iterator[Loss]:
    yield from model_losses(plan, "Megatron-LM")
    yield from compile_losses(plan)
    yield from float8_losses(plan)
    yield from chunk_losses(plan)
    yield from input_losses(plan)
    yield from offload_losses(plan)
    yield from _schedule_losses(plan)
    yield from order_losses(plan)
    if plan.degrees.dp_shard > 1 and plan.reshard_after_forward and plan.degrees.pp > 1:
        yield Loss(
            asked=f"ZeRO-3 over {plan.degrees.dp_shard} ranks beside {plan.degrees.pp} pipeline "
            "ranks",
            instead="the distributed optimizer (ZeRO-1): parameters and gradients of a stage whole "
            "on each of its ranks",
        )
    if selective := recompute_modes(plan)[Recomputation.SELECTIVE]:
        yield Loss(
            asked=f"selective recomputation of {selective} blocks, which keeps matrix products",
            instead="full recomputation of them",
        )
    counts, blocks = recomputed_per_stage(plan), blocks_per_stage(plan)
    if any(count != min(max(counts), held) for count, held in zip(counts, blocks, strict=True)):
        yield Loss(
            asked=f"recomputation {recompute_words(plan)}, by stage {spread(counts)}",
            instead=f"of the first {max(counts)} blocks of every stage",
        )


def _schedule_losses(plan: Plan) -> Iterator[Loss]:
    """Megatron places stages round the ranks, and runs whole backwards."""
    if plan.schedule in ZERO_BUBBLE_SCHEDULES:
        yield Loss(
            asked=f"{plan.virtual_stages} stages on each rank under {plan.schedule}",
            instead="interleaved 1F1B, with backwards whole and stages going round the ranks",
        )


def _notes(plan: Plan) -> Iterator[str]:
    yield (
        "the model is Megatron's own, by the options that you add: heads, width and vocabulary "
        "must be those of the plan's model"
    )
    if plan.schedule == Schedule.GPIPE:
        yield "the schedule is 1F1B instead of GPipe: the same bubble, fewer microbatches held"
    if plan.degrees.dp_shard > 1 and not plan.reshard_after_forward:
        yield (
            "parameters and gradients are whole between microbatches, as in the plan; Megatron "
            "keeps the bfloat16 parameters whole between steps too"
        )
    if plan.degrees.tp > 1:
        yield "Megatron pads the vocabulary to a multiple of 128 x tp"
