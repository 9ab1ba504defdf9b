"""The first command for twelve models: `python tests/bench/first_command.py [NAME ...]`.

Each is planned with ``plan MODEL --gpus N --out DIR``; then ``plan check`` holds the plan to its
script, with ``--run`` where the model is small enough to train here. A line per model.
"""

import json
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parents[2]
RUN, ZOO = ROOT / "tests" / "run", ROOT / "tests" / "graph" / "zoo"
HERE = ("--cluster", "cpu", "--dtype", "float32")
DECODER = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 64,
}
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
GPT2 = {"n_embd": 64, "n_head": 4, "n_layer": 4, "n_positions": 64, "vocab_size": 256, **NO_DROPOUT}
QWEN_7B = {
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "max_position_embeddings": 32768,
}
MIXTRAL = {**DECODER, "num_local_experts": 4}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model as a user names it; a config is a dict."""

    name: str
    model: object
    options: tuple[str, ...]
    is_small: bool = True


def config(model_type, architecture, sizes):
    return {"model_type": model_type, "architectures": [architecture], **sizes}


def large(name, model, gpus, *options):
    options = ("--gpus", str(gpus), "--seq-len", "4096", *options)
    return Case(name=name, model=model, options=options, is_small=False)


def small(name, model, *options):
    return Case(name=name, model=model, options=("--gpus", "2", *HERE, *options))


CASES = (
    small("own gpt", ROOT / "examples" / "gpt.py"),
    small("own llama, pipeline", ROOT / "examples" / "llama.py", "--fix", "pp=2"),
    small("own vit", ZOO / "vit.py"),
    small("own mixture", ZOO / "moe.py"),
    small("routed mixture, hint", RUN / "routed_moe.py", "--hint", "routed_moe.py:38=false"),
    small("own t5, pipeline", ZOO / "t5.py", "--fix", "pp=2"),
    small("hf gpt2", config("gpt2", "GPT2LMHeadModel", GPT2)),
    small("hf llama, tp", config("llama", "LlamaForCausalLM", DECODER), "--fix", "tp=2"),
    small("hf mixtral", config("mixtral", "MixtralForCausalLM", MIXTRAL)),
    large("llama 8b, lora", ROOT / "tests" / "bench" / "lora_llama_8b.py", 1),
    large("qwen 7b", config("qwen2", "Qwen2ForCausalLM", QWEN_7B), 8),
    large("llama 70b", f"{ROOT / 'examples' / 'llama.py'}:llama_70b", 64),
)


def plan(*words):
    """Run a command of the planner, and return its exit code and last line."""
    done = subprocess.run(
        [sys.executable, "-c", "from planner.cli.main import main; main()", *map(str, words)],
        capture_output=True,
        text=True,
        check=False,
    )
    lines = (done.stderr if done.returncode else done.stdout).strip().splitlines()
    return done.returncode, "\n".join(lines)


def row(case):
    """Plan and check a case; return its line, and whether it starts."""
    start = time.perf_counter()
    with TemporaryDirectory() as made:
        model = case.model
        if isinstance(model, dict):
            Path(made, "config.json").write_text(json.dumps(model))
            model = made
        folder = Path(made, "plan")
        code, text = plan(model, *case.options, "--out", folder)
        words = f"not planned ({code}): {text}"
        if code == 0:
            code, text = plan("check", folder, *(["--run"] if case.is_small else []))
            words = "as planned" if code == 0 else f"check {code}: {text[-600:]}"
    return f"{case.name:<24} {time.perf_counter() - start:5.0f} s  {words}", code == 0


def main(names=()):
    """Print the table, and return how many start."""
    started = 0
    for case in CASES:
        if not names or case.name in names:
            line, starts = row(case)
            started += starts
            print(line, flush=True)
    return started


if __name__ == "__main__":
    main(sys.argv[1:])
