"""An emitted script on one GPU beside a hand-written one, turn by turn, compiled and not.

    python tests/bench/gpu/one_device.py DIR   # DIR from shares.py plan

Prints, for GPT-2 small, the step that the plan predicts, that of the emitted script and that of a
training loop as torch's tutorials write it for the same layout: bf16 compute on float32 parameters
by FSDP2, fused AdamW, clipping, the loss read in each step.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

sys.path.append(str(Path(__file__).resolve().parents[3] / "examples"))

PLANS = {"gpt-124m": False, "gpt-124m-compiled": True}
SAMPLES, LENGTH = 16, 1024
STEPS, WARM_UP = 60, 20
MAX_GRAD_NORM = 1.0


def emitted(folder: Path) -> tuple[float, float]:
    """Run a plan's script; seconds of a step, predicted and measured."""
    log = folder / "one-device.jsonl"
    log.unlink(missing_ok=True)
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1", "train.py"]
    words = ["--steps", str(STEPS), "--log-file", str(log)]
    subprocess.run([sys.executable, *command, *words], cwd=folder, check=True, stdout=sys.stderr)
    rows = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    measured = [row["step_time_s"] for row in rows][WARM_UP:]
    plan = json.loads((folder / "plan.json").read_text(encoding="utf-8"))
    return plan["best"]["costs"]["step_time_s"], statistics.median(measured)


def hand_written(*, compiled: bool) -> float:
    """Seconds of a step of a loop without the planner."""
    import gpt

    torch.manual_seed(0)
    with torch.device("cuda"):
        model = gpt.gpt_124m()
    policy = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.transformer["h"]:
        if compiled:
            block.compile()
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    seconds = []
    for _ in range(STEPS):
        start_s = time.perf_counter()
        tokens, targets = (t.cuda() for t in gpt.example_batch(SAMPLES, seq_len=LENGTH))
        loss = gpt.loss_fn(model(tokens).float(), targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        optimizer.step()
        optimizer.zero_grad()
        loss.item()
        seconds.append(time.perf_counter() - start_s)
    return statistics.median(seconds[WARM_UP:])


def in_a_process(*, compiled: bool) -> float:
    """Run the hand-written loop in a fresh process."""
    command = [sys.executable, __file__, "--hand", "compiled" if compiled else "plain"]
    environment = {**os.environ, "RANK": "0", "WORLD_SIZE": "1", "MASTER_PORT": "29511"}
    environment["MASTER_ADDR"] = "127.0.0.1"
    done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    return float(done.stdout.splitlines()[-1])


def main() -> None:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, nargs="?", metavar="DIR")
    parser.add_argument("--hand", choices=("plain", "compiled"), help="the loop alone")
    options = parser.parse_args()
    if options.hand:
        dist.init_process_group("nccl")
        print(hand_written(compiled=options.hand == "compiled"))
        dist.destroy_process_group()
        return
    for name, compiled in PLANS.items():
        hand_s = in_a_process(compiled=compiled)
        predicted_s, emitted_s = emitted(options.folder / name)
        tokens = SAMPLES * LENGTH
        print(
            f"{name:18} predicted {predicted_s * 1e3:6.1f} ms, emitted {emitted_s * 1e3:6.1f} ms "
            f"({tokens / emitted_s:7.0f} tokens/s), hand-written {hand_s * 1e3:6.1f} ms, "
            f"emitted against it {hand_s / emitted_s - 1:+.1%}",
            flush=True,
        )


if __name__ == "__main__":
    main()
