"""Blocks, units, structure hashes and cut points."""

import pytest
import torch
from graph_models import Stream, example, mean_square, token_loss, tokens, vectors, wrap
from torch import nn

from planner.graph.operator_graph import Phase, UnitKind
from planner.graph.trace import trace_model


def trace(loaded, size=2, dtype="float32"):
    return trace_model(loaded, microbatch_size=size, dtype=dtype)


@pytest.mark.parametrize(
    ("source", "block_list", "count", "structures"),
    [
        ("gpt.py", "transformer.h", 8, 1),
        ("llama.py", "layers", 8, 1),
        ("mlp.py", "", 13, 13),
    ],
)
def test_blocks_of_the_examples(source, block_list, count, structures):
    graph = trace(example(source))
    assert graph.block_list == block_list
    kinds = [unit.kind for unit in graph.units]
    assert kinds == [UnitKind.PROLOGUE, *[UnitKind.BLOCK] * count, UnitKind.EPILOGUE]
    blocks = graph.units[1:-1]
    prefix = f"{block_list}." if block_list else ""
    assert [unit.name for unit in blocks] == [f"{prefix}{index}" for index in range(count)]
    assert [unit.block for unit in blocks] == list(range(count))
    assert len({unit.structure for unit in blocks}) == structures


@pytest.mark.parametrize("source", ["gpt.py", "llama.py", "mlp.py"])
def test_every_op_belongs_to_one_unit(source):
    graph = trace(example(source))
    forward = [op for unit in graph.units for op in unit.forward_ops]
    backward = sorted(op for unit in graph.units for op in unit.backward_ops)
    assert forward == [op.id for op in graph.nodes if op.phase is Phase.FORWARD]
    assert backward == [op.id for op in graph.nodes if op.phase is Phase.BACKWARD]


def test_backward_work_stays_with_its_block():
    graph = trace(example("gpt.py"))
    for unit in graph.units[1:-1]:
        modules = {graph.nodes[op].module for op in (*unit.forward_ops, *unit.backward_ops)}
        assert all(module == unit.name or module.startswith(unit.name + ".") for module in modules)


def test_parameters_of_units_tied_ones_in_both():
    graph = trace(example("gpt.py"))
    names = [
        {name for index in unit.parameters for name in graph.parameters[index].names}
        for unit in graph.units
    ]
    assert names[0] == {"transformer.wte.weight", "lm_head.weight", "transformer.wpe.weight"}
    assert {"transformer.wte.weight", "lm_head.weight"} < names[-1]
    assert all(name.startswith("transformer.h.3.") for name in names[4])


def test_cuts_lie_around_every_block_and_send_the_stream():
    graph = trace(example("gpt.py"), size=4)
    assert [cut.after_unit for cut in graph.cuts] == list(range(9))
    for cut in graph.cuts:
        (value,) = cut.values
        assert graph.values[value].shape == (4, 64, 64)
        assert cut.crossing_bytes == 4 * 64 * 64 * 4
        assert cut.constant_values == ()
    assert graph.no_cut_reason == ""


def test_rotary_tables_are_made_again_by_each_stage():
    graph = trace(example("llama.py"))
    assert len(graph.cuts) == 9
    for cut in graph.cuts[:-1]:
        shapes = [graph.values[value].shape for value in cut.constant_values]
        assert shapes == [(64, 4), (64, 4)]
    assert graph.cuts[-1].constant_values == ()


