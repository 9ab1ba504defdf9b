"""One process trains as a loop does that knows nothing of the runtime."""

import math
from pathlib import Path

import pytest
import torch
from launch import arguments_of, outcome_of, run_jobs

import planner
from planner.runtime.data import drawn_microbatches
from planner.runtime.model import UserModel, user_module

pytestmark = pytest.mark.run

HERE = Path(__file__).parent
MODELS = ("complex_positions", "shallow_gpt", "shallow_llama", "routed_experts")
STEPS, SAMPLES = 3, 8


def plain_losses(file):
    """Losses of the model as its file builds it, nothing cast."""
    user = UserModel(file=file, factory="build_model")
    module = user_module(user)
    torch.manual_seed(0)
    model = module.build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1)
    losses = []
    for step in range(STEPS):
        ((inputs, targets),) = drawn_microbatches(user, 0, step, range(SAMPLES), SAMPLES)
        loss = module.loss_fn(model(inputs), targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("name", MODELS)
def test_the_reference_is_training_as_anyone_would_write_it(name, tmp_path):
    file = HERE / f"{name}.py"
    planner.plan(
        str(file), gpus=1, cluster="cpu", dtype="float32", global_batch_size=SAMPLES,
        fix={"microbatch_size": SAMPLES},
    ).save(tmp_path / "plan")  # fmt: skip
    run_jobs([(tmp_path / "plan", arguments_of(tmp_path / "plan", extra=("--reference",)))])
    found = outcome_of(tmp_path / "plan").losses
    expected = plain_losses(file)
    assert all(map(math.isfinite, expected))
    assert found == pytest.approx(expected, rel=1e-5)


def test_complex_weights_are_refused_and_pairs_of_real_ones_train_as_they_would(tmp_path):
    file = HERE / "complex_weights.py"
    asked = {"gpus": 2, "cluster": "cpu", "dtype": "float32", "global_batch_size": SAMPLES}
    with pytest.raises(planner.RequestError, match=r"complex numbers .*0\.spectral\.weight and 2"):
        planner.plan(str(file), **asked)
    result = planner.plan(f"{file}:build_of_pairs", **asked, fix={"dp_shard": 2})
    result.save(tmp_path / "plan")
    run_jobs([(tmp_path / "plan", arguments_of(tmp_path / "plan"))], num_processes=2)
    found = outcome_of(tmp_path / "plan").losses
    assert found == pytest.approx(plain_losses(file), rel=1e-5)
