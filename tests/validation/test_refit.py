"""The plans by which shipped constants are fitted, and the writing of what they find."""

from dataclasses import replace

import pytest

from planner.framework.profiles import list_frameworks, load_framework
from planner.framework.tuning import SETTINGS
from planner.validation.fitting import refit as refits
from planner.validation.fitting.refit import (
    PLANS,
    RUNS_FOLDER,
    FitPlan,
    Refit,
    profile_file,
    refit,
    written,
)

PROFILE = """format = 1 # of the file

[[runs]]
cluster = "h100-sxm"

# Fitted to runs on one node.
[[tuned]]
cluster = "h100-sxm"
step_us = { value = 9200, provenance = "fitted", source = "own" }
host_dispatch_us = { value = 45, provenance = "fitted", source = "own" } # the host's

[[tuned]]
cluster = "h200-sxm"
step_us = { value = 1, provenance = "fitted", source = "own" }
"""


def test_numbers_are_replaced_in_place():
    text = written(PROFILE, "h100-sxm", {"step_us": 10490.0, "host_dispatch_us": 43.9})
    expected = PROFILE.replace("value = 9200", "value = 10490").replace(
        "value = 45", "value = 43.9"
    )
    assert text == expected
    assert written(PROFILE, "h200-sxm", {"step_us": 2.5}) == PROFILE.replace("= 1,", "= 2.5,")


def test_a_constant_that_is_not_there_is_not_written():
    with pytest.raises(AssertionError, match="tp_overlap stands 0 times"):
        written(PROFILE, "h100-sxm", {"tp_overlap": 0.5})


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: f"{plan.framework} {plan.cluster}")
def test_a_plan_names_what_is_there(plan):
    for name in plan.frameworks:
        assert set(plan.free) <= set(load_framework(name).tuned[plan.cluster])
    assert set(plan.free) <= set(SETTINGS)
    for table in plan.tables:
        assert (RUNS_FOLDER / f"{table}.csv").is_file()


def test_every_constant_that_is_said_to_be_refitted_is_in_a_plan():
    planned = {
        (name, plan.cluster, key) for plan in PLANS for name in plan.frameworks for key in plan.free
    }
    for name in list_frameworks():
        framework = load_framework(name)
        for cluster, values in framework.tuned.items():
            for key in values:
                if (
                    framework.numbers[f"{cluster}.{key}"].source
                    == "planner.validation.fitting.refit"
                ):
                    assert (name, cluster, key) in planned


@pytest.fixture
def few_rows(monkeypatch):
    """Four small runs of nanotron instead of all."""
    cases_of = refits._cases_of
    few = [case for case in cases_of("nanotron_ultrascale_h100") if case.run.pp == 1][:4]
    monkeypatch.setattr(refits, "_cases_of", lambda table: tuple(few))


def test_later_plans_keep_what_earlier_ones_found(few_rows):
    first = FitPlan(
        framework="nanotron", cluster="h100-sxm", tables=("any",), free=("step_us",), most_gpus=512
    )
    second = replace(first, free=("host_dispatch_us",), most_gpus=None)
    one, two = refit([first, second])
    assert one.num_rows == two.num_rows == 4
    assert one.old == load_framework("nanotron").tuned["h100-sxm"]
    assert {key for key in one.new if one.new[key] != one.old[key]} <= {"step_us"}
    assert two.old == one.new
    assert {key for key in two.new if two.new[key] != two.old[key]} <= {"host_dispatch_us"}
    assert two.new_error <= one.old_error + 0.02
    assert f"{one.new['step_us']:.4g}" == f"{one.new['step_us']:g}"


def test_lines_say_what_changes():
    plan = FitPlan(framework="f", cluster="c", tables=("t",), free=("step_us",), most_gpus=16)
    found = Refit(
        plan=plan,
        framework="f",
        num_rows=7,
        old={"step_us": 10.0},
        new={"step_us": 12.5},
        old_error=0.2,
        new_error=0.1,
    )
    head, line = found.lines()
    assert head == "f on c, 7 rows on at most 16 devices: mean error 20.0% -> 10.0%"
    assert line.split() == ["step_us", "10", "->", "12.5"]


def test_the_command_writes_what_it_finds(monkeypatch, tmp_path, capsys):
    file = tmp_path / "nanotron.toml"
    file.write_text(profile_file("nanotron").read_text())
    (plan,) = (each for each in PLANS[:1] if each.framework == "nanotron")
    old = dict(load_framework("nanotron").tuned["h100-sxm"])
    found = Refit(
        plan=plan,
        framework="nanotron",
        num_rows=1,
        old=old,
        new={**old, "step_us": 321.0},
        old_error=0.2,
        new_error=0.1,
    )
    monkeypatch.setattr(refits, "refit", lambda plans: iter([found]))
    monkeypatch.setattr(refits, "profile_file", lambda name: file)
    assert refits.main(["nanotron"]) == 0
    assert "-> 321" in capsys.readouterr().out
    assert load_framework(str(file)).tuned["h100-sxm"] == old
    assert refits.main(["nanotron", "--write"]) == 0
    assert load_framework(str(file)).tuned["h100-sxm"] == {**old, "step_us": 321.0}
    with pytest.raises(SystemExit):
        refits.main(["megatrom"])
    assert "no fit of megatrom" in capsys.readouterr().err
