"""Samples split over more ranks than attention has heads of keys and values."""

from pathlib import Path

import pytest

import planner
from planner.checking.check import check_plan

EXAMPLES = Path(__file__).parents[2] / "examples"

MODEL = f"""
import sys
sys.path.insert(0, {str(EXAMPLES)!r})
import llama
from llama import LlamaConfig, apply_rotary, example_batch, loss_fn
from torch.nn import functional


class Attention(llama.Attention):
    def forward(self, x, cos, sin):
        size, length, _ = x.shape
        projections = (self.wq, self.wk, self.wv)
        q, k, v = (each(x).view(size, length, -1, self.head_dim) for each in projections)
        q, k = apply_rotary(q, cos, sin), apply_rotary(k, cos, sin)
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.wo(out.transpose(1, 2).reshape(size, length, -1))


def build_model():
    config = LlamaConfig(
        dim=1024, n_layers=4, n_heads=16, n_kv_heads=2, ffn_dim=4096, vocab_size=1024,
        max_seq_len=16384,
    )
    model = llama.Llama(config)
    for layer in model.layers:
        layer.attention = Attention(config)
    return model
"""

MASK = "torch.ones(length, length, dtype=torch.bool, device=x.device).tril().triu(-99)"
MASKED = MODEL.replace("is_causal=True", f"attn_mask={MASK}").replace(
    "import llama\n", "import llama\nimport torch\n"
)
"""Its kernel takes no groups, so that attention repeats keys and values by itself."""

CASES = [
    *(({"cp": cp}, kind) for cp, kind in ((2, "none"), (8, "full"))),
    ({"tp": 2, "cp": 2, "sequence_parallel": False}, "selective"),
    ({"tp": 2, "cp": 2, "pp": 2, "schedule": "1F1B"}, "full"),
]
"""Of two heads of keys and values tp leaves each rank one, or both."""
MORE = [
    *(
        ({"cp": cp}, kind)
        for cp, kind in ((8, "none"), (8, "selective"), (2, "selective"), (2, "full"))
    ),
    *(({"tp": 2, "cp": 4}, kind) for kind in ("none", "selective", "full")),
    ({"tp": 4, "cp": 2}, "none"),
]


@pytest.mark.parametrize(
    ("fix", "recompute"), [*CASES, *(pytest.param(*case, marks=pytest.mark.bench) for case in MORE)]
)
def test_long_samples_take_the_memory_and_the_traffic_that_are_planned(fix, recompute, tmp_path):
    check = checked(MODEL, 16384, tmp_path, {**fix, "activation_checkpointing": recompute})
    assert check.traffic_holds
    assert abs(check.stages[0].error) <= 0.03, check.stages[0]


@pytest.mark.parametrize(
    "fix",
    [{"cp": 4}, {"tp": 2, "cp": 4}, pytest.param({"tp": 2, "cp": 2}, marks=pytest.mark.bench)],
)
def test_heads_that_attention_repeats_by_itself_are_sent_once(fix, tmp_path):
    check = checked(MASKED, 2048, tmp_path, {**fix, "activation_checkpointing": "none"})
    assert "all_to_all" in {each.kind for each in check.collectives}
    assert check.traffic_holds
    assert abs(check.stages[0].error) <= 0.03, check.stages[0]


def checked(model, length, folder, fix):
    (folder / "grouped.py").write_text(model)
    planner.estimate(
        str(folder / "grouped.py"),
        gpus=8,
        cluster="h100-sxm",
        seq_len=length,
        fix={**fix, "microbatch_size": 2},
        global_batch_size=16,
    ).save(folder / "plan")
    return check_plan(folder / "plan")
