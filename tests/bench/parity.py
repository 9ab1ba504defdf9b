"""Plans models under many layouts, trains each on gloo, compares with one process.

``make parity``, or ``python tests/bench/parity.py [--model NAME|FILE] [--dtype NAME] [--only N]``:
a line for each layout that is refused or differs, a table, and exit code 1 where one differs. With
``--random N [--seed S]`` layouts are drawn instead, N for each model, of all that can be fixed.
"""

import argparse
import json
import math
import os
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

sys.path.insert(0, str(Path(__file__).parents[1] / "run"))

from driver import IMPORTED
from families import fast_links, last_line, write_config
from in_float64 import run_scripts_in_float64
from launch import (
    Outcome,
    arguments_of,
    largest_difference,
    largest_weight_difference,
    outcome_of,
    run_jobs,
)

from planner.vocabulary import SHARED_SCHEDULES, Schedule

SCHEDULES = (Schedule.ONE_F_ONE_B, Schedule.GPIPE, *SHARED_SCHEDULES)
TESTS = Path(__file__).parents[1]
EXAMPLES = TESTS.parent / "examples"

MODELS = {
    "gpt": EXAMPLES / "gpt.py",
    "llama": EXAMPLES / "llama.py",
    "moe": TESTS / "graph" / "zoo" / "moe.py",
    "hf llama": ("decoder", "llama"),
    "hf gpt2": ("decoder", "gpt2"),
    "vit": TESTS / "graph" / "zoo" / "vit.py",
    "unet": TESTS / "graph" / "zoo" / "unet.py",
    "lora": TESTS / "run" / "lora_llama.py",
}
"""A model file, or kind and type of a tiny Hugging Face config, as ``families.py`` has them."""

STEPS = 5
LENGTH = 32
BATCH = 16
LIMITS = {"float64": 1e-8, "float32": 1e-5, "bfloat16": 1e-2}
"""Largest relative difference of losses; in float64 of gradient norms and weights as well."""

