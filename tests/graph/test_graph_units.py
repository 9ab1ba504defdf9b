"""Blocks, units, structure hashes and cut points."""

import pytest
import torch
from graph_models import (
    ZOO,
    EagerBlock,
    Stream,
    example,
    mean_square,
    token_loss,
    tokens,
    vectors,
    wrap,
)
from torch import nn

from planner.graph.loading.load import load_model
from planner.graph.operator_graph import ModuleOutput, Phase, UnitKind
from planner.graph.trace import trace_model


def trace(loaded, size=2, dtype="float32"):
    return trace_model(loaded, microbatch_size=size, dtype=dtype)


@pytest.mark.parametrize(
    ("source", "prefix", "count", "structures"),
    [
        ("gpt.py", "transformer.h.", 8, 1),
        ("llama.py", "layers.", 8, 1),
        ("mlp.py", "", 13, 13),
    ],
)
def test_blocks_of_the_examples(source, prefix, count, structures):
    graph = trace(example(source))
    kinds = [unit.kind for unit in graph.units]
    assert kinds == [UnitKind.PROLOGUE, *[UnitKind.BLOCK] * count, UnitKind.EPILOGUE]
    blocks = graph.units[1:-1]
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


class Pairs(nn.Module):
    """Layers that are lists, whose parts the model itself calls."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleList([nn.Linear(8, 8), feed(8)]) for _ in range(3))

    def forward(self, x):
        for mixing, feeding in self.layers:
            x = x + mixing(x)
            x = x + feeding(x)
        return x


class Rows(nn.Module):
    """Lists that do not run one after the other, with chains in them."""

    def __init__(self):
        super().__init__()
        self.rows = nn.ModuleList(nn.ModuleList([feed(8), feed(8)]) for _ in range(2))

    def forward(self, x):
        return sum(last(first(x)) for first, last in self.rows)


def feed(size):
    return nn.Sequential(nn.Linear(size, 4 * size), nn.GELU(), nn.Linear(4 * size, size))


@pytest.mark.parametrize(("model", "path", "count"), [(Pairs, "layers", 3), (Rows, "rows", 2)])
def test_what_lists_in_a_list_hold_are_the_blocks(model, path, count):
    graph = trace(wrap(model(), vectors(8), mean_square))
    names = [unit.name for unit in graph.units if unit.kind is UnitKind.BLOCK]
    assert names == [f"{path}.{row}.{at}" for row in range(count) for at in range(2)]


def test_layers_that_are_lists_are_cut_between_their_parts():
    graph = trace(wrap(Pairs(), vectors(8), mean_square))
    assert [cut.after_unit for cut in graph.cuts] == [1, 2, 3, 4, 5, 6]


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


class Parallel(Skips):
    """Children that do not follow one another (experts, heads)."""

    def forward(self, x):
        x = self.stem(x)
        return sum(block(x) for block in self.blocks)


class Reversed(Skips):
    """Blocks called in another order than listed."""

    def forward(self, x):
        for block in reversed(self.blocks):
            x = block(x)
        return self.stem(x)


class Positions(Skips):
    """A parameter of the model itself that is added between blocks."""

    def __init__(self):
        super().__init__()
        self.position = nn.Parameter(torch.zeros(8))

    def forward(self, x):
        x = self.stem(x)
        shift = torch.tanh(self.position) * x.shape[0]
        for block in self.blocks:
            x = block(x) + shift
        return x


class Leaking(Skips):
    """Blocks that leave a tensor behind which the end of the model reads."""

    class Block(nn.Linear):
        def forward(self, x):
            self.inner = torch.relu(x)
            return super().forward(self.inner)

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([self.Block(8, 8) for _ in range(3)])

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return x + self.blocks[0].inner


def carried(cut):
    return [(output.module, output.index) for output in cut.carried]


def test_a_skip_around_the_blocks_is_carried_over_every_cut():
    graph = trace(wrap(Skips, vectors(8), mean_square))
    assert [cut.after_unit for cut in graph.cuts] == [0, 1, 2, 3]
    first, *others = graph.cuts
    # Before the first block the skip is the stream itself: it is sent once.
    assert (carried(first), first.stream_output) == ([], ModuleOutput(module="stem", index=0))
    assert first.crossing_bytes == 2 * 8 * 4
    for cut in others:
        assert (carried(cut), cut.stream_output) == ([("stem", 0)], None)
        assert cut.crossing_bytes == 2 * 2 * 8 * 4
        assert [graph.values[value].shape for value in cut.values] == [(2, 8), (2, 8)]


def test_work_between_blocks_belongs_to_the_one_before():
    graph = trace(wrap(Scaled, vectors(8), mean_square))
    assert [cut.after_unit for cut in graph.cuts] == [0, 1, 2, 3]
    assert all(cut.carried == () for cut in graph.cuts)
    names = [[graph.nodes[op].name for op in unit.forward_ops] for unit in graph.units]
    assert all("mul" in each for each in names[1:3])


def test_what_is_computed_from_a_module_output_is_computed_again():
    graph = trace(wrap(Conditioned, vectors(8), mean_square))
    assert [cut.after_unit for cut in graph.cuts] == [1, 2, 3]
    assert [carried(cut) for cut in graph.cuts] == [[("stem", 0)]] * 3


@pytest.mark.parametrize(
    ("model", "places", "reason"),
    [
        (Positions, [0, 1, 2, 3], "computed from position"),
        (Leaking, [1, 2, 3], "relu makes inside of blocks.0"),
    ],
)
def test_what_no_stage_can_hand_over_forbids_the_cut(model, places, reason):
    graph = trace(wrap(model, vectors(8), mean_square))
    assert [cut.after_unit for cut in graph.refused_cuts] == places
    assert all(reason in cut.reason for cut in graph.refused_cuts)
    assert {cut.after_unit for cut in graph.cuts} == {0, 1, 2, 3} - set(places)
    assert (reason in graph.no_cut_reason) == (not graph.cuts)


@pytest.mark.parametrize("model", [Shared, Parallel])
def test_children_that_run_often_or_side_by_side_are_no_blocks(model):
    graph = trace(wrap(model, vectors(8), mean_square))
    (unit,) = graph.units
    assert (unit.name, unit.block) == ("model", None)
    assert graph.cuts == ()
    assert "nn.ModuleList" in graph.no_cut_reason
    assert len(unit.forward_ops) + len(unit.backward_ops) == len(graph.nodes)


def test_blocks_stand_in_the_order_in_which_they_run():
    graph = trace(wrap(Reversed, vectors(8), mean_square))
    assert [unit.name for unit in graph.units[1:-1]] == ["blocks.2", "blocks.1", "blocks.0"]


def block_names(build, batch=None):
    graph = trace(wrap(build, batch or vectors(8), mean_square))
    return [unit.name for unit in graph.units[1:-1]]


def test_a_list_among_other_work_is_divided_into_its_alike_children():
    class Wrapped(nn.Module):
        def __init__(self):
            super().__init__()
            inner = nn.Sequential(*[nn.Linear(8, 8) for _ in range(6)])
            self.parts = nn.Sequential(nn.Linear(8, 8), inner, nn.Linear(8, 8))

        def forward(self, x):
            return self.parts(x)

    names = ["parts.0", *[f"parts.1.{index}" for index in range(6)], "parts.2"]
    assert block_names(Wrapped) == names


def test_alike_blocks_are_not_taken_apart():
    def block():
        return nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))

    assert block_names(lambda: nn.Sequential(*[block() for _ in range(3)])) == ["0", "1", "2"]


def test_stages_of_a_pyramid_are_divided():
    def stage(width, depth):
        blocks = [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(depth)]
        return nn.Sequential(nn.Sequential(*blocks), nn.Linear(width, 2 * width))

    names = block_names(lambda: nn.Sequential(stage(8, 2), stage(16, 3)))
    assert names == ["0.0.0", "0.0.1", "0.1", "1.0.0", "1.0.1", "1.0.2", "1.1"]


def test_blocks_in_attributes_are_found_where_there_is_no_list():
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = EagerBlock(16, 2)
            self.second = EagerBlock(16, 2)
            self.third = EagerBlock(16, 2)

        def forward(self, x):
            return self.third(self.second(self.first(x.view(-1, 4, 16))))

    assert block_names(Named, vectors(64)) == ["first", "second", "third"]


def test_blocks_that_are_called_by_keyword():
    class Keyword(Skips):
        class Block(nn.Linear):
            def forward(self, *, hidden):
                return super().forward(hidden)

        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList([self.Block(8, 8) for _ in range(3)])

        def forward(self, x):
            x = self.stem(x)
            for block in self.blocks:
                x = block(hidden=x)
            return x

    graph = trace(wrap(Keyword, vectors(8), mean_square))
    assert [cut.after_unit for cut in graph.cuts] == [0, 1, 2, 3]


def test_an_encoder_and_a_decoder_are_one_row_of_blocks():
    graph = trace(example("t5.py", folder=ZOO))
    names = [unit.name for unit in graph.units[1:-1]]
    assert names == [f"{half}.{index}" for half in ("encoder", "decoder") for index in range(3)]
    assert [cut.after_unit for cut in graph.cuts] == list(range(7))
    inside_encoder, inside_decoder = graph.cuts[1], graph.cuts[5]
    assert carried(inside_encoder) == [("encoder_bias", 0)]
    assert sorted(carried(inside_decoder)) == [("decoder_bias", 0), ("encoder_norm", 0)]
    shared = graph.parameters[inside_encoder.tied_parameters[0]]
    assert shared.names[0] == "embed.weight"
    assert inside_decoder.tied_parameters == ()


def test_a_stream_from_which_another_argument_is_made_comes_out_of_its_block():
    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x, y):
            return self.linear(x) * y

    class Derived(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem = nn.Linear(8, 8)
            self.blocks = nn.ModuleList([Pair() for _ in range(2)])

        def forward(self, x):
            x = self.stem(x)
            for block in self.blocks:
                x = block(x, torch.sin(x))
            return x

    graph = trace(wrap(Derived, vectors(8), mean_square))
    assert [cut.stream_output for cut in graph.cuts] == [
        ModuleOutput(module="stem", index=0),
        ModuleOutput(module="blocks.0", index=0),
        None,
    ]
    assert not any(cut.carried for cut in graph.cuts)


def test_what_a_block_hands_on_is_known_by_what_it_is_computed_from():
    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x, y):
            return self.linear(x) * y, y

    class HandedOn(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem = nn.Linear(8, 8)
            self.blocks = nn.ModuleList([Pair() for _ in range(3)])

        def forward(self, x):
            y = torch.sin(self.stem(x))
            for block in self.blocks:
                x, _ = block(x, y)
            return x

    graph = trace(wrap(HandedOn, vectors(8), mean_square))
    # The input is what the first block works on, so that there is no cut before it.
    assert [carried(cut) for cut in graph.cuts] == [[("stem", 0)], [("stem", 0)], []]


class Half(nn.Module):
    """A stack whose dropout runs twice, so that its result is known by the stack alone."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])
        self.dropout = nn.Dropout(0.1)

    def forward(self, x, memory=None):
        x = self.dropout(x)
        for block in self.blocks:
            x = block(x if memory is None else x + memory)
        return self.dropout(x)


