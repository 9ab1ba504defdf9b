"""Rows of every framework are priced, and the others say why they are not."""

import math

import pytest
from run_tables import make_runs, make_table

import planner
from planner.errors import ProfileError, RequestError
from planner.framework.profiles import list_frameworks, load_framework
from planner.validation.pricing.predict import predict_runs
from planner.validation.types import Prediction
from planner.validation.view import error_notes

SMALL = {
    **{"layers": 4, "hidden": 512, "ffn": 2048, "heads": 8, "kv_heads": 8, "vocab": 1024},
    **{"seq_len": 512, "tp": 1, "pp": 1, "dp": 8, "num_gpus": 8, "params_b": None},
    **{"micro_batch": 2, "global_batch": 32, "peak_mem_gib": None, "step_time_s": None},
}


def predictions(*changes, calibration=None):
    runs = make_runs(*({**SMALL, **change} for change in changes))
    return predict_runs(runs, calibration=calibration, progress=None)


@pytest.mark.parametrize("gpu", ["H100-80GB-SXM", "A100-40GB-SXM", "V100-32GB-SXM2"])
@pytest.mark.parametrize("name", list_frameworks())
def test_a_row_of_each_framework_is_priced_on_any_device(name, gpu):
    framework = load_framework(name)
    match = framework.matches[0]
    fsdp = framework.state_form == "fsdp"
    (found,) = predictions(
        {
            **{"framework": match.framework, "source": match.source, "notes": match.notes},
            **{"gpu": gpu, "arch": "llama" if fsdp else "gpt", "precision": "fp16"},
            "zero_stage_or_fsdp": "FSDP FULL_SHARD" if fsdp else "1",
        }
    )
    assert isinstance(found, Prediction)
    assert 1e-3 < found.step_time_s < 10
    assert found.costs.step_time_s == found.step_time_s
    assert found.memory.total_bytes == found.peak_mem_bytes
    assert found.feasible
    assert found.costs.compute_s > 0
    assert found.memory.params_bytes > 0


def test_layouts_differ_as_they_should():
    pipeline = {"pp": 2, "dp": 4}
    tensor = {"tp": 2, "dp": 4, "seq_parallel": "yes"}
    plain, recomputed, piped, split = predictions({}, {"recompute": "full"}, pipeline, tensor)
    assert plain.costs.recompute_s == plain.costs.bubble_s == plain.costs.tp_comm_s == 0
    assert recomputed.costs.recompute_s > 0
    assert recomputed.memory.activations_bytes < plain.memory.activations_bytes
    assert piped.costs.bubble_s > 0
    assert piped.costs.pp_comm_s > 0
    assert split.costs.tp_comm_s > 0
    assert split.memory.params_bytes < plain.memory.params_bytes


def test_what_is_too_large_does_not_fit():
    (found,) = predictions(
        {"hidden": 8192, "ffn": 32768, "heads": 64, "kv_heads": 64, "layers": 12}
    )
    assert not found.feasible
    assert found.peak_mem_bytes > 80 * 2**30


def test_answers_come_in_order_with_reasons():
    answers = predictions({}, {"cp": 2, "dp": 4}, {"global_batch": 8}, {"vocab": None})
    assert [answer.row for answer in answers] == [0, 1, 2, 3]
    priced = [isinstance(answer, Prediction) for answer in answers]
    assert priced == [True, False, False, True]
    assert "context parallelism" in answers[1].reason
    assert "dp 8 x micro_batch 2 > global_batch 8" in answers[2].reason
    assert answers[3].assumptions == ("vocab 131072 (not stated)",)


def test_a_calibration_takes_the_place_of_the_profiles_constants(tmp_path):
    file = tmp_path / "own.toml"
    number = '{ value = 1e7, provenance = "fitted", source = "own runs" }'
    file.write_text(f'format = 1\n[[framework]]\nname = "nanotron"\nstep_us = {number}\n')
    (found,) = predictions({}, calibration=file)
    assert 10 < found.step_time_s < 11
    (plain,) = predictions({})
    assert math.isclose(plain.peak_mem_bytes, found.peak_mem_bytes, rel_tol=0.05)
    file.write_text(file.read_text().replace("step_us", "step_ms"))
    with pytest.raises(ProfileError, match="step_ms"):
        predictions({}, calibration=file)


@pytest.mark.parametrize(
    ("column", "value", "words"),
    [
        ("gpu", "H1000", "column gpu: accelerator 'H1000' is of no cluster"),
        ("num_gpus", "7", "column num_gpus: tp 1"),
    ],
)
def test_unknown_names_are_errors_or_listed(column, value, words):
    table = make_table({**SMALL, "mfu": None}, {**SMALL, "mfu": None, column: value})
    with pytest.raises(RequestError, match=rf"row 1 \(line 3\), {words}"):
        planner.validate(table)
    result = planner.validate(table, keep_going=True)
    assert result.unpriced["column"].tolist() == [column]
    assert len(result.runs.priced) == 1


def test_devices_with_equal_constants_have_prices_of_their_own():
    # Large enough that kernels, and not the host, decide: memory of the two differs in speed.
    big = {
        **{"framework": "planner", "zero_stage_or_fsdp": "FSDP FULL_SHARD", "arch": "llama"},
        **{"hidden": 4096, "ffn": 11264, "heads": 32, "kv_heads": 32, "seq_len": 2048},
    }
    large, small = ({**big, "gpu": f"A100-{size}GB-SXM"} for size in (80, 40))
    together = predictions(large, small)
    assert [each.step_time_s for each in together] == [
        each.step_time_s for change in (large, small) for each in predictions(change)
    ]
    assert together[0].costs.compute_s < together[1].costs.compute_s


def test_times_that_only_units_explain_are_pointed_out():
    seconds = {**SMALL, "mfu": None, "step_time_s": 0.1}
    result = planner.validate(make_table(seconds, {**seconds, "step_time_s": 100.0}))
    (_, note) = error_notes(result)
    assert note.startswith("units? 1 row is off by more than 200 times, first row 1 (line 3)")
    assert "step_time_s 100, predicted 0." in note
    assert len(error_notes(planner.validate(make_table(seconds)))) == 1


def test_open_cells_take_what_is_assumed_and_say_so():
    open_cells = {**SMALL, "mfu": None, "recompute": None, "framework": "own-fork"}
    table = make_table(open_cells, {**open_cells, "recompute": "none"})
    assume = {"recompute": "full", "framework": "nanotron"}
    first, second = planner.validate(table, assume=assume).runs.priced
    assert first.assumptions == ("recompute full (assumed)", "framework nanotron (assumed)")
    assert second.assumptions == ("framework nanotron (assumed)",)
    assert first.step_time_s > second.step_time_s
    (plain, _) = planner.validate(table).runs.priced
    assert "recompute none (not stated)" in plain.assumptions
    assert "framework as megatron (own-fork has no profile)" in plain.assumptions


@pytest.mark.parametrize(
    ("assume", "words"),
    [
        ({"step_time_s": "3"}, "a measurement cannot be assumed"),
        ({"recomputation": "full"}, "there is no such column"),
        ({"recompute": " "}, "the value is empty"),
    ],
)
def test_what_cannot_be_assumed_is_refused(assume, words):
    with pytest.raises(RequestError, match=words):
        planner.validate(make_table({**SMALL, "mfu": None}), assume=assume)
