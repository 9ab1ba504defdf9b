"""The model that a plan's folder holds."""

import ast
from dataclasses import replace
from pathlib import Path

from planner.errors import ModelError
from planner.graph.loading.hints import Hint, make_hints
from planner.graph.loading.load import load_model
from planner.graph.loading.own_place import COPIES_FOLDER, asks_for_its_place
from planner.graph.sizes.family import GraphFamily, trace_family
from planner.plan.serialize import SavedPlan
from planner.plan.verify import verify_plan


def saved_graphs(saved: SavedPlan) -> GraphFamily:
    """Trace the model of a plan.

    Raises:
        ModelError: It is gone, or cannot be traced.
        VerificationError: It is not the model of the plan.
    """
    source, hints = _model_source(saved)
    loaded = load_model(source, seq_len=saved.plan.model.seq_len)
    graphs = trace_family(replace(loaded, hints=hints), dtype=saved.plan.dtype)
    hint = f"Has {source} changed since the plan was made? Plan it again."
    verify_plan(saved.plan, saved.cluster, graphs=graphs, name=f"{saved.file}", hint=hint)
    return graphs


def _model_source(saved: SavedPlan) -> tuple[str, tuple[Hint, ...]]:
    """Name the model as ``load_model`` takes it, where the script took it from.

    That is the copy beside the plan, or the original where the code looks for what lies beside it
    and the original is still there.
    """
    model, folder = saved.plan.model, saved.file.parent
    hints = make_hints(saved.request.hints)
    if model.is_config:
        copy = folder / "config.json"
        return str(copy if copy.exists() else model.file), hints
    if model.file is None and model.module is None:
        raise ModelError(
            f"{saved.file}: its model was passed as an object, and no file holds it",
            hint="Put it into a file with build_model() and example_batch(), and plan that file.",
        )
    if model.file is None:
        return f"{model.module}:{model.factory}", hints
    copies = folder / COPIES_FOLDER
    copy = copies / Path(model.file).name
    if not copy.exists() or (Path(model.file).exists() and _looks_around(copies)):
        return f"{model.file}:{model.factory}", hints
    # A copy lies elsewhere: hints name its files by the end of their path.
    own = tuple(replace(hint, file=Path(hint.file).name) for hint in hints)
    return f"{copy}:{model.factory}", own


def _looks_around(copies: Path) -> bool:
    files = copies.rglob("*.py")
    return any(asks_for_its_place(ast.parse(file.read_text(encoding="utf-8"))) for file in files)
