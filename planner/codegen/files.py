"""The files of a training script."""

from pathlib import Path

from planner.codegen.emit import MODEL_NAME, emit_script
from planner.errors import CodegenError
from planner.plan.types import Plan
from planner.plan.verify import verify_layout

RUNTIME_FILE = Path(__file__).parent / "runtime" / "parallel.py"
"""The runtime, copied as it is."""

CONFIG_MODEL_FILE = Path(__file__).parents[1] / "graph" / "loading" / "hf_model.py"
"""The model file of every Hugging Face config, copied as it is."""


def script_files(plan: Plan, *, folder: Path | None = None) -> dict[str, str]:
    """Give the training script and what lies beside it, text by file name.

    That is the runtime; for a Hugging Face config also the config and a model file that reads it.

    Args:
        plan: What to run.
        folder: Where the files will lie: the model file is then named relative to it. None
            names it by its absolute path.

    Raises:
        CodegenError: The plan cannot be expressed as a script, or its config is gone.
        VerificationError: Its layout breaks a rule.
    """
    verify_layout(plan)
    files = {
        "train.py": emit_script(plan, folder=folder),
        "parallel.py": RUNTIME_FILE.read_text(encoding="utf-8"),
    }
    if plan.model.is_config:
        files[MODEL_NAME] = CONFIG_MODEL_FILE.read_text(encoding="utf-8")
        files["config.json"] = _config_text(str(plan.model.file))
    return files


def _config_text(file: str) -> str:
    try:
        return Path(file).read_text(encoding="utf-8")
    except OSError as error:
        raise CodegenError(
            f"the script needs a copy of {file}, which cannot be read: {error.strerror}",
            hint="put it back, or plan again with its new path",
        ) from error
