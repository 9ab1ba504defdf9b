"""Times single ranks of plans on one GPU, the other ranks faked, and holds the plans to them.

    python tests/bench/gpu/shares.py plan DIR      # writes the plans and their scripts
    python tests/bench/gpu/shares.py measure DIR   # on the GPU: DIR/shares.jsonl, a line for each
    python tests/bench/gpu/shares.py compare DIR   # the table, and DIR/gpu_shares.csv

What runs is the worker of ``plan check --gpu``. Only ``measure`` needs a GPU, and of the planner's
dependencies it needs torch alone; a line is on disk as soon as it is there. With ``--smoke`` small
models stand for the large ones, on the CPU too.
"""

import argparse
import csv
import json
import multiprocessing
import statistics
import sys
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from share_cases import ShareCase, share_cases, smoke_cases

if TYPE_CHECKING:
    from planner.checking.share import ShareCheck

TIMED_S = 2.0
"""After so long no further step of a share is timed."""

LIMIT_S = 75.0
"""A share that has not ended by then has failed."""

BUDGET_S = 450.0
JOBS, TABLE, COMPARED = "jobs.json", "shares.jsonl", "gpu_shares.csv"
LONGEST_NAME = 160
CLUSTER = "h100-sxm"
PROFILES = {
    "NVIDIA H100 80GB HBM3": "h100-sxm",
    "NVIDIA H200": "h200-sxm",
    "one core of the CPU": CLUSTER,
}
"""Profile of each device that shares were timed on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A rank to time."""

    name: str
    pp_rank: int
    rank: int
    num_microbatches: int


def _rows(folder: Path) -> list[dict[str, Any]]:
    """What is measured so far."""
    table = folder / TABLE
    lines = table.read_text(encoding="utf-8").splitlines() if table.exists() else []
    return [json.loads(line) for line in lines]


# -- here -----------------------------------------------------------------------------------------


def plan_shares(folder: Path, cases: Sequence[ShareCase], cluster: str) -> int:
    """Write the plans and what is to be timed; returns how many cannot be planned."""
    from planner.errors import PlannerError

    folder.mkdir(parents=True, exist_ok=True)
    jobs: list[Job] = []
    refused = 0
    for case in cases:
        try:
            jobs += _planned(folder, case, cluster)
        except PlannerError as error:
            refused += 1
            print(f"{case.name}: {error}", file=sys.stderr, flush=True)
    (folder / JOBS).write_text(json.dumps([asdict(job) for job in jobs], indent=1) + "\n")
    return refused


def _planned(folder: Path, case: ShareCase, cluster: str) -> list[Job]:
    import planner
    from planner.strategy.placement import mesh_axis
    from planner.vocabulary import Axis

    source = case.source
    if case.config:
        source = str(folder / case.model)
        Path(source).write_text(json.dumps(case.config), encoding="utf-8")
    result = planner.estimate(
        source, gpus=case.gpus, cluster=cluster, fix=case.fix, seq_len=case.seq_len,
        global_batch_size=case.samples, dtype="bfloat16",
    )  # fmt: skip
    result.save(folder / case.name, force=True)
    plan = result.best
    stride = mesh_axis(plan.degrees, Axis.PP, plan.mesh_order).stride
    return [
        Job(
            name=case.name, pp_rank=pp_rank, rank=pp_rank * stride,
            num_microbatches=plan.num_microbatches,
        )
        for pp_rank in case.pp_ranks
    ]  # fmt: skip


# -- on the GPU -----------------------------------------------------------------------------------


def measure_shares(folder: Path, budget_s: float, only: Sequence[str]) -> int:
    """Time the shares, each in a process of its own; returns how many failed."""
    import planner.checking.share_run  # noqa: F401  # once, for all that are forked

    started_s = time.monotonic()
    failed = 0
    jobs = [Job(**job) for job in json.loads((folder / JOBS).read_text(encoding="utf-8"))]
    done = {(row["name"], row["pp_rank"]) for row in _rows(folder) if "error" not in row}
    with (folder / TABLE).open("a", encoding="utf-8") as table:
        for job in jobs:
            elapsed_s = time.monotonic() - started_s
            if elapsed_s > budget_s:
                break
            if (job.name, job.pp_rank) in done or (only and job.name not in only):
                continue
            row = {**asdict(job), **_in_a_process(folder, job)}
            failed += "error" in row
            table.write(json.dumps(row) + "\n")
            table.flush()
            words = row.get("error") or f"{row['step_s'] * 1e3:.1f} ms"
            print(f"{elapsed_s:6.1f} s {job.name} {job.pp_rank}: {words}", flush=True)
    return failed


