"""One microbatch size stands in for others when layouts are tried; the plan's own is tried too."""

import pytest
from searches import search_for

from planner.graph.trial import LayoutTrial, Refusal
from planner.hardware.profiles import load_cluster

CLUSTER = load_cluster("h100-sxm", gpus=2)


@pytest.fixture
def tried(monkeypatch):
    """Sizes at which blocks were tried, and those at which no layout is to run."""
    sizes, refused = [], set()
    block = LayoutTrial.block

    def noted(self, unit, layouts):
        size = self._graph.microbatch_size
        sizes.append(size)
        if size in refused and any(m.split for each in layouts for m in each.modules):
            return Refusal(module=unit.name, reason=f"not at {size}")
        return block(self, unit, layouts)

    monkeypatch.setattr(LayoutTrial, "block", noted)
    return sizes, refused


def test_the_size_of_the_plan_is_tried(gpt, tried):
    sizes, _ = tried
    outcome = search_for(gpt, CLUSTER, tp=2, pp=1)
    assert outcome.best.microbatch_size in sizes
    assert outcome.best.microbatch_size > 2
    assert set(sizes) < {1, 2, 4, 8, 16}


def test_what_does_not_run_at_its_own_size_is_no_plan(gpt, tried):
    sizes, refused = tried
    before = search_for(gpt, CLUSTER, tp=2, pp=1).best
    refused.add(before.microbatch_size)
    after = search_for(gpt, CLUSTER, tp=2, pp=1).best
    if after.microbatch_size in refused:
        blocks = range(1, len(after.units) - 1)
        inside = [unit for unit in after.shardings if set(unit.units) <= set(blocks)]
        assert not any(module.split for unit in inside for module in unit.modules)
    assert after.microbatch_size in sizes
    assert after.costs.step_time_s >= before.costs.step_time_s