TRIES_TOGETHER = 6
"""Scripts that run one after the other in one process group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """What is fixed; the planner decides the rest."""

    fix: tuple[tuple[str, object], ...]

    @property
    def name(self) -> str:
        return " ".join(f"{key}={value}" for key, value in self.fix)

    @property
    def num_processes(self) -> int:
        axes = ("dp_replicate", "dp_shard", "cp", "tp", "pp")
        return math.prod(int(str(dict(self.fix).get(axis, 1))) for axis in axes)


def degrees(num_processes: int) -> Iterator[dict[str, object]]:
    """Every way to divide processes over four axes."""
    powers = [2**i for i in range(num_processes.bit_length())]
    for dp_replicate in powers:
        for dp_shard in powers:
            for tp in powers:
                rest, left = divmod(num_processes, dp_replicate * dp_shard * tp)
                if not left and rest:
                    yield {"dp_replicate": dp_replicate, "dp_shard": dp_shard, "tp": tp, "pp": rest}


def layouts() -> list[Layout]:
    """All degrees of 2, 4 and 8 processes, and what else a layout may say on some of them."""
    plain = [each for count in (2, 4, 8) for each in degrees(count)]
    two = {"dp_replicate": 1, "dp_shard": 2, "tp": 1, "pp": 1}
    tensor = {**two, "tp": 2}
    staged = {**two, "pp": 2}
    all_three = {**two, "tp": 2, "pp": 2}
    contexts = {**two, "dp_shard": 1, "cp": 2, "tp": 2}
    more = [
        *({**contexts, "sequence_parallel": word} for word in (True, False)),
        *({**contexts, axis: 2} for axis in ("dp_replicate", "dp_shard", "pp")),
        *({**base, "activation_checkpointing": word} for base in (two, tensor, staged, all_three)
          for word in ("selective", "full")),
        *({**base, "reshard_after_forward": word} for base in (two, tensor, staged)
          for word in (True, False)),
        *({**base, "sequence_parallel": word} for base in (tensor, all_three, {**two, "tp": 4})
          for word in (True, False)),
        *({**base, "schedule": word, "microbatch_size": 2} for base in (staged, all_three)
          for word in ("GPipe", "1F1B", "Interleaved1F1B")),
    ]  # fmt: skip
    return [Layout(fix=tuple(fix.items())) for fix in (*plain, *more)]


EXPERTS = re.compile("expert|moe|routed")
"""In names of models that have experts."""


def drawn_layout(chance: random.Random, *, experts: bool) -> Layout:
    """A layout of 2, 4 or 8 processes, with whatever else its axes let one fix."""
    fix: dict[str, object] = {}
    left = chance.choice((2, 4, 4, 8))
    while left > 1:
        axis = chance.choice(("dp_replicate", "dp_shard", "tp", "tp", "pp", "pp", "cp"))
        fix[axis] = int(str(fix.get(axis, 1))) * 2
        left //= 2
    options: dict[str, tuple[object, ...]] = {
        "activation_checkpointing": ("none", "selective", "full"),
        "microbatch_size": (1, 2, 4),
        "loss_chunks": (1, 2, 4),
    }
    if "dp_shard" in fix:
        options |= {"reshard_after_forward": (True, False)}
    if experts and {"dp_shard", "tp", "cp"} & fix.keys():
        options |= {"ep": (2, 4)}
    if "tp" in fix:
        options |= {"sequence_parallel": (True, False)}
    if "pp" in fix:
        options |= {"schedule": SCHEDULES, "virtual_stages": (1, 2, 3)}
    for name, values in options.items():
        value = chance.choice(values)
        if value != 1 and chance.random() < 0.6:
            fix[name] = value
    axes = [axis for axis in fix if axis in ("dp_replicate", "dp_shard", "tp", "pp", "cp")]
    if len(axes) > 1 and chance.random() < 0.2:
        fix["mesh_order"] = "-".join(chance.sample(axes, len(axes)))
    return Layout(fix=tuple(fix.items()))


def planned(model: str, folder: Path, cluster: str, layout: Layout) -> str:
    """Plan a layout and write its script: "" or why it was refused."""
    import planner
    from planner.errors import PlannerError

    try:
        result = planner.plan(
            model, gpus=layout.num_processes, cluster=cluster, dtype="float64",
            global_batch_size=BATCH, seq_len=length_of(model), fix=dict(layout.fix),
        )  # fmt: skip
        result.save(folder, force=True)
    except PlannerError as error:
        return str(error).splitlines()[0]
    return ""


def length_of(model: str) -> int | None:
    """Tokens of a sample, where the model's config leaves them open."""
    path = Path(model)
    reads_tokens = path.name == "config.json" and path.parent.name == "tokens"
    return LENGTH if reads_tokens else None


def argument_of(name: str, folder: Path) -> str:
    kind, _, model_type = name.partition(":")
    source = MODELS.get(name, (kind, model_type) if model_type else name)
    if not isinstance(source, tuple):
        return str(source)
    reads = "other" if source[0] in ("vision", "speech") else "tokens"
    return str(write_config(folder / reads, *source))


def compare(name: str, dtypes: list[str], chosen: list[Layout], root: Path) -> dict[str, Counter]:
    """Run one model under all layouts: how many were equal, refused, different, by dtype."""
    cluster = fast_links(root)
    model = argument_of(name, root / "model")
    folders: dict[Layout, Path] = {}
    counts = {dtype: Counter() for dtype in dtypes}
    for index, layout in enumerate(chosen):
        folder = root / f"{index:02d}"
        reason = planned(model, folder, cluster, layout)
        if reason:
            print(f"    {name} {layout.name}: refused: {reason[:150]}", flush=True)
            for dtype in dtypes:
                counts[dtype]["refused"] += 1
        else:
            folders[layout] = folder
    for dtype in dtypes:
        for layout, words in outcomes(folders, dtype):
            counts[dtype]["equal" if not words else "different"] += 1
            if words:
                print(f"    {name} {layout.name} {dtype}: {words}", flush=True)
    return counts


