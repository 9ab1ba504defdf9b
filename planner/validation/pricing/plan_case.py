"""A logged run as what is priced: the model that the plan's folder holds, and its layout."""

import ast
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from planner.framework.calibration import load_calibration
from planner.framework.constants import PROFILES_OWN, Constants
from planner.framework.profiles import load_framework
from planner.framework.script import SCRIPT
from planner.framework.spec import FrameworkSpec
from planner.graph.loading.hints import Hint, make_hints
from planner.graph.loading.load import load_model
from planner.graph.loading.own_place import COPIES_FOLDER, asks_for_its_place
from planner.graph.sizes.family import GraphFamily, trace_family
from planner.plan.serialize import SavedPlan
from planner.plan.verify import verify_plan
from planner.validation.types import LoggedRun


@dataclass(frozen=True, kw_only=True, eq=False)
class PlanCase:
    """A logged run, with what it is priced by."""

    run: LoggedRun
    """The run."""

    @property
    def framework(self) -> FrameworkSpec:
        """The emitted script."""
        return load_framework(SCRIPT)

    @property
    def cluster(self) -> str:
        """Name or path of the cluster profile that the plan was asked for."""
        return self.run.saved.request.cluster

    @property
    def gpus_per_node(self) -> int | None:
        """Devices per node, as the plan has them."""
        return self.run.saved.cluster.gpus_per_node

    @property
    def assumptions(self) -> tuple[str, ...]:
        """What was taken of the log."""
        return self.run.notes

    @property
    def tells_reserve(self) -> bool:
        """Whether its memory holds what plans count in reserve."""
        return not self.run.is_allocated

    @cached_property
    def constants(self) -> Constants:
        """What the plan was made with in the place of the profiles' numbers.

        Raises:
            ProfileError: The file of constants that it was made with is gone, or wrong.
        """
        calibration = self.run.saved.request.calibration
        return PROFILES_OWN if calibration is None else load_calibration(Path(calibration))

    @cached_property
    def graphs(self) -> GraphFamily:
        """Its model, traced.

        Raises:
            ModelError: It is gone, or cannot be traced.
            VerificationError: It is not the model of the plan.
        """
        saved = self.run.saved
        source, hints = _model_source(saved)
        loaded = load_model(source, seq_len=saved.plan.model.seq_len)
        graphs = trace_family(replace(loaded, hints=hints), dtype=saved.plan.dtype)
        hint = f"Has {source} changed since the plan was made? Plan it again."
        verify_plan(saved.plan, saved.cluster, graphs=graphs, name=f"{saved.file}", hint=hint)
        return graphs


def _looks_around(copies: Path) -> bool:
    files = copies.rglob("*.py")
    return any(asks_for_its_place(ast.parse(file.read_text(encoding="utf-8"))) for file in files)


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
    if model.file is None:
        return f"{model.module}:{model.factory}", hints
    copies = folder / COPIES_FOLDER
    copy = copies / Path(model.file).name
    if not copy.exists() or (Path(model.file).exists() and _looks_around(copies)):
        return f"{model.file}:{model.factory}", hints
    # A copy lies elsewhere: hints name its files by the end of their path.
    own = tuple(replace(hint, file=Path(hint.file).name) for hint in hints)
    return f"{copy}:{model.factory}", own
