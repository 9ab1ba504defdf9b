"""The exceptions that a user can meet, and their exit codes.

PlannerError
|-- RequestError         2  impossible or contradictory request
|-- InfeasiblePlanError  3  nothing fits
|-- SolverError          4  limit reached with no incumbent, or no solver
|-- ModelError           5  the model cannot be loaded or traced
|-- ProfileError         6  device or cluster profile missing or wrong
|-- CodegenError         7  the plan cannot be expressed in the target
|-- VerificationError    8  a plan breaks a rule that every plan keeps: our bug, or an edited file
`-- CheckError           9  the script does not do what the plan says

Each message has three parts: what was asked, which rule it breaks with the numbers, and
(``hint``) what would work.
"""

from collections.abc import Mapping


class PlannerError(Exception):
    """Base of all errors shown to users."""

    exit_code = 1

    def __init__(self, message: str, *, hint: str = "") -> None:
        """Keep the message (asked, rule) and the hint (what would work)."""
        super().__init__(message)
        self.hint = hint

    def __str__(self) -> str:
        message = super().__str__()
        return f"{message}\n{self.hint}" if self.hint else message


class RequestError(PlannerError):
    """An impossible or contradictory request: degrees, divisibility, an unknown option value."""

    exit_code = 2


class InfeasiblePlanError(PlannerError):
    """No layout fits into the device memory."""

    exit_code = 3

    def __init__(
        self, message: str, *, hint: str = "", shortfall_bytes_by_stage: Mapping[int, int] = {}
    ) -> None:
        """Keep what is missing on each stage of the closest layout."""
        super().__init__(message, hint=hint)
        self.shortfall_bytes_by_stage = dict(shortfall_bytes_by_stage)


class SolverError(PlannerError):
    """The solver stopped without an answer, or there is no solver."""

    exit_code = 4


class ModelError(PlannerError):
    """The user's model cannot be imported, built or traced."""

    exit_code = 5


class ProfileError(PlannerError):
    """A device or cluster profile is missing or wrong."""

    exit_code = 6


class CodegenError(PlannerError):
    """The plan cannot be expressed in the target."""

    exit_code = 7


class VerificationError(PlannerError):
    """A plan breaks a rule that every plan keeps: a bug of the planner, or an edited file."""

    exit_code = 8

    def __init__(self, message: str, *, rule: str, hint: str = "") -> None:
        """Keep the name of the broken rule."""
        super().__init__(message, hint=hint)
        self.rule = rule


class CheckError(PlannerError):
    """A plan's script does not run, or needs other memory than the plan says."""

    exit_code = 9