def test_a_sequential_is_cut_between_its_children_but_not_before_the_first():
    graph = trace(example("mlp.py"))
    assert [cut.after_unit for cut in graph.cuts] == list(range(1, 14))
    assert graph.units[0].forward_ops == ()
    widths = [cut.crossing_bytes // (2 * 4) for cut in graph.cuts]
    assert widths[::2] == [512, 256, 384, 128, 192, 64, 10]


class Skips(nn.Module):
    """A long skip around all blocks."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(8, 8)
        self.blocks = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])

    def forward(self, x):
        x = skip = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return x + skip


class Scaled(Skips):
    """Work between the blocks, outside of them."""

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x) * 2
        return x


class Conditioned(Skips):
    """Blocks that also take a second stream."""

    def forward(self, x):
        condition = torch.tanh(self.stem(x))
        for block in self.blocks:
            x = block(x) + condition
        return x


class Shared(Skips):
    """One block called again and again."""

    def forward(self, x):
        for _ in range(3):
            x = self.blocks[0](x)
        return self.stem(x)


class Reversed(Skips):
    """Blocks called in another order than listed."""

    def forward(self, x):
        for block in reversed(self.blocks):
            x = block(x)
        return self.stem(x)


def test_a_skip_around_the_blocks_forbids_cuts_inside_it():
    graph = trace(wrap(Skips, vectors(8), mean_square))
    assert graph.block_list == "blocks"
    # Before the first block the skip is the stream itself.
    assert [cut.after_unit for cut in graph.cuts] == [0]


@pytest.mark.parametrize(
    ("model", "reason"),
    [(Scaled, "not the first argument"), (Conditioned, "not the first argument")],
)
def test_work_between_blocks_forbids_cuts_between_them(model, reason):
    graph = trace(wrap(model, vectors(8), mean_square))
    between = {cut.after_unit for cut in graph.cuts} & {1, 2}
    assert between == set()
    if not graph.cuts:
        assert reason in graph.no_cut_reason


@pytest.mark.parametrize("model", [Shared, Reversed])
def test_blocks_that_do_not_run_once_in_order_are_no_block_list(model):
    graph = trace(wrap(model, vectors(8), mean_square))
    assert graph.block_list is None
    (unit,) = graph.units
    assert (unit.name, unit.block) == ("model", None)
    assert graph.cuts == ()
    assert "nn.ModuleList" in graph.no_cut_reason
    assert len(unit.forward_ops) + len(unit.backward_ops) == len(graph.nodes)


def test_the_list_that_divides_the_work_best_is_chosen():
    class Wrapped(nn.Module):
        def __init__(self):
            super().__init__()
            inner = nn.Sequential(*[nn.Linear(8, 8) for _ in range(6)])
            self.parts = nn.Sequential(nn.Linear(8, 8), inner, nn.Linear(8, 8))

        def forward(self, x):
            return self.parts(x)

    graph = trace(wrap(Wrapped, vectors(8), mean_square))
    assert graph.block_list == "parts.1"
    assert len(graph.units) == 8


def test_a_module_listed_twice_is_two_blocks():
    def build():
        act = nn.Tanh()
        return nn.Sequential(nn.Linear(8, 8), act, nn.Linear(8, 8), act)

    graph = trace(wrap(build, vectors(8), mean_square))
    assert [unit.name for unit in graph.units] == ["prologue", "0", "1", "2", "3", "epilogue"]
    assert graph.units[2].structure == graph.units[4].structure


def test_structure_tells_shapes_arguments_and_wiring_apart():
    class Branch(nn.Module):
        def __init__(self, kind):
            super().__init__()
            self.kind = kind
            self.a = nn.Linear(8, 8)
            self.b = nn.Linear(8, 8)

        def forward(self, x):
            if self.kind == "chain":
                return self.b(self.a(x))
            if self.kind == "swapped":
                return self.a(self.b(x))
            return nn.functional.leaky_relu(self.b(self.a(x)), 0.1 if self.kind == "low" else 0.2)

    kinds = ["chain", "chain", "swapped", "low", "high", "low", "chain"]

    def build():
        return nn.Sequential(*[Branch(kind) for kind in kinds])

    graph = trace(wrap(build, vectors(8), mean_square))
    # The first block's input needs no gradient, so that its backward is another.
    structures = [unit.structure for unit in graph.units[2:-1]]
    expected = kinds[1:]
    for left, kind in zip(structures, expected, strict=True):
        same = [other for other, name in zip(structures, expected, strict=True) if name == kind]
        assert set(same) == {left}
    assert len(set(structures)) == len(set(expected))


def test_structure_does_not_depend_on_names_or_place():
    few = trace(wrap(lambda: Stream(blocks=2), tokens, token_loss))
    many = trace(wrap(lambda: Stream(blocks=4), tokens, token_loss))
    assert {unit.structure for unit in few.units[1:-1]} == {
        unit.structure for unit in many.units[1:-1]
    }


def test_stochastic_depth_leaves_blocks_alike():
    def build():
        drops = [nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1 * (i + 1))) for i in range(4)]
        return nn.Sequential(nn.Linear(8, 8), nn.Sequential(*drops))

    graph = trace(wrap(build, vectors(8), mean_square))
    assert graph.block_list == "1"
    assert len({unit.structure for unit in graph.units[1:-1]}) == 1
