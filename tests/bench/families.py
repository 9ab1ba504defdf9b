"""Plans tiny models of many families with tensor parallelism, runs the scripts, prints a table.

Alone: ``python tests/bench/families.py [--out FILE.md] [TYPE ...]``.
"""

import argparse
import json
import math
import re
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

sys.path.insert(0, str(Path(__file__).parents[1] / "run"))

from driver import IMPORTED
from in_float64 import run_scripts_in_float64
from launch import (
    arguments_of,
    largest_difference,
    largest_weight_difference,
    outcome_of,
    run_jobs,
)

from planner.vocabulary import split_styles

LAYOUTS = {
    "tp 2": {"tp": 2},
    "dp 2 x tp 2": {"tp": 2, "dp_shard": 2},
    "tp 2 x pp 2": {"tp": 2, "pp": 2},
    "tp 4": {"tp": 4},
    "cp 2": {"cp": 2},
    "cp 2 x pp 2": {"cp": 2, "pp": 2},
    "ep 2": {"dp_shard": 2, "ep": 2},
    "ep 2 x dp 2": {"dp_shard": 4, "ep": 2},
    "ep 2 x pp 2": {"dp_shard": 2, "ep": 2, "pp": 2},
    "tp 2 x ep 2": {"tp": 2, "ep": 2},
    "tp 2 x ep 4": {"tp": 2, "dp_shard": 2, "ep": 4},
    "2 chunks": {"dp_shard": 2, "loss_chunks": 2},
    "2 chunks x pp 2": {"dp_shard": 2, "pp": 2, "loss_chunks": 2},
}


def processes(fix: dict) -> int:
    """Ranks of a layout: those of ep are some of dp_shard's."""
    return math.prod(n for name, n in fix.items() if name not in ("ep", "loss_chunks"))


LIMIT = 1e-8
"""Largest relative difference to one process in float64."""

SMALL = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embed_dim"), 64),
    **dict.fromkeys(("embedding_size", "word_embed_proj_dim", "d_embed"), 64),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "n_layers"), 4),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_heads", "n_heads"), 8),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 8),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), 4),
    **dict.fromkeys(("intermediate_size", "d_ff", "ffn_dim", "n_inner", "hidden_dim"), 128),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim", "ffn_hidden_size"), 128),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 64),
    **dict.fromkeys(("head_dim", "d_kv", "attention_head_size", "key_length"), 8),
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k"), 2),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len"), 64),
    **dict.fromkeys(("max_source_positions", "max_target_positions"), 32),
    "vocab_size": 256,
    "image_size": 32,
    "patch_size": 8,
    "num_mel_bins": 16,
    "num_labels": 8,
}
"""Sizes by the names that configs have for them; those that a config lacks are left out."""

DROPOUTS = re.compile(r"drop|layerdrop|jitter")

SPECIAL = {
    "gemma2": {"query_pre_attn_scalar": 8, "sliding_window": 8},
    "gemma3_text": {"query_pre_attn_scalar": 8, "sliding_window": 8},
    "llama": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    "phi3": {"pad_token_id": 0},
    "gptj": {"rotary_dim": 4},
    "codegen": {"rotary_dim": 4},
    "gpt_bigcode": {"multi_query": False},
    "nemotron": {"num_key_value_heads": 4},
    "esm": {"vocab_size": 32, "pad_token_id": 1, "mask_token_id": 31, "token_dropout": False},
    "beit": {"out_features": None, "out_indices": None, "stage_names": None},
    "dinov2": {"out_features": None, "out_indices": None, "stage_names": None},
    "whisper": {"decoder_start_token_id": 1, "max_source_positions": 16},
}
"""What a type needs beyond that."""

FAMILIES = {
    "decoder": (
        "gpt2 llama mistral qwen2 qwen3 gemma gemma2 gemma3_text phi phi3 opt bloom gpt_neox "
        "gptj stablelm olmo olmo2 granite cohere starcoder2 gpt_bigcode mpt codegen "
        "smollm3 helium glm nemotron"
    ),
    "experts": "mixtral qwen2_moe olmoe granitemoe qwen3_moe",
    "encoder": "bert roberta electra albert distilbert mpnet camembert ernie modernbert esm",
    "encoder-decoder": "t5 bart mt5 pegasus m2m_100 mbart blenderbot",
    "vision": "vit deit beit dinov2 ijepa",
    "speech": "whisper audio-spectrogram-transformer",
}
"""Types of config by what their models are."""

