"""Activations of all units together against those of the whole graph, each storage once."""

from pathlib import Path

import pytest

from planner.graph.analysis.retained import by_unit, retained_bytes
from planner.graph.loading.load import load_model
from planner.graph.sizes.family import trace_family
from planner.hardware.profiles import load_cluster
from planner.pricing.choice import ShardingChoice
from planner.pricing.model_pricing import ModelPricer
from planner.vocabulary import RECOMPUTATIONS

ROOT = Path(__file__).parents[2]
ZOO = ROOT / "tests" / "graph" / "zoo"
MODELS = {
    "gpt": ROOT / "examples" / "gpt.py",
    **{name: ZOO / f"{name}.py" for name in ("deepseek", "dit", "resnet", "t5", "tied", "unet")},
}
SOMEWHAT_MORE = {("t5", "none"): 1.02, ("unet", "selective"): 1.03}
"""Position biases are kept by recomputed blocks alone; an output of a convolution that leaves its
unit counts there and in the next."""


@pytest.mark.parametrize("name", MODELS)
def test_units_keep_together_what_the_model_keeps(name):
    family = trace_family(load_model(str(MODELS[name])), dtype="bfloat16")
    pricer = ModelPricer(family, load_cluster("h100-sxm", gpus=8), "bfloat16")
    choice = ShardingChoice(tp=1, sequence_parallel=False, split_tables=False, microbatch_size=2)
    model = pricer.priced(choice).model
    graph = family.at(2)
    shared_bytes = sum(
        each.size_bytes
        for each in model.shared
        if each.counts(0, len(model.units)) and not graph.storages[each.storage].kind.is_of_batch
    )
    for recomputation in RECOMPUTATIONS:
        kinds = by_unit(graph, recomputation)
        pairs = zip(model.units, kinds, strict=True)
        counted = shared_bytes + sum(unit.activation_bytes[kind] for unit, kind in pairs)
        kept = retained_bytes(graph, kinds)
        assert kept <= counted <= kept * SOMEWHAT_MORE.get((name, recomputation), 1.0)
