"""Holds the efficiency numbers of the profiles to measurements, and fits them.

``python -m planner.cost.calibrate`` prices every row of the tables in ``profiles/published`` and
``profiles/measured`` with the shipped profiles and prints the errors; with ``--fit`` it also
searches the parameters anew and prints the values to write into the profiles. The fit minimises
the mean absolute logarithm of predicted over measured time by a pattern search that is the same
on every run.
"""

import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from planner.cost.device_fit import fit_efficiency, price_op
from planner.cost.link_fit import fit_link_to, price_collective
from planner.cost.tables import (
    CollectiveSample,
    OpSample,
    collective_samples,
    elementwise_samples,
    matmul_samples,
    measured_folders,
    measured_samples,
    v100_samples,
)
from planner.hardware.profiles import load_cluster, load_device
from planner.hardware.spec import DeviceSpec

DEVICES = {
    "A100-80GB-SXM": "a100-80gb-sxm",
    "H100-80GB-SXM": "h100-sxm",
    "A40-48GB": "a40",
    "V100-32GB-SXM2": "v100-32gb-sxm",
}
"""Profile of each device of the op tables."""

FITTED_GROUPS = ("matmul", "residual add", "rms_norm", "gelu", "layernorm")
"""Parts of the op tables that parameters are fitted to. ``silu_and_mul`` is left out: it is one
fused kernel of an inference engine, at half the bandwidth of torch's own pointwise kernels."""

HOST_BOUND_GPU = "V100-32GB-SXM2"
HOST_BOUND_FIXED = ("kernel_launch_us", "matmul_setup_us", "matmul_fraction_of_bandwidth")
"""The V100 table has the host's time in all short ops and no memory-bound matmuls, so that these
cannot be fitted to it."""


IDLE_FIXED = ("sustained_fraction_of_peak",)
"""The published tables were measured on idle cards, which shows no limit under load."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FitError:
    """How well prices match one part of a table."""

    table: str
    """Table."""
    system: str
    """Device, or cluster with ranks and nodes."""
    group: str
    """Part of the table."""
    num_rows: int
    """Measurements."""
    median: float
    """Median of |predicted / measured - 1|."""
    mape: float
    """Mean of |predicted / measured - 1|."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkFit:
    """A link of a cluster and the measurements that it is fitted to."""

    cluster: str
    """Shipped cluster whose link this is."""
    index: int
    """Position of the link, 0 is the innermost."""
    systems: tuple[str, ...]
    """Systems in the tables that have this link."""
    num_nodes: tuple[int, ...]
    """Node counts of the rows used."""
    max_ranks: int
    """Most ranks of the rows used; larger jobs are reported but not fitted (noise)."""
    fixed: tuple[str, ...] = ()
    """Parameters that keep the profile's values."""


LINK_FITS = (
    LinkFit(
        cluster="a100-80gb-sxm",
        index=0,
        systems=("a100_dgx", "A100-80GB-SXM"),
        num_nodes=(1,),
        max_ranks=8,
    ),
    LinkFit(
        cluster="h100-sxm",
        index=0,
        systems=("h100_dgx", "H200-141GB-SXM", "H100-80GB-SXM"),
        num_nodes=(1,),
        max_ranks=8,
    ),
    LinkFit(cluster="b200-sxm", index=0, systems=("B200-180GB-SXM",), num_nodes=(1,), max_ranks=8),
    LinkFit(
        cluster="v100-sxm",
        index=0,
        systems=("V100-16GB", "V100-32GB"),
        num_nodes=(1,),
        max_ranks=8,
    ),
    LinkFit(cluster="b200-sxm", index=1, systems=("B200-180GB-SXM",), num_nodes=(4,), max_ranks=32),
    LinkFit(
        cluster="h100-sxm",
        index=1,
        systems=("H100-80GB-SXM",),
        num_nodes=(2, 4, 8, 16, 32, 64),
        max_ranks=512,
        fixed=("gb_per_s",),
    ),
    LinkFit(
        cluster="mi300x",
        index=1,
        systems=("h100_dgx",),
        num_nodes=(2,),
        max_ranks=16,
        fixed=("gb_per_s",),
    ),
)
"""Links and what they are fitted to. EFA on H100 has one payload size only, but 2 to 64 nodes,
which tell the latency of a hop from the ramp; its bandwidth is that of B200. The InfiniBand class
is fitted to transfers between H100 nodes (400 Gbit/s per GPU); the profile "mi300x" stands for it
because it has that rate."""


def op_samples() -> dict[str, list[OpSample]]:
    """Read all op tables, by device."""
    by_gpu: dict[str, list[OpSample]] = {gpu: [] for gpu in DEVICES}
    for sample in (*matmul_samples(), *elementwise_samples(), *v100_samples()):
        by_gpu[sample.gpu].append(sample)
    return by_gpu