CLASSES = {
    "causal": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "seq2seq": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "masked": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "image": "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
    "speech": "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
    "ctc": "MODEL_FOR_CTC_MAPPING_NAMES",
    "audio": "MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES",
}
TABLES = {
    "decoder": ("causal",),
    "experts": ("causal",),
    "encoder": ("masked",),
    "encoder-decoder": ("seq2seq",),
    "vision": ("image",),
    "speech": ("speech", "ctc", "audio"),
}


@dataclass(kw_only=True)
class Row:
    """One family under all layouts."""

    family: str
    model_type: str
    results: dict[str, str] = field(default_factory=dict)
    """By layout: "equal" with what is split, or why it was refused, or how it failed."""


def class_of(kind: str, model_type: str) -> str:
    from transformers.models.auto import modeling_auto

    for table in TABLES[kind]:
        names = getattr(modeling_auto, CLASSES[table])
        if model_type in names:
            found = names[model_type]
            return found if isinstance(found, str) else found[0]
    raise KeyError(f"{model_type} has no {kind}")


def write_config(folder: Path, kind: str, model_type: str) -> Path:
    """Write the config of a tiny model of a type, without dropout."""
    from transformers import CONFIG_MAPPING

    config = CONFIG_MAPPING[model_type]()
    known = config.to_dict()
    small = {name: size for name, size in SMALL.items() if known.get(name) is not None}
    still = {
        name: 0.0
        for name, value in known.items()
        if DROPOUTS.search(name) and isinstance(value, float)
    }
    changes = {**small, **still, **SPECIAL.get(model_type, {})}
    changes |= {
        name: 0
        for name, value in known.items()
        if name.endswith("_token_id") and isinstance(value, int) and value >= 256
    }
    layer_types = known.get("layer_types")
    if layer_types:
        changes["layer_types"] = layer_types[: changes.get("num_hidden_layers", 4)]
    document = {**known, **changes}
    document |= {"architectures": [class_of(kind, model_type)], "model_type": model_type}
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "config.json"
    file.write_text(json.dumps(document, default=str))
    return file


def fast_links(folder: Path) -> str:
    """The CPU cluster with links so fast that the layouts are those of large models."""
    from planner.hardware.profiles import PROFILES_FOLDER

    text = (PROFILES_FOLDER / "clusters" / "cpu.toml").read_text()
    text = re.sub(r"(latency_us_per_\w+ = \{ value =) \d+", r"\1 0", text)
    text = re.sub(r"(unidirectional = \{ value =) [\d.]+", r"\1 10000", text)
    path = folder / "fast.toml"
    path.write_text(text)
    return str(path)


def split_words(best) -> str:
    """How many of the blocks have something split, and which modules of the first kind of block."""
    if best.loss_chunks > 1:
        return f"{best.loss_chunks} chunks of {best.loss_module}"
    blocks = [unit for unit, name in enumerate(best.units) if name not in ("prologue", "epilogue")]
    styles = split_styles(best.degrees.split_axis)
    split = {
        unit
        for group in best.shardings
        for unit in group.units
        if any(module.style in styles for module in group.modules)
    }
    covered = sum(unit in split for unit in blocks)
    modules = sorted(
        {
            module.module.rpartition(".")[2] or module.module
            for group in best.shardings
            if set(group.units) & set(blocks)
            for module in group.modules
            if module.style in styles
        }
    )
    return (
        f"{covered}/{len(blocks)} blocks"
        + (", sequence" if best.sequence_parallel else "")
        + f": {' '.join(modules)}"
    )


def plan_layout(config: Path, folder: Path, cluster: str, fix: dict) -> tuple[str, str]:
    """Plan one layout and write its script: what is split, or why it was refused."""
    import planner
    from planner.errors import PlannerError

    gpus = processes(fix)
    try:
        result = planner.plan(
            str(config), gpus=gpus, cluster=cluster, dtype="float64", global_batch_size=8,
            seq_len=16 if "vision" not in folder.parts and "speech" not in folder.parts else None,
            fix={**fix, "microbatch_size": 2} if "pp" in fix else fix,
        )  # fmt: skip
    except PlannerError as error:
        return "refused", str(error).splitlines()[0][:160]
    except Exception as error:
        return "PLANNING FAILED", f"{type(error).__name__}: {error}"[:160]
    result.save(folder, force=True)
    return "planned", split_words(result.best)


