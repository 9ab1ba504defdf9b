"""The longest sample of an 8 B Llama that fits devices: `python tests/bench/longest_sample.py`.

Alone, with inputs of blocks in host memory, with states there, and with both: a line for each, with
the step that is predicted. Lengths are multiples of 128 Ki tokens.
"""

import argparse
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import planner
from planner.errors import InfeasiblePlanError

EXAMPLES = Path(__file__).parents[2] / "examples"
STEP = 2**17
MOST_STEPS = 64

MODEL = f"""
import sys
sys.path.insert(0, {str(EXAMPLES)!r})
from llama import Llama, LlamaConfig, example_batch, loss_fn


def build_model():
    return Llama(
        LlamaConfig(
            dim=4096, n_layers=32, n_heads=32, n_kv_heads=8, ffn_dim=14336, vocab_size=128256,
            max_seq_len={STEP * MOST_STEPS},
        )
    )
"""

OFFLOADS = {
    "on devices": {"activation_offload": False, "cpu_offload": False},
    "activation_offload": {"activation_offload": True, "cpu_offload": False},
    "cpu_offload": {"activation_offload": False, "cpu_offload": True},
    "both": {"activation_offload": True, "cpu_offload": True},
}


def longest(model: str, gpus: int, cluster: str, fix: dict[str, bool]) -> planner.PlanResult | None:
    """Return the plan of the longest sample that fits, by bisection."""
    found, fits, fails = None, 0, MOST_STEPS + 1
    while fails - fits > 1:
        steps = (fits + fails) // 2
        try:
            found = planner.plan(
                model, gpus=gpus, cluster=cluster, seq_len=STEP * steps, global_batch_size=1,
                fix=fix,
            )  # fmt: skip
            fits = steps
        except InfeasiblePlanError:
            fails = steps
    return found


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--cluster", default="h100-sxm")
    arguments = parser.parse_args()
    with TemporaryDirectory() as folder:
        model = Path(folder, "long_llama.py")
        model.write_text(MODEL)
        for name, fix in OFFLOADS.items():
            result = longest(str(model), arguments.gpus, arguments.cluster, fix)
            if result is None:
                line = "none fits"
            else:
                best = result.best
                tokens, step_s = best.tokens_per_step, best.costs.step_time_s
                hosts = max(best.host_bytes_by_rank, default=0) / 2**30
                line = f"{tokens:>9,} tokens, {step_s:6.0f} s a step, {hosts:5.1f} GiB of a host"
            sys.stdout.write(f"{name:20} {line}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
