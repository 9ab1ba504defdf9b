"""Plans as a function that returns torchtitan's ``Trainer.Config``.

torchtitan took TOML out on 2026-02-23 (pytorch/torchtitan#2386); a configuration is a function that
``--module`` and ``--config`` name. Fields are those of ``torchtitan/config/configs.py`` of 0.3.0.
"""

from collections.abc import Iterator, Mapping

from planner.export.facts import block_positions, recompute_modes, recompute_words
from planner.export.own_models import (
    chunk_losses,
    float8_losses,
    input_losses,
    model_losses,
    order_losses,
)
from planner.export.terms import Loss, Terms, header_lines, torchrun
from planner.plan.serialize import SavedPlan
from planner.plan.types import Plan
from planner.rendering import render
from planner.vocabulary import Dtype, Recomputation

NAME = "torchtitan"
VERSION = "torchtitan 0.3.0"
FILE_NAME = "titan_plan.py"

_POLICIES: Mapping[str, str] = {
    Recomputation.NONE: "None",
    Recomputation.SELECTIVE: "SelectiveAC.Config()",
    Recomputation.FULL: "FullAC.Config()",
}


def express(saved: SavedPlan) -> Terms:
    """Put a plan in torchtitan's terms."""
    plan = saved.plan
    has_pp = plan.degrees.pp > 1
    values = {
        "degrees": plan.degrees,
        "local_batch_size": plan.microbatch_size * (plan.num_microbatches if has_pp else 1),
        "microbatch_size": plan.microbatch_size,
        "global_batch_size": plan.global_batch_size,
        "seq_len": saved.model.seq_len,
        "reshard": "always" if plan.reshard_after_forward else "never",
        "sequence_parallel": plan.sequence_parallel,
        "cpu_offload": plan.cpu_offload,
        "param_dtype": _param_dtype(plan),
        "policy": _POLICIES[_policy(plan)],
        "num_blocks": len(block_positions(plan)),
        "has_pp": has_pp,
        "schedule": plan.schedule,
        "parts": _parts(plan) if has_pp else [],
    }
    return Terms(values=values, losses=tuple(_losses(plan)), notes=tuple(_notes(plan)))


def text(saved: SavedPlan, terms: Terms) -> str:
    """Write the file."""
    module = FILE_NAME.removesuffix(".py")
    options = f"--module {module} --config planned"
    run = (
        "export BASE=torchtitan.models.llama3.config_registry:llama3_8b  # the same model's own\n"
        f"PYTHONPATH=. {torchrun(saved)} -m torchtitan.train {options}"
    )
    check = (
        f"PYTHONPATH=. python -m torchtitan.config.manager {options}\n"
        f"PYTHONPATH=. NGPU={saved.cluster.num_gpus} LOCAL_RANK=0 python -m torchtitan.train "
        f"{options} --comm.mode=fake_backend --training.steps 1\n"
        "(the latter trains one step of one rank with the others faked, on one GPU)"
    )
    header = header_lines(saved, terms, version=VERSION, run=run, check=check)
    return render("export/torchtitan.py.j2", header=header, **terms.values)


def _param_dtype(plan: Plan) -> str:
    return Dtype.BFLOAT16 if plan.dtype == Dtype.BFLOAT16 else Dtype.FLOAT32


def _policy(plan: Plan) -> str:
    """What all blocks recompute: where they differ, what needs the least memory of them."""
    modes = recompute_modes(plan)
    for mode in (Recomputation.FULL, Recomputation.SELECTIVE):
        if modes[mode]:
            return mode
    return Recomputation.NONE


def _parts(plan: Plan) -> list[list[str]]:
    """Names of torchtitan's modules on each stage, in model order."""
    number = {unit: block for block, unit in enumerate(block_positions(plan))}
    outer = {"prologue": ["tok_embeddings"], "epilogue": ["norm", "lm_head"]}
    return [
        [
            name
            for unit in range(stage.first_unit, stage.end_unit)
            for name in outer.get(plan.units[unit], [f"layers.{number.get(unit)}"])
        ]
        for stage in plan.stages
    ]


def _losses(plan: Plan) -> Iterator[Loss]:
    yield from model_losses(plan, NAME)
    yield from float8_losses(plan)
    yield from chunk_losses(plan)
    yield from input_losses(plan)
    yield from order_losses(plan)
    if plan.degrees.cp > 1:
        yield Loss(
            asked=f"attention that exchanges tokens for heads on {plan.degrees.cp} ranks",
            instead="torchtitan's own, which sends keys and values round",
        )
    if len(recompute_modes(plan)) > 1:
        yield Loss(
            asked=f"recomputation block by block ({recompute_words(plan)})",
            instead=f"one policy for all blocks, {_policy(plan)}",
        )


def _notes(plan: Plan) -> Iterator[str]:
    price = "with blocks compiled" if plan.compile else "without torch.compile"
    yield (
        "the model, its data, optimiser and torch.compile are those of BASE; the plan's price is "
        f"{price}"
    )
    if recompute_modes(plan)[Recomputation.SELECTIVE]:
        yield (
            "selective recomputation of torchtitan keeps every second matrix product, the plan's "
            "all of them"
        )
    if plan.degrees.pp > 1:
        yield "CUDA graphs are switched off, since torchtitan has none with a pipeline"