def outcomes(folders: dict[Layout, Path], dtype: str) -> Iterator[tuple[Layout, str]]:
    """Run the scripts: what is wrong with each, "" where nothing is."""
    if not folders:
        return
    references: dict[int, Outcome] = {}
    sizes = {layout: microbatch_size(folder) for layout, folder in folders.items()}
    for layout, size in sizes.items():  # losses of a whole batch depend on it
        if size not in references:
            references[size] = reference(folders[layout], dtype)
    by_count: dict[int, list[Layout]] = {}
    for layout in folders:
        by_count.setdefault(layout.num_processes, []).append(layout)
    for num_processes, listed in by_count.items():
        for start in range(0, len(listed), TRIES_TOGETHER):
            group = listed[start : start + TRIES_TOGETHER]
            together = failure([folders[each] for each in group], dtype, num_processes)
            for layout in group:
                failed = together and failure([folders[layout]], dtype, num_processes)
                if failed:
                    yield layout, f"FAILED: {failed}"
                else:
                    found = outcome_of(folders[layout], name=dtype, steps=STEPS)
                    yield layout, difference(found, references[sizes[layout]], dtype)


def microbatch_size(folder: Path) -> int:
    size: int = json.loads((folder / "plan.json").read_text())["best"]["microbatch_size"]
    return size


def reference(folder: Path, dtype: str) -> Outcome:
    """Train as one process, in microbatches of a plan's size."""
    name, extra = f"reference-{dtype}", ("--dtype", dtype, "--reference")
    job = (folder, arguments_of(folder, name=name, steps=STEPS, extra=extra))
    run_jobs([job], function=run_scripts_in_float64)
    return outcome_of(folder, name=name, steps=STEPS)


def failure(folders: list[Path], dtype: str, num_processes: int) -> str:
    jobs = [
        (folder, arguments_of(folder, name=dtype, steps=STEPS, extra=("--dtype", dtype)))
        for folder in folders
    ]
    try:
        run_jobs(jobs, num_processes=num_processes, function=run_scripts_in_float64)
    except AssertionError as error:
        return last_line(error)
    return ""


def difference(found, expected, dtype: str) -> str:
    worst = largest_difference(found.losses, expected.losses)
    if dtype == "float64":
        norms = largest_difference(found.grad_norms, expected.grad_norms)
        worst = max(worst, norms, largest_weight_difference(found.weights, expected.weights))
    return "" if worst < LIMITS[dtype] else f"DIFFERS by {worst:.1e}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--model", action="append", help=f"a file, KIND:TYPE, or {', '.join(MODELS)}"
    )
    parser.add_argument("--random", type=int, metavar="N", help="draw N layouts for each model")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", action="append", choices=LIMITS)
    parser.add_argument("--only", type=int, default=1, metavar="N", help="every Nth layout")
    options = parser.parse_args()
    dtypes = options.dtype or list(LIMITS)
    chance = random.Random(options.seed)
    IMPORTED.append("transformers.modeling_utils")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    total = Counter()
    for name in options.model or MODELS:
        start_s = time.perf_counter()
        chosen = layouts()[:: options.only]
        if options.random:
            experts = EXPERTS.search(name) is not None
            chosen = [drawn_layout(chance, experts=experts) for _ in range(options.random)]
        print(f"{name}: {len(chosen)} layouts, {STEPS} steps", flush=True)
        with TemporaryDirectory() as folder:
            counts = compare(name, dtypes, chosen, Path(folder))
        for dtype, count in counts.items():
            words = ", ".join(f"{number} {word}" for word, number in sorted(count.items()))
            print(f"{name:10} {dtype:9} {words} ({time.perf_counter() - start_s:.0f} s)")
            total += count
    print(", ".join(f"{number} {word}" for word, number in sorted(total.items())))
    return 1 if total["different"] else 0


if __name__ == "__main__":
    sys.exit(main())
