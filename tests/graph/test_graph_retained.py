"""What stays in memory under each recomputation, against live tensors of real runs."""

import runpy

import pytest
import torch
from graph_models import EXAMPLES, example, wrap
from hypothesis import given, settings
from hypothesis import strategies as st
from real_runs import MODELS, build, load, measure, recompute, run_loss, traced
from test_graph_flops import attention_in_steps
from torch import nn
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from planner.graph.analysis.retained import (
    KEPT_BY_SELECTIVE,
    RECOMPUTATIONS,
    kept_storages,
    recompute_flop,
    recompute_refusals,
    recomputed_ops,
    retained_bytes,
    retained_storages,
)
from planner.graph.operator_graph import Phase, UnitKind
from planner.graph.trace import trace_model
from planner.runtime.recompute import SAVED_OPS

SIZE = 2
RUN = [name for name in MODELS if name != "lstm"]
"""LSTMs on the CPU keep what their own kernel needs; see the closed form below."""


def random_state_bytes(graph, recomputation):
    """Kept states of the random generator, which attention returns on CUDA alone."""
    states = {
        graph.values[value].storage
        for op in graph.nodes
        if op.phase is Phase.FORWARD and "attention" in op.name
        for value in op.outputs
        if graph.values[value].dtype in ("int64", "uint64")
    }
    kept = states & retained_storages(graph, recomputation)
    return sum(graph.storages[storage].size_bytes for storage in kept)


@pytest.mark.parametrize("recomputation", RECOMPUTATIONS)
@pytest.mark.parametrize("name", RUN)
def test_kept_bytes_are_those_of_a_real_run(name, recomputation):
    loaded = load(name)
    graph = traced(name, size=SIZE)
    kept_bytes = retained_bytes(graph, recomputation) - random_state_bytes(graph, recomputation)
    assert kept_bytes == measure(loaded, graph, recomputation, SIZE).kept_bytes


@pytest.mark.parametrize(
    ("name", "recomputation"),
    [*((name, "full") for name in RUN), ("llama", "selective"), ("resnet", "selective")],
)
def test_flops_of_recomputation_are_those_of_a_real_run(name, recomputation):
    loaded = load(name)
    graph = traced(name, size=SIZE)
    counted = {}
    for each in ("none", recomputation):
        model, batch = build(loaded, SIZE)
        recompute(model, graph, each)
        with attention_in_steps():
            loss = run_loss(loaded, model, batch)
            with FlopCounterMode(display=False) as counter:
                loss.backward()
        counted[each] = counter.get_total_flops()
    assert recompute_flop(graph, recomputation) == counted[recomputation] - counted["none"]


def test_selective_keeps_what_the_script_keeps():
    in_script = {op._overloadpacket.__name__ for op in SAVED_OPS}
    assert in_script == KEPT_BY_SELECTIVE


def test_an_llamas_recomputation_stops_before_its_last_projection():
    graph = trace_model(
        example("llama.py:llama_8b", seq_len=8192), microbatch_size=1, dtype="bfloat16"
    )
    block = graph.units[2]
    flop = sum(graph.nodes[op].flop for op in block.forward_ops)
    again = sum(graph.nodes[op].flop for op in recomputed_ops(graph, block, "full"))
    assert flop - again == 2 * 8192 * 14336 * 4096
    assert again / flop == pytest.approx(0.79, abs=0.005)


def test_a_mix_of_recomputations_keeps_what_each_block_keeps():
    graph = traced("gpt", size=SIZE)
    kinds = ["none"] * len(graph.units)
    kinds[2:5] = ["full", "selective", "full"]
    expected = set()
    for unit, kind in zip(graph.units, kinds, strict=True):
        expected |= kept_storages(graph, unit, kind)
    assert retained_storages(graph, kinds) == expected
    bounds = [retained_bytes(graph, kind) for kind in ("full", "none")]
    assert bounds[0] < retained_bytes(graph, kinds) < bounds[1]
    assert recompute_flop(graph, kinds) == pytest.approx(recompute_flop(graph, "full") / 4)


def test_an_lstm_keeps_its_ends_and_its_gates():
    """Input, output and first states, and of each layer and step four gates and a cell."""
    graph = traced("lstm", size=SIZE)
    steps, dim, layers, vocabulary = SIZE * 16, 48, 2, 128
    states = 2 * layers * SIZE * dim
    kept = 2 * steps * dim + states + layers * steps * dim * 5 + steps * vocabulary
    total_weight = 1
    assert graph.saved_bytes == 4 * (kept + total_weight)


# Korthikanti et al. 2022, arXiv 2205.05198, section 4 ------------------------------------------

SEQ, BATCH, HIDDEN, HEADS = 1024, 2, 1024, 16


def kept_by_a_block(loaded, recomputation):
    graph = trace_model(loaded, microbatch_size=BATCH, dtype="bfloat16")
    block = [unit for unit in graph.units if unit.kind is UnitKind.BLOCK][1]
    kept = kept_storages(graph, block, recomputation)
    return sum(graph.storages[storage].size_bytes for storage in kept)


def flash_gpt():
    gpt = runpy.run_path(str(EXAMPLES / "gpt.py"))
    config = gpt["GPTConfig"](block_size=SEQ, n_layer=2, n_head=HEADS, n_embd=HIDDEN, dropout=0.1)
    return wrap(
        lambda: gpt["GPT"](config), lambda size: gpt["example_batch"](size, SEQ), gpt["loss_fn"]
    )


