"""Turns what the user typed into a ``PlanRequest``, or says which rule it breaks.

All rules here need the request alone: no model, no profile, no torch, so that a slip is told
at once. Rules that need the model's shapes (heads, vocabulary) are the search's.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from difflib import get_close_matches

from planner.errors import RequestError
from planner.fix_rules import FIX_RULES, FRAMEWORK_FIX_RULES, check_choice
from planner.graph.loading.hints import make_hints
from planner.hardware.mixed import check_total, parse_parts
from planner.hardware.spec import DeviceSpec
from planner.plan.types import Plan
from planner.request import PlanRequest
from planner.vocabulary import (
    COMPUTE_DTYPES,
    MESH_ORDER,
    ORDER_SIGN,
    PLANNED_AXES,
    SHARED_SCHEDULES,
    V_SCHEDULES,
    Axis,
    Dtype,
)

LEAST_MARGIN = 0.05
"""Share of a device's memory that plans keep free where the request says nothing: predicted peaks
are within it of the live tensors of emitted scripts, and no profile states a larger error."""

MOST_GPUS = 2**20
"""Devices up to which numbers are taken: lists of all nodes fit the memory of this machine."""

SAMPLES_PER_GPU = 8
"""Global batch size per device where the request names none."""


def parse_fix(settings: Iterable[str]) -> dict[str, str]:
    """Read ``--fix`` settings of the form NAME=VALUE, several of them between commas.

    Raises:
        RequestError: For a setting without "=" and for a name that is given twice.
    """
    fixed: dict[str, str] = {}
    for setting in (part for text in settings for part in text.split(",")):
        name, equals, value = (part.strip() for part in setting.partition("="))
        if not (name and equals and value):
            raise RequestError(
                f"--fix {setting}: a setting has the form NAME=VALUE",
                hint=f"For example --fix tp=2. Names: {', '.join(FIX_RULES)}.",
            )
        if fixed.setdefault(name, value) != value:
            raise RequestError(
                f"--fix {name}={fixed[name]} and --fix {name}={value} contradict each other",
                hint=f"Keep one of them, or neither to let the planner decide {name}.",
            )
    return fixed


def parse_margin(text: str) -> float:
    """Read a share of memory: "0.05" or "5%".

    Raises:
        RequestError: It is neither.
    """
    return parse_share("--memory-margin", text)


def parse_share(option: str, text: str) -> float:
    """Read a share: "0.05" or "5%".

    Raises:
        RequestError: It is neither.
    """
    number, percent, rest = text.strip().partition("%")
    try:
        share = float(number) / (100 if percent else 1)
    except ValueError:
        share = math.nan
    if rest or not 0 <= share < 1:
        raise bad_share(option, text)
    return share


def resolve_margin(request: PlanRequest) -> float:
    """Choose the share of memory to keep free.

    What another framework cannot use of a device is a number of its own profile.
    """
    if request.memory_margin is not None:
        return request.memory_margin
    return LEAST_MARGIN if request.framework is None else 0.0


def bad_share(option: str, value: object) -> RequestError:
    """Make the error of a value that is no share."""
    return RequestError(
        f"{option} {value}: it is a share, from 0 to below 1",
        hint=f"For example {option} 0.05 or {option} 5%.",
    )


def check_request(request: PlanRequest) -> PlanRequest:
    """Check all rules that need nothing but the request.

    Returns:
        The request, its fixed values in their canonical spelling and order.

    Raises:
        RequestError: For the first rule that is broken.
    """
    for option, value in (
        ("gpus", request.gpus),
        ("gpus_per_node", request.gpus_per_node),
        ("global_batch_size", request.global_batch_size),
        ("seq_len", request.seq_len),
        ("top", request.top),
    ):
        if value is not None:
            _check_positive(option, value)
    if parts := parse_parts(request.cluster):
        check_total(request.cluster, parts, request.gpus)
        if request.gpus_per_node is not None or request.framework is not None:
            option = "gpus-per-node" if request.framework is None else "framework"
            raise RequestError(
                f"--{option} with --cluster {request.cluster}: devices are of several kinds, "
                "whose nodes are those of their profiles and whose runs are the script's",
                hint=f"leave --{option} out",
            )
    if request.gpus > MOST_GPUS:
        raise RequestError(
            f"--gpus {request.gpus:,}: plans are made for {MOST_GPUS:,} at most",
            hint=f"Use --gpus {MOST_GPUS} or fewer.",
        )
    limit_s = request.time_limit_s
    if limit_s is not None and not (math.isfinite(limit_s) and limit_s > 0):
        raise RequestError(
            f"{_flag('time_limit')} {limit_s:g}: the solver needs some time",
            hint="Give a number of seconds above 0, or leave it out for a limit of work.",
        )
    margin = request.memory_margin
    if margin is not None and not 0 <= margin < 1:
        raise bad_share("--memory-margin", margin)
    if request.dtype is not None:
        known = COMPUTE_DTYPES if request.framework is None else tuple(Dtype)
        check_choice(f"--dtype {request.dtype}", request.dtype, known)
    make_hints(request.hints)
    fixed = _check_fixed(request)
    return _with_fixed(request, fixed)


def check_trace(*, microbatch_size: int, seq_len: int | None, dtype: str) -> None:
    """Check what is asked of a trace.

    Raises:
        RequestError: For the first rule that is broken.
    """
    _check_positive("microbatch_size", microbatch_size)
    if seq_len is not None:
        _check_positive("seq_len", seq_len)
    check_choice(f"--dtype {dtype}", dtype, COMPUTE_DTYPES)


def resolve_dtype(request: PlanRequest, *devices: DeviceSpec) -> str:
    """Choose the compute dtype: the one asked for, else the faster of bfloat16 and float32.

    Where devices are of several kinds it is what is faster on the slowest of them.

    Raises:
        RequestError: A device's profile has no peak for the dtype asked for.
    """
    if request.dtype is None:
        return max(
            (Dtype.FLOAT32, Dtype.BFLOAT16),
            key=lambda dtype: min(each.peak_flop_per_s.get(dtype, 0.0) for each in devices),
        )
    for device in devices:
        peaks = device.peak_flop_per_s
        if request.dtype not in peaks:
            raise RequestError(
                f"--dtype {request.dtype} on {device.name}: its profile states no peak rate for "
                "this dtype",
                hint=f"It has {', '.join(d for d in COMPUTE_DTYPES if d in peaks)}.",
            )
    return request.dtype


def estimated_layout(request: PlanRequest) -> dict[str, str]:
    """Fix all degrees of an estimate: 1 where nothing is said, and the rest to data parallelism.

    The devices that are left over go to dp_shard, to dp_replicate where dp_shard is fixed.

    Raises:
        RequestError: The fixed degrees leave devices over.
    """
    fixed = dict(request.fixed)
    product = math.prod(int(fixed.get(axis, "1")) for axis in MESH_ORDER)
    left_over = request.gpus // product
    filling = next((axis for axis in (Axis.DP_SHARD, Axis.DP_REPLICATE) if axis not in fixed), None)
    if filling is not None:
        fixed[filling] = str(left_over)
    elif left_over > 1:
        raise RequestError(
            f"--fix {' --fix '.join(f'{name}={value}' for name, value in request.fixed)} on "
            f"{request.gpus} GPUs: the degrees multiply to {product}",
            hint=f"Use --gpus {product}, or fix degrees that multiply to {request.gpus}.",
        )
    return {**dict.fromkeys(PLANNED_AXES, "1"), **fixed}


def fix_warnings(request: PlanRequest, plan: Plan) -> tuple[str, ...]:
    """Name the fixed settings that have no effect on a plan."""
    fixed = dict(request.fixed)
    degrees = plan.degrees
    warnings = [
        f"--fix {name}={fixed[name]} has no effect: the plan has {axis}=1"
        for name, axis, degree in (
            ("reshard_after_forward", Axis.DP_SHARD, degrees.shards),
            ("sequence_parallel", Axis.TP, degrees.tp),
            ("schedule", Axis.PP, degrees.pp),
            ("virtual_stages", Axis.PP, degrees.pp),
        )
        # One stage on each rank is what there is without a pipeline.
        if name in fixed and degree == 1 and (name, fixed[name]) != ("virtual_stages", "1")
    ]
    order = fixed["mesh_order"].split(ORDER_SIGN) if "mesh_order" in fixed else []
    alone = [axis for axis in order if getattr(degrees, axis) == 1]
    if len(order) < len(alone) + 2 and order:
        sizes = ", ".join(f"{axis}=1" for axis in alone)
        warnings.append(
            f"--fix mesh_order={fixed['mesh_order']} has no effect: the plan has {sizes}"
        )
    if plan.compile and plan.units == ("model",):
        warnings.append("--fix compile=true has no effect: the model has no blocks")
    return tuple(warnings)


def _with_fixed(request: PlanRequest, fixed: Mapping[str, str]) -> PlanRequest:
    ordered = tuple((name, fixed[name]) for name in FIX_RULES if name in fixed)
    return replace(request, fixed=ordered)


def _flag(option: str) -> str:
    return "--" + option.replace("_", "-")


def _check_positive(option: str, value: int) -> None:
    if value < 1:
        raise RequestError(
            f"{_flag(option)} {value}: it must be at least 1",
            hint=f"For example {_flag(option)} 8.",
        )


def _check_fixed(request: PlanRequest) -> dict[str, str]:
    fixed: dict[str, str] = {}
    rules = FIX_RULES if request.framework is None else FRAMEWORK_FIX_RULES
    for name, value in request.fixed:
        if name not in rules:
            near = get_close_matches(name, FIX_RULES, n=1, cutoff=0.4)
            meant = f"Did you mean {near[0]}? " if near else ""
            raise RequestError(
                f"--fix {name}={value}: nothing is named {name}",
                hint=f"{meant}Names: {', '.join(FIX_RULES)}.",
            )
        fixed[name] = rules[name](name, value)
    _check_product(request, fixed)
    _check_experts(request, fixed)
    _check_pipeline(fixed)
    return fixed


def _check_product(request: PlanRequest, fixed: Mapping[str, str]) -> None:
    """The degrees multiply to the number of devices: none idle, none missing."""
    named = {axis: int(fixed[axis]) for axis in MESH_ORDER if axis in fixed}
    product = math.prod(named.values())
    settings = " ".join(f"--fix {axis}={degree}" for axis, degree in named.items())
    if request.gpus % product:
        works = [str(d) for d in range(1, request.gpus + 1) if request.gpus % d == 0]
        shown = works if len(works) <= 12 else [*works[:6], "...", *works[-3:]]
        whole = "it" if len(named) == 1 else f"their product {product}"
        raise RequestError(
            f"{settings} on {request.gpus} GPUs: all degrees multiply to the number of GPUs, "
            f"and {whole} does not divide {request.gpus}",
            hint=f"What divides {request.gpus}: {', '.join(shown)}.",
        )
    if len(named) == len(MESH_ORDER) and product != request.gpus:
        raise RequestError(
            f"{settings} on {request.gpus} GPUs: all degrees are fixed and multiply to "
            f"{product}, so that {request.gpus - product} GPUs would idle",
            hint=f"Use --gpus {product}, or leave one of the degrees to the planner.",
        )


def _check_experts(request: PlanRequest, fixed: Mapping[str, str]) -> None:
    """The ranks of ep are those of tp and cp, and some of dp_shard."""
    ep = int(fixed.get(Axis.EP, "1"))
    named = {axis: int(fixed[axis]) for axis in (Axis.DP_SHARD, Axis.TP, Axis.CP) if axis in fixed}
    are_known = len(named) == 3
    ranks = math.prod(named.values()) if are_known else request.gpus
    if ranks % ep:
        settings = " ".join(f"--fix {axis}={degree}" for axis, degree in named.items())
        of_whom = settings if are_known else f"{request.gpus} GPUs"
        raise RequestError(
            f"--fix ep={ep} with {of_whom}: ep borrows its ranks from dp_shard, cp and tp, and "
            f"{ranks} % {ep} = {ranks % ep}",
            hint=f"Use an ep that divides {ranks}.",
        )


def _check_pipeline(fixed: Mapping[str, str]) -> None:
    """A schedule needs a pipeline, several stages per rank an interleaved schedule."""
    schedule, virtual_stages = fixed.get("schedule"), int(fixed.get("virtual_stages", "1"))
    if schedule and fixed.get(Axis.PP) == "1":
        raise RequestError(
            f"--fix schedule={schedule} --fix pp=1: without pipeline stages there is no schedule",
            hint="Leave out one of them.",
        )
    if virtual_stages != 2 and "virtual_stages" in fixed and schedule in V_SCHEDULES:
        raise RequestError(
            f"--fix schedule={schedule} --fix virtual_stages={virtual_stages}: {schedule} runs "
            "two stages per rank",
            hint="Leave out virtual_stages.",
        )
    if virtual_stages > 1 and schedule not in (None, *SHARED_SCHEDULES):
        raise RequestError(
            f"--fix schedule={schedule} --fix virtual_stages={virtual_stages}: {schedule} runs "
            "one stage per rank",
            hint="Use --fix schedule=Interleaved1F1B, or leave out virtual_stages.",
        )
    if schedule in SHARED_SCHEDULES and fixed.get("virtual_stages") == "1":
        raise RequestError(
            f"--fix schedule={schedule} --fix virtual_stages=1: this schedule interleaves "
            "two or more stages per rank",
            hint="Use --fix schedule=1F1B, or --fix virtual_stages=2.",
        )
