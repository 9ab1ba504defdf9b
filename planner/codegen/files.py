"""The files of a training script."""

from pathlib import Path

from planner.codegen.emit import emit_script
from planner.plan.types import Plan

RUNTIME_FILE = Path(__file__).parent / "runtime" / "parallel.py"
"""The runtime, copied as it is."""


def script_files(plan: Plan, *, folder: Path | None = None) -> dict[str, str]:
    """Give the training script and the runtime beside it, text by file name.

    Args:
        plan: What to run.
        folder: Where the files will lie: the model file is then named relative to it. None
            names it by its absolute path.

    Raises:
        CodegenError: The plan cannot be expressed as a script.
    """
    return {
        "train.py": emit_script(plan, folder=folder),
        "parallel.py": RUNTIME_FILE.read_text(encoding="utf-8"),
    }
