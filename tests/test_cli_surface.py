"""The names that scripts of users depend on; adding is fine, renaming breaks them."""

import subprocess
import sys

import click
import pytest

from planner.cli.commands import plan_command
from planner.cli.main import VERBS
from planner.errors import (
    CheckError,
    CodegenError,
    InfeasiblePlanError,
    ModelError,
    PlannerError,
    ProfileError,
    RequestError,
    SolverError,
    VerificationError,
)
from planner.fix_rules import FIX_NAMES

REQUEST = {
    "--cluster",
    "--dtype",
    "--fix",
    "--global-batch-size",
    "--gpus",
    "--gpus-per-node",
    "--calibration",
    "--hint",
    "--hints",
    "--memory-margin",
    "--seq-len",
}
OUTPUT = {"--force", "--json", "--no-color", "--out", "--quiet", "--verbose", "-q", "-v"}


def options_of(command):
    return {
        name
        for parameter in command.params
        if isinstance(parameter, click.Option)
        for name in parameter.opts
    }


def test_the_main_job_takes_these_options():
    expected = REQUEST | OUTPUT | {"--time-limit", "--top", "--version"}
    assert options_of(plan_command) == expected


def test_the_verbs_are_these():
    assert set(VERBS) == {
        *("calibrate", "check", "compare", "estimate", "explain", "export"),
        *("profile", "profiles", "sweep", "trace", "validate"),
    }
    assert options_of(VERBS["check"]) == (OUTPUT - {"--force", "--out"}) | {"--run", "--gpu"}
    assert options_of(VERBS["estimate"]) == REQUEST | OUTPUT | {"--framework"}
    assert options_of(VERBS["sweep"]) == REQUEST | OUTPUT | {
        *("--objective", "--plot", "--price", "--time-limit", "--tokens", "--within"),
    }
    assert options_of(VERBS["explain"]) == (OUTPUT - {"--force", "--out"}) | {"--why-not"}
    assert set(VERBS["profiles"].commands) == {"list", "new", "show"}
    assert options_of(VERBS["trace"]) == (OUTPUT - {"--out"}) | {
        *("--dot", "--dtype", "--hint", "--hints", "--microbatch-size", "--ops", "--seq-len"),
    }
    assert options_of(VERBS["validate"]) == OUTPUT | {
        *("--assume", "--calibration", "--capacity-gib", "--failed", "--failed-out"),
        *("--keep-going", "--min-group", "--plan", "--plot"),
    }
    assert options_of(VERBS["calibrate"]) == (OUTPUT - {"--json"}) | {
        *("--assume", "--keep-going", "--plan"),
    }


def test_what_can_be_fixed():
    assert FIX_NAMES == (
        "dp_replicate",
        "dp_shard",
        "cp",
        "tp",
        "pp",
        "ep",
        "schedule",
        "virtual_stages",
        "microbatch_size",
        "activation_checkpointing",
        "reshard_after_forward",
        "sequence_parallel",
        "compile",
        "float8",
        "loss_chunks",
        "cpu_offload",
        "activation_offload",
        "mesh_order",
    )


def test_exit_codes():
    codes = {
        PlannerError: 1,
        RequestError: 2,
        InfeasiblePlanError: 3,
        SolverError: 4,
        ModelError: 5,
        ProfileError: 6,
        CodegenError: 7,
        VerificationError: 8,
        CheckError: 9,
    }
    assert {error: error.exit_code for error in codes} == codes


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["estimate", "--help"],
        ["explain", "--help"],
        ["sweep", "--help"],
        ["profiles", "--help"],
        ["trace", "--help"],
        ["validate", "--help"],
        ["calibrate", "--help"],
        ["--version"],
    ],
)
def test_help_imports_nothing_heavy(arguments):
    code = (
        "import sys\n"
        "from planner.cli.main import run\n"
        f"assert run({arguments!r}) == 0\n"
        "heavy = {'torch', 'pandas', 'networkx', 'pulp', 'numpy', 'jinja2'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout
    assert not done.stderr


def test_help_opens_with_three_examples():
    done = subprocess.run(
        [sys.executable, "-c", "from planner.cli.main import run; run(['--help'])"],
        capture_output=True,
        text=True,
        check=True,
    )
    first, *examples = done.stdout.splitlines()[:4]
    assert first == "Examples:"
    assert all(line.startswith("  plan ") for line in examples)
    assert "Verbs" in done.stdout
    assert "Exit codes" in done.stdout
