"""Emitted scripts beside hand-written ones of the same layout, turn by turn on two processes.

``python tests/bench/overhead.py [--rounds N]`` prints tokens/s of both and the difference. Run it
on a machine that does nothing else.
"""

import argparse
import json
import os
import statistics
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

sys.path.insert(0, str(Path(__file__).parents[1] / "run"))

from driver import run_ranks, run_script
from families import fast_links
from hand_written import BATCH, MICROBATCHES, train
from wide_llama import SEQUENCE

STEPS = 6
WARM_UP = 2
MODEL = Path(__file__).with_name("wide_llama.py")
LAYOUTS = {
    "dp_shard": {"dp_shard": 2},
    "tp": {"tp": 2, "sequence_parallel": False},
    "pp": {"pp": 2, "schedule": "1F1B"},
}


def write_plan(folder: Path, layout: str, cluster: str) -> None:
    import planner

    samples = BATCH // (2 if layout == "dp_shard" else 1) // MICROBATCHES[layout]
    fix = {
        **LAYOUTS[layout], "microbatch_size": samples, "activation_checkpointing": "none",
        "reshard_after_forward": True,
    }  # fmt: skip
    result = planner.plan(
        str(MODEL), gpus=2, cluster=cluster, dtype="float32",
        global_batch_size=BATCH, fix=fix,
    )  # fmt: skip
    result.save(folder, force=True)


def take_turns(folder: str, layout: str, rounds: int) -> None:
    """Run both, one after the other; rank 0 writes the seconds of the hand-written steps."""
    for index in range(rounds):
        log = str(Path(folder) / f"emitted-{index}.jsonl")
        run_script(folder, ["--steps", str(STEPS), "--log", log], index)
        seconds = train(layout, STEPS)
        if os.environ["RANK"] == "0":
            (Path(folder) / f"hand-{index}.json").write_text(json.dumps(seconds))


def medians(folder: Path, rounds: int) -> tuple[float, float]:
    """Seconds of a step after the warm-up: emitted, hand-written."""
    emitted, hand = [], []
    for index in range(rounds):
        lines = (folder / f"emitted-{index}.jsonl").read_text().splitlines()
        emitted += [json.loads(line)["step_time_s"] for line in lines][WARM_UP:]
        hand += json.loads((folder / f"hand-{index}.json").read_text())[WARM_UP:]
    return statistics.median(emitted), statistics.median(hand)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layout", action="append", choices=LAYOUTS)
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    tokens = BATCH * SEQUENCE
    print(f"{'layout':10} {'emitted':>12} {'hand-written':>14}   tokens/s")
    for layout in options.layout or LAYOUTS:
        with TemporaryDirectory() as name:
            folder = Path(name) / layout
            write_plan(folder, layout, fast_links(Path(name)))
            run_ranks(take_turns, str(folder), layout, options.rounds, num_processes=2)
            emitted_s, hand_s = medians(folder, options.rounds)
        words = f"{tokens / emitted_s:12.0f} {tokens / hand_s:14.0f}"
        print(f"{layout:10} {words}   {hand_s / emitted_s - 1:+.1%}", flush=True)


if __name__ == "__main__":
    main()
