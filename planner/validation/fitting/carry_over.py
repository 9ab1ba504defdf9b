"""How well fitted constants carry over to models that they were not fitted to.

``python -m planner.validation.fitting.carry_over [NAME ...]`` leaves out one hidden size after
the other of the runs that a plan of ``planner.validation.fitting.refit`` is fitted to, fits the
plan's constants to the rest, and prints how far off the step times of the runs left out are.
"""

import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from planner.framework.profiles import load_framework
from planner.validation.fitting.fit import RESERVE, fit_constants
from planner.validation.fitting.refit import PLANS, FitPlan, plan_cases
from planner.validation.pricing.cases import Case
from planner.validation.pricing.pricing import CasePricer


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """Runs of one hidden size, priced with constants that were fitted to the others."""

    plan: FitPlan
    """What was fitted."""
    hidden: int
    """The hidden size that was left out."""
    num_rows: int
    """Its runs."""
    mean_error: float
    """Mean absolute error of their step times."""
    median_error: float
    """Median of the same."""

    def line(self) -> str:
        """The same in words."""
        return (
            f"{self.plan.framework:30} {self.plan.cluster:26} hidden {self.hidden:6}"
            f" {self.num_rows:5} rows  mean {self.mean_error:6.1%}  median {self.median_error:6.1%}"
        )


def left_out(plan: FitPlan, pricer: CasePricer) -> Iterator[LeftOut]:
    """Leave out each hidden size of a plan's runs in turn; nothing where there is only one."""
    cases = [case for name in plan.frameworks for case in plan_cases(plan, name)]
    shipped = {name: load_framework(name).tuned[plan.cluster] for name in plan.frameworks}
    start = {key: shipped[plan.framework][key] for key in plan.free if key != RESERVE}
    sizes = sorted({case.run.hidden for case in cases})
    for hidden in sizes if len(sizes) > 1 else ():
        rest = [case for case in cases if case.run.hidden != hidden]
        fitted = fit_constants(rest, start, own=shipped, pricer=pricer)
        errors = [
            _error(case, pricer, {**shipped[case.framework.name], **fitted})
            for case in cases
            if case.run.hidden == hidden
        ]
        yield LeftOut(
            plan=plan,
            hidden=hidden,
            num_rows=len(errors),
            mean_error=statistics.fmean(errors),
            median_error=statistics.median(errors),
        )


def _error(case: Case, pricer: CasePricer, values: dict[str, float]) -> float:
    assert case.run.step_time_s, "plans hold timed runs only"
    return abs(pricer.price(case, values).costs.step_time_s / case.run.step_time_s - 1)


def main(names: Sequence[str]) -> int:
    """Print the errors of the named frameworks, or of all."""
    pricer = CasePricer()
    for plan in PLANS:
        if not names or plan.framework in names:
            for each in left_out(plan, pricer):
                sys.stdout.write(each.line() + "\n")
                sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
