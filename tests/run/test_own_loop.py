"""Training loops of a user's own, with their model in ``parallelize``, train as on one process."""

import difflib
import json

import pytest
import torch
from driver import run_ranks
from launch import largest_difference
from own_loops import EXAMPLES, run_loops
from transformers import GPT2Config, GPT2LMHeadModel

import planner

pytestmark = pytest.mark.run

LOOPS = {
    "nanogpt": ({"dp_shard": 2, "tp": 2}, 16),
    "hf": ({"dp_shard": 2, "pp": 2, "schedule": "1F1B"}, 8),
    "vision": ({"dp_shard": 4}, 16),
}
"""Layout and samples of a step."""


def write_inputs(root):
    """Write what the loops read: a text, a small pretrained model, images."""
    (root / "text").write_text("What a user has on disk is read by the user's own code. " * 20)
    torch.manual_seed(7)
    sizes = {"n_layer": 4, "n_head": 4, "n_embd": 64, "n_positions": 32, "vocab_size": 256}
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    GPT2LMHeadModel(GPT2Config(**sizes, **dropout)).save_pretrained(root / "gpt2")
    images = torch.randn(96, 3, 16, 16), torch.randint(0, 10, (96,))
    torch.save(images, root / "images.pt")


def plan_of(root, name, model, seq_len=None):
    fixed, batch = LOOPS[name]
    result = planner.estimate(
        str(model), gpus=4, cluster="cpu", dtype="float32", seq_len=seq_len,
        global_batch_size=batch, fix={"microbatch_size": 2, **fixed},
    )  # fmt: skip
    result.save(root / name)


@pytest.fixture(scope="module")
def losses(tmp_path_factory):
    root = tmp_path_factory.mktemp("own_loop")
    write_inputs(root)
    plan_of(root, "nanogpt", EXAMPLES / "nanogpt_model.py")
    plan_of(root, "hf", root / "gpt2" / "config.json", seq_len=32)
    plan_of(root, "vision", EXAMPLES / "vision_model.py")
    arguments = {
        "nanogpt": ["--text", root / "text", "--steps", "6", "--out", root / "out"],
        "hf": ["--text", root / "text", "--model", root / "gpt2"],
        "vision": ["--images", root / "images.pt"],
    }
    jobs = {"single": [], "planned": []}
    for name, given in arguments.items():
        given = [str(each) for each in given]
        jobs["single"].append((f"{name}_single", given, str(root / f"{name}-single.json")))
        more = ["--plan", str(root / name)]
        jobs["planned"].append(
            (f"{name}_planned", given + more, str(root / f"{name}-planned.json"))
        )
    run_ranks(run_loops, jobs["single"])
    run_ranks(run_loops, jobs["planned"], num_processes=4)
    return root


@pytest.mark.parametrize("name", LOOPS)
def test_an_own_loop_trains_as_on_one_process(losses, name):
    one, many = (
        json.loads((losses / f"{name}-{kind}.json").read_text()) for kind in ("single", "planned")
    )
    assert len(one) > 5
    assert min(one) < one[0]
    assert largest_difference(many, one) < 1e-4  # float32, after several steps


@pytest.mark.parametrize("name", LOOPS)
def test_an_own_loop_changes_in_fewer_than_thirty_lines(name):
    one, many = (
        (EXAMPLES / f"{name}_{kind}.py").read_text().splitlines() for kind in ("single", "planned")
    )
    signs = [line[0] for line in difflib.ndiff(one, many)]
    assert max(signs.count("+"), signs.count("-")) < 30