def idle(device: DeviceSpec) -> DeviceSpec:
    """Lift the limit of a training load: the op tables were measured on idle cards."""
    return replace(device, efficiency=replace(device.efficiency, sustained_fraction=1.0))


def op_errors() -> list[FitError]:
    """Hold the shipped devices to the published op tables."""
    return [
        error
        for gpu, samples in op_samples().items()
        for error in device_errors(idle(load_device(DEVICES[gpu])), samples)
    ]


def measured_errors(folders: Iterable[Path]) -> list[FitError]:
    """Hold the shipped devices to their own measured tables.

    Args:
        folders: Named as the profiles of the devices.
    """
    return [
        error
        for folder in folders
        for error in device_errors(load_device(folder.name), list(measured_samples(folder)))
    ]


def device_errors(device: DeviceSpec, samples: Sequence[OpSample]) -> list[FitError]:
    """Hold a device to samples, by table and part of it."""
    errors = []
    for table, group in dict.fromkeys((sample.table, sample.group) for sample in samples):
        part = [s for s in samples if (s.table, s.group) == (table, group)]
        ratios = [price_op(sample, device) / sample.measured_s for sample in part]
        errors.append(_fit_error(table, part[0].gpu, group, ratios))
    return errors


def link_errors() -> list[FitError]:
    """Hold the shipped links to the collective tables."""
    errors = []
    for fit in LINK_FITS:
        cluster = load_cluster(fit.cluster, gpus=1024, gpus_per_node=8)
        samples = link_samples(fit, max_ranks=1024)
        keys = dict.fromkeys(_collective_key(sample) for sample in samples)
        for system, group in keys:
            part = [s for s in samples if _collective_key(s) == (system, group)]
            ratios = [price_collective(s, cluster) / s.measured_s for s in part]
            errors.append(_fit_error(part[0].table, system, group, ratios))
    return errors


def link_samples(fit: LinkFit, *, max_ranks: int) -> list[CollectiveSample]:
    """Select the measurements of a link."""
    return [
        sample
        for sample in collective_samples()
        if sample.system in fit.systems
        and (sample.num_nodes > 1) == (fit.num_nodes[0] > 1)
        and sample.num_ranks <= max_ranks
    ]


def fit_device(gpu: str, samples: Sequence[OpSample]) -> dict[str, float]:
    """Search the efficiency parameters of a device of the published tables.

    Returns:
        Values by their keys in the profile.
    """
    return fit_efficiency(
        idle(load_device(DEVICES[gpu])),
        [sample for sample in samples if sample.group in FITTED_GROUPS],
        fixed=(*IDLE_FIXED, *(HOST_BOUND_FIXED if gpu == HOST_BOUND_GPU else ())),
    )


def fit_link(fit: LinkFit) -> dict[str, float]:
    """Search the parameters of a link.

    Returns:
        Values by their keys in the profile, the bandwidth as "gb_per_s" instead of a fraction.
    """
    cluster = load_cluster(fit.cluster, gpus=1024, gpus_per_node=8)
    samples = link_samples(fit, max_ranks=fit.max_ranks)
    return fit_link_to(cluster, fit.index, samples, fixed=fit.fixed)


def main(arguments: Sequence[str]) -> int:
    """Print the errors of the shipped profiles, and with ``--fit`` the parameters found anew."""
    measured = measured_folders()
    lines = [f"{'table':34} {'system':16} {'part':30} {'rows':>5} {'median':>7} {'MAPE':>7}"]
    lines += [
        f"{e.table:34} {e.system:16} {e.group:30} {e.num_rows:5} {e.median:7.1%} {e.mape:7.1%}"
        for e in (*op_errors(), *measured_errors(measured), *link_errors())
    ]
    if "--fit" in arguments:
        for gpu, samples in op_samples().items():
            lines.append(f"{DEVICES[gpu]}: {_show(fit_device(gpu, samples))}")
        for folder in measured:
            found = fit_efficiency(load_device(folder.name), list(measured_samples(folder)))
            lines.append(f"{folder.name} as measured: {_show(found)}")
        for fit in LINK_FITS:
            lines.append(f"{fit.cluster} links[{fit.index}]: {_show(fit_link(fit))}")
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


def _show(values: Mapping[str, float]) -> str:
    return ", ".join(f"{name} = {value:.4g}" for name, value in values.items())


def _collective_key(sample: CollectiveSample) -> tuple[str, str]:
    ring = " ring" if "ring" in sample.setting else ""
    size = f"{sample.num_ranks} ranks on {sample.num_nodes}"
    return sample.system, f"{sample.collective}{ring}, {size}"


def _fit_error(table: str, system: str, group: str, ratios: Sequence[float]) -> FitError:
    errors = [abs(ratio - 1) for ratio in ratios]
    return FitError(
        table=table,
        system=system,
        group=group,
        num_rows=len(errors),
        median=statistics.median(errors),
        mape=statistics.fmean(errors),
    )


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
