"""Plans models for emulated clusters, runs many layouts of each, compares with the predictions.

``python tests/bench/emulated/experiment.py prepare|measure [--work DIR] ...``
"""

import argparse
import sys
from pathlib import Path

from layouts import MODELS, Task
from measure import CLUSTERS, measure, prepare, sampled
from network import why_not


def with_same_hosts(names: list[str], ranks: int) -> list[list[str]]:
    """Group clusters of a size by their hosts."""
    found: dict[int, list[str]] = {}
    for name in names:
        if CLUSTERS[name].num_ranks == ranks:
            found.setdefault(CLUSTERS[name].hosts, []).append(name)
    return list(found.values())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("phase", choices=("prepare", "measure"))
    parser.add_argument("--work", type=Path, default=Path("plans/emulated"))
    parser.add_argument("--model", action="append", choices=MODELS)
    parser.add_argument("--ranks", action="append", type=int, choices=(2, 4))
    parser.add_argument("--cluster", action="append", choices=CLUSTERS)
    parser.add_argument("--layouts", type=int, default=15)
    options = parser.parse_args()
    reason = why_not()
    if reason:
        print(f"skipped: {reason}")
        return 0
    for model in options.model or MODELS:
        for ranks in options.ranks or (2, 4):
            if options.phase == "prepare":
                task = Task(model=model, ranks=ranks, ranks_per_host=ranks, cluster="cpu")
                found = prepare(options.work, task, count=options.layouts)
                print(f"{model} on {ranks}: {len(found)} scripts", flush=True)
                continue
            sample = sampled(options.work, model, ranks)
            sample = [*sample[: min(options.layouts, len(sample) - 1)], sample[-1]]
            for clusters in with_same_hosts(options.cluster or list(CLUSTERS), ranks):
                measure(options.work, model, sample, clusters, options.work / "runs.jsonl")
    return 0


if __name__ == "__main__":
    sys.exit(main())
