"""The runtime's parts that need no process group."""

import copy
from collections import UserDict

import pytest
import torch
from crossing_models import TUPLES
from example_plans import EXAMPLES
from torch import nn
from torch.distributed.run import get_args_parser
from torch.nn.functional import cross_entropy, linear

import planner.runtime.split_ops  # noqa: F401  # the rules by which split tensors run
from planner.runtime.anatomy import examine
from planner.runtime.checkpoint_folders import CheckpointWriter
from planner.runtime.data import drawn_microbatches, joined_batch, split_batch
from planner.runtime.first_weights import parameters_on_meta
from planner.runtime.fused import RankOrder
from planner.runtime.layout import REPLICATE, shard
from planner.runtime.loaders import Data
from planner.runtime.model import (
    UserModel,
    build_model,
    user_module,
)
from planner.runtime.module_edge import placement
from planner.runtime.options import parse_options
from planner.runtime.part import named_parameters
from planner.runtime.processes import RunError, process_group
from planner.runtime.product_rules import GRADIENT_RULES
from planner.runtime.split_tensor import Ranks, SplitTensor, changed, unwrapped, wrapped
from planner.runtime.stages import Stage, StageSpec
from planner.runtime.unread import SplitError

GPT = UserModel(file=EXAMPLES / "gpt.py", factory="build_model", seq_len=8)
BLOCKS = tuple(f"transformer.h.{i}" for i in range(8))
SPECS = tuple(StageSpec(0, a, b) for a, b in ((0, 0), (0, 3), (3, 8), (8, 8)))


def options(*arguments):
    return parse_options("", "float32", arguments)


@pytest.fixture(scope="module")
def whole():
    return build_model(GPT, 0)


@pytest.fixture(scope="module")
def anatomy(whole):
    inputs, _ = GPT.example_batch(2)
    return examine(whole, BLOCKS, inputs, torch.float32)


@pytest.fixture(scope="module")
def stages(whole, anatomy):
    made = [Stage(whole, anatomy, GPT, SPECS, index) for index in range(len(SPECS))]
    for stage in made:
        stage.register_late_hooks()
    return made


def test_stages_in_a_row_compute_the_model_and_its_gradients(whole, stages):
    model = copy.deepcopy(whole)
    inputs, targets = GPT.example_batch(2)
    expected = cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
    expected.backward()
    stream = ()
    for stage in stages:
        stream = (stage(*stream, inputs=inputs, targets=targets),)
    (loss,) = stream
    loss.backward()
    assert loss.item() == expected.item()
    held = [dict(named_parameters(stage)) for stage in stages]
    for name, parameter in model.named_parameters():
        of_stages = [found[name].grad for found in held if name in found]
        torch.testing.assert_close(sum(of_stages), parameter.grad)
    whole.zero_grad()


def test_stages_of_a_rank_hold_a_parameter_that_they_share_each_for_itself(whole, anatomy):
    tied = "transformer.wte.weight"
    for last_rank, is_shared in ((0, False), (1, True)):
        specs = StageSpec(0, 0, 4), StageSpec(last_rank, 4, 8)
        both = [Stage(whole, anatomy, GPT, specs, index) for index in range(2)]
        first, last = (dict(named_parameters(stage)) for stage in both)
        assert (first[tied] is last[tied]) is is_shared
        torch.testing.assert_close(first[tied], last[tied])
        assert last["transformer.ln_f.weight"] is whole.transformer.ln_f.weight


def test_stage_holds_only_what_it_runs(stages):
    names = [sorted(name for name, _ in named_parameters(stage)) for stage in stages]
    assert names[0] == ["transformer.wpe.weight", "transformer.wte.weight"]
    assert {name.split(".")[2] for name in names[1]} == {"0", "1", "2"}
    assert names[3] == [
        "transformer.ln_f.bias",
        "transformer.ln_f.weight",
        "transformer.wte.weight",  # the tied head
    ]


def test_tied_parameters_are_seen_in_both_ends(anatomy):
    assert anatomy.first_names["lm_head.weight"] == "transformer.wte.weight"
    assert anatomy.users["transformer.wte.weight"] == {0, 9}


TUPLE_MODEL = UserModel(file=TUPLES.file, factory="build_model")


