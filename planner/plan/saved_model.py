"""The model that a plan's folder holds."""

import ast
from dataclasses import dataclass, replace
from pathlib import Path

from planner.errors import ModelError
from planner.graph.loading.hints import Hint, make_hints
from planner.graph.loading.load import load_model
from planner.graph.loading.own_place import COPIES_FOLDER, asks_for_its_place, original_named_by
from planner.graph.sizes.family import GraphFamily, trace_family
from planner.plan.serialize import SavedPlan
from planner.plan.verify import verify_plan


def saved_graphs(saved: SavedPlan) -> GraphFamily:
    """Trace the model of a plan.

    Raises:
        ModelError: It is gone, or cannot be traced.
        VerificationError: It is not the model of the plan.
    """
    found = _model_source(saved)
    loaded = load_model(found.source, seq_len=saved.plan.model.seq_len, folder=found.folder)
    graphs = trace_family(replace(loaded, hints=found.hints), dtype=saved.plan.dtype)
    hint = f"Has {found.source} changed since the plan was made? Plan it again."
    verify_plan(saved.plan, saved.cluster, graphs=graphs, name=f"{saved.file}", hint=hint)
    return graphs


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """A saved plan's model as ``load_model`` takes it."""

    source: str
    hints: tuple[Hint, ...]
    folder: Path | None = None
    """Folder that a named module lies in, None for the working directory."""


def _model_source(saved: SavedPlan) -> _Found:
    """Find the model where the script takes it from.

    That is the copy beside the plan, or the original where the code looks for what lies beside it
    and the original is still there.
    """
    model, folder = saved.plan.model, saved.file.parent
    hints = make_hints(saved.request.hints)
    # A copy lies elsewhere: hints name its files by the end of their path.
    own = tuple(replace(hint, file=Path(hint.file).name) for hint in hints)
    copies = folder / COPIES_FOLDER
    if model.is_config:
        copy = folder / "config.json"
        return _Found(source=str(copy if copy.exists() else model.file), hints=hints)
    if model.file is None and model.module is None:
        raise ModelError(
            f"{saved.file}: its model was passed as an object, and no file holds it",
            hint="Put it into a file with build_model() and example_batch(), and plan that file.",
        )
    if model.file is None:
        source = f"{model.module}:{model.factory}"
        if not copies.exists():
            return _Found(source=source, hints=hints)
        return _Found(source=source, hints=own, folder=copies)
    copy = copies / Path(model.file).name
    if not copy.exists():
        return _Found(source=f"{model.file}:{model.factory}", hints=hints)
    file = _original(folder, Path(model.file)) if _looks_around(copies) else None
    return _Found(source=f"{file or copy}:{model.factory}", hints=own)


def _original(folder: Path, given: Path) -> Path | None:
    """Find a model file where it was planned, None where it is no longer there.

    The user may have named it as seen from another working directory than this one.
    """
    script = folder / "train.py"
    named = original_named_by(script) if script.is_file() else None
    return next((file for file in (named, given) if file is not None and file.is_file()), None)


def _looks_around(copies: Path) -> bool:
    files = copies.rglob("*.py")
    return any(asks_for_its_place(ast.parse(file.read_text(encoding="utf-8"))) for file in files)
