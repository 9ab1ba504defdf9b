"""Models on one process of this CPU, predicted and measured: `python tests/bench/one_process.py`.

``plan profile`` measures the machine; each model is planned for it with ``plan MODEL --gpus 1``,
and the script is run. A line per model: the median step after the first two, and the peak resident
memory, beside what the plan says. Run it on a machine that does nothing else.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parents[2]
ZOO, WIDE = ROOT / "tests" / "graph" / "zoo", Path(__file__).parent / "emulated" / "models"
BERT = {"model_type": "bert", "hidden_size": 128, "intermediate_size": 512}
BERT |= {"architectures": ["BertForMaskedLM"], "num_hidden_layers": 4, "num_attention_heads": 4}
BERT |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "vocab_size": 1000}

MODELS = {
    "gpt": ROOT / "examples" / "gpt.py",
    "llama": ROOT / "examples" / "llama.py",
    "wide gpt": WIDE / "wide_gpt.py",
    "wide llama": WIDE / "wide_llama.py",
    "wide mixture": WIDE / "wide_moe.py",
    "uneven mlp": WIDE / "uneven_mlp.py",
    "wide vit": WIDE / "wide_vit.py",
    "wide unet": WIDE / "wide_unet.py",
    "resnet": ZOO / "resnet.py",
    "lstm": ZOO / "lstm.py",
    "t5": ZOO / "t5.py",
    "dit": ZOO / "dit.py",
    "hf bert": BERT,
}
"""A model file, or a Hugging Face config."""

SAMPLES = 16
STEPS, FIRST_STEPS = 12, 2
ENVIRONMENT = {"OMP_NUM_THREADS": "1", **os.environ}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", action="append", choices=MODELS)
    parser.add_argument("--quick", action="store_true", help="plan profile --quick")
    parser.add_argument("--profile", type=Path, help="measured before")
    options = parser.parse_args()
    with TemporaryDirectory() as made:
        machine = options.profile or Path(made, "machine.toml")
        if options.profile is None:
            quick = ["--quick"] * options.quick
            planner("profile", "--processes", "1", "--out", machine, *quick)
        errors = [row(name, machine, Path(made)) for name in options.model or MODELS]
    times, memory = zip(*errors, strict=True)
    print(f"{len(errors)} models: median error of steps {statistics.median(times):.1%} (bar 10%),")
    print(f"of peak memory {statistics.median(memory):.1%} (bar 5%)")
    return 0


def row(name: str, machine: Path, made: Path) -> tuple[float, float]:
    """Plan and run a model, and print its line; return the errors of its time and its memory."""
    model = MODELS[name]
    if isinstance(model, dict):
        Path(made, "config.json").write_text(json.dumps(model))
        model = made
    folder, log = made / name.replace(" ", "_"), made / "log.jsonl"
    words = ("--gpus", 1, "--cluster", machine, "--dtype", "float32")
    planner(model, *words, "--global-batch-size", SAMPLES, "--out", folder)
    run([sys.executable, folder / "train.py", "--steps", STEPS, "--log", log])
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    measured_s = statistics.median(each["step_time_s"] for each in rows[FIRST_STEPS:])
    predicted_s = rows[-1]["predicted_step_time_s"]
    measured_mib, predicted_mib = (
        rows[-1][key] / 2**20 for key in ("peak_memory_bytes", "predicted_peak_memory_bytes")
    )
    off, memory_off = predicted_s / measured_s - 1, predicted_mib / measured_mib - 1
    print(
        f"{name:14} {predicted_s * 1e3:6.0f} ms, measured {measured_s * 1e3:6.0f} ms {off:+5.0%}   "
        f"{predicted_mib:5.0f} MiB, measured {measured_mib:5.0f} MiB {memory_off:+5.0%}",
        flush=True,
    )
    return abs(off), abs(memory_off)


def planner(*words: object) -> None:
    """Run a command of the planner."""
    run([sys.executable, "-c", "from planner.cli.main import main; main()", *words])


def run(command: list[object]) -> None:
    words = list(map(str, command))
    done = subprocess.run(words, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(words)}\nended with exit code {done.returncode}:\n{done.stderr}")


if __name__ == "__main__":
    sys.exit(main())
