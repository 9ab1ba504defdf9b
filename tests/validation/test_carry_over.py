from dataclasses import replace

from planner.validation.fitting.carry_over import left_out
from planner.validation.fitting.refit import PLANS
from planner.validation.pricing.pricing import CasePricer

(MEGATRON,) = (plan for plan in PLANS if plan.framework == "megatron")


def test_every_hidden_size_is_left_out_once():
    found = list(left_out(MEGATRON, CasePricer()))
    assert [each.hidden for each in found] == [2304, 4096, 6144, 8192, 12288, 20480]
    assert sum(each.num_rows for each in found) == 9
    assert all(0 < each.mean_error < 0.1 for each in found)
    assert found[2].line().split()[:4] == ["megatron", "a100-80gb-sxm", "hidden", "6144"]


def test_one_hidden_size_leaves_nothing_to_fit_to():
    (vtrain,) = (plan for plan in PLANS if plan.framework == "megatron-deepspeed-vtrain")
    single = replace(vtrain, tables=("vtrain_single_node",))
    assert list(left_out(single, CasePricer())) == []