def _in_a_process(folder: Path, job: Job) -> dict[str, Any]:
    forks = multiprocessing.get_context("fork")
    mine, theirs = forks.Pipe(duplex=False)
    process = forks.Process(target=_run, args=(folder / job.name, job, theirs))
    process.start()
    theirs.close()
    found: dict[str, Any] = {"error": f"nothing within {LIMIT_S:g} s"}
    if mine.poll(LIMIT_S):
        try:
            found = mine.recv()
        except EOFError:
            process.join(5)
            found = {"error": f"ended with code {process.exitcode}"}
    process.kill()
    process.join()
    return found


def _run(folder: Path, job: Job, answer: Connection) -> None:
    from planner.checking.share_run import share_of, timed_share

    sys.path.insert(0, str(folder))
    try:
        with share_of(folder, job.rank, job.num_microbatches) as (step, device):
            found = timed_share(step, device, TIMED_S)
            answer.send({**found, "torch": torch.__version__, "kernels": _kernels(step)})
    except BaseException as error:
        answer.send({"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()})


def _kernels(step: Callable[[], object]) -> dict[str, tuple[int, float]]:
    """Run one more step, and tell how often each kernel ran, and its seconds in all."""
    if not torch.cuda.is_available():
        return {}
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize()
    seconds: dict[str, list[float]] = defaultdict(list)
    for event in profile.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            seconds[event.name[:LONGEST_NAME]].append(event.device_time_total * 1e-6)
    return {name: (len(each), sum(each)) for name, each in seconds.items()}


# -- here, again ----------------------------------------------------------------------------------


def compare_shares(folder: Path, host_time_factor: float) -> None:
    """Print predicted against measured, share by share, then the median errors; write COMPARED."""
    rows = {(row["name"], row["pp_rank"]): row for row in _rows(folder)}
    print(f"{'share':28} {'measured':>10} {'of it idle':>10} {'time':>8} {'memory':>9} {'off':>8}")
    found, table = [], []
    for (name, pp_rank), row in rows.items():
        if "error" in row:
            print(f"{name:28} {row['error'].splitlines()[0]}")
            continue
        share = _share(folder / name, row, host_time_factor)
        kernels_s = sum(seconds for _, seconds in row["kernels"].values())
        found.append(share)
        table.append(
            {"share": name, "torch": row["torch"], **asdict(share), "kernels_s": kernels_s}
        )
        print(
            f"{name + ' ' + str(pp_rank):28} {share.measured_busy_s * 1e3:7.1f} ms "
            f"{1 - kernels_s / share.measured_busy_s:10.1%} {share.time_error:+8.1%} "
            f"{(share.measured_peak_bytes or 0) / 2**30:5.1f} GiB {share.memory_error:+8.1%}"
        )
    time = statistics.median(abs(share.time_error) for share in found)
    memory = statistics.median(abs(share.memory_error) for share in found)
    print(f"median error of {len(found)} shares: time {time:.1%}, memory {memory:.1%}")
    with (folder / COMPARED).open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(table[0]))
        writer.writeheader()
        writer.writerows(table)


def _share(folder: Path, row: dict[str, Any], host_time_factor: float) -> "ShareCheck":
    from dataclasses import replace

    from planner.checking.share import price_without_links, share_check
    from planner.framework.script import SCRIPT, framework_on_cluster
    from planner.plan.serialize import load_saved_plan

    saved = load_saved_plan(folder)
    _, cluster = framework_on_cluster(SCRIPT, PROFILES[row["device"]], gpus=saved.request.gpus)
    host = cluster.device
    factors = {
        name: getattr(host, name) * host_time_factor
        for name in ("host_dispatch_s", "split_dispatch_s", "selective_dispatch_s")
    }
    saved = replace(saved, cluster=replace(cluster, device=replace(host, **factors)))
    return share_check(saved.plan, price_without_links(saved), row["pp_rank"], row)


def main(arguments: Sequence[str] | None = None) -> int:
    """Read the command line and do what it says."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("plan", "measure", "compare"))
    parser.add_argument("folder", type=Path, metavar="DIR")
    parser.add_argument("--smoke", action="store_true", help="small models, on the CPU too")
    parser.add_argument("--only", action="append", default=[], metavar="NAME")
    parser.add_argument("--budget-s", type=float, default=BUDGET_S, metavar="S")
    parser.add_argument("--cluster", default=CLUSTER)
    parser.add_argument("--host-time-factor", type=float, default=1.0, metavar="X")
    options = parser.parse_args(arguments)
    if options.what == "plan":
        cases = [
            c
            for c in (smoke_cases() if options.smoke else share_cases())
            if not options.only or c.name in options.only
        ]
        return min(plan_shares(options.folder, cases, options.cluster), 1)
    if options.what == "measure":
        return min(measure_shares(options.folder, options.budget_s, options.only), 1)
    compare_shares(options.folder, options.host_time_factor)
    return 0


if __name__ == "__main__":
    sys.exit(main())
