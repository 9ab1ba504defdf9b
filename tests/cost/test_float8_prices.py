"""Prices of products in float8."""

import pytest

import planner
from planner.cost.op import OpWork, op_s
from planner.errors import RequestError
from planner.graph.loading.load import load_model
from planner.graph.sizes.family import trace_family
from planner.hardware.profiles import load_cluster, load_device
from planner.pricing.choice import ShardingChoice
from planner.pricing.model_pricing import ModelPricer

DEVICE = load_device("h100-sxm")
LARGE = "examples/llama.py:llama_8b"


def product(*, float8, size=8192):
    return OpWork(
        kind="matmul", flop=2.0 * size**3, read_bytes=2.0 * size**2, write_bytes=2.0 * size**2,
        m=size, n=size, k=size, float8=float8,
    )  # fmt: skip


def test_a_large_product_takes_as_much_less_as_the_rates_say():
    seconds = {float8: op_s(product(float8=float8), DEVICE, "bfloat16") for float8 in (True, False)}
    rates = DEVICE.float8_flop_per_s * DEVICE.efficiency.float8_sustained_fraction
    rates /= DEVICE.peak_flop_per_s["bfloat16"] * DEVICE.efficiency.sustained_fraction
    assert seconds[False] / seconds[True] == pytest.approx(rates, rel=0.05)


def estimated(cluster="h100-sxm", *, dtype="bfloat16", **fix):
    return planner.estimate(
        LARGE, gpus=8, cluster=cluster, seq_len=8192, global_batch_size=16, dtype=dtype,
        fix={"dp_shard": 8, "microbatch_size": 2, "activation_checkpointing": "full", **fix},
    )  # fmt: skip


def test_layers_that_multiply_in_float8_are_faster_and_hold_more_for_a_while():
    plain, rounded = (estimated(float8=float8).best for float8 in (False, True))
    assert rounded.costs.compute_s < 0.9 * plain.costs.compute_s
    temporary = [max(s.memory.temporary_bytes for s in p.stages) for p in (plain, rounded)]
    assert temporary[1] >= temporary[0]


def test_compiled_blocks_round_in_fewer_kernels():
    gains = []
    for compiled in (False, True):
        plain, rounded = (estimated(float8=f, compile=compiled).best for f in (False, True))
        gains.append(plain.costs.compute_s - rounded.costs.compute_s)
    assert gains[1] > gains[0] > 0


@pytest.mark.parametrize("split", [{"tp": 2}, {"tp": 4, "sequence_parallel": True}, {"cp": 2}])
def test_layouts_are_chosen_by_what_blocks_then_take(split):
    """Programs of layouts count the kernels of products in float8 that plans count."""
    loaded = load_model(LARGE, seq_len=4096)
    pricer = ModelPricer(
        trace_family(loaded, dtype="bfloat16"), load_cluster("h100-sxm", gpus=8), "bfloat16"
    )
    found = {}
    for float8 in (False, True):
        fields = {"tp": 1, "sequence_parallel": False, **split}
        choice = ShardingChoice(**fields, split_tables=False, microbatch_size=2, float8=float8)
        priced = pricer.priced(choice)
        number = len(priced.graph.units) // 2
        unit = priced.model.units[number]
        solution = priced.solutions[priced.graph.units[number].structure]
        found[float8] = solution, unit.forward_s + unit.backward_s
    (plain, plain_s), (rounded, rounded_s) = found[False], found[True]
    assert rounded.chosen == plain.chosen
    saved_s = plain.objective_s - rounded.objective_s
    assert saved_s == pytest.approx(plain_s - rounded_s, rel=1e-3)


@pytest.mark.parametrize(
    ("asked", "rule"),
    [
        ({"cluster": "a100-80gb-sxm"}, "a100-80gb-sxm, whose profile has no rate"),
        ({"dtype": "float32"}, "all else is in bfloat16"),
        ({"dp_shard": 4, "pp": 2, "schedule": "ZBVZeroBubble"}, "float8=true: torch does not"),
    ],
)
def test_what_has_no_such_products_is_refused_with_the_reason(asked, rule):
    with pytest.raises(RequestError) as refused:
        estimated(float8=True, **{"activation_checkpointing": "none", **asked})
    said = f"{refused.value} {refused.value.hint}"
    assert rule in said, said


def test_every_device_that_has_a_rate_has_a_share_of_it():
    for name in ("h100-sxm", "h200-sxm", "b200-sxm"):
        device = load_cluster(name, gpus=8).device
        assert device.float8_flop_per_s > device.peak_flop_per_s["bfloat16"]
        assert device.efficiency.float8_sustained_fraction < 1