class Halves(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(8, 8)
        self.encoder, self.decoder = Half(), Half()

    def forward(self, x):
        x = self.stem(x)
        return self.decoder(torch.tanh(x), self.encoder(x))


def test_what_a_stack_of_blocks_returns_is_carried_once_it_has_ended():
    graph = trace(wrap(Halves, vectors(8), mean_square))
    after = {graph.units[cut.after_unit].name: carried(cut) for cut in graph.cuts}
    # Inside the encoder the decoder's own input crosses; it comes from the stem.
    assert after["encoder.blocks.0"] == [("stem", 0)]
    assert after["decoder.blocks.0"] == [("encoder", 0)]
    # What the last block works on has been computed.
    assert after["decoder.blocks.1"] == []


def test_a_skip_of_a_u_net_is_sent_once_while_it_is_the_stream():
    graph = trace(example("unet.py", folder=ZOO))
    units = [unit.name for unit in graph.units]
    after = {units[cut.after_unit]: cut for cut in graph.cuts}
    assert after["down.1"].stream_output == ModuleOutput(module="down.1", index=0)
    assert ("down.1", 0) not in carried(after["down.1"])
    assert ("down.1", 0) in carried(after["middle.0"])
    widest = after["middle.0"].crossing_bytes
    assert after["down.0"].crossing_bytes < widest > after["up.5"].crossing_bytes
    for cut in graph.cuts:
        assert len(set(cut.values)) == len(cut.values)


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
    assert [unit.name for unit in graph.units[1:-1]] == ["0", "1.0", "1.1", "1.2", "1.3"]
    assert len({unit.structure for unit in graph.units[2:-2]}) == 1


class WithAWeightOfOthers(nn.Module):
    """Layers, and something else that reads the weights of some of them."""

    def __init__(self, shared):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(4)])
        self.shared = shared
        if shared == "tied":
            self.layers[3].weight = self.layers[1].weight

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        penalized = {"first": [self.layers[0]], "all": self.layers}.get(self.shared, [])
        return x.square().mean() + sum(layer.weight.square().sum() for layer in penalized)


