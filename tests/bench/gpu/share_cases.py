"""The shares that are timed: layouts of 1 to 512 GPUs, the most telling first."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[3]
LLAMA, GPT = "examples/llama.py", "examples/gpt.py"
ZOO = "tests/graph/zoo"


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareCase:
    """A layout whose ranks are timed one by one."""

    name: str
    model: str
    """As ``plan`` takes it, from the top of the repository; a config's path below the plans."""
    gpus: int
    samples: int
    """Global batch."""
    fix: Mapping[str, Any]
    seq_len: int | None = None
    pp_ranks: tuple[int, ...] = (0,)
    """Ranks of the pipeline that are timed."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """Of a Hugging Face model, which ``model`` then names."""

    @property
    def source(self) -> str:
        """MODEL."""
        return self.model if self.config else str(REPOSITORY / self.model)


def _fix(recompute: str, microbatch_size: int = 1, **others: Any) -> dict[str, Any]:
    return {
        "activation_checkpointing": recompute, "microbatch_size": microbatch_size, **others,
    }  # fmt: skip


def _llama(
    name: str, size: str, gpus: int, samples: int, seq_len: int, fix: Mapping[str, Any],
    pp_ranks: tuple[int, ...] = (0,),
) -> ShareCase:  # fmt: skip
    return ShareCase(
        name=name, model=f"{LLAMA}:llama_{size}", gpus=gpus, samples=samples, seq_len=seq_len,
        fix=fix, pp_ranks=pp_ranks,
    )  # fmt: skip


def _gpt(
    name: str, size: str, gpus: int, samples: int, seq_len: int, fix: Mapping[str, Any]
) -> ShareCase:
    return ShareCase(
        name=name, model=f"{GPT}:gpt_{size}", gpus=gpus, samples=samples, seq_len=seq_len, fix=fix
    )


def _zoo(name: str, file: str, gpus: int, samples: int, fix: Mapping[str, Any]) -> ShareCase:
    return ShareCase(name=name, model=file, gpus=gpus, samples=samples, fix=fix)


def _config(model_type: str, architecture: str, **sizes: Any) -> dict[str, Any]:
    return {"model_type": model_type, "architectures": [architecture], **sizes}


def share_cases() -> list[ShareCase]:
    """List all."""
    groups = [list(_first()), list(_dense()), list(_others()), list(_modes()), list(_compiled())]
    groups.append(list(_kept_aside()))
    places = [
        (index / len(group), number, case)
        for number, group in enumerate(groups)
        for index, case in enumerate(group)
    ]
    return [case for _, _, case in sorted(places, key=lambda place: place[:2])]


def _first() -> Iterator[ShareCase]:
    """Llama-3-8B, data and tensor parallel, by recomputation."""
    split = {"tp": 2, "dp_shard": 4, "sequence_parallel": True}
    yield _llama("8b-dp8-full", "8b", 8, 8, 8192, _fix("full", dp_shard=8))
    yield _llama("8b-dp8-none", "8b", 8, 16, 2048, _fix("none", dp_shard=8))
    yield _llama("8b-dp8-selective", "8b", 8, 8, 4096, _fix("selective", dp_shard=8))
    yield _llama("8b-tp2-none", "8b", 8, 4, 4096, _fix("none", **split))
    yield _llama("8b-tp2-full", "8b", 8, 4, 8192, _fix("full", **split))
    whole = {"tp": 8, "sequence_parallel": False}
    yield _llama("8b-tp8-plain-none", "8b", 8, 2, 4096, _fix("none", **whole))
    split = {"tp": 8, "sequence_parallel": True}
    yield _llama("8b-tp8-selective", "8b", 8, 2, 8192, _fix("selective", 2, **split))
    split = {"tp": 4, "dp_shard": 2, "sequence_parallel": True}
    yield _llama("8b-tp4-full", "8b", 8, 4, 8192, _fix("full", 2, **split))
    hsdp = {"dp_replicate": 8, "dp_shard": 8}
    yield _llama("8b-hsdp-none", "8b", 64, 64, 4096, _fix("none", **hsdp))
    kept = {"dp_shard": 64, "reshard_after_forward": False}
    yield _llama("8b-dp64-kept-none", "8b", 64, 256, 1024, _fix("none", **kept))


def _dense() -> Iterator[ShareCase]:
    """Pipelines, long samples, larger models."""
    staged = {"pp": 4, "dp_shard": 2, "schedule": "1F1B"}
    yield _llama("8b-pp4-none", "8b", 8, 16, 2048, _fix("none", **staged), (0, 3))
    staged = {"tp": 8, "pp": 4, "dp_shard": 4, "schedule": "1F1B", "sequence_parallel": True}
    yield _llama("70b-tp8-pp4-full", "70b", 128, 32, 4096, _fix("full", **staged), (0,))
    long = {"cp": 4, "dp_shard": 2}
    yield _llama("8b-cp4-full", "8b", 8, 4, 8192, _fix("full", 2, **long))
    staged = {"tp": 8, "pp": 8, "dp_shard": 8, "schedule": "1F1B", "sequence_parallel": True}
    yield _llama("70b-tp8-pp8-selective", "70b", 512, 64, 4096, _fix("selective", **staged), (1,))
    split = {"tp": 8, "dp_shard": 16, "sequence_parallel": True}
    yield _llama("70b-tp8-full", "70b", 128, 16, 4096, _fix("full", **split))
    yield _llama("70b-dp64-full", "70b", 64, 64, 1024, _fix("full", dp_shard=64))
    long = {"cp": 2, "tp": 2, "dp_shard": 2, "sequence_parallel": True}
    yield _llama("8b-cp2-tp2-selective", "8b", 8, 2, 8192, _fix("selective", **long))
    staged = {"pp": 2, "tp": 4, "virtual_stages": 2, "sequence_parallel": True}
    yield _llama("8b-interleaved-none", "8b", 8, 8, 4096, _fix("none", **staged), (1,))
    staged = {"tp": 8, "pp": 16, "dp_shard": 4, "schedule": "1F1B", "sequence_parallel": True}
    yield _llama("405b-tp8-pp16-full", "405b", 512, 64, 2048, _fix("full", **staged), (1,))


QWEN = _config(
    "qwen2", "Qwen2ForCausalLM", hidden_size=1536, intermediate_size=8960, num_hidden_layers=28,
    num_attention_heads=12, num_key_value_heads=2, vocab_size=151936, tie_word_embeddings=True,
    max_position_embeddings=32768, rms_norm_eps=1e-6,
)  # fmt: skip
BERT = _config(
    "bert", "BertForMaskedLM", hidden_size=1024, intermediate_size=4096, num_hidden_layers=24,
    num_attention_heads=16, vocab_size=30522, max_position_embeddings=512,
)  # fmt: skip
T5 = _config(
    "t5", "T5ForConditionalGeneration", d_model=1024, d_ff=4096, d_kv=64, num_layers=24,
    num_decoder_layers=24, num_heads=16, vocab_size=32128, decoder_start_token_id=0,
)  # fmt: skip


def _hf(name: str, config: Mapping[str, Any], gpus: int, samples: int, seq_len: int,
        fix: Mapping[str, Any]) -> ShareCase:  # fmt: skip
    return ShareCase(
        name=name, model=f"{config['model_type']}.json", gpus=gpus, samples=samples,
        seq_len=seq_len, fix=fix, config=config,
    )  # fmt: skip


def _others() -> Iterator[ShareCase]:
    """Other models."""
    yield _gpt("gpt-124m", "124m", 1, 16, 1024, _fix("none", 16))
    yield _gpt("gpt-1.3b", "1_3b", 1, 8, 2048, _fix("none", 4))
    yield _zoo("vit-22b-tp8", f"{ZOO}/vit_22b.py", 64, 64, _fix("none", 8, tp=8, dp_shard=8))
    yield _hf("qwen2-1.5b", QWEN, 8, 16, 4096, _fix("none", 2, dp_shard=8))
    yield _zoo("moe-dp8", "tests/bench/gpu/models/large_moe.py", 8, 8, _fix("none", dp_shard=8))
    yield _zoo("unet-sdxl", f"{ZOO}/unet_sdxl.py", 8, 16, _fix("none", 2, dp_shard=8))
    yield _hf("bert-large", BERT, 8, 256, 512, _fix("none", 32, dp_shard=8))
    yield _gpt("gpt-1.3b-tp2", "1_3b", 2, 8, 2048, _fix("selective", 8, tp=2))
    yield _gpt("gpt-1.3b-full", "1_3b", 8, 64, 2048, _fix("full", 8, dp_shard=8))
    yield _hf("t5-large", T5, 8, 64, 512, _fix("none", 8, dp_shard=8))
    yield _zoo("dit-xl-2", f"{ZOO}/dit_xl_2.py", 8, 512, _fix("none", 64, dp_shard=8))
    yield _zoo("lora-8b", "tests/bench/lora_llama_8b.py", 1, 1, _fix("full"))
    yield _zoo("resnet-50", f"{ZOO}/resnet_50.py", 8, 1024, _fix("none", 128, dp_replicate=8))
    yield _zoo("vit-22b-full", f"{ZOO}/vit_22b.py", 64, 1024, _fix("full", 16, dp_shard=64))


def _modes() -> Iterator[ShareCase]:
    """Compiled, in float8, with states or inputs on the host."""
    yield _gpt("gpt-124m-compiled", "124m", 1, 16, 1024, _fix("none", 16, compile=True))
    float8 = {"dp_shard": 8, "float8": True}
    yield _llama("8b-float8-compiled", "8b", 8, 8, 4096, _fix("full", compile=True, **float8))
    yield _llama("8b-compiled-none", "8b", 8, 16, 2048, _fix("none", compile=True, dp_shard=8))
    inputs = {"dp_shard": 8, "activation_offload": True}
    yield _llama("8b-inputs-on-hosts", "8b", 8, 16, 8192, _fix("full", 2, **inputs))
    yield _llama("8b-float8", "8b", 8, 8, 4096, _fix("full", **float8))
    states = {"dp_shard": 8, "cpu_offload": True}
    yield _gpt("gpt-1.3b-states-on-hosts", "1_3b", 8, 64, 2048, _fix("none", 4, **states))
    float8 = {"tp": 2, "dp_shard": 4, "sequence_parallel": True, "float8": True}
    yield _llama("8b-float8-tp2", "8b", 8, 4, 4096, _fix("none", **float8))
    yield _llama("8b-compiled-full", "8b", 8, 8, 8192, _fix("full", compile=True, dp_shard=8))
    yield _gpt("gpt-1.3b-compiled", "1_3b", 1, 8, 2048, _fix("none", 4, compile=True))


def _compiled() -> Iterator[ShareCase]:
    """Split blocks, compiled."""
    split = {"tp": 2, "dp_shard": 4, "sequence_parallel": True, "compile": True}
    yield _llama("8b-tp2-compiled-none", "8b", 8, 4, 4096, _fix("none", **split))
    split = {"tp": 8, "dp_shard": 16, "sequence_parallel": True, "compile": True}
    yield _llama("70b-tp8-compiled-full", "70b", 128, 16, 4096, _fix("full", **split))
    long = {"cp": 4, "dp_shard": 2, "compile": True}
    yield _llama("8b-cp4-compiled-full", "8b", 8, 4, 8192, _fix("full", 2, **long))
    split = {"tp": 8, "sequence_parallel": True, "compile": True}
    yield _llama("8b-tp8-compiled-selective", "8b", 8, 2, 8192, _fix("selective", 2, **split))
    vit = _fix("none", 8, tp=8, dp_shard=8, compile=True)
    yield _zoo("vit-22b-tp8-compiled", f"{ZOO}/vit_22b.py", 64, 64, vit)


def _kept_aside() -> Iterator[ShareCase]:
    """Layouts that no constant was chosen by."""
    summed = {"dp_replicate": 2, "dp_shard": 4}
    yield _llama("8b-hsdp-summed-none", "8b", 8, 32, 2048, _fix("none", **summed))
    staged = {"pp": 4, "dp_shard": 2, "schedule": "1F1B"}
    yield _gpt("gpt-1.3b-pp4-none", "1_3b", 8, 32, 2048, _fix("none", 2, **staged))
    yield _llama("8b-dp16-wide-full", "8b", 16, 64, 2048, _fix("full", 4, dp_shard=16))
    yield _hf("qwen2-1.5b-full", QWEN, 4, 32, 2048, _fix("full", 8, dp_shard=4))
    yield _hf("bert-large-full", BERT, 4, 256, 512, _fix("full", 64, dp_shard=4))
    yield _zoo("dit-xl-2-full", f"{ZOO}/dit_xl_2.py", 4, 512, _fix("full", 128, dp_shard=4))
    staged = {"pp": 8, "dp_shard": 8, "schedule": "1F1B"}
    yield _llama("70b-pp8-full", "70b", 64, 128, 2048, _fix("full", **staged), (3,))
    yield _zoo(
        "moe-dp16-summed",
        "tests/bench/gpu/models/large_moe.py",
        16,
        64,
        _fix("full", 2, dp_shard=16),
    )


def smoke_cases() -> list[ShareCase]:
    """A small model of each file, for seconds on a CPU."""
    return [
        ShareCase(
            name="gpt", model=GPT, gpus=4, samples=8, seq_len=64,
            fix=_fix("none", 2, pp=2, dp_shard=2), pp_ranks=(0, 1),
        ),
        ShareCase(
            name="llama", model=LLAMA, gpus=4, samples=8, seq_len=64,
            fix=_fix("full", 2, tp=2, dp_shard=2, sequence_parallel=True),
        ),
    ]  # fmt: skip
