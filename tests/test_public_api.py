import inspect
import logging
import subprocess
import sys
from dataclasses import fields

import pytest

import planner

PUBLIC = [
    "CheckError",
    "CodegenError",
    "Explanation",
    "InfeasiblePlanError",
    "ModelError",
    "OperatorGraph",
    "Plan",
    "PlanResult",
    "PlannerError",
    "ProfileError",
    "RequestError",
    "SolverError",
    "SweepResult",
    "TraceResult",
    "ValidationResult",
    "VerificationError",
    "WhyNot",
    "estimate",
    "explain",
    "explain_why_not",
    "load_plan",
    "plan",
    "sweep",
    "trace",
    "trace_lengths",
    "validate",
]

PLAN_PARAMETERS = [
    "model",
    "gpus",
    "cluster",
    "gpus_per_node",
    "calibration",
    "global_batch_size",
    "seq_len",
    "dtype",
    "memory_margin",
    "fix",
    "top",
    "time_limit_s",
    "example_batch",
    "loss_fn",
    "hints",
    "progress",
]

ESTIMATE_PARAMETERS = [
    *PLAN_PARAMETERS[: PLAN_PARAMETERS.index("fix")],
    "framework",
    *(
        each
        for each in PLAN_PARAMETERS[PLAN_PARAMETERS.index("fix") :]
        if each not in ("top", "time_limit_s")
    ),
]

TRACE_PARAMETERS = [
    "model",
    "microbatch_size",
    "seq_len",
    "dtype",
    "example_batch",
    "loss_fn",
    "hints",
    "progress",
]

VALIDATE_PARAMETERS = [
    "runs",
    "failed",
    "plan",
    "calibration",
    "assume",
    "keep_going",
    "capacity_gib",
    "min_group",
    "progress",
]


def test_the_public_names_are_these():
    assert planner.__all__ == PUBLIC
    for name in PUBLIC:
        assert getattr(planner, name).__name__ == name
    assert set(PUBLIC) <= set(dir(planner))


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'plann'"):
        planner.plann  # noqa: B018


@pytest.mark.parametrize(
    ("function", "names"),
    [
        ("plan", PLAN_PARAMETERS),
        ("estimate", ESTIMATE_PARAMETERS),
        ("trace", TRACE_PARAMETERS),
        ("validate", VALIDATE_PARAMETERS),
    ],
)
def test_the_calls_take_these_arguments(function, names):
    parameters = inspect.signature(getattr(planner, function)).parameters
    assert list(parameters) == names
    for name, parameter in list(parameters.items())[1:]:
        assert parameter.kind is inspect.Parameter.KEYWORD_ONLY, name


def test_the_result_offers_these():
    public = {name for name in vars(planner.PlanResult) if not name.startswith("_")}
    assert public == {
        "best",
        "candidates",
        "outcome",
        "record",
        "rejected",
        "save",
        "to_json",
        "warnings",
    }


def test_the_validation_offers_these():
    public = {name for name in vars(planner.ValidationResult) if not name.startswith("_")}
    assert public == {
        "by_group",
        "failed_predictions",
        "plot",
        "plot_bytes",
        "plotted_points",
        "predictions",
        "tables",
        "to_json",
        "unpriced",
    }


def test_the_trace_offers_these():
    public = {name for name in vars(planner.TraceResult) if not name.startswith("_")}
    assert public == {
        "backward_flop",
        "block_kinds",
        "block_pattern",
        "cuts",
        "forward_flop",
        "model",
        "num_parameters",
        "num_trainable_parameters",
        "nx",
        "ops",
        "saved_bytes",
        "units",
        "warnings",
    }
    assert [each.name for each in fields(planner.TraceResult)] == ["graph"]


def test_plan_is_the_function_and_not_the_package_of_that_name():
    code = (
        "import planner.plan.types, planner.plan.serialize, planner.api, planner\n"
        "from planner.plan.types import Plan\n"
        "assert callable(planner.plan), planner.plan\n"
        "assert planner.Plan is Plan\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_importing_the_package_is_light():
    code = (
        "import sys, planner\n"
        "heavy = {'torch', 'pandas', 'networkx', 'pulp', 'jinja2', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_library_logs_nothing_unasked():
    handlers = logging.getLogger("planner").handlers
    assert [type(handler) for handler in handlers] == [logging.NullHandler]