def try_family(kind: str, model_type: str, root: Path, cluster: str, layouts) -> Row:
    """Plan and run a family under all layouts."""
    row = Row(family=kind, model_type=model_type)
    base = root / kind / model_type
    try:
        config = write_config(base / "model", kind, model_type)
    except Exception as error:
        row.results = dict.fromkeys(layouts, f"no config: {error}"[:120])
        return row
    planned = {}
    for name in layouts:
        folder = base / name.replace(" ", "")
        status, words = plan_layout(config, folder, cluster, LAYOUTS[name])
        row.results[name] = f"{status}: {words}"
        if status == "planned":
            planned[name] = folder
    if planned:
        _run_all(row, planned)
    return row


def _run_all(row: Row, planned: dict[str, Path]) -> None:
    first = next(iter(planned.values()))
    reference = arguments_of(first, name="reference", steps=2, extra=("--reference",))
    try:
        run_jobs([(first, reference)], timeout_s=300, function=run_scripts_in_float64)
    except AssertionError as error:
        for name in planned:
            row.results[name] = f"reference failed: {last_line(error)}"
        return
    expected = outcome_of(first, name="reference", steps=2)
    by_size: dict[int, list[str]] = {}
    for name in planned:
        by_size.setdefault(processes(LAYOUTS[name]), []).append(name)
    for gpus, names in by_size.items():
        together = _failure([planned[name] for name in names], gpus) if len(names) > 1 else "?"
        for name in names:
            words = row.results[name].partition(": ")[2]
            failure = together and _failure([planned[name]], gpus)
            row.results[name] = (
                f"FAILED: {failure} ({words})"
                if failure
                else _compared(outcome_of(planned[name], steps=2), expected, words)
            )


def _failure(folders: list[Path], gpus: int) -> str:
    """Run scripts one after the other in one group: what failed, "" where nothing did."""
    jobs = [(folder, arguments_of(folder, steps=2)) for folder in folders]
    try:
        run_jobs(jobs, num_processes=gpus, timeout_s=300, function=run_scripts_in_float64)
    except AssertionError as error:
        return last_line(error)
    return ""


def _compared(found, expected, words: str) -> str:
    worst = max(
        largest_difference(found.losses, expected.losses),
        largest_weight_difference(found.weights, expected.weights),
    )
    return f"{'equal' if worst < LIMIT else 'DIFFERS'} {worst:.0e}: {words}"


def last_line(error: AssertionError) -> str:
    lines = [line for line in str(error).splitlines() if line.strip() and line[0] not in " [-"]
    errors = [line for line in lines if re.match(r"\w*(\.\w+)*(Error|Exception)\b", line)]
    return (errors or lines or ["?"])[0][:200]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("types", nargs="*")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--layout", action="append", choices=LAYOUTS)
    options = parser.parse_args()
    layouts = options.layout or list(LAYOUTS)
    rows = []
    IMPORTED.append("transformers.modeling_utils")
    with TemporaryDirectory() as folder:
        cluster = fast_links(Path(folder))
        for kind, types in FAMILIES.items():
            for model_type in types.split():
                if options.types and model_type not in options.types:
                    continue
                start_s = time.perf_counter()
                row = try_family(kind, model_type, Path(folder), cluster, layouts)
                rows.append(row)
                print(f"{kind} {model_type} ({time.perf_counter() - start_s:.0f} s)", flush=True)
                for name, result in row.results.items():
                    print(f"    {name:12} {result}", flush=True)
    print(summary(rows))
    if options.out is not None:
        options.out.write_text(document(rows, layouts))


def summary(rows: list[Row]) -> str:
    results = [result for row in rows for result in row.results.values()]
    equal = sum(result.startswith("equal") for result in results)
    refused = sum(result.startswith("refused") for result in results)
    failed = len(results) - equal - refused
    return (
        f"{len(rows)} families, {len(results)} layouts: {equal} equal, {refused} refused, "
        f"{failed} failed"
    )


WORDS = """# Families under tensor parallelism

Tiny models of Hugging Face families, planned with links fast enough that splitting pays, run on
gloo in float64 for two steps, and compared with one process: the largest relative difference of
losses and weights, in how many blocks something is split, and what. "sequence" is sequence
parallelism. Made by `python tests/bench/families.py --out docs/families.md`.

"""


def document(rows: list[Row], layouts: list[str]) -> str:
    """The table with what it shows."""
    lines = ["| family | type | " + " | ".join(layouts) + " |", "|---" * (2 + len(layouts)) + "|"]
    for row in rows:
        cells = [row.results[name].replace("|", "/") for name in layouts]
        lines.append(f"| {row.family} | {row.model_type} | " + " | ".join(cells) + " |")
    return WORDS + summary(rows) + ".\n\n" + "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
