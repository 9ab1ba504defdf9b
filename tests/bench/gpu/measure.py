"""Measures one GPU: kernels, and whole transformer blocks with their memory.

    python tests/bench/gpu/measure.py --out profiles/measured/h200-sxm

Needs torch and this tree. Writes kernels.csv, blocks.csv (a row as soon as it is measured) and
machine.json into the folder, whose name is that of the device's profile. Stops when the budget is
used up; what tells most is measured first. With ``--smoke`` tiny shapes run in seconds, on the
CPU too. ``profiles/measured/README.md`` says what the columns mean.
"""

import argparse
import csv
import gc
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from gpu_blocks import BlockRow, BlockShape, block_shapes, measure_stack

from planner.profiling.clock import MOST_REPEATS, Clock
from planner.profiling.kernel_cases import kernel_groups
from planner.profiling.kernels import KernelCase, KernelRow

BUDGET_S = 450.0
HEAT_UP_S = 5.0
SMOKE_REPEATS = 10
TABLES = {"kernels.csv": KernelRow, "blocks.csv": BlockRow}


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Something to measure, and the table that its rows go to."""

    table: str
    label: str
    rows: Callable[[Clock], Iterator[KernelRow | BlockRow]]


class Tables:
    """The CSV files, each row on disk as soon as it is there."""

    def __init__(self, folder: Path) -> None:
        self._files = {
            name: (folder / name).open("w", newline="", encoding="utf-8") for name in TABLES
        }
        self._writers = {
            name: csv.DictWriter(self._files[name], [each.name for each in fields(row)])
            for name, row in TABLES.items()
        }
        self.num_rows = dict.fromkeys(TABLES, 0)
        for name, writer in self._writers.items():
            writer.writeheader()
            self._files[name].flush()

    def write(self, table: str, row: KernelRow | BlockRow) -> None:
        """Append a row; times to six digits."""
        values = {
            name: f"{value:.6g}" if isinstance(value, float) else value
            for name, value in asdict(row).items()
        }
        self._writers[table].writerow(values)
        self._files[table].flush()
        self.num_rows[table] += 1

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            file.close()


def jobs(*, smoke: bool) -> list[Job]:
    """List all that is measured: each group in its own order, the groups interleaved."""
    groups = [[_kernel_job(case) for case in group] for group in kernel_groups(smoke=smoke)]
    groups.append([_block_job(shape) for shape in block_shapes(smoke=smoke)])
    places = [
        (position / len(group), number, job)
        for number, group in enumerate(groups)
        for position, job in enumerate(group)
    ]
    return [job for _, _, job in sorted(places, key=lambda place: place[:2])]


def _kernel_job(case: KernelCase) -> Job:
    return Job(table="kernels.csv", label=case.label, rows=case.measure)


def _block_job(shape: BlockShape) -> Job:
    label = f"{shape.model} block, hidden {shape.hidden}, {shape.microbatch_size} x {shape.seq_len}"
    return Job(table="blocks.csv", label=label, rows=lambda clock: measure_stack(shape, clock))


def measure(folder: Path, *, smoke: bool, budget_s: float, command: str) -> int:
    """Measure until all is done or the budget is used up.

    Returns:
        How many measurements failed.
    """
    started_s = time.monotonic()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    if device.type == "cpu":
        torch.set_num_threads(1)  # as the profile "cpu"
    torch.set_float32_matmul_precision("highest")  # no TF32
    clock = Clock(device, most_repeats=SMOKE_REPEATS if smoke else MOST_REPEATS)
    clock.heat_up(0.5 if smoke else HEAT_UP_S)
    tables = Tables(folder)
    about = {**machine(device), "command": command, "smoke": smoke, "budget_s": budget_s}
    failed: list[str] = []
    todo = jobs(smoke=smoke)
    done = 0

    def write_about() -> None:
        state = {
            "measured": f"{done} of {len(todo)}",
            "rows": tables.num_rows,
            "failed": failed,
            "wall_s": round(time.monotonic() - started_s, 1),
            "clocks_after": clocks(device),
        }
        text = json.dumps({**about, **state}, indent=2)
        (folder / "machine.json").write_text(text + "\n", encoding="utf-8")

    write_about()
    for job in todo:
        if time.monotonic() - started_s > budget_s:
            break
        try:
            for row in job.rows(clock):
                tables.write(job.table, row)
        except Exception as error:  # out of memory, no such kernel: the others are measured still
            failed.append(f"{job.label}: {type(error).__name__}: {str(error).split(chr(10))[0]}")
            print(f"failed: {failed[-1]}", file=sys.stderr, flush=True)
        done += 1
        _free(device)
        write_about()
    tables.close()
    write_about()
    print(
        f"{done} of {len(todo)} measurements, {tables.num_rows['kernels.csv']} kernels and "
        f"{tables.num_rows['blocks.csv']} blocks in {time.monotonic() - started_s:.0f} s, "
        f"{len(failed)} failed: {folder}",
        flush=True,
    )
    return len(failed)


def _free(device: torch.device) -> None:
    """Give memory back, so that no measurement finds the last one's pieces."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def machine(device: torch.device) -> dict[str, Any]:
    """Describe the device and the software."""
    about: dict[str, Any] = {
        "device_name": platform.processor() or platform.machine(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version() if device.type == "cuda" else None,
        "python": platform.python_version(),
        "host_cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        about |= {
            "device_name": properties.name,
            "memory_bytes": properties.total_memory,
            "num_sms": properties.multi_processor_count,
            "l2_bytes": getattr(properties, "L2_cache_size", None),
        }
    return about | {"clocks_before": clocks(device)}


def clocks(device: torch.device) -> dict[str, float] | None:
    """Clock, power and temperature now, None where torch cannot say (it asks NVML)."""
    if device.type != "cuda":
        return None
    try:
        return {
            "sm_mhz": torch.cuda.clock_rate(device),
            "power_w": torch.cuda.power_draw(device) / 1e3,
            "temperature_c": torch.cuda.temperature(device),
        }
    except Exception:  # NVML has errors of its own
        return None


def main(arguments: Sequence[str] | None = None) -> int:
    """Read the command line and measure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--smoke", action="store_true", help="tiny shapes, on the CPU too")
    parser.add_argument("--budget-s", type=float, default=BUDGET_S, metavar="S")
    options = parser.parse_args(arguments)
    if not options.smoke and not torch.cuda.is_available():
        parser.error("torch sees no GPU here; --smoke tries everything with tiny shapes")
    present = [name for name in TABLES if (options.out / name).exists()]
    if present:
        parser.error(f"{options.out} holds {present[0]} already: give a new folder")
    options.out.mkdir(parents=True, exist_ok=True)
    words = sys.argv[1:] if arguments is None else list(arguments)
    command = " ".join(["python tests/bench/gpu/measure.py", *words])
    num_failed = measure(
        options.out, smoke=options.smoke, budget_s=options.budget_s, command=command
    )
    return 1 if num_failed else 0


if __name__ == "__main__":
    sys.exit(main())
