"""The joint fit: what it finds on rows whose constants are known, and what it writes."""

import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from run_tables import make_runs

sys.path.append(str(Path(__file__).parents[1] / "bench" / "fitting"))
from fit_parameters import PARAMETERS, RELATIVES, RESERVES
from joint_fit import FitRow, JointFit, Pricer, constants_of, thinned, touches
from left_out import rank_correlation, with_defaults
from refit import profile_file, written

from planner.framework.constants import KEYS
from planner.framework.profiles import list_frameworks
from planner.hardware.profiles import PROFILES_FOLDER, list_clusters, list_devices
from planner.validation.pricing.cases import case_of

MOST_CONSTANTS = 28
NAMES = {"device": list_devices(), "cluster": list_clusters(), "framework": list_frameworks()}


def parameter(owner, key, name):
    (found,) = (
        each for each in PARAMETERS if (each.owner, each.key) == (owner, key) and name in each.names
    )
    return found


HOST = parameter("framework", "host_dispatch_us", "nanotron")
TRAINING = parameter("device", "training_fraction_of_sustained", "h100-sxm")


@pytest.fixture(scope="module")
def pricer():
    return Pricer()


@pytest.fixture(scope="module")
def rows(pricer):
    """Rows that cost what the model says under 70 us per op and 60% of the sustained rate."""
    large = {"hidden": 4096, "ffn": 14336, "layers": 4, "num_gpus": 8, "tp": 1, "pp": 1, "dp": 8}
    small = {**large, "hidden": 512, "ffn": 1024, "heads": 8, "kv_heads": 8, "micro_batch": 1}
    true = constants_of({HOST: 70.0, TRAINING: 0.6})
    found = []
    for run in make_runs(large, small):
        row = FitRow(part=f"hidden {run.hidden}", case=case_of(run))
        price = pricer.price(row, true)
        timed = replace(run, step_time_s=price.costs.step_time_s)
        found.append(FitRow(part=row.part, case=replace(row.case, run=timed)))
    return found


def test_every_constant_belongs_to_profiles_that_are_there_and_hold_it():
    for each in PARAMETERS:
        assert each.key in KEYS[each.owner]
        assert set(each.names) <= set(NAMES[each.owner])
        for name in each.names:
            text = profile_file(each.owner, name).read_text()
            assert f"\n{each.key} = " in text, (name, each.key)


def test_no_number_is_fitted_twice():
    numbers = [(each.owner, each.key, name) for each in PARAMETERS for name in each.names]
    assert len(set(numbers)) == len(numbers)


def test_constants_are_fewer_than_those_of_pairs_were():
    assert len(PARAMETERS) + len(RESERVES) <= MOST_CONSTANTS


def test_what_profiles_share_is_the_same_in_all_of_them():
    for each in PARAMETERS:
        values = {
            tomllib.loads(profile_file(each.owner, name).read_text())[each.key]["value"]
            for name in each.names
        }
        assert len(values) == 1, each.label
    for relative, names in RELATIVES.items():
        key = "training_fraction_of_sustained"
        devices = [
            tomllib.loads((PROFILES_FOLDER / "devices" / f"{name}.toml").read_text())[key]
            for name in (relative, *names)
        ]
        assert len({device["value"] for device in devices}) == 1
        assert {device["provenance"] for device in devices[1:]} == {"assumed"}


def test_known_constants_are_found_again(rows, pricer):
    fit = JointFit(rows, (HOST, TRAINING), pricer)
    found = fit.fitted({HOST: HOST.start, TRAINING: TRAINING.start})
    assert found[HOST] == pytest.approx(70, rel=0.05)
    assert found[TRAINING] == pytest.approx(0.6, rel=0.05)


def test_what_no_row_shows_keeps_its_start(rows, pricer):
    unseen = parameter("framework", "launch_wait_us", "megatron-deepspeed-bigscience")
    fit = JointFit(rows, (TRAINING, unseen), pricer)
    assert fit.num_rows(unseen) == 0
    assert fit.fitted({TRAINING: 0.9, unseen: 12.0})[unseen] == 12.0


def test_constants_touch_what_they_belong_to():
    assert touches(TRAINING, ("megatron", "h200-sxm"))
    assert not touches(TRAINING, ("megatron", "a10g"))
    assert touches(HOST, ("nanotron", "a10g"))


def test_a_device_left_out_takes_what_its_relative_shows():
    other = parameter("device", "training_fraction_of_sustained", "h100-96gb-sxm")
    found = with_defaults({other: 0.8, HOST: 50.0}, {TRAINING})
    assert found == pytest.approx({other: 0.8, HOST: 50.0, TRAINING: 0.8})


def test_what_nothing_is_near_to_keeps_its_start():
    unseen = parameter("cluster", "inner_bandwidth_share", "a100-80gb-sxm-opa-4x100")
    assert with_defaults({HOST: 50.0}, {unseen})[unseen] == unseen.start


def test_rows_of_long_parts_are_thinned(rows):
    many = [rows[0]] * 100 + [rows[1]] * 3
    assert [len([r for r in thinned(many, 20) if r.part == row.part]) for row in rows] == [20, 3]


def test_rank_correlation_within_groups(rows):
    times = [1.0, 2.0, 3.0, 4.0, 5.0]
    some = [
        FitRow(
            part="",
            case=replace(rows[0].case, run=replace(rows[0].case.run, step_time_s=time)),
        )
        for time in times
    ]
    assert rank_correlation(some, [0.0] * 5) == pytest.approx(1)
    assert rank_correlation(some, [6 / t - 2 for t in times]) == pytest.approx(-1)
    assert rank_correlation(some[:4], [0.0] * 4) is None


def test_a_number_is_written_where_it_stood():
    text = 'format = 1 # of the file\na = { value = 3, provenance = "assumed", source = "own" }\n'
    assert written(text, "a", 4.56789, "refit") == (
        'format = 1 # of the file\na = { value = 4.568, provenance = "fitted", source = "refit" }\n'
    )
    with pytest.raises(AssertionError):
        written(text, "b", 1.0, "refit")
