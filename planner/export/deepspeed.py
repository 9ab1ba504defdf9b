"""Plans as DeepSpeed's JSON.

Keys are those of ``deepspeed/runtime/config.py`` of 0.19.8. JSON has no comments, and other
programs than DeepSpeed read the file too, so that what stands first in other files is the value of
a key here; DeepSpeed passes over keys that it does not know.
"""

import json
from collections.abc import Iterator

from planner.export.facts import (
    blocks_per_stage,
    recompute_modes,
    recompute_words,
    refuse_other_axes,
    spread,
    whole_blocks,
)
from planner.export.own_models import (
    chunk_losses,
    compile_losses,
    dtype_losses,
    float8_losses,
    input_losses,
    order_losses,
)
from planner.export.terms import Loss, Terms, header_lines, torchrun
from planner.plan.serialize import SavedPlan
from planner.plan.types import Plan
from planner.vocabulary import Dtype, Recomputation

NAME = "deepspeed"
VERSION = "DeepSpeed 0.19.8"
FILE_NAME = "deepspeed.json"


def express(saved: SavedPlan) -> Terms:
    """Put a plan in DeepSpeed's terms."""
    plan = saved.plan
    refuse_other_axes(plan, VERSION)
    values: dict[str, object] = {
        "train_batch_size": plan.global_batch_size,
        "train_micro_batch_size_per_gpu": plan.microbatch_size,
        "gradient_accumulation_steps": plan.num_microbatches,
        "zero_optimization": {"stage": _zero_stage(plan), **_offloaded(plan)},
    }
    if plan.dtype == Dtype.BFLOAT16:
        values["bf16"] = {"enabled": True}
        values["communication_data_type"] = "fp32"
        values["data_types"] = {"grad_accum_dtype": "fp32"}
    if plan.degrees.tp > 1:
        values["tensor_parallel"] = {"autotp_size": plan.degrees.tp}
    return Terms(values=values, losses=tuple(_losses(plan)), notes=tuple(_notes(plan)))


def text(saved: SavedPlan, terms: Terms) -> str:
    """Write the file."""
    plan = saved.plan
    run = f"{torchrun(saved)} your_script.py --deepspeed_config {FILE_NAME}"
    one_rank = plan.microbatch_size * plan.num_microbatches
    check = (
        'python -c "import json; from deepspeed.runtime.config import DeepSpeedConfig as Config; '
        f"Config({{**json.load(open('{FILE_NAME}')), 'train_batch_size': {one_rank}}})\"\n"
        "(one process reads it as one rank, whose share of the batch it is)"
    )
    header = header_lines(saved, terms, version=VERSION, run=run, check=check)
    return json.dumps({"_planner": header, **terms.values}, indent=2) + "\n"


def _offloaded(plan: Plan) -> dict[str, object]:
    """Name what lies in host memory: parameters in stage 3 alone."""
    names = {"offload_optimizer": 1, "offload_param": 3}
    place = {"device": "cpu", "pin_memory": True}
    stage = _zero_stage(plan)
    return {name: place for name, least in names.items() if plan.cpu_offload and stage >= least}


def _zero_stage(plan: Plan) -> int:
    """Choose the stage that holds and sends what the plan does.

    A plan that keeps parameters and gradients whole until the last microbatch is stage 1: stage 2
    divides the gradients in every microbatch, which is the same where there is one only.
    """
    if plan.degrees.dp_shard == 1 and not plan.cpu_offload:
        return 0
    if plan.degrees.pp > 1:
        return 1
    if plan.reshard_after_forward:
        return 2 if plan.degrees.tp > 1 else 3  # AutoTP trains with stages 0 to 2 (#8167)
    return 2 if plan.num_microbatches == 1 else 1


def _losses(plan: Plan) -> Iterator[Loss]:
    degrees = plan.degrees
    yield from dtype_losses(plan)
    yield from compile_losses(plan)
    yield from float8_losses(plan)
    yield from chunk_losses(plan)
    yield from input_losses(plan)
    yield from order_losses(plan)
    if degrees.pp > 1:
        yield Loss(
            asked=f"{len(plan.stages)} pipeline stages of {spread(blocks_per_stage(plan))} blocks, "
            f"{plan.schedule}",
            instead="what deepspeed.pipe.PipelineModule in your code says, with ZeRO up to stage 1",
        )
    if degrees.dp_replicate > 1 and degrees.dp_shard > 1:
        yield Loss(
            asked=f"{degrees.dp_replicate} replicas of {degrees.dp_shard} ranks that share a model",
            instead=f"one model shared by {degrees.dp} ranks, with its traffic between replicas",
        )
    if degrees.tp > 1:
        yield from _tensor_losses(plan)
    if not set(recompute_modes(plan)) <= {Recomputation.NONE} and not _recomputes_all(plan):
        yield Loss(
            asked=f"recomputation {recompute_words(plan)}",
            instead="what your model's code recomputes",
        )


def _tensor_losses(plan: Plan) -> Iterator[Loss]:
    if plan.degrees.dp_shard > 1 and plan.reshard_after_forward:
        yield Loss(
            asked=f"ZeRO-3 over {plan.degrees.dp_shard} ranks beside {plan.degrees.tp} "
            "tensor-parallel ranks",
            instead=f"ZeRO-{_zero_stage(plan)}, since AutoTP trains with stages 0 to 2: parameters "
            "whole on each rank",
        )
    if plan.sequence_parallel:
        yield Loss(
            asked=f"the stream split over the sequence on {plan.degrees.tp} ranks",
            instead="the whole stream on each of them",
        )
    if whole := whole_blocks(plan):
        yield Loss(asked=f"{whole} blocks whole on each rank", instead="what AutoTP splits")


def _notes(plan: Plan) -> Iterator[str]:
    yield "optimiser, learning rate and clipping are those of your code"
    if _recomputes_all(plan):
        yield "recompute all blocks in full: model.gradient_checkpointing_enable()"
    if plan.degrees.dp_shard > 1 and not plan.reshard_after_forward and _zero_stage(plan) == 1:
        yield (
            "stage 1, not 2: the plan keeps gradients whole until the last of "
            f"{plan.num_microbatches} microbatches, and stage 2 divides them in each"
        )


def _recomputes_all(plan: Plan) -> bool:
    return set(recompute_modes(plan)) == {Recomputation.FULL}
