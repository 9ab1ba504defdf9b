"""Runs a plan, its runner-up and the rule of thumb, and shows the measured step times.

    python examples/compare_layouts.py plans/demo --cluster plans/machine.toml

Each is planned again as it stands in plan.json, with the same cluster, and trained for some steps.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any


def main() -> int:
    arguments = parse_arguments()
    document = json.loads((arguments.folder / "plan.json").read_text(encoding="utf-8"))
    seen: list[list[str]] = []
    print(f"\n{'':14}  {'layout':36} {'predicted':>9}  {'measured':>8}  {'off':>5}")
    for name, key in (
        ("plan", "best"),
        ("runner-up", "runner_up"),
        ("rule of thumb", "rule_of_thumb"),
    ):
        plan = document[key]
        if plan is None:
            continue
        fixed = layout_of(plan)
        if fixed in seen:
            print(f"{name:14}  the same as one above")
            continue
        seen.append(fixed)
        predicted_s = plan["costs"]["step_time_s"]
        measured_s = measured_step_s(plan, fixed, arguments)
        print(
            f"{name:14}  {' '.join(words_of(plan)):36} {predicted_s * 1e3:6.0f} ms  "
            f"{measured_s * 1e3:5.0f} ms  {predicted_s / measured_s - 1:+5.0%}",
            flush=True,
        )
    return 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path, help="folder that `plan --out` wrote")
    parser.add_argument("--cluster", required=True, help="that of the plan")
    parser.add_argument("--steps", type=int, default=6, help="the first is not counted")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for each run")
    return parser.parse_args()


def words_of(plan: dict[str, Any]) -> list[str]:
    degrees = plan["degrees"]
    axes = ("dp_replicate", "dp_shard", "tp", "pp")
    words = [f"{axis} {degrees[axis]}" for axis in axes if degrees[axis] > 1]
    return [*words, plan["schedule"]] if degrees["pp"] > 1 else words


def layout_of(plan: dict[str, Any]) -> list[str]:
    """What of a plan `--fix` takes."""
    degrees = plan["degrees"]
    fixed = {axis: degrees[axis] for axis in ("dp_replicate", "dp_shard", "tp", "pp")}
    fixed["microbatch_size"] = plan["microbatch_size"]
    if plan["activation_checkpointing"] in ("none", "selective", "full"):
        fixed["activation_checkpointing"] = plan["activation_checkpointing"]
    fixed["reshard_after_forward"] = str(plan["reshard_after_forward"]).lower()
    if degrees["pp"] > 1:
        fixed["schedule"] = plan["schedule"]
        fixed["virtual_stages"] = plan["virtual_stages"]
    if degrees["tp"] > 1:
        fixed["sequence_parallel"] = str(plan["sequence_parallel"]).lower()
    return [f"{name}={value}" for name, value in fixed.items()]


def measured_step_s(plan: dict[str, Any], fixed: list[str], arguments: argparse.Namespace) -> float:
    """The median step after the first."""
    model = plan["model"]
    gpus = plan["degrees"]["world_size"]
    with tempfile.TemporaryDirectory() as work:
        folder, log = Path(work, "plan"), Path(work, "log.jsonl")
        command = [
            *(str(Path(sys.executable).with_name("plan")), "estimate"),
            *(f"{model['file']}:{model['factory']}", "--gpus", str(gpus), "--quiet"),
            *("--cluster", arguments.cluster, "--dtype", plan["dtype"], "--out", str(folder)),
            *("--global-batch-size", str(plan["global_batch_size"])),
        ]
        for each in fixed:
            command += ["--fix", each]
        run(command, arguments.timeout)
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        torchrun += ["--nproc-per-node", str(gpus), str(folder / "train.py")]
        run([*torchrun, "--steps", str(arguments.steps), "--log-file", str(log)], arguments.timeout)
        rows = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    return statistics.median(row["step_time_s"] for row in rows[1:])


def run(command: list[str], timeout_s: float) -> None:
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    done = subprocess.run(
        command, timeout=timeout_s, env=environment, capture_output=True, text=True
    )
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)}\nended with exit code {done.returncode}:\n{done.stderr}")


if __name__ == "__main__":
    sys.exit(main())
