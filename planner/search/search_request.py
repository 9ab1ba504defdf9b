"""What a search is asked for."""

from dataclasses import dataclass, field
from functools import partial

from planner.framework.profiles import load_framework
from planner.framework.script import SCRIPT
from planner.framework.spec import FrameworkSpec
from planner.plan.types import ModelRef
from planner.strategy.rules import FixedValues


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchRequest:
    """What to search for; every value is resolved."""

    model: ModelRef
    """What is trained."""
    global_batch_size: int
    """Samples per step."""
    dtype: str
    """Compute dtype."""
    fixed: FixedValues
    """Values to keep."""
    top: int
    """Layouts to show."""
    time_limit_s: float | None = None
    """Time after which the search proves no more and shows the gap; None for a limit of work, which
    is the same on every machine."""
    framework: FrameworkSpec = field(default_factory=partial(load_framework, SCRIPT))
    """What runs the plans: the emitted script."""
