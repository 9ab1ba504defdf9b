"""Memory over neighbouring lengths and widths: no jump that the graph does not explain.

What is alive at a moment is a sum of storages, each of which is affine in the sequence length, so
that what is kept is affine and a peak, the highest of such sums, is convex, with few kinks. A
gradient that is taken for another where sizes happen to be equal breaks that.
"""

from dataclasses import replace
from fractions import Fraction
from itertools import pairwise
from pathlib import Path

import pytest

from planner.cost.held_stage import HeldStage
from planner.cost.model_units import ModelUnits
from planner.cost.stage_memory import StageMemory
from planner.framework.profiles import load_framework
from planner.framework.script import SCRIPT
from planner.graph.loading.load import load_model
from planner.graph.operator_graph import UnitKind
from planner.graph.trace import trace_model
from planner.hardware.profiles import load_cluster
from planner.pricing.choice import ShardingChoice, unit_problem
from planner.pricing.graph_sizes import GraphSizes
from planner.pricing.model_pricing import ModelPricer, model_work
from planner.pricing.sharding_ilp import solve_sharding
from planner.strategy.configuration import Configuration
from planner.strategy.mesh import ParallelDegrees
from planner.strategy.moments import StageMoment
from planner.strategy.nodes import fold_unit
from planner.vocabulary import RECOMPUTATIONS

FRAMEWORK = load_framework(SCRIPT)
EXAMPLES = Path(__file__).parents[2] / "examples"
MODELS = {
    "llama": "from llama import Llama as Model, LlamaConfig, example_batch, loss_fn\n"
    "CONFIG = LlamaConfig(dim={width}, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=3 * {width},"
    " vocab_size=96, max_seq_len=4096)\n",
    "gpt": "from gpt import GPT as Model, GPTConfig, example_batch, loss_fn\n"
    "CONFIG = GPTConfig(n_embd={width}, n_layer=2, n_head=4, vocab_size=96, block_size=4096)\n",
}
ANCHORS = (64, 128, 512)
CLUSTER = load_cluster("h100-sxm", gpus=8)
MOST_KINKS = 3
"""Other moments may become the fullest as sizes grow, but not often."""

ZERO_3 = Configuration(
    degrees=ParallelDegrees(dp_shard=2),
    schedule="none",
    virtual_stages=1,
    microbatch_size=1,
    num_microbatches=2,
    reshard_after_forward=True,
    sequence_parallel=False,
)


AT_BACKWARD = StageMoment(in_flight=1, has_gradients=True)
"""Of the last microbatch."""


def traced(folder, name, *, width, length):
    source = folder / f"{name}_{width}.py"
    source.write_text(
        f"import sys\nsys.path.insert(0, {str(EXAMPLES)!r})\n"
        + MODELS[name].format(width=width)
        + "def build_model():\n    return Model(CONFIG)\n"
    )
    model = load_model(str(source), seq_len=length)
    return trace_model(model, microbatch_size=1, dtype="bfloat16")


class Sizes:
    """A graph between others that differ in one size: each number of its tensors a polynomial."""

    def __init__(self, anchors):
        self.anchors = anchors
        first = next(iter(anchors.values()))
        for other in anchors.values():
            assert [op.outputs for op in other.nodes] == [op.outputs for op in first.nodes]

    def at(self, point):
        weights = [
            self._weight(anchor, [each for each in self.anchors if each != anchor], point)
            for anchor in self.anchors
        ]

        def number(*numbers):
            if len(set(numbers)) == 1:
                return numbers[0]
            mixed = sum(w * n for w, n in zip(weights, numbers, strict=True))
            assert mixed == int(mixed)
            return int(mixed)

        def shape(*parts):
            return tuple(map(number, *[each.shape for each in parts]))

        graphs = list(self.anchors.values())
        return replace(
            graphs[0],
            storages=tuple(
                replace(each[0], size_bytes=number(*[storage.size_bytes for storage in each]))
                for each in zip(*[graph.storages for graph in graphs], strict=True)
            ),
            values=tuple(
                replace(each[0], shape=shape(*each))
                for each in zip(*[graph.values for graph in graphs], strict=True)
            ),
            parameters=tuple(
                replace(each[0], shape=shape(*each))
                for each in zip(*[graph.parameters for graph in graphs], strict=True)
            ),
        )

    def _weight(self, anchor, others, point):
        weight = Fraction(1)
        for other in others:
            weight *= Fraction(point - other, anchor - other)
        return weight


