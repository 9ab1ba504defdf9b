"""Plans how to train a PyTorch model on many GPUs, proves the plan best, and writes the script.

    import planner
    result = planner.plan("model.py", gpus=8)
    result                      # a table in a notebook
    result.candidates           # a DataFrame, one row per layout
    result.save("plans/run1")
    planner.trace("model.py")   # the operator graph alone

What is named in ``__all__`` is the public library. It is imported on first use: torch and pandas
are heavy, and ``plan --help`` needs neither.
"""

import logging
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from planner.api import estimate as estimate
    from planner.api import plan as plan
    from planner.errors import CheckError as CheckError
    from planner.errors import CodegenError as CodegenError
    from planner.errors import InfeasiblePlanError as InfeasiblePlanError
    from planner.errors import ModelError as ModelError
    from planner.errors import PlannerError as PlannerError
    from planner.errors import ProfileError as ProfileError
    from planner.errors import RequestError as RequestError
    from planner.errors import SolverError as SolverError
    from planner.errors import VerificationError as VerificationError
    from planner.graph.operator_graph import OperatorGraph as OperatorGraph
    from planner.plan.serialize import load_plan as load_plan
    from planner.plan.types import Plan as Plan
    from planner.questions.explain import Explanation as Explanation
    from planner.questions.explain import WhyNot as WhyNot
    from planner.questions.sweep_result import SweepResult as SweepResult
    from planner.questions_api import explain as explain
    from planner.questions_api import explain_why_not as explain_why_not
    from planner.questions_api import sweep as sweep
    from planner.result import PlanResult as PlanResult
    from planner.trace_api import trace as trace
    from planner.trace_api import trace_lengths as trace_lengths
    from planner.trace_result import TraceResult as TraceResult
    from planner.validation.validate import ValidationResult as ValidationResult
    from planner.validation.validate import validate as validate

_MODULES = {
    "CheckError": "planner.errors",
    "CodegenError": "planner.errors",
    "Explanation": "planner.questions.explain",
    "InfeasiblePlanError": "planner.errors",
    "ModelError": "planner.errors",
    "OperatorGraph": "planner.graph.operator_graph",
    "Plan": "planner.plan.types",
    "PlanResult": "planner.result",
    "PlannerError": "planner.errors",
    "ProfileError": "planner.errors",
    "RequestError": "planner.errors",
    "SolverError": "planner.errors",
    "SweepResult": "planner.questions.sweep_result",
    "TraceResult": "planner.trace_result",
    "ValidationResult": "planner.validation.validate",
    "VerificationError": "planner.errors",
    "WhyNot": "planner.questions.explain",
    "estimate": "planner.api",
    "explain": "planner.questions_api",
    "explain_why_not": "planner.questions_api",
    "load_plan": "planner.plan.serialize",
    "plan": "planner.api",
    "sweep": "planner.questions_api",
    "trace": "planner.trace_api",
    "trace_lengths": "planner.trace_api",
    "validate": "planner.validation.validate",
}
"""Where each public name lives."""

__all__ = [
    "CheckError",
    "CodegenError",
    "Explanation",
    "InfeasiblePlanError",
    "ModelError",
    "OperatorGraph",
    "Plan",
    "PlanResult",
    "PlannerError",
    "ProfileError",
    "RequestError",
    "SolverError",
    "SweepResult",
    "TraceResult",
    "ValidationResult",
    "VerificationError",
    "WhyNot",
    "estimate",
    "explain",
    "explain_why_not",
    "load_plan",
    "plan",
    "sweep",
    "trace",
    "trace_lengths",
    "validate",
]

# Importing the package ``planner.plan`` binds its name here, once. It is unbound so that
# ``planner.plan`` is the function; ``from planner.plan.types import ...`` is not touched by this.
import_module("planner.plan")
del globals()["plan"]

logging.getLogger("planner").addHandler(logging.NullHandler())


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module 'planner' has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
