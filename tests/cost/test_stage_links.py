"""What crosses the boundaries of stages, and what that takes."""

from dataclasses import replace
from pathlib import Path

import pytest

from planner.cost.stage_links import StageLinks
from planner.framework.profiles import load_framework
from planner.framework.script import SCRIPT
from planner.graph.loading.load import load_model
from planner.graph.sizes.family import trace_family
from planner.hardware.profiles import load_cluster
from planner.pricing.choice import ShardingChoice
from planner.pricing.model_pricing import ModelPricer
from planner.strategy.configuration import Configuration
from planner.strategy.mesh import ParallelDegrees

ROOT = Path(__file__).parents[2]
CLUSTER = load_cluster("h100-sxm", gpus=8)
MESSAGE_S = 1.0
"""Far longer than any transfer."""


def links_of(model, **framework):
    configuration = Configuration(
        degrees=ParallelDegrees(pp=2, dp_shard=4),
        schedule="1F1B",
        virtual_stages=1,
        microbatch_size=1,
        num_microbatches=4,
        reshard_after_forward=False,
        sequence_parallel=False,
        state_form="fsdp",
    )
    script = replace(load_framework(SCRIPT), message_s=MESSAGE_S, **framework)
    return StageLinks(model, configuration, CLUSTER, script, ())


def priced(source):
    family = trace_family(load_model(str(ROOT / source)), dtype="float32")
    choice = ShardingChoice(tp=1, sequence_parallel=False, split_tables=False, microbatch_size=1)
    return family.at(1).cuts, ModelPricer(family, CLUSTER, "float32").priced(choice).model


@pytest.mark.parametrize(
    ("source", "most"), [("examples/gpt.py", 1), ("tests/graph/zoo/unet.py", 2)]
)
def test_the_host_hands_on_each_tensor_that_crosses_a_boundary(source, most):
    """A U-Net's skips cross it beside its stream."""
    cuts, model = priced(source)
    links, num_units = links_of(model), len(model.units)
    for cut in cuts:
        first = cut.after_unit + 1
        before_s, behind_s = links.transfers_s(0, first, 0), links.transfers_s(first, num_units, 1)
        assert before_s == behind_s == pytest.approx(len(cut.values) * MESSAGE_S, rel=0.01)
    assert max(len(cut.values) for cut in cuts) >= most
    fewest = min(len(cut.values) for cut in cuts)
    least_s = links.least_transfers_s([cut.after_unit + 1 for cut in cuts])
    assert least_s == [pytest.approx(fewest * MESSAGE_S, rel=0.01)] * 2


def test_a_model_that_does_not_say_hands_on_one():
    _, model = priced("tests/graph/zoo/unet.py")
    links = links_of(replace(model, entering_tensors=()))
    assert links.transfers_s(0, 2, 0) == pytest.approx(MESSAGE_S, rel=0.01)
