"""Each private name of torch that tracing uses still does what tracing needs."""

import pytest
import torch
from torch import nn

from planner.graph import torch_private

aten = torch.ops.aten


class Probe(torch_private.TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, int, int | None]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        node = torch_private.current_node()
        number = None if node is None else torch_private.node_sequence_number(node)
        name = torch_private.packet_name(func)
        self.seen.append((name, torch_private.next_sequence_number(), number))
        return func(*args, **(kwargs or {}))


def test_backward_ops_carry_the_sequence_number_of_their_forward_op():
    x = torch.empty(3, device="meta", requires_grad=True)
    with Probe() as probe:
        y = x.sin().exp()
        y.sum().backward()
    forward = {name: sequence - 1 for name, sequence, node in probe.seen if node is None}
    backward = {name: node for name, _, node in probe.seen if node is not None}
    assert backward["cos"] == forward["sin"]
    assert forward["sin"] < forward["exp"]


def test_inputs_are_packed_after_the_node_is_made_and_outputs_before_the_next():
    numbers = []
    x = torch.empty(3, device="meta", requires_grad=True)

    def pack(tensor):
        numbers.append(torch_private.next_sequence_number())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), Probe() as probe:
        x.sin()
        x.exp()
    (_, at_sin, _), (_, at_exp, _) = probe.seen
    # sin saves its input, just before it is dispatched; exp its output, just after.
    assert numbers == [at_sin, at_exp]
    assert at_exp == at_sin + 1


def test_accumulation_nodes_name_their_parameter():
    found = []

    class Catch(torch_private.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            node = torch_private.current_node()
            if node is not None and hasattr(node, "variable"):
                found.append(node.variable)
            return func(*args, **(kwargs or {}))

    x = torch.empty(3, device="meta", requires_grad=True)
    loss = x.sum()
    with Catch():
        loss.backward()
    assert found
    assert all(variable is x for variable in found)


def test_schema_says_what_is_a_view_and_what_is_written():
    assert torch_private.schema_aliases(aten.view.default) == (True, ())
    assert torch_private.schema_aliases(aten.mm.default) == (False, ())
    views, written = torch_private.schema_aliases(aten.add_.Tensor)
    assert not views
    assert written == ((0, "self", False),)


def test_a_tag_tells_pointwise_overloads():
    assert torch_private.is_pointwise(aten.gelu.default)
    assert torch_private.is_pointwise(aten.max.other)
    assert not torch_private.is_pointwise(aten.max.dim)
    assert not torch_private.is_pointwise(aten.cummax.default)


def test_tags_tell_random_and_data_dependent_ops():
    assert torch_private.is_random(aten.bernoulli.default)
    assert not torch_private.is_random(aten.mm.default)
    assert torch_private.has_dynamic_output(aten.nonzero.default)
    assert torch_private.has_dynamic_output(aten._local_scalar_dense.default)
    assert not torch_private.has_dynamic_output(aten.mm.default)


def test_storage_key_is_shared_by_views_only():
    x = torch.empty(4, 4, device="meta")
    assert torch_private.storage_key(x)[1] == torch_private.storage_key(x[1:])[1]
    assert torch_private.storage_key(x)[1] != torch_private.storage_key(torch.empty_like(x))[1]


def test_modes_can_be_switched_off():
    with torch.device("meta"), Probe() as probe, torch_private.modes_disabled():
        assert torch_private.are_modes_disabled()
        made = torch.ones(2).sum()
    assert not torch_private.are_modes_disabled()
    assert probe.seen == []
    assert made.device.type == "cpu"


def test_functions_that_make_tensors_on_a_device():
    makers = torch_private.device_constructors()
    assert makers >= {torch.empty, torch.arange, torch.rand, torch.tensor, torch.linspace}
    assert torch.add not in makers


def test_module_hooks_surround_every_forward_even_if_it_raises():
    class Broken(nn.Module):
        def forward(self, x):
            raise ValueError("no")

    events = []
    model = nn.Sequential(nn.Identity(), Broken())
    with (
        torch_private.module_hooks(
            lambda module, args: events.append(("in", type(module).__name__)),
            lambda module, output: events.append(("out", type(module).__name__)),
        ),
        pytest.raises(ValueError, match="no"),
    ):
        model(torch.ones(1))
    assert events == [
        ("in", "Sequential"),
        ("in", "Identity"),
        ("out", "Identity"),
        ("in", "Broken"),
        ("out", "Broken"),
        ("out", "Sequential"),
    ]


def test_tree_map_only_visits_tensors_in_argument_order():
    order = []
    tree = ((torch.ones(1), [torch.ones(2)]), {"a": torch.ones(3), "b": 4})
    torch_private.tree_map_only(torch.Tensor, lambda tensor: order.append(tensor.numel()), tree)
    assert order == [1, 2, 3]


def test_tree_leaves_finds_what_lies_in_lists_and_dicts():
    assert torch_private.tree_leaves(([1, (2,)], {"a": 3})) == [1, 2, 3]


@pytest.mark.filterwarnings("ignore:Warning only once for all operators")
def test_kernels_of_autocast_can_be_had_for_meta_tensors():
    assert {"linear", "softmax.int", "norm.ScalarOpt_dim"} <= set(torch_private.autocast_ops())
    seen = []

    def kernel(source):
        seen.append(source.device.type)
        with torch_private.without_autocast():
            return aten.exp.default(source)

    library = torch.library.Library("aten", "IMPL")
    library.impl("exp", kernel, "AutocastCUDA", allow_override=True)
    x = torch.empty(3, device="meta")
    try:
        with torch_private.autocast_reaches_meta():
            x.exp()
            assert seen == []
            torch.set_autocast_enabled("cuda", True)
            x.exp()
            torch.set_autocast_enabled("cuda", False)
        torch.set_autocast_enabled("cuda", True)
        x.exp()
    finally:
        torch.set_autocast_enabled("cuda", False)
        library._destroy()
    assert seen == ["meta"]


def test_packing_is_seen_by_function_modes():
    from torch.overrides import TorchFunctionMode

    seen = []

    class Watch(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with Watch():
        packed = nn.utils.rnn.pack_padded_sequence(torch.ones(2, 1, 3), [2])
        nn.utils.rnn.pad_packed_sequence(packed)
    assert torch_private.pack_padded_sequence in seen
    assert torch_private.pad_packed_sequence in seen


def test_transformed_tensors_are_told_apart():
    seen = []
    torch.func.vmap(lambda row: (seen.append(torch_private.is_transformed(row)), row)[1])(
        torch.ones(2)
    )
    assert seen == [True]
    assert not torch_private.is_transformed(torch.ones(2))


def test_flex_attention_can_be_given_a_kernel():
    from torch.nn.attention.flex_attention import flex_attention

    calls = []

    def kernel(query, key, value, score_mod, block_mask, scale, options):
        calls.append((scale, score_mod(query, 0, 0, 0, 0) is query, len(block_mask) > 2))
        return query, query[..., 0], query[..., 0]

    x = torch.empty(1, 2, 8, 4, device="meta")
    with torch_private.flex_attention_kernel(kernel):
        assert flex_attention(x, x, x).shape == x.shape
    assert calls == [(0.5, True, True)]
    with pytest.raises(ValueError, match="meta"):
        flex_attention(x, x, x)