def tuple_stages(*received, first_blocks=(0, 1, 3, 5)):
    """Stages of the model whose blocks return tuples, and a batch of it."""
    model = build_model(TUPLE_MODEL, 0)
    inputs, targets = TUPLE_MODEL.example_batch(2)
    anatomy = examine(model, TUPLES.blocks, inputs, torch.float32)
    edges = (*first_blocks, 5)
    specs = [
        StageSpec(0, edges[i], edges[i + 1], receives=received[i] if received else ())
        for i in range(len(first_blocks))
    ]
    made = [Stage(model, anatomy, TUPLE_MODEL, specs, index) for index in range(len(specs))]
    for stage in made:
        stage.register_late_hooks()
    return model, made, {"inputs": inputs, "targets": targets}


CONDITION = (("time", 0), ("label", 0))
WITH_BIAS = (*CONDITION, ("blocks.0", 1))


def test_stages_hand_over_what_blocks_and_other_modules_return():
    """The bias comes back out of every block; the conditioning is changed after it is returned."""
    model, stages, batch = tuple_stages((), WITH_BIAS, WITH_BIAS, ())
    whole = copy.deepcopy(model)
    inputs, targets = batch["inputs"], batch["targets"]
    expected = cross_entropy(whole(*inputs).flatten(0, 1), targets.flatten())
    expected.backward()
    sent = ()
    for stage in stages:
        sent = stage(*sent, **batch)
        sent = sent if isinstance(sent, tuple) else (sent,)
    sent[0].backward()
    assert sent[0].item() == expected.item()
    found = dict(model.named_parameters())
    for name, parameter in whole.named_parameters():
        torch.testing.assert_close(found[name].grad, parameter.grad)


def test_what_is_passed_on_is_a_tensor_of_its_own():
    """The received one is kept by torch for all steps, and hooks on it would add up."""
    _, stages, batch = tuple_stages((), WITH_BIAS, WITH_BIAS, ())
    received = [t.detach().requires_grad_() for t in stages[0](**batch)]
    passed = stages[1](*received, **batch)
    assert [t.data_ptr() == r.data_ptr() for t, r in zip(passed, received, strict=True)] == [
        *(False, True, True, True)
    ]
    assert not any(t.is_leaf or t._is_view() for t in passed)


def test_stand_ins_of_earlier_modules_take_no_memory():
    _, stages, batch = tuple_stages((), WITH_BIAS, WITH_BIAS, ())
    seen = []
    block = stages[3].model.get_submodule("blocks.4")
    block.register_forward_hook(lambda _, __, output: seen.append(output))
    stages[3](torch.zeros(2, 12, 16), **batch)
    ((stream, nothing, bias),) = seen
    assert nothing is None
    assert stream.shape == (2, 12, 16)
    assert (bias.shape, bias.untyped_storage().nbytes()) == ((1, 2, 12, 12), 4)


def test_stand_ins_keep_type_and_methods_and_hand_on_what_the_module_does():
    model, stages, _ = tuple_stages((), WITH_BIAS, WITH_BIAS, ())
    block = stages[2].model.get_submodule("blocks.1")
    assert isinstance(block, type(model.blocks[1]))
    assert not list(block.parameters())
    assert block.bias.__func__ is type(model.blocks[1]).bias
    assert block.heads == 2
    bias = torch.ones(1, 2, 12, 12)
    stream, _, handed_on = block.forward(torch.ones(2, 12, 16), bias, torch.ones(2, 16))
    assert handed_on is bias
    assert not stream.any()


@pytest.mark.parametrize(
    ("received", "message"),
    [
        (((), CONDITION, WITH_BIAS, ()), "stage 2 receives output 1 of blocks.0, which stage 1"),
        (((), (("blocks.0", 2),), (), ()), "'blocks.0' is no module"),
        (((), (("nothing", 0),), (), ()), "'nothing' is no module"),
    ],
)
def test_outputs_that_cannot_be_sent_are_refused(received, message):
    with pytest.raises(ValueError, match=message):
        tuple_stages(*received)


def test_blocks_out_of_order_are_refused():
    model = build_model(TUPLE_MODEL, 0)
    inputs, _ = TUPLE_MODEL.example_batch(2)
    with pytest.raises(ValueError, match=r"blocks\.0 runs earlier"):
        examine(model, ("blocks.1", "blocks.0"), inputs, torch.float32)


