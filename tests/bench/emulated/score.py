"""Prices measured runs with a cluster's profile, and holds the planner to its bars.

``python tests/bench/emulated/score.py profiles/measured/emulated_runs.csv`` prints the bars of a
table that ``experiment.py --out`` has written.
"""

import statistics
import subprocess
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import pandas as pd
from layouts import DTYPE, MODELS
from measure import CLUSTERS, MeasuredRun
from paced import IMPORTED

from planner.framework.script import SCRIPT, framework_on_cluster
from planner.graph.loading.load import load_model
from planner.graph.sizes.family import GraphFamily, trace_family
from planner.plan.serialize import load_saved_plan
from planner.plan.types import Plan
from planner.pricing.model_pricing import ModelPricer
from planner.pricing.op_rows import plan_choice
from planner.pricing.reprice import price_plan
from planner.pricing.traffic_rows import traffic_rows
from planner.report.words import detail_words, layout_words

MIB = 2**20

FEWEST_RANKED = 4
"""Runs of a group whose order says something."""


class Pricer:
    """Prices saved plans on measured clusters; work is counted once for each choice."""

    def __init__(self, work: Path, clusters: Path, calibration: str | None = None) -> None:
        self._work, self._clusters, self._calibration = work, clusters, calibration
        self._graphs: dict[str, GraphFamily] = {}
        self._pricers: dict[tuple[str, int], ModelPricer] = {}

    def row(self, run: MeasuredRun) -> dict[str, object]:
        """A run as a row of the table."""
        plan = load_saved_plan(self._work / run.folder).plan
        network = CLUSTERS[run.cluster]
        framework, cluster = framework_on_cluster(
            SCRIPT,
            str(self._clusters / f"{run.cluster}.toml"),
            gpus=network.num_ranks,
            gpus_per_node=network.ranks_per_host,
            calibration=self._calibration,
        )
        pricer = self._pricer(run.model, network.num_ranks)
        work = pricer.work(plan_choice(plan))
        assert work is not None
        price = price_plan(plan, [work], cluster, framework)
        memory = price.peak_memory
        costs = price.costs
        return {
            "model": run.model,
            "cluster": run.cluster,
            "hosts": network.hosts,
            "ranks_per_host": network.ranks_per_host,
            "inside_mbit_per_s": network.inside_mbit_per_s,
            "between_mbit_per_s": network.between_mbit_per_s,
            "layout": f"{layout_words(plan)}, {detail_words(plan)}"
            + (", ZeRO-3" if plan.reshard_after_forward and plan.degrees.dp_shard > 1 else "")
            + (", sequence parallel" if plan.sequence_parallel else "")
            + (f", {plan.virtual_stages} stages a rank" if plan.virtual_stages > 1 else ""),
            "why": run.why,
            "measured_step_s": run.step_time_s,
            "measured_least_s": min(run.step_times_s),
            "measured_most_s": max(run.step_times_s),
            "predicted_step_s": costs.step_time_s,
            "compute_s": costs.compute_s + costs.recompute_s,
            "tp_comm_s": costs.tp_comm_s,
            "pp_comm_s": costs.pp_comm_s,
            "dp_comm_s": costs.dp_comm_s,
            "bubble_s": costs.bubble_s,
            "optimizer_s": costs.optimizer_s,
            "measured_memory_mib": max(run.memory_bytes) / MIB,
            "predicted_memory_mib": (memory.total_bytes - start_bytes()) / MIB,
            "measured_sent_mb": sum_of_hosts(run) / 1e6,
            "predicted_sent_mb": sent_bytes(plan, pricer) / 1e6,
            "load": run.load,
        }

    def _pricer(self, model: str, ranks: int) -> ModelPricer:
        if model not in self._graphs:
            loaded = load_model(str(MODELS[model]), seq_len=None)
            self._graphs[model] = trace_family(loaded, dtype=DTYPE)
        if (model, ranks) not in self._pricers:
            framework, cluster = framework_on_cluster(
                SCRIPT, "cpu", gpus=ranks, gpus_per_node=ranks
            )
            self._pricers[model, ranks] = ModelPricer(
                self._graphs[model],
                cluster,
                DTYPE,
                kernels=framework.kernels,
                collective_host_s=framework.collective_host_s,
                is_tried=True,
            )
        return self._pricers[model, ranks]


