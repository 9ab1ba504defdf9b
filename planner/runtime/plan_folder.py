"""A plan's own script, for training loops of the user's."""

import importlib.util
import sys
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

    from .parallel_model import ParallelModel


def parallelize(model: "nn.Module", plan: str | Path, **options: object) -> "ParallelModel":
    """Lay a model out as a plan says, under torchrun, for any training loop.

    The same as ``from train import parallelize`` in the plan's folder, which needs no planner::

        model = planner.runtime.parallelize(model, "plans/gpt")
        for step in range(model.load("checkpoints"), 1000):
            loss = model.step(batch)  # inputs and targets of model.batch_size samples
        model.close()

    Args:
        model: The whole model, built alike on all ranks, with weights on the CPU.
        plan: Folder that ``plan --out`` wrote, or the plan.json in it.
        options: ``dtype`` (a torch.dtype), ``max_grad_norm``, ``timeout_s``, and functions in the
            place of those of the model file: ``loss_fn``, ``configure_optimizer``,
            ``lr_schedule``.

    Returns:
        This rank's share of the model, with its optimisers.

    Raises:
        FileNotFoundError: The folder has no train.py.
        ImportError: Another module named ``runtime`` is loaded.
    """
    folder = Path(plan).resolve()
    script = _script(folder.parent if folder.is_file() else folder)
    parallel: ParallelModel = script.parallelize(model, **options)
    return parallel


@cache
def _script(folder: Path) -> ModuleType:
    path = folder / "train.py"
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not there: give the folder that plan --out wrote")
    loaded = sys.modules.get("runtime")
    if loaded is not None and Path(str(loaded.__file__)).parent != folder / "runtime":
        raise ImportError(
            f"{path} needs its folder runtime, but {loaded.__file__} is loaded under that name: "
            "one plan to a process, and no module of that name beside it"
        )
    sys.path.insert(0, str(folder))
    spec = importlib.util.spec_from_file_location("planned_train", path)
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script