def eager_gpt():
    gpt = runpy.run_path(str(MODELS["gpt_dropout"]))
    return wrap(
        lambda: gpt["GPT"](128, HIDDEN, 2, HEADS, 0.1, SEQ),
        lambda size: gpt["example_batch"](size, SEQ),
        gpt["loss_fn"],
    )


NORMS_BYTES = 2 * 2 * 4 * SEQ * BATCH
"""Mean and deviation of each row in two norms, in float32; the paper leaves them out."""


def test_a_block_with_fused_attention_keeps_34_sbh():
    kept = kept_by_a_block(flash_gpt(), "none")
    formula = 34 * SEQ * BATCH * HIDDEN
    assert kept == pytest.approx(formula, rel=0.02)
    log_sums, random_state = 4 * HEADS * SEQ * BATCH, 24
    assert kept == formula + NORMS_BYTES + log_sums + random_state


def test_a_block_with_eager_attention_keeps_5_a_s_over_h_more():
    kept = kept_by_a_block(eager_gpt(), "none")
    formula = SEQ * BATCH * HIDDEN * 34 + 5 * HEADS * SEQ**2 * BATCH
    assert kept == pytest.approx(formula, rel=0.02)
    assert kept == formula + NORMS_BYTES


@pytest.mark.parametrize("loaded", [flash_gpt, eager_gpt])
def test_a_recomputed_block_keeps_2_sbh(loaded):
    assert kept_by_a_block(loaded(), "full") == 2 * SEQ * BATCH * HIDDEN


# Changes in place ------------------------------------------------------------------------------


class Overwriting(nn.Module):
    """Blocks that change in place what they are given, what they made, or nothing held."""

    def __init__(self, where):
        super().__init__()
        self.embed = nn.Linear(8, 8)
        self.blocks = nn.ModuleList([nn.Sequential(*self.middle(where)) for _ in range(2)])

    def middle(self, where):
        return {
            "input": [nn.ReLU(inplace=True), nn.Linear(8, 8), nn.Tanh()],
            "product": [nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 8)],
            "norm": [nn.Linear(8, 8), nn.LayerNorm(8), nn.ReLU(inplace=True), nn.Linear(8, 8)],
        }[where]

    def forward(self, x):
        x = self.embed(x) + 1
        for block in self.blocks:
            x = block(x)
        return x.sum()


@pytest.mark.parametrize(
    ("where", "refused"),
    [("input", {"selective", "full"}), ("product", {"selective"}), ("norm", set())],
)
def test_recomputation_is_refused_where_torch_would_raise(where, refused):
    loaded = wrap(lambda: Overwriting(where), lambda size: (torch.randn(size, 8), None))
    graph = trace_model(loaded, microbatch_size=2, dtype="float32")
    refusals = recompute_refusals(graph)
    assert set(refusals) == refused
    assert all(reason.startswith("relu_ in blocks.0 changes") for reason in refusals.values())
    for recomputation in ("selective", "full"):
        model, batch = build(loaded, 2)
        recompute(model, graph, recomputation)
        loss = run_loss(loaded, model, batch)
        if recomputation in refused:
            with pytest.raises(RuntimeError, match=r"inplace|mutated"):
                loss.backward()
        else:
            loss.backward()


# Any chain of ops ------------------------------------------------------------------------------


class Chain(nn.Module):
    """Ops that view, expand, change in place, share or keep, in any order."""

    def __init__(self, ops):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.ops = ops

    def forward(self, x):
        x = x @ self.weight
        for name in self.ops:
            x = CHAIN_OPS[name](x, self.weight)
        return (x * x).sum()


CHAIN_OPS = {
    "matmul": lambda x, w: x @ w,
    "square": lambda x, w: x * x,
    "tanh": lambda x, w: torch.tanh(x),
    "relu_": lambda x, w: functional.relu_(x + 1),
    "mul_": lambda x, w: (x + 1).mul_(2),
    "transposed": lambda x, w: (x.transpose(0, 1) * 2).transpose(0, 1),
    "halves": lambda x, w: torch.cat([half.sigmoid() for half in x.chunk(2, 1)], 1),
    "half": lambda x, w: x * x[:, :1],
    "expanded": lambda x, w: x * x.mean(0, keepdim=True).expand(x.shape[0], -1),
    "repeated": lambda x, w: x.unsqueeze(0).expand(3, -1, -1).sin().sum(0),
    "in_place_view": lambda x, w: doubled_corner(x.clone()),
    "max": lambda x, w: x * x.max(1, keepdim=True).values,
    "cast": lambda x, w: x.double().cos().float(),
    "softmax": lambda x, w: torch.softmax(x, 1),
}


def doubled_corner(x):
    x[:2, :2] *= 2
    return x


@settings(max_examples=60, deadline=None)
@given(names=st.lists(st.sampled_from(sorted(CHAIN_OPS)), min_size=1, max_size=6))
def test_saved_storages_of_any_chain_are_each_counted_once(names):
    """Bytes of the distinct storages that autograd packs in a real run."""

    def batch(size):
        return torch.randn(size, 4), None

    graph = trace_model(wrap(lambda: Chain(names), batch), microbatch_size=6, dtype="float32")
    model, (x, _) = Chain(names), batch(6)
    outside = {each.untyped_storage()._cdata for each in (x, model.weight)}
    packed = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        packed[storage._cdata] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(x)
    kept = [storage.nbytes() for address, storage in packed.items() if address not in outside]
    assert loss.requires_grad
    assert graph.saved_bytes == sum(kept)
    assert len(graph.saved_storages) == len(kept)