class UsesEmbeddingTwice(nn.Module):
    """Ties embedding and head without a second name."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.blocks = nn.ModuleList([nn.Linear(4, 4) for _ in range(2)])
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x):
        x = self.embed(x) * self.scale
        for block in self.blocks:
            x = block(x)
        return self.logits(x)

    def logits(self, x):
        return linear(x, self.embed.weight)


class UsesTransposedEmbedding(UsesEmbeddingTwice):
    def logits(self, x):
        return x @ self.embed.weight.T


def two_stages(model, tokens, *, receives=()):
    """Cut before the second block; the loss is the sum of the output."""
    anatomy = examine(model, ("blocks.0", "blocks.1"), tokens, torch.float32)
    specs = (StageSpec(0, 0, 1), StageSpec(1, 1, 2, receives=receives))
    stages = [Stage(model, anatomy, SumOfOutput(), specs, index) for index in range(2)]
    for stage in stages:
        stage.register_late_hooks()
    return stages


@pytest.mark.parametrize("kind", [UsesEmbeddingTwice, UsesTransposedEmbedding])
def test_parameter_used_without_its_module_is_kept(kind):
    model, tokens = kind(), torch.randint(0, 10, (2, 3))
    first, last = two_stages(model, tokens)
    stream = first(inputs=tokens, targets=None)
    assert last(stream, inputs=tokens, targets=None) == model(tokens).sum()
    assert [name for name, _ in named_parameters(last)] == [
        "embed.weight",
        "blocks.1.weight",
        "blocks.1.bias",
    ]


class LooksIntoModules(UsesEmbeddingTwice):
    """Asks what other stages hold for its dtype; knows a module under two names."""

    def __init__(self):
        super().__init__()
        self.shifts = nn.ModuleDict({"first": nn.Linear(4, 4), "second": nn.Linear(4, 4)})
        self.shift = self.shifts["second"]

    def forward(self, x):
        x = self.embed(x).to(self.blocks[0].weight.dtype)
        shift = self.shift(x).to(self.shifts["first"].weight.dtype)
        for block in self.blocks:
            x = block(x) + shift
        return x * self.blocks[0].weight.shape[0]


def test_stand_ins_can_be_looked_into_and_replace_a_module_under_all_names():
    model, tokens = LooksIntoModules(), torch.randint(0, 10, (2, 3))
    first, last = two_stages(model, tokens, receives=(("shifts.second", 0),))
    sent = first(inputs=tokens, targets=None)
    torch.testing.assert_close(last(*sent, inputs=tokens, targets=None), model(tokens).sum())
    names = [name for name, _ in named_parameters(last)]
    assert names == ["blocks.1.weight", "blocks.1.bias"]


class SumOfOutput:
    def loss(self, output, targets):
        del targets
        return output.sum()


def test_a_batch_that_does_not_divide_is_refused():
    tokens = torch.zeros(5, 3)
    with pytest.raises(RunError, match="5 samples are no whole microbatches of 2"):
        split_batch((tokens, tokens), 2)
    with pytest.raises(RunError, match=r"gave a tensor of shape \(4, 3\)"):
        split_batch((tokens, tokens[:4]), 5)


def test_global_batches_depend_on_seed_and_step_alone():
    first, again = (joined_batch(drawn_microbatches(GPT, 1, 5, range(4), 4)) for _ in range(2))
    second = drawn_microbatches(GPT, 1, 5, range(2, 4), 1)
    assert [inputs.shape[0] for inputs, _ in second] == [1, 1]
    later, other = joined_batch(second), joined_batch(drawn_microbatches(GPT, 1, 6, range(4), 4))
    assert torch.equal(first[0], again[0])
    assert not torch.equal(first[0], other[0])
    assert torch.equal(later[0], first[0][2:])
    assert torch.equal(later[1], first[1][2:])


def test_a_collators_dict_is_the_arguments_of_a_model_with_its_own_loss():
    batch = UserDict(input_ids=torch.arange(8).view(4, 2), labels=torch.arange(4))
    first, second = split_batch(batch, 2)
    assert second[1] is None
    assert second[0]["labels"].tolist() == [2, 3]
    whole, _ = joined_batch([first, second])
    assert torch.equal(whole["input_ids"], batch["input_ids"])


def test_same_weights_whatever_was_drawn_before():
    torch.manual_seed(3)
    first = build_model(GPT, 0)
    second = build_model(GPT, 0)
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b)


def test_parameters_on_meta_keep_ties_and_real_buffers():
    llama = UserModel(file=EXAMPLES / "llama.py", factory="llama_tiny")
    with parameters_on_meta():
        tied = user_module(GPT).build_model()
        model = user_module(llama).llama_tiny()
    assert tied.lm_head.weight is tied.transformer.wte.weight
    assert all(parameter.is_meta for parameter in model.parameters())
    assert model.cos[0].tolist() == [1.0] * 4


def test_wrong_number_of_processes_says_how_to_start():
    with (
        pytest.raises(RunError, match="--nproc-per-node 8"),
        process_group(8, 1.0),
    ):
        pass


@pytest.mark.parametrize("wrong", [["--resume"], ["--steps", "many"], ["--unknown"]])
def test_a_wrong_command_line_is_an_error_that_one_rank_shows(wrong):
    with pytest.raises(RunError, match=wrong[0]):
        options(*wrong)


def test_torchrun_leaves_the_options_to_the_script():
    """It would take an option for its own where that begins one of its own ambiguously."""
    given = [
        *("--steps", "3", "--log-file", "x", "--checkpoint", "x", "--checkpoint-every", "2"),
        *("--keep-checkpoints", "2", "--evaluate-every", "2"),
        *("--resume", "--init", "x", "--dtype", "float64", "--timeout-s", "60"),
    ]
    parsed = get_args_parser().parse_args(["--nproc-per-node", "2", "train.py", *given])
    assert parsed.training_script_args == given


def test_functions_of_the_model_file_are_checked_before_training():
    user = UserModel(module="types", factory="x", functions={"evaluate": lambda model: None})
    with pytest.raises(RunError, match=r"must be evaluate\(model, step\)"):
        user.function("evaluate")
    with pytest.raises(RunError, match=r"--evaluate-every needs evaluate\(model, step\)"):
        UserModel(module="types", factory="x").function("evaluate", needed_by="--evaluate-every")


def test_missing_loss_is_named():
    nothing = UserModel(module="types", factory="x")
    with pytest.raises(TypeError, match="no loss_fn"):
        nothing.loss(torch.ones(2), None)
    assert nothing.loss({"loss": torch.tensor(2.0)}, None) == 2.0
    assert nothing.loss((torch.ones(2), torch.tensor(3.0)), None) == 3.0


def test_loss_is_computed_in_float32_at_least():
    logits = torch.randn(2, 3, 128, dtype=torch.bfloat16)
    assert GPT.loss(logits, torch.zeros(2, 3, dtype=torch.long)).dtype is torch.float32


def test_layouts_are_read_as_torch_spells_them():
    assert placement("Replicate", 3) == REPLICATE
    assert placement("Shard(-1)", 3) == shard(2)
    with pytest.raises(ValueError, match="no layout"):
        placement("Partial", 3)


def split_tensor(whole, dim, *, rank, size=2):
    ranks = Ranks(rank=rank, size=size, group=None)
    return SplitTensor(ranks.part(whole, shard(dim)), shard(dim), ranks)


def test_a_split_tensor_looks_whole_and_runs_on_its_part():
    whole = torch.randn(2, 8, 3)
    halves = [split_tensor(whole, 1, rank=rank) for rank in range(2)]
    views = [half.view(2, 4, 2, 3).transpose(1, 2) + torch.ones(4, 3) for half in halves]
    assert [view.shape for view in views] == [(2, 2, 4, 3)] * 2
    expected = whole.view(2, 4, 2, 3).transpose(1, 2) + 1
    torch.testing.assert_close(torch.cat([view.local for view in views], 2), expected)


READINGS = {
    "alone": lambda found, _: found + 1,
    "as a view": lambda found, _: found.t(),
    "beside a part": lambda found, half: half * found,
    "by a function": lambda found, _: nn.functional.gelu(found),
    "in place": lambda found, _: found.zero_(),
    "its data": lambda found, _: found.sum().item(),
}


@pytest.mark.parametrize("read", READINGS.values(), ids=READINGS)
def test_what_no_rule_lays_out_is_refused_when_it_is_read(read):
    half = split_tensor(torch.randn(2, 8), 1, rank=0).requires_grad_()
    found, places = half.sort()
    assert found.shape == places.shape == half.shape
    with pytest.raises(SplitError, match=r"sort of \(2, 8\) Shard\(1\): no rule says"):
        read(found, half)
    with pytest.raises(SplitError, match="no rule says"):
        places + 1


@pytest.mark.parametrize("enter", ["as a part", "as a whole"])
def test_a_gradient_that_no_rule_lays_out_is_refused_where_it_leaves(enter, monkeypatch):
    """Who asks autograd for it, as schedules do, need not read it before an optimiser does."""
    monkeypatch.delitem(GRADIENT_RULES, "elu_backward")
    ranks = Ranks(rank=0, size=2, group=None)
    leaf = torch.randn(2, 4 if enter == "as a part" else 8, requires_grad=True)
    half = (wrapped if enter == "as a part" else changed)(leaf, shard(1), ranks)
    loss = unwrapped(nn.functional.elu(half)).sum()
    with pytest.raises(SplitError, match=r"elu_backward of .*: no rule says"):
        torch.autograd.grad(loss, leaf)


def test_what_would_be_written_and_a_whole_tensor_with_a_gradient_are_refused_at_once():
    half = split_tensor(torch.randn(2, 8), 1, rank=0)
    with pytest.raises(SplitError, match="no rule says"):
        half.cumsum_(1)
    with pytest.raises(SplitError, match="would know a part of its gradient"):
        half * torch.ones(8, requires_grad=True)


def test_fused_projections_lie_by_rank():
    order = RankOrder(shard(0, 3), 2)
    whole = torch.arange(12)
    by_rank = order.by_rank(whole)
    assert by_rank[:6].tolist() == [0, 1, 4, 5, 8, 9]
    assert torch.equal(order._swapped(by_rank, 2, 3), whole)


class Experts(nn.Module):
    """Tokens grouped by expert; torch's meta kernel for them takes bfloat16 only."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 8, 8))

    def forward(self, x):
        return x + torch.nn.functional.grouped_mm(x, self.weight, offs=torch.tensor([2, 4]).int())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_dry_run_of_experts_in_any_dtype(dtype):
    model = nn.Sequential(Experts(), Experts())
    anatomy = examine(model, ("0", "1"), (torch.randn(4, 8),), dtype)
    assert [(stream.shape, stream.dtype) for stream in anatomy.streams] == [((4, 8), dtype)] * 3
    assert anatomy.users["1.weight"] == {2}


