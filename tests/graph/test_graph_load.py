"""Loading user code, and what is said when it cannot be used."""

import sys

import pytest
import torch
from graph_models import EXAMPLES, Stream, token_loss, tokens
from torch import nn

from planner.errors import ModelError, RequestError
from planner.graph.loading.build import meta_copy
from planner.graph.loading.load import load_model, wrap_module
from planner.graph.trace import trace_model

MODEL = """
import torch
from torch import nn

def build_model():
    return nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
"""
BATCH = """
def example_batch(microbatch_size):
    return torch.randn(microbatch_size, 4), torch.randn(microbatch_size, 4)
"""
LOSS = """
def loss_fn(output, targets):
    return ((output - targets) ** 2).mean()
"""


@pytest.fixture
def write(tmp_path):
    def write_file(text: str, name: str = "model.py") -> str:
        path = tmp_path / name
        path.write_text(text)
        return str(path)

    return write_file


def trace(loaded, dtype="float32"):
    return trace_model(loaded, microbatch_size=2, dtype=dtype)


def test_a_file_with_the_three_functions(write):
    source = write(MODEL + BATCH + LOSS)
    loaded = load_model(source, seq_len=None)
    assert (loaded.file, loaded.module, loaded.factory) == (source, None, "build_model")
    assert trace(loaded).num_parameters == 4 * 8 + 8 + 8 * 4 + 4


def test_a_named_factory_and_a_sequence_length():
    loaded = load_model(f"{EXAMPLES / 'llama.py'}:llama_8b", seq_len=128)
    assert (loaded.factory, loaded.seq_len) == ("llama_8b", 128)
    assert loaded.example_batch(2).args[0].shape == (2, 128)


def test_an_importable_module(tmp_path, monkeypatch):
    (tmp_path / "some_package").mkdir()
    (tmp_path / "some_package" / "__init__.py").write_text("")
    (tmp_path / "some_package" / "nets.py").write_text(MODEL + BATCH + LOSS)
    monkeypatch.chdir(tmp_path)
    loaded = load_model("some_package.nets:build_model", seq_len=None)
    assert (loaded.file, loaded.module) == (None, "some_package.nets")
    assert trace(loaded).forward_flop > 0
    assert "some_package" not in sys.modules


def test_imports_beside_the_file_work_and_leave_no_trace(tmp_path):
    before = list(sys.path)
    for name, width in (("one", 3), ("two", 5)):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "parts.py").write_text(f"WIDTH = {width}\n")
        (folder / "late.py").write_text("from parts import WIDTH\n")
        (folder / "model.py").write_text(
            "import torch\nfrom torch import nn\nfrom parts import WIDTH\n"
            "class Net(nn.Module):\n"
            "    def __init__(self):\n"
            "        super().__init__()\n"
            "        self.linear = nn.Linear(WIDTH, WIDTH)\n"
            "    def forward(self, x):\n"
            "        import late\n"
            "        return self.linear(x).sum() * late.WIDTH\n"
            "def build_model():\n    return Net()\n"
            "def example_batch(size):\n    return torch.randn(size, WIDTH), None\n"
        )
    loaded = [load_model(str(tmp_path / name / "model.py")) for name in ("one", "two")]
    assert [trace(each).num_parameters for each in loaded] == [12, 30]
    assert sys.path == before
    assert not {"parts", "late", "model"} & set(sys.modules)


def test_modules_of_a_folder_that_the_code_adds_to_the_path_leave_no_trace(tmp_path):
    for name, width in (("one", 3), ("two", 5)):
        folder = tmp_path / name
        (folder / "common").mkdir(parents=True)
        (folder / "common" / "shared.py").write_text(f"WIDTH = {width}\n")
        (folder / "model.py").write_text(
            "import sys\nfrom pathlib import Path\n"
            "sys.path.insert(0, str(Path(__file__).parent / 'common'))\n"
            "import torch\nfrom torch import nn\nfrom shared import WIDTH\n"
            "def build_model():\n    return nn.Linear(WIDTH, WIDTH)\n"
            "def example_batch(size):\n    return torch.randn(size, WIDTH), torch.ones(size)\n"
            "def loss_fn(output, targets):\n    return output.sum()\n"
        )
    loaded = [load_model(str(tmp_path / name / "model.py")) for name in ("one", "two")]
    assert [trace(each).num_parameters for each in loaded] == [12, 30]
    assert "shared" not in sys.modules


def test_keyword_inputs_and_a_loss_from_the_model(write):
    text = """
import torch
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
    def forward(self, *, x, labels):
        out = self.linear(x)
        loss = (out - labels).pow(2).mean()
        return RESULT
def build_model():
    return Net()
def example_batch(size):
    return {"x": torch.randn(size, 4), "labels": torch.randn(size, 4)}, None
"""
    for result in (
        "loss",
        "(out, loss)",
        "{'loss': loss, 'logits': out}",
        "type('Output', (), {'loss': loss})()",
    ):
        graph = trace(load_model(write(text.replace("RESULT", result))))
        assert graph.backward_flop > 0


def test_the_example_batch_is_the_same_every_time_and_leaves_the_generator_alone(write):
    loaded = load_model(write(MODEL + BATCH + LOSS))
    state = torch.random.get_rng_state()
    first, second = loaded.example_batch(3), loaded.example_batch(3)
    assert torch.equal(first.args[0], second.args[0])
    assert torch.equal(torch.random.get_rng_state(), state)


def test_the_default_dtype_is_left_alone():
    trace(wrap_module(Stream, example_batch=tokens, loss_fn=token_loss), dtype="float64")
    assert torch.get_default_dtype() == torch.float32


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_a_module_passed_as_an_object(device):
    with torch.device(device):
        model = Stream()
    graph = trace(wrap_module(model, example_batch=tokens, loss_fn=token_loss))
    assert graph.parameters[0].names == ("embed.weight", "head.weight")
    assert model.embed.weight.device.type == device
    assert model.embed.weight.grad is None


