"""Runs an emitted script twice and compares: on all its processes, and on one as the reference.

Shows the measured step time beside the predicted one, too.

    python examples/compare_losses.py plans/demo --processes 4 --steps 3

Both runs start from the same weights and read the same global batches, so that their losses agree
to rounding. Exits with 1 where they do not.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path


def main() -> int:
    arguments = parse_arguments()
    script = arguments.folder / "train.py"
    with tempfile.TemporaryDirectory() as logs:
        planned_log, reference_log = Path(logs, "planned.jsonl"), Path(logs, "reference.jsonl")
        options = [
            *("--steps", str(arguments.steps)),
            *("--dtype", arguments.dtype),
        ]
        torchrun = [
            *(sys.executable, "-m", "torch.distributed.run"),
            *("--standalone", "--nproc-per-node", str(arguments.processes)),
        ]
        run([*torchrun, str(script), *options, "--log-file", str(planned_log)], arguments.timeout)
        one_process = [sys.executable, str(script), "--reference"]
        run([*one_process, *options, "--log-file", str(reference_log)], arguments.timeout)
        planned, reference = read_losses(planned_log), read_losses(reference_log)
        measured_s = min(record["step_time_s"] for record in read_log(planned_log))
    code = report(planned, reference, arguments)
    report_step_time(arguments.folder, measured_s)
    return code


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path, help="folder that `plan --out` wrote")
    parser.add_argument("--processes", type=int, required=True, help="devices of the plan")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--tolerance", type=float, default=1e-5, help="relative")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for each run")
    return parser.parse_args()


def run(command: list[str], timeout_s: float) -> None:
    print("$", " ".join(command), flush=True)
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    done = subprocess.run(command, timeout=timeout_s, env=environment)
    if done.returncode != 0:
        sys.exit(f"the run above ended with exit code {done.returncode}")


def read_log(log: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]


def read_losses(log: Path) -> dict[int, float]:
    return {int(record["step"]): record["loss"] for record in read_log(log)}


def report_step_time(folder: Path, measured_s: float) -> None:
    plan = json.loads((folder / "plan.json").read_text(encoding="utf-8"))
    predicted_s = plan["best"]["costs"]["step_time_s"]
    print(
        f"Step time: predicted {predicted_s * 1e3:.0f} ms, fastest measured "
        f"{measured_s * 1e3:.0f} ms ({measured_s / predicted_s:.1f} times)."
    )


def report(
    planned: dict[int, float], reference: dict[int, float], arguments: argparse.Namespace
) -> int:
    print(f"\nstep  {arguments.processes} processes      1 process   relative difference")
    differences = []
    for step in sorted(reference):
        difference = abs(planned[step] / reference[step] - 1)
        differences.append(difference)
        print(f"{step:4}  {planned[step]:13.9f}  {reference[step]:13.9f}  {difference:12.2e}")
    complete = len(reference) == arguments.steps and planned.keys() == reference.keys()
    agree = complete and all(each <= arguments.tolerance for each in differences)
    verdict = "agree" if agree else "DO NOT AGREE"
    print(f"The losses {verdict} to {arguments.tolerance:g} relative over {len(reference)} steps.")
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