class Numbers:
    """Yields its numbers as microbatches of two."""

    def __init__(self, count):
        self.count, self.at, self.epochs = count, 0, []

    def set_epoch(self, epoch):
        self.epochs.append(epoch)

    def __iter__(self):
        first, self.at = self.at, 0
        for number in range(first, self.count):
            self.at = (number + 1) % self.count
            yield torch.full((2, 1), number), {"targets": torch.ones(2)}


class StatefulNumbers(Numbers):
    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


class CountedNumbers(Numbers):
    def __len__(self):
        return self.count


def loaded(loader, step=0, checkpoint=None):
    user = UserModel(module="types", factory="x", functions={"data_loader": lambda *_: loader})
    sizes = {"world_size": 2, "microbatch_size": 2, "num_microbatches": 2}
    data = Data(user=user, seed=0, ranks=(1,), **sizes)
    data.start(step, checkpoint)
    return data


def numbers(data, steps):
    return [int(inputs[0]) for step in range(steps) for inputs, _ in data.microbatches(step)]


def test_a_loader_is_read_pass_after_pass_and_resumed(tmp_path):
    loader = StatefulNumbers(3)
    data = loaded(loader)
    assert numbers(data, 2) == [0, 1, 2, 0]
    assert loader.epochs == [0, 1]
    state = {f"extra.{name}": content for name, content in data.state().items()}
    CheckpointWriter().write(state, tmp_path / "saved", wait=True)
    again = StatefulNumbers(3)
    assert numbers(loaded(again, 2, tmp_path / "saved"), 1) == [1, 2] == numbers(data, 1)
    assert again.epochs == [1]
    plain = CountedNumbers(3)
    assert numbers(loaded(plain, 2), 1) == [1, 2]
    assert plain.epochs == [1]


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        (iter([(torch.ones(2, 1), torch.ones(2))] * 3), "yields no microbatch in a pass"),
        ([(torch.ones(2, 1), torch.ones(2)), (torch.ones(1, 1), torch.ones(1))], "drop_last=True"),
    ],
)
def test_loaders_that_do_not_do_say_why(loader, message):
    data = loaded(loader)
    with pytest.raises(RunError, match=message):
        numbers(data, 2)
