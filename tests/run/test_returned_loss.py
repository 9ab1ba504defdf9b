"""A model that takes targets and returns its loss, from the advice of the error to training."""

from pathlib import Path

import pytest
from launch import arguments_of, largest_difference, outcome_of, run_jobs

import planner
from planner.errors import ModelError

pytestmark = pytest.mark.run

MODEL = Path(__file__).with_name("returns_loss.py")


def test_the_error_names_the_form_that_works(tmp_path):
    model = tmp_path / "model.py"
    text = MODEL.read_text().replace("Path(__file__)", f"Path({str(MODEL)!r})")
    works = "(tokens[:, :-1], tokens[:, 1:]), None"
    model.write_text(text.replace(works, "tokens[:, :-1], tokens[:, 1:]"))
    with pytest.raises(ModelError, match="must return its loss") as caught:
        planner.trace(str(model))
    assert f"return {works}" in caught.value.hint
    model.write_text(text)
    planner.trace(str(model))


@pytest.mark.parametrize("fixed", [{"pp": 2, "schedule": "1F1B"}, {"dp_shard": 2}, {"tp": 2}])
def test_it_trains_as_on_one_process(fixed, tmp_path):
    result = planner.estimate(
        str(MODEL), gpus=2, cluster="cpu", dtype="float64", global_batch_size=8,
        fix={"microbatch_size": 2, **fixed},
    )  # fmt: skip
    result.save(tmp_path)
    run_jobs([(tmp_path, arguments_of(tmp_path, name="reference", extra=("--reference",)))])
    run_jobs([(tmp_path, arguments_of(tmp_path))], num_processes=2)
    expected = outcome_of(tmp_path, name="reference")
    assert largest_difference(outcome_of(tmp_path).losses, expected.losses) < 1e-8
