"""Fits the constants of the shipped framework profiles again: their ``[[tuned]]`` tables.

``python -m planner.validation.fitting.refit [NAME ...]`` prints, for each profile named (all of
them without a name), the constants that a new fit to the published runs finds, and the error
before and after; ``--write`` puts them into the profiles.
"""

import argparse
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from planner.errors import PlannerError
from planner.framework.calibration import FrameworkOnCluster
from planner.framework.profiles import load_framework
from planner.hardware.profiles import PROFILES_FOLDER
from planner.validation.fitting.fit import RESERVE, centred_reserve, fit_constants, mean_error
from planner.validation.pricing.cases import Case, case_of
from planner.validation.pricing.pricing import CasePricer
from planner.validation.reading.table import read_table

RUNS_FOLDER = PROFILES_FOLDER / "published" / "runs"
"""Tables of published runs."""

_DIGITS = 4
"""Significant digits of a written constant."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FitPlan:
    """Which constants are fitted together, and to which runs."""

    framework: str
    """Name of the framework profile."""
    also: tuple[str, ...] = ()
    """Profiles of the same machine and kernels, whose runs are fitted together."""
    cluster: str
    """Name of the cluster profile."""
    tables: tuple[str, ...]
    """Tables of published runs; those of the framework on the cluster count."""
    free: tuple[str, ...]
    """Keys of the constants that are fitted, the memory's reserve for each profile by itself; the
    others keep their values."""
    most_gpus: int | None = None
    """Runs on more are left out, None for all."""

    @property
    def frameworks(self) -> tuple[str, ...]:
        """All its profiles."""
        return (self.framework, *self.also)


PLANS = (
    FitPlan(
        framework="nanotron",
        cluster="h100-sxm",
        tables=("nanotron_ultrascale_h100",),
        most_gpus=16,
        free=(
            "host_dispatch_us",
            "sustained_fraction_of_peak",
            "collective_host_us",
            "network_host_us_per_rank",
            "step_us",
        ),
    ),
    FitPlan(
        framework="nanotron",
        cluster="h100-sxm",
        tables=("nanotron_ultrascale_h100",),
        free=("gradient_overlap", "outer_latency_factor", "congested_message_us"),
    ),
    FitPlan(
        framework="composer-fsdp",
        cluster="h100-sxm",
        tables=("llm_foundry_mpt",),
        free=(
            "sustained_fraction_of_peak",
            "attention_forward_fraction_of_peak",
            "step_us",
            "accumulated_bytes_per_parameter",
        ),
    ),
    FitPlan(
        framework="composer-fsdp",
        cluster="a100-80gb-sxm",
        tables=("llm_foundry_mpt",),
        free=(
            "attention_forward_fraction_of_peak",
            "pointwise_fraction_of_bandwidth",
            "accumulated_bytes_per_parameter",
        ),
    ),
    FitPlan(
        framework="composer-fsdp-pure",
        cluster="a100-80gb-sxm",
        tables=("llm_foundry_mpt",),
        free=(
            "sustained_fraction_of_peak",
            "attention_forward_fraction_of_peak",
            "step_us",
            "accumulated_bytes_per_parameter",
        ),
    ),
    FitPlan(
        framework="composer-fsdp-pure",
        cluster="a100-40gb-sxm",
        tables=("llm_foundry_mpt",),
        free=("sustained_fraction_of_peak", "attention_forward_fraction_of_peak", "step_us"),
    ),
    FitPlan(
        framework="internevo",
        cluster="a100-80gb-sxm-roce-4x100",
        tables=("internevo",),
        free=("sustained_fraction_of_peak", "gradient_overlap", "step_us"),
    ),
    FitPlan(
        framework="megatron-deepspeed-vtrain",
        cluster="a100-80gb-sxm-ib-4x200",
        tables=("vtrain_single_node", "vtrain_multi_node"),
        free=(
            "host_dispatch_us",
            "sustained_fraction_of_peak",
            "pointwise_fraction_of_bandwidth",
            "inner_bandwidth_share",
            "outer_bandwidth_share",
            "matmul_k_overhead_elements",
            "partial_ring_share",
        ),
    ),
    FitPlan(
        framework="megatron",
        also=("megatron-sc21",),
        cluster="a100-80gb-sxm",
        tables=("korthikanti2022_table5", "megatron_sc21_table1"),
        free=("sustained_fraction_of_peak", "pointwise_fraction_of_bandwidth"),
    ),
    FitPlan(
        framework="megatron-zero-bubble",
        cluster="a100-80gb-sxm-roce",
        tables=("zero_bubble_table4",),
        free=(
            "sustained_fraction_of_peak",
            "pointwise_fraction_of_bandwidth",
            "message_us",
            "outer_bandwidth_share",
            "reserve_gib",
        ),
    ),
    FitPlan(
        framework="megatron-deepspeed-bigscience",
        also=("megatron-deepspeed-bigscience-bf16",),
        cluster="a100-80gb-sxm-opa-4x100",
        tables=("bigscience_a100_176b",),
        free=(
            "sustained_fraction_of_peak",
            "kernel_launch_us",
            "outer_bandwidth_share",
            "inner_bandwidth_share",
            "pointwise_fraction_of_bandwidth",
            "reserve_gib",
        ),
    ),
    FitPlan(
        framework="torchtitan",
        also=("torchtitan-compile",),
        cluster="h100-96gb-sxm",
        tables=("torchtitan",),
        free=("sustained_fraction_of_peak",),
    ),
)
"""In order: a later one of the same framework and cluster keeps what an earlier one has fitted.

