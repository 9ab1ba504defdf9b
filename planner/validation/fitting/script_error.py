"""How far off step times are with the emitted script's own constants.

``python -m planner.validation.fitting.script_error`` prices the published runs of FSDP frameworks
with the constants of ``profiles/frameworks/planner.toml`` in the place of what was fitted to each
framework, and prints the errors by cluster. The mean is the ``step_time_error`` of the cluster's
profile, which plans show beside their step time. The constants were chosen with these runs in
view, and none of them is a run of the script itself.
"""

import statistics
import sys
from collections.abc import Mapping
from contextlib import suppress

from planner.errors import PlannerError
from planner.framework.profiles import load_framework
from planner.framework.script import SCRIPT
from planner.validation.fitting.refit import RUNS_FOLDER
from planner.validation.pricing.cases import case_of
from planner.validation.pricing.pricing import CasePricer
from planner.validation.reading.table import read_table

TABLES = ("llm_foundry_mpt", "torchtitan")
"""Tables of FSDP frameworks."""


def script_errors() -> Mapping[str, list[float]]:
    """Absolute errors of the step times, by cluster of the script's profile."""
    constants = load_framework(SCRIPT).tuned
    pricer = CasePricer()
    found: dict[str, list[float]] = {}
    for table in TABLES:
        for run in read_table(RUNS_FOLDER / f"{table}.csv", keep_going=True).runs:
            with suppress(PlannerError):  # what is not modelled has no error
                case = case_of(run)
                if case.cluster in constants and run.step_time_s:
                    price = pricer.price(case, constants[case.cluster])
                    error = abs(price.costs.step_time_s / run.step_time_s - 1)
                    found.setdefault(case.cluster, []).append(error)
    return found


def main() -> int:
    """Print the errors."""
    for cluster, errors in sorted(script_errors().items()):
        tenth = statistics.quantiles(errors, n=10)[-1]
        sys.stdout.write(
            f"{cluster:16} {len(errors):3} runs  mean {statistics.fmean(errors):5.1%}  "
            f"median {statistics.median(errors):5.1%}  one in ten above {tenth:5.1%}\n"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
