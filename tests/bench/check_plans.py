"""Plans of large models held to their scripts: `python tests/bench/check_plans.py [NAME ...]`.

Each is checked without a cluster (``planner.checking``), one rank per pipeline stage. The table has
the memory of the stage that is off most, and the kinds of collectives that differ.
"""

import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import planner
from planner.checking.check import check_plan
from planner.errors import PlannerError

LLAMA = Path(__file__).parents[2] / "examples" / "llama.py"
MICROBATCHES = 32
"""Per step and data-parallel rank; of long pipelines fewer, so that all of them are run."""

LONG = 4
"""Pipeline ranks of a pipeline that is not long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A layout of a model on so many devices."""

    model: str
    gpus: int
    fix: dict = field(default_factory=dict)
    seq_len: int = 4096

    @property
    def microbatches(self):
        pp = self.fix.get("pp", 1)
        return MICROBATCHES if pp <= LONG else pp + 2

    @property
    def name(self):
        words = [f"{name}{value}" for name, value in self.fix.items()]
        return f"{self.model.rpartition(':')[2]} x{self.gpus} {' '.join(words)}"


def llama(size, gpus, **fix):
    return Case(model=f"{LLAMA}:llama_{size}", gpus=gpus, fix={"microbatch_size": 1, **fix})


FULL = {"activation_checkpointing": "full"}
SOME = {"activation_checkpointing": "selective"}
NONE = {"activation_checkpointing": "none"}
F1B = {"schedule": "1F1B"}
LOOPED = {"schedule": "Interleaved1F1B", "virtual_stages": 2}

WHOLE = {"sequence_parallel": False}
PARTS = {"sequence_parallel": True}
ZERO_3 = {"reshard_after_forward": True}
ZERO_2 = {"reshard_after_forward": False}

CASES = (
    llama("8b", 8, dp_shard=8, **ZERO_3, **FULL),
    llama("8b", 8, dp_shard=8, **ZERO_2, **SOME),
    llama("8b", 16, dp_replicate=2, dp_shard=8, **ZERO_3, **SOME),
    llama("8b", 8, tp=2, dp_shard=4, **PARTS, **ZERO_3, **SOME),
    llama("8b", 8, tp=4, dp_shard=2, **WHOLE, **ZERO_2, **NONE),
    llama("8b", 8, tp=8, **PARTS, **NONE),
    llama("8b", 16, pp=2, dp_shard=8, **ZERO_3, **F1B, **FULL),
    llama("8b", 16, tp=2, pp=2, dp_shard=4, **PARTS, **LOOPED, **SOME),
    llama("8b", 32, tp=2, pp=4, dp_replicate=2, dp_shard=2, **WHOLE, **F1B, **NONE),
    llama("8b", 64, pp=4, dp_shard=16, **ZERO_2, **F1B, **SOME),
    llama("70b", 64, dp_shard=64, **ZERO_3, **FULL),
    llama("70b", 64, tp=8, dp_shard=8, **PARTS, **ZERO_3, **SOME),
    llama("70b", 64, tp=4, pp=4, dp_shard=4, **PARTS, **F1B, **FULL),
    llama("70b", 128, tp=8, pp=4, dp_shard=4, **PARTS, **LOOPED, **SOME),
    llama("70b", 256, tp=8, pp=8, dp_replicate=2, dp_shard=2, **WHOLE, **F1B, **FULL),
    llama("70b", 512, tp=4, dp_replicate=2, dp_shard=64, **ZERO_3, **FULL),
    llama("405b", 512, tp=8, dp_shard=64, **PARTS, **ZERO_3, **FULL),
    llama("405b", 512, tp=8, pp=8, dp_shard=8, **PARTS, **F1B, **FULL),
    llama("405b", 256, tp=8, pp=16, dp_shard=2, **PARTS, **F1B, **FULL),
    llama("405b", 1024, tp=8, pp=8, dp_shard=16, **PARTS, **ZERO_3, **F1B, **FULL),
)  # fmt: skip


def checked(case):
    """Plan and check a case."""
    data_parallel = case.fix.get("dp_replicate", 1) * case.fix.get("dp_shard", 1)
    result = planner.estimate(
        case.model, gpus=case.gpus, cluster="h100-sxm", seq_len=case.seq_len, fix=case.fix,
        global_batch_size=data_parallel * case.microbatches,
    )  # fmt: skip
    with TemporaryDirectory() as folder:
        result.save(Path(folder) / "plan")
        return check_plan(Path(folder) / "plan")


def row(case):
    """Check a case and return its line of the table, and whether all holds."""
    start = time.perf_counter()
    try:
        check = checked(case)
    except PlannerError as error:
        return f"{case.name:<100} {error}", False
    differing = [
        f"{each.kind}/{each.group_size}@{each.pp_rank}: {each.predicted_count} "
        f"{each.predicted_bytes:.3e} != {each.counted_count} {each.counted_bytes:.3e}"
        for each in check.collectives
        if not each.is_equal
    ]
    worst = check.worst
    line = (
        f"{case.name:<100} {worst.predicted_peak_bytes / 2**30:7.2f} "
        f"{worst.tracked_peak_bytes / 2**30:7.2f} {worst.error:+7.2%} "
        f"{len(check.collectives) - len(differing)}/{len(check.collectives)} equal "
        f"{time.perf_counter() - start:5.0f} s  {' '.join(differing)}"
    )
    return line, check.memory_holds and check.traffic_holds


def main(names=()):
    """Print the table, and return how many cases hold."""
    print(f"{'plan':<100} planned tracked     off collectives", flush=True)
    held = 0
    for case in CASES:
        if all(name in case.name for name in names):
            line, holds = row(case)
            held += holds
            print(line, flush=True)
    return held


if __name__ == "__main__":
    main(sys.argv[1:])