@cache
def start_bytes() -> int:
    """Resident memory of a rank before its script begins, which the reserve of a profile holds."""
    resident = "int(open('/proc/self/statm').read().split()[1]) * resource.getpagesize()"
    words = f"import resource, {', '.join(IMPORTED)}; print({resident})"
    return int(
        subprocess.run([sys.executable, "-c", words], check=True, stdout=subprocess.PIPE).stdout
    )


def sum_of_hosts(run: MeasuredRun) -> int:
    """All that was sent: each host tells what its ranks sent together."""
    per_host = CLUSTERS[run.cluster].ranks_per_host
    return sum(run.sent_bytes[::per_host])


def sent_bytes(plan: Plan, pricer: ModelPricer) -> float:
    """What all ranks send in a step, by rings; gloo reduces whole tensors everywhere."""
    total = 0.0
    for row in traffic_rows(plan, pricer, plan.stages):
        n = row.group_size
        share = {
            "all_gather": (n - 1) / n,
            "reduce_scatter": 2 * (n - 1) / n,
            "all_reduce": 2 * (n - 1) / n,
            "send": 1.0,
        }.get(row.kind, 0.0)
        total += row.bytes * share
    return total * plan.degrees.world_size / plan.degrees.pp


def table(runs: Iterable[MeasuredRun], pricer: Pricer) -> pd.DataFrame:
    """All runs."""
    return pd.DataFrame([pricer.row(run) for run in runs])


def bars(frame: pd.DataFrame) -> list[tuple[str, str, str]]:
    """What was found, beside the bar."""
    own = frame[frame.why != "again"]
    errors = (own.predicted_step_s / own.measured_step_s - 1).abs()
    memory = (own.predicted_memory_mib / own.measured_memory_mib - 1).abs()
    sent = (own.predicted_sent_mb / own.measured_sent_mb - 1).abs()
    losses, thumbs, spearman = [], [], []
    for _, group in own.groupby(["model", "cluster"]):
        best_s = group.measured_step_s.min()
        picked = group.loc[group.predicted_step_s.idxmin()]
        losses.append(picked.measured_step_s / best_s - 1)
        thumb = group[group.why == "rule of thumb"]
        named = thumb if len(thumb) else group[group.why == "pick"]
        thumbs.append(float(named.measured_step_s.iloc[0]) / best_s - 1)
        if len(group) >= FEWEST_RANKED:
            ranks = group[["predicted_step_s", "measured_step_s"]].rank()
            spearman.append(ranks.corr().iloc[0, 1])
    correlations = pd.Series(spearman, dtype=float)
    return [
        ("runs, groups", "", f"{len(own)}, {len(losses)}"),
        ("pick over the measured best, mean", "5%", f"{statistics.fmean(losses):.1%}"),
        ("pick over the measured best, worst", "15%", f"{max(losses):.1%}"),
        ("rule of thumb over the best, mean", "above the pick", f"{statistics.fmean(thumbs):.1%}"),
        ("step time, median error", "10%", f"{errors.median():.1%}"),
        ("step time, within 25%", "90%", f"{(errors <= 0.25).mean():.1%}"),
        ("rank correlation in a group, mean", "0.9", f"{correlations.mean():.2f}"),
        ("rank correlation in a group, least", "", f"{correlations.min():.2f}"),
        ("memory beyond the start, median error", "5%", f"{memory.median():.1%}"),
        ("traffic, median error", "", f"{sent.median():.1%}"),
        ("noise: the same layout twice, median", "", f"{noise(frame):.1%}"),
    ]


def noise(frame: pd.DataFrame) -> float:
    """Median difference of a layout that ran twice at once."""
    keys = ["model", "cluster", "layout"]
    again = frame[frame.why == "again"].merge(frame[frame.why != "again"], on=keys)
    return float((again.measured_step_s_x / again.measured_step_s_y - 1).abs().median())


def words(frame: pd.DataFrame) -> str:
    """The runs for people."""
    columns = {
        "model": "model",
        "cluster": "cluster",
        "layout": "layout",
        "measured_step_s": "measured s",
        "predicted_step_s": "predicted s",
        "measured_memory_mib": "MiB",
        "predicted_memory_mib": "predicted MiB",
        "measured_sent_mb": "sent MB",
        "predicted_sent_mb": "predicted MB",
        "load": "load",
    }
    return frame[list(columns)].rename(columns=columns).round(3).to_string(index=False)


def lines(frame: pd.DataFrame) -> list[str]:
    """The bars for people."""
    return [f"{name:40} {bar:15} {found}" for name, bar, found in bars(frame)]


if __name__ == "__main__":
    print("\n".join(lines(pd.read_csv(sys.argv[1]))))
