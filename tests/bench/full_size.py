"""Models of full size for the bench, with what is known of them from elsewhere."""

from collections.abc import Mapping
from dataclasses import dataclass

ZOO = "tests/graph/zoo"

GIB_IN_MIB = 1024


@dataclass(frozen=True, kw_only=True)
class FullSize:
    """One model, and the bars for its trace."""

    model: str
    """MODEL; "config.json" where it is made from ``config``, "deep.py" from ``DEEP_LLAMA``."""
    parameters: int
    """Counted by their authors, or by hand."""
    pattern: str
    """Pattern of its blocks, "" where it is not one to check."""
    most_s: float
    seq_len: int | None = None
    config: Mapping[str, object] | None = None
    most_mib: float = GIB_IN_MIB


LLAMA_405B = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 16384,
    "intermediate_size": 53248,
    "num_hidden_layers": 126,
    "num_attention_heads": 128,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-05,
    "tie_word_embeddings": False,
}

MIXTRAL_8X7B = {
    "model_type": "mixtral",
    "architectures": ["MixtralForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 32000,
    "max_position_embeddings": 32768,
    "sliding_window": None,
    "tie_word_embeddings": False,
}

DEEPSEEK_V3 = {
    "model_type": "deepseek_v3",
    "architectures": ["DeepseekV3ForCausalLM"],
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "n_shared_experts": 1,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 3,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "vocab_size": 129280,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}

T5_11B = {
    "model_type": "t5",
    "architectures": ["T5ForConditionalGeneration"],
    "d_model": 1024,
    "d_kv": 128,
    "d_ff": 65536,
    "num_layers": 24,
    "num_heads": 128,
    "vocab_size": 32128,
    "is_encoder_decoder": True,
    "decoder_start_token_id": 0,
    "pad_token_id": 0,
}

DEEP_LLAMA = """
import sys
sys.path.insert(0, {examples!r})
from llama import Llama, LlamaConfig, example_batch, loss_fn

def build_model():
    return Llama(LlamaConfig(
        dim=4096, n_layers=1000, n_heads=32, n_kv_heads=8, ffn_dim=14336, vocab_size=128256,
        max_seq_len=8192,
    ))
"""
"""A thousand blocks of Llama-3-8B."""

FULL_SIZES = {
    "Llama-3-405B": FullSize(
        model="examples/llama.py:llama_405b",
        seq_len=8192,
        parameters=405_853_388_800,
        pattern="126 A",
        most_s=6,
    ),
    "Llama of 1,000 blocks": FullSize(
        model="deep.py",
        seq_len=8192,
        parameters=1000 * 218_112_000 + 2 * 128_256 * 4096 + 4096,
        pattern="1000 A",
        most_s=15,
        most_mib=4 * GIB_IN_MIB,
    ),
    "SDXL U-Net": FullSize(
        model=f"{ZOO}/unet_sdxl.py", parameters=2_567_463_684, pattern="", most_s=10
    ),
    "ViT-22B": FullSize(
        model=f"{ZOO}/vit_22b.py", parameters=21_757_017_064, pattern="48 A", most_s=6
    ),
    "DiT-XL/2": FullSize(
        model=f"{ZOO}/dit_xl_2.py", parameters=675_129_632, pattern="28 A", most_s=6
    ),
    "Llama-3-405B, config.json": FullSize(
        model="config.json",
        config=LLAMA_405B,
        seq_len=8192,
        parameters=405_853_388_800,
        pattern="126 A",
        most_s=10,
    ),
    "Mixtral-8x7B, config.json": FullSize(
        model="config.json",
        config=MIXTRAL_8X7B,
        seq_len=4096,
        parameters=46_702_792_704,
        pattern="32 A",
        most_s=10,
    ),
    "DeepSeek-V3, config.json": FullSize(
        model="config.json",
        config=DEEPSEEK_V3,
        seq_len=4096,
        # Their 671,026,419,200 count the corrections of the router's scores, here buffers.
        parameters=671_026_419_200 - 58 * 256,
        pattern="3 A + 58 B",
        most_s=15,
    ),
    "T5-11B, config.json": FullSize(
        model="config.json",
        config=T5_11B,
        seq_len=512,
        parameters=11_307_321_344,
        pattern="",
        most_s=10,
    ),
}
