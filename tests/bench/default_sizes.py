"""Plans architectures of transformers in their default sizes, and prints what was proven of each.

``python tests/bench/default_sizes.py [--cluster NAME:GPUS ...] [--limit-s S] [TYPE ...]``; a TYPE
is a model type of transformers. Exits with 1 where a plan was not proven, or did not end.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from transformers import AutoConfig

TYPES = (
    "bamba", "bloom", "convnext", "ernie4_5_moe", "falcon_h1", "gemma3_text", "gpt_oss",
    "granitemoehybrid", "lfm2", "llama4_text", "longt5", "mamba2", "modernbert", "nemotron_h",
    "olmo_hybrid", "opt", "phimoe", "qwen3_moe", "qwen3_next", "resnet", "swin",
    "switch_transformers", "t5", "whisper", "zamba2",
)  # fmt: skip
CLUSTERS = ("h100-sxm:8", "h100-sxm:64", "a100-80gb-sxm:256")
LIMIT_S = 300.0
PLAN = "import sys; from planner.cli.main import run; sys.exit(run(sys.argv[1:]))"


def planned(config: Path, cluster: str, limit_s: float) -> tuple[bool, str]:
    """Plan a model, and say whether the plan is proven, and how it ended."""
    name, _, gpus = cluster.rpartition(":")
    command = [sys.executable, "-c", PLAN, str(config), "--cluster", name, "--gpus", gpus]
    begun_s = time.perf_counter()
    try:
        done = subprocess.run(
            [*command, "--json", "--quiet"], capture_output=True, text=True, timeout=limit_s
        )
    except subprocess.TimeoutExpired:
        return False, f"did not end in {limit_s:.0f} s"
    wall_s = time.perf_counter() - begun_s
    if done.returncode:
        said = (done.stderr.strip() or "nothing said").splitlines()[0]
        return True, f"refused, exit code {done.returncode}: {said[:120]}"
    solver: dict[str, Any] = json.loads(done.stdout)["solver"]
    gap = solver["gap"]
    words = f"{solver['status']}, gap {gap:.2%}, step {solver['objective_s']:.3g} s"
    return gap <= 1e-3, f"{words}, {wall_s:.0f} s in all"


def main() -> int:
    """Plan all that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("types", nargs="*", metavar="TYPE", default=TYPES)
    parser.add_argument("--cluster", action="append", metavar="NAME:GPUS")
    parser.add_argument("--limit-s", type=float, default=LIMIT_S)
    options = parser.parse_args()
    open_ones = 0
    with TemporaryDirectory() as folder:
        for model_type in options.types:
            config = Path(folder) / model_type
            AutoConfig.for_model(model_type).save_pretrained(config)
            for cluster in options.cluster or CLUSTERS:
                is_proven, words = planned(config / "config.json", cluster, options.limit_s)
                open_ones += not is_proven
                print(f"{model_type} on {cluster}: {words}", flush=True)
    print(f"{open_ones} not proven")
    return int(open_ones > 0)


if __name__ == "__main__":
    sys.exit(main())
