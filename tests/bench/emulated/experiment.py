"""Plans models for emulated clusters, runs many layouts of each, compares with the predictions.

``make bench-emulated``, or ``python tests/bench/emulated/experiment.py [--model NAME] [--cluster
NAME] [--layouts N] [--out CSV]``: measures each cluster with ``plan profile``, writes the scripts
of random layouts, runs them on the clusters in turn, and prints the predictions beside what was
measured. What is in ``--work`` already is not done again, but for the prices.
"""

import argparse
import sys
from itertools import groupby
from pathlib import Path

SMALL = {"model": ["gpt", "mlp"], "cluster": ["pair", "two-hosts"], "layouts": 5}
"""What runs where nothing is asked for: ten minutes."""


def main() -> int:
    # Every rank imports this file again, and must not hold what it has no use for.
    from layouts import MODELS
    from measure import CLUSTERS
    from network import why_not

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, default=Path("plans/emulated"))
    parser.add_argument("--model", action="append", choices=MODELS)
    parser.add_argument("--cluster", action="append", choices=CLUSTERS)
    parser.add_argument("--layouts", type=int, default=SMALL["layouts"])
    parser.add_argument("--all", action="store_true", help="every model on every cluster")
    parser.add_argument("--out", type=Path, metavar="CSV", help="write every run")
    options = parser.parse_args()
    reason = why_not()
    if reason:
        print(f"skipped: {reason}")
        return 0
    models = options.model or list(MODELS if options.all else SMALL["model"])
    clusters = options.cluster or list(CLUSTERS if options.all else SMALL["cluster"])
    run(options.work, models, clusters, options.layouts)
    show(options.work, models, clusters, options.out)
    return 0


def run(work: Path, models: list[str], clusters: list[str], layouts: int) -> None:
    """Do what is not yet done."""
    from cluster_profile import profile
    from layouts import Task
    from measure import CLUSTERS, measure, prepare, read_runs, sampled

    for name in clusters:
        if not (work / "clusters" / f"{name}.toml").exists():
            profile(name, work / "clusters", quick=True)
    runs = work / "runs.jsonl"
    done = {(each.model, each.cluster) for each in read_runs(runs)}
    for model in models:
        left = [name for name in clusters if (model, name) not in done]
        left.sort(key=lambda name: (CLUSTERS[name].num_ranks, CLUSTERS[name].hosts))
        for ranks, names in groupby(left, key=lambda name: CLUSTERS[name].num_ranks):
            if not (work / f"{model}-{ranks}" / "sample.json").exists():
                task = Task(model=model, ranks=ranks, ranks_per_host=ranks, cluster="cpu")
                prepare(work, task, count=layouts)
            sample = sampled(work, model, ranks)
            sample = [*sample[: min(layouts, len(sample) - 1)], sample[-1]]
            for _, same in groupby(names, key=lambda name: CLUSTERS[name].hosts):
                measure(work, model, sample, list(same), runs)


def show(work: Path, models: list[str], clusters: list[str], out: Path | None) -> None:
    """Price what was measured, and print it."""
    from measure import read_runs
    from score import Pricer, lines, table, words

    runs = [
        each
        for each in read_runs(work / "runs.jsonl")
        if each.model in models and each.cluster in clusters
    ]
    frame = table(runs, Pricer(work, work / "clusters"))
    print("\n".join([words(frame), *lines(frame)]))
    if out is not None:
        frame.to_csv(out, index=False, float_format="%.5g")


if __name__ == "__main__":
    sys.exit(main())