@pytest.mark.parametrize(
    ("shared", "blocks"),
    [
        ("none", ["layers.0", "layers.1", "layers.2", "layers.3"]),
        ("first", ["layers.1", "layers.2", "layers.3"]),
        ("tied", ["layers.0", "layers.2"]),
        ("all", []),
    ],
)
def test_a_module_whose_parameters_others_read_is_no_block(shared, blocks):
    graph = trace(
        wrap(lambda: WithAWeightOfOthers(shared), lambda size: (torch.randn(size, 8), None))
    )
    assert [unit.name for unit in graph.units if unit.kind is UnitKind.BLOCK] == blocks
    assert ("layers.0.weight" in graph.no_cut_reason) == (shared == "all")


@pytest.mark.parametrize(
    ("factory", "names"),
    [
        ("unet", ["first", *(f"{way}{i}" for way in ("down", "up") for i in (1, 2, 3)), "head"]),
        ("halves", [f"{way}.{i}" for way in ("downs", "ups") for i in range(3)]),
        ("stages", [f"stages.{i}.{half}" for i in range(3) for half in "ab"]),
    ],
)
def test_a_convolution_with_its_norm_and_activation_is_no_list_of_blocks(factory, names):
    graph = trace(load_model(f"{ZOO / 'double_convs.py'}:{factory}"), dtype="float64")
    assert [unit.name for unit in graph.units if unit.kind is UnitKind.BLOCK] == names
