"""The files of a training script."""

import ast
from pathlib import Path

from planner.codegen.emit import MODEL_NAME, block_names, emit_script
from planner.codegen.reads import looks_at_model
from planner.errors import CodegenError
from planner.plan.types import Plan
from planner.plan.verify import verify_layout

RUNTIME_FOLDER = Path(__file__).parents[1] / "runtime"
"""The runtime, of which each script gets the modules that it needs, copied as they are."""

CONFIG_MODEL_FILE = Path(__file__).parents[1] / "graph" / "loading" / "hf_model.py"
"""The model file of every Hugging Face config, copied as it is."""


def script_files(plan: Plan, *, folder: Path | None = None) -> dict[str, str]:
    """Give the training script and what lies beside it, text by file name.

    That is what it needs of the runtime; for a Hugging Face config also the config and a model
    file that reads it.

    Args:
        plan: What to run.
        folder: Where the files will lie: the model file is then named relative to it. None
            names it by its absolute path.

    Raises:
        CodegenError: The plan cannot be expressed as a script, the script could not look at the
            model, or its config is gone.
        VerificationError: Its layout breaks a rule.
    """
    verify_layout(plan)
    script = emit_script(plan, folder=folder)
    files = {"train.py": script, **_runtime_files(script)}
    config_files = {}
    if plan.model.is_config:
        config_files = {
            MODEL_NAME: CONFIG_MODEL_FILE.read_text(encoding="utf-8"),
            "config.json": _config_text(str(plan.model.file)),
        }
    if plan.data_reads and looks_at_model(plan):
        from planner.codegen.trial import try_model  # imports torch

        try_model(plan, tuple(block_names(plan)), config_files)
    return {**files, **config_files}


def _runtime_files(script: str) -> dict[str, str]:
    """Give the modules of the runtime that a script imports, and those that these import."""
    files: dict[str, str] = {}
    wanted = ["__init__", *_imported(script, "runtime")]
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


def _config_text(file: str) -> str:
    try:
        return Path(file).read_text(encoding="utf-8")
    except OSError as error:
        raise CodegenError(
            f"the script needs a copy of {file}, which cannot be read: {error.strerror}",
            hint="put it back, or plan again with its new path",
        ) from error
