"""The files of a training script."""

import ast
from pathlib import Path

from planner.codegen.emit import block_names, emit_script
from planner.codegen.model_files import model_files
from planner.codegen.reads import looks_at_model
from planner.hardware.spec import ClusterSpec
from planner.plan.types import Plan
from planner.plan.verify import verify_layout

RUNTIME_FOLDER = Path(__file__).parents[1] / "runtime"
"""The runtime, of which each script gets the modules that it needs, copied as they are."""

PACKAGE_TEXT = '"""What train.py runs: modules of planner.runtime, copied as they are."""\n'
"""The package of the copies."""


def script_files(
    plan: Plan, *, cluster: ClusterSpec | None = None, folder: Path | None = None
) -> dict[str, str]:
    """Give the training script and what lies beside it, text by file name.

    That is what it needs of the runtime, the model's own code (``model/``; a Hugging Face config
    and a model file that reads it), and ``requirements.txt``.

    Args:
        plan: What to run.
        cluster: What it was planned for; without it the log states no MFU.
        folder: Where the files will lie, as in ``emit_script``.

    Raises:
        CodegenError: The plan cannot be expressed as a script, the script could not look at the
            model, or its code or config is gone.
        VerificationError: Its layout breaks a rule.
    """
    verify_layout(plan)
    script = emit_script(plan, cluster=cluster, folder=folder)
    user = model_files(plan.model, folder)
    # The search has tried what is split, with all answers to reads, and no stages.
    looks = looks_at_model(plan) and (bool(plan.data_reads) or plan.degrees.pp > 1)
    on_cpus = cluster is not None and cluster.host_is_device
    if looks or plan.compile or on_cpus:
        from planner.codegen.trial import ModelTrial  # imports torch

        trial = ModelTrial(
            plan, tuple(block_names(plan)), user.copies if plan.model.is_config else {}
        )
        if looks:
            trial.look()
        if plan.compile:
            trial.compile()
        if on_cpus:
            trial.kernels()
    return {
        "train.py": script,
        **_runtime_files(script),
        **user.copies,
        "requirements.txt": user.requirements(),
    }


def runtime_paths() -> list[str]:
    """Paths of all modules of the runtime in a plan's folder, of which a script needs some."""
    return [f"{RUNTIME_FOLDER.name}/{each.name}" for each in RUNTIME_FOLDER.glob("*.py")]


def _runtime_files(script: str) -> dict[str, str]:
    """Give the modules of the runtime that a script imports, and those that these import."""
    files = {f"{RUNTIME_FOLDER.name}/__init__.py": PACKAGE_TEXT}
    wanted = _imported(script, "runtime")
    while wanted:
        name = wanted.pop()
        path = f"{RUNTIME_FOLDER.name}/{name}.py"
        if path not in files:
            files[path] = (RUNTIME_FOLDER / f"{name}.py").read_text(encoding="utf-8")
            wanted += _imported(files[path], "")
    return dict(sorted(files.items()))


def _imported(source: str, package: str) -> list[str]:
    """Name the modules of a package that a source imports names from; "" is its own package."""
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom)]
    if not package:
        return [str(node.module) for node in nodes if node.level]
    prefix = f"{package}."
    modules = [str(node.module) for node in nodes]
    return [name.removeprefix(prefix) for name in modules if name.startswith(prefix)]
