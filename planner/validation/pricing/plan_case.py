"""A logged run as what is priced: the model that the plan's folder holds, and its layout."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from planner.framework.calibration import load_calibration
from planner.framework.constants import PROFILES_OWN, Constants
from planner.framework.profiles import load_framework
from planner.framework.script import SCRIPT
from planner.framework.spec import FrameworkSpec
from planner.graph.sizes.family import GraphFamily
from planner.plan.saved_model import saved_graphs
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
        """Devices per node, as the plan has them; None where those of the profiles count."""
        return self.run.saved.request.gpus_per_node

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
        return saved_graphs(self.run.saved)