def series(sizes, points, *, tp):
    """Memory by quantity and its limit of growth, over the points, for layouts chosen once."""
    choice = ShardingChoice(tp=tp, sequence_parallel=tp > 1, split_tables=True, microbatch_size=1)
    rank = ModelPricer(None, CLUSTER, "bfloat16").rank(choice)
    first = sizes.at(points[0])
    solutions = {
        unit.structure: solve_sharding(unit_problem(first, fold_unit(first, unit), choice), rank)
        for unit in GraphSizes(first).representatives
    }
    found, wholes = {}, []
    for point in points:
        graph = sizes.at(point)
        wholes.append(sum(storage.size_bytes for storage in graph.storages))
        moved = {
            unit.structure: replace(
                solutions[unit.structure],
                problem=unit_problem(graph, fold_unit(graph, unit), choice),
            )
            for unit in GraphSizes(graph).representatives
        }
        work = model_work(GraphSizes(graph), moved, choice, FRAMEWORK.kernels, known={})
        model = work.priced(rank)
        prices = dict(zip([u.structure for u in graph.units], model.units, strict=True))
        for kind in RECOMPUTATIONS:
            for structure, price in prices.items():
                held = price.activation_bytes[kind]
                found.setdefault(("kept", structure, kind), []).append(held)
                most = held + price.temporary_bytes[kind]
                found.setdefault(("peak", structure, kind), []).append(most)
            total = stage_bytes(graph, prices, kind)
            found.setdefault(("stage", "model", kind), []).append(total)
    growth = max(after - before for before, after in pairwise(wholes))
    return found, growth


def stage_bytes(graph, prices, kind):
    """All that a rank holds under ZeRO-3."""
    units = tuple(prices[unit.structure] for unit in graph.units)
    model = ModelUnits(units=units, entering_bytes=(0,) * len(units), tied=(), shared=())
    kinds = tuple(kind if each.kind is UnitKind.BLOCK else "none" for each in graph.units)
    stage = HeldStage(first=0, end=len(units), kinds=kinds, moment=AT_BACKWARD)
    return StageMemory(model, ZERO_3, CLUSTER.device, FRAMEWORK).peak([stage]).total_bytes


def steps(numbers):
    return [after - before for before, after in pairwise(numbers)]


def check(found, growth, *, is_affine):
    """Kept memory is affine, a peak convex with few kinks, and so is the whole of a rank.

    Parameters curve by themselves where the width grows, and weigh 16 bytes for their 2.
    """
    for (what, structure, kind), numbers in found.items():
        where = what, structure, kind
        first = steps(numbers)
        limit = 8 * growth if what == "stage" else growth
        assert all(abs(step) <= limit for step in first), where
        bends = steps(first)
        kinks = sum(bend != 0 for bend in bends)
        assert min(bends) >= 0, where
        if what == "kept":
            assert kinks == 0, where
        elif what == "peak" or is_affine:
            assert kinks <= 2 * MOST_KINKS, where


@pytest.mark.parametrize(("tp", "number"), [(1, 200), (2, 60)])
@pytest.mark.parametrize("name", MODELS)
def test_memory_follows_the_length(name, tp, number, tmp_path):
    sizes = Sizes({each: traced(tmp_path, name, width=64, length=each) for each in ANCHORS})
    checked = traced(tmp_path, name, width=64, length=200)
    assert sizes.at(200).storages == checked.storages
    # With 64 and 192 tokens activations have as many elements as weights.
    start = 30 if tp == 1 else 130
    points = range(start, start + number * tp, tp)
    check(*series(sizes, points, tp=tp), is_affine=True)


@pytest.mark.parametrize("name", MODELS)
def test_memory_follows_the_width(name, tmp_path):
    sizes = Sizes({each: traced(tmp_path, name, width=each, length=256) for each in ANCHORS})
    checked = traced(tmp_path, name, width=200, length=256)
    assert sizes.at(200).storages == checked.storages
    # As many tokens as channels at 256.
    check(*series(sizes, range(64, 64 + 8 * 200, 8), tp=1), is_affine=False)