def test_a_meta_copy_keeps_ties_and_frozen_parameters():
    model = Stream()
    model.blocks[0].proj.weight.requires_grad_(False)
    twin = meta_copy(model)
    assert twin.head.weight is twin.embed.weight
    assert not twin.blocks[0].proj.weight.requires_grad
    assert all(each.is_meta for each in twin.parameters())


def fails(source, *needles, seq_len=None, kind=ModelError):
    with pytest.raises(kind) as error:
        trace(load_model(source, seq_len=seq_len))
    for needle in needles:
        assert needle in str(error.value)
    assert error.value.hint
    return error.value


def test_a_missing_file_names_what_is_near(tmp_path):
    (tmp_path / "model.py").write_text("")
    error = fails(str(tmp_path / "modle.py"), "does not exist")
    assert error.hint == f"Did you mean {tmp_path / 'model.py'}?"
    assert error.exit_code == 5


def test_a_missing_folder_a_folder_and_a_missing_module(tmp_path):
    fails(str(tmp_path / "nowhere" / "model.py"), "no folder")
    fails(str(tmp_path) + "/", f"{tmp_path / 'config.json'} cannot be read")
    fails("no_such_package.nets:build", "no importable module 'no_such_package.nets'")


def test_a_file_without_build_model_lists_what_it_has(write):
    text = "import torch\nfrom torch import nn\ndef make_net():\n    return nn.Linear(4, 4)\n"
    source = write(text + BATCH)
    error = fails(source, "has no build_model()", "make_net, example_batch")
    assert "def build_model():" in error.hint
    assert f"{source}:make_net" in error.hint
    assert "no functions" in str(fails(write("x = 1\n"), "has no build_model()"))


def test_a_missing_example_batch_shows_the_lines_to_add(write):
    error = fails(write(MODEL), "has no example_batch(microbatch_size)")
    assert "def example_batch(microbatch_size):" in error.hint


def test_a_sequence_length_that_nobody_takes(write):
    error = fails(
        write(MODEL + BATCH + LOSS), "--seq-len 16", "microbatch_size", seq_len=16,
        kind=RequestError,
    )  # fmt: skip
    assert error.exit_code == 2


@pytest.mark.parametrize(
    ("text", "needles"),
    [
        ("raise ValueError('broken file')\n", ["Importing", "ValueError: broken file"]),
        ("import sys\nsys.exit(3)\n", ["SystemExit: 3", "sys.exit(3)"]),
        ("def build_model(:\n", ["SyntaxError"]),
        (
            "def build_model():\n    raise RuntimeError('no weights')\n" + BATCH,
            ["Building", "RuntimeError: no weights", "raise RuntimeError('no weights')"],
        ),
        ("def build_model():\n    return 3\n" + BATCH, ["must return an nn.Module", "int"]),
        (
            MODEL + "def example_batch(size):\n    raise KeyError('data')\n",
            ["Calling example_batch(2) raised KeyError", "raise KeyError('data')"],
        ),
        (
            MODEL + "def example_batch(size):\n    return torch.ones(size, 4)\n",
            ["must return (inputs, targets)", "shape (2, 4)"],
        ),
        (
            MODEL + "def example_batch(size):\n    return torch.ones(size, 5), None\n",
            ["forward pass", "RuntimeError"],
        ),
        (
            MODEL + BATCH + "def loss_fn(output, targets):\n    return output - targets\n",
            ["loss_fn must return a scalar", "shape (2, 4)"],
        ),
        (
            MODEL + BATCH + "def loss_fn(output, targets):\n    return 1.0\n",
            ["loss_fn must return a scalar", "float"],
        ),
        (
            MODEL + BATCH + "def loss_fn(output, targets):\n    return output.detach().sum()\n",
            ["without a gradient"],
        ),
        (MODEL + BATCH, ["There is no loss_fn", "shape (2, 4)"]),
        (
            MODEL.replace("return nn", "return nn.Identity() and nn").replace(
                "nn.Linear(4, 8), nn.Linear(8, 4)", "nn.Identity()"
            )
            + BATCH
            + LOSS,
            ["no parameter that requires a gradient"],
        ),
        ("import no_such_library\n", ["ModuleNotFoundError", "Install no_such_library"]),
    ],
)
def test_user_errors_keep_their_type_message_and_line(write, text, needles):
    header = "" if "import" in text.split("\n")[0] or text.startswith("raise") else "import torch\n"
    fails(write(header + text), *needles)


def test_a_model_that_runs_in_float32_only(write):
    text = MODEL.replace("nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))", "Net()") + BATCH + LOSS
    text += """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4))
        self.register_buffer("table", torch.ones(4, 4))
    def forward(self, x):
        return (x @ self.table) @ self.weight
"""
    loaded = load_model(write(text))
    assert trace(loaded, dtype="float32").forward_flop > 0
    with pytest.raises(ModelError, match="try --dtype float32"):
        trace(loaded, dtype="bfloat16")


def test_a_dtype_that_is_none(write):
    with pytest.raises(RequestError, match="no floating-point type"):
        trace(load_model(write(MODEL + BATCH + LOSS)), dtype="int8")


def test_a_wrapped_module_needs_a_batch():
    with pytest.raises(ModelError, match="without example_batch"):
        wrap_module(nn.Linear(1, 1), example_batch=None)


@pytest.mark.parametrize("name", ["gpt.py", "llama.py", "mlp.py"])
def test_the_examples_load(name):
    assert load_model(str(EXAMPLES / name)).loss_fn is not None