Where a framework ran on few and on many devices, what the few show is fitted to them alone: the
network between nodes would hide it.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refit:
    """What one plan finds for one of its profiles."""

    plan: FitPlan
    """The plan."""
    framework: str
    """Name of the profile."""
    num_rows: int
    """Runs of the profile that it was fitted to."""
    old: Mapping[str, float]
    """Constants before."""
    new: Mapping[str, float]
    """The same after."""
    old_error: float
    """Mean absolute error of the step times before."""
    new_error: float
    """The same after."""

    def lines(self) -> list[str]:
        """What changes, for people."""
        plan = self.plan
        where = f"{self.framework} on {plan.cluster}, {self.num_rows} rows"
        if plan.most_gpus is not None:
            where += f" on at most {plan.most_gpus} devices"
        head = f"{where}: mean error {self.old_error:.1%} -> {self.new_error:.1%}"
        return [head, *(f"  {key:32} {self.old[key]:g} -> {self.new[key]:g}" for key in plan.free)]


def refit(plans: Sequence[FitPlan]) -> Iterator[Refit]:
    """Fit by plans, one after the other.

    Args:
        plans: Each starts from what the profile holds and the earlier ones have found.
    """
    pricer = CasePricer()
    current: dict[FrameworkOnCluster, Mapping[str, float]] = {}
    for plan in plans:
        old = {
            name: current.get((name, plan.cluster)) or load_framework(name).tuned[plan.cluster]
            for name in plan.frameworks
        }
        cases = {name: plan_cases(plan, name) for name in plan.frameworks}
        start = {key: old[plan.framework][key] for key in plan.free if key != RESERVE}
        fitted = fit_constants(
            [case for some in cases.values() for case in some], start, own=old, pricer=pricer
        )
        for name, some in cases.items():
            new = {**old[name], **fitted}
            if RESERVE in plan.free:
                new |= centred_reserve(pricer, some, new)
            new |= {key: _rounded(new[key]) for key in plan.free}
            current[name, plan.cluster] = new
            yield Refit(
                plan=plan,
                framework=name,
                num_rows=len(some),
                old=old[name],
                new=new,
                old_error=mean_error(some, old[name], pricer=pricer),
                new_error=mean_error(some, new, pricer=pricer),
            )


def plan_cases(plan: FitPlan, framework: str) -> list[Case]:
    """Timed runs of one of the plan's profiles on its cluster."""
    return [
        case
        for table in plan.tables
        for case in _cases_of(table)
        if (case.framework.name, case.cluster) == (framework, plan.cluster)
        and (plan.most_gpus is None or case.run.num_gpus <= plan.most_gpus)
        and case.run.step_time_s
    ]


@cache
def _cases_of(table: str) -> tuple[Case, ...]:
    runs = read_table(RUNS_FOLDER / f"{table}.csv", keep_going=True).runs
    found = []
    for run in runs:
        with suppress(PlannerError):  # what is not modelled cannot be fitted to
            found.append(case_of(run))
    return tuple(found)


def _rounded(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")


def written(text: str, cluster: str, values: Mapping[str, float]) -> str:
    """A profile's text with other numbers in its ``[[tuned]]`` table of a cluster.

    Args:
        text: The profile; every key stands there on a line of its own.
        cluster: Whose table.
        values: New numbers by key; comments, order and sources stay.
    """
    before, *tables = re.split(r"(?m)^(?=\[\[)", text)
    (index,) = (
        index
        for index, table in enumerate(tables)
        if re.match(rf'\[\[tuned\]\]\s+cluster = "{re.escape(cluster)}"\s', table)
    )
    for key, value in values.items():
        tables[index], found = re.subn(
            rf"(?m)^({re.escape(key)} = \{{ value = )[^,]+",
            rf"\g<1>{value:g}",
            tables[index],
        )
        assert found == 1, f"{key} stands {found} times in the table of {cluster}"
    return "".join([before, *tables])


def profile_file(framework: str) -> Path:
    """File of a shipped framework profile."""
    return PROFILES_FOLDER / "frameworks" / f"{framework}.toml"


def main(arguments: Sequence[str]) -> int:
    """Fit, print, and with ``--write`` put the constants into the profiles."""
    names = sorted({plan.framework for plan in PLANS})
    parser = argparse.ArgumentParser(prog="python -m planner.validation.fitting.refit")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(names)}")
    parser.add_argument("--write", action="store_true", help="put the constants into the profiles")
    options = parser.parse_args(arguments)
    unknown = sorted({*options.names} - {*names})
    if unknown:
        parser.error(f"no fit of {', '.join(unknown)}; there are {', '.join(names)}")
    for fitted in refit([each for each in PLANS if each.framework in (options.names or names)]):
        sys.stdout.write("\n".join(fitted.lines()) + "\n")
        sys.stdout.flush()
        if options.write:
            file = profile_file(fitted.framework)
            new = {key: fitted.new[key] for key in fitted.plan.free}
            text = written(file.read_text(encoding="utf-8"), fitted.plan.cluster, new)
            file.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
