"""``plan trace MODEL`` from the options to files, screen and exit code."""

import csv
import json
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

import planner
from planner.cli import trace_runner
from planner.cli.main import run
from planner.cli.terminal import ProgressLine
from planner.errors import ModelError
from planner.graph.analysis.causal import phase_masked_flop
from planner.graph.analysis.retained import recompute_flop, retained_bytes
from planner.graph.operator_graph import Phase
from planner.progress import PhaseEvent
from planner.units import format_bytes, format_flop

EXAMPLES = Path(__file__).parents[2] / "examples"
GPT = str(EXAMPLES / "gpt.py")


@pytest.fixture(scope="module")
def gpt():
    return planner.trace(GPT, dtype="float32")


@pytest.fixture(autouse=True)
def workplace(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    monkeypatch.setenv("COLUMNS", "80")
    return tmp_path


@pytest.fixture
def traced(monkeypatch, gpt):
    """What reached the trace, which is played by one made before."""
    calls = []

    def trace(model, **options):
        calls.append({"model": model, **options})
        return gpt

    monkeypatch.setattr(trace_runner, "trace", trace)
    return calls


def row(text, name):
    """The cells of the first line that begins with a name."""
    return next(line.split()[1:] for line in text.splitlines() if line.split()[:1] == [name])


def answer(capsys, *arguments):
    assert run(["trace", GPT, *arguments]) == 0
    return capsys.readouterr().out


def test_options_reach_the_trace(traced, capsys):
    answer(capsys, "--seq-len", "32", "--microbatch-size", "4", "--dtype", "float64")
    (call,) = traced
    assert call.pop("progress") is not None
    assert call == {
        "model": GPT,
        "microbatch_size": 4,
        "seq_len": 32,
        "dtype": "float64",
        "hints": {},
    }


def test_a_model_is_traced_once_and_for_real(monkeypatch, capsys):
    calls = []
    trace = trace_runner.trace
    monkeypatch.setattr(
        trace_runner, "trace", lambda *args, **kwargs: calls.append(1) or trace(*args, **kwargs)
    )
    out = answer(capsys, "--microbatch-size", "2", "--seq-len", "32")
    assert len(calls) == 1
    assert "412 k parameters; microbatch 2 x 32 tokens, bfloat16" in out


def test_the_screen_says_what_is_in_the_model(traced, gpt, capsys):
    out = answer(capsys)
    assert capsys.readouterr().err == ""
    assert f"Model      {GPT}:build_model"[:60] in out
    num_forward = sum(op.phase == "forward" for op in gpt.graph.nodes)
    assert f"{len(gpt.graph.nodes):,}: {num_forward:,} forward, " in out
    # 8 blocks of 24 * 64 * 64**2 + 4 * 64**2 * 64 FLOPs and a head of 2 * 64 * 64 * 128.
    # Attention is 8 * 4 * 64**3 of them, and hides all pairs above the diagonal.
    hidden = 8 * 4 * 64 * 64 * 64 * (63 / 128) / 59.8e6
    assert f"forward   59.8 MFLOP   934 kFLOP    {hidden:.1%}" in out
    assert row(out, "none")[:2] == format_bytes(gpt.saved_bytes).split()
    for way in ("selective", "full"):
        assert row(out, way)[:2] == format_bytes(retained_bytes(gpt.graph, way)).split()
    assert row(out, "full")[-2:] == format_flop(recompute_flop(gpt.graph, "full")).split()
    assert "Blocks: 8 A\n" in out
    assert "A             8 transformer.h.0   50 k 7.34 MFLOP 15.2 MFLOP" in out
    assert "Cuts: 9 places for a stage to end" in out
    assert "after prologue to transformer.h.7 9 x 16.0 KiB 1 x 64 x 64" in out
    assert "both stages hold it: transformer.wte.weight" in out
    assert "Units, in order" not in out


@pytest.mark.parametrize("columns", [80, 120])
def test_it_fits_the_terminal(traced, monkeypatch, capsys, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    out = answer(capsys, "-v")
    assert max(map(len, out.splitlines())) <= columns
    assert not any(line.endswith(" ") for line in out.splitlines())


@pytest.mark.parametrize("verbose", [[], ["-v"]])
def test_long_names_are_folded_and_not_cut(workplace, capsys, verbose):
    name = "a_name_of_a_module_that_is_much_longer_than_names_of_modules_are"
    (workplace / "long.py").write_text(
        "from torch import nn, randn\n"
        "class Model(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        f"        self.{name} = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))\n"
        f"    def forward(self, x): return self.{name}(x)\n"
        "build_model = Model\n"
        "def example_batch(size): return randn(size, 2), None\n"
        "def loss_fn(output, targets): return output.float().mean()\n"
    )
    assert run(["trace", "long.py", *verbose]) == 0
    out = capsys.readouterr().out
    assert "\u2026" not in out
    assert max(map(len, out.splitlines())) <= 80


def test_verbose_lists_every_unit(traced, gpt, capsys):
    out = answer(capsys, "-v")
    units = out[out.index("Units, in order") : out.index("Cuts:")].splitlines()
    assert len([line for line in units if line]) == 2 + len(gpt.units)


def test_a_model_without_blocks_says_why_it_has_no_cuts(workplace, capsys):
    (workplace / "line.py").write_text(
        "from torch import nn, randn\n"
        "def build_model(): return nn.Linear(3, 5)\n"
        "def example_batch(size): return randn(size, 3), None\n"
        "def loss_fn(output, targets): return output.float().mean()\n"
    )
    assert run(["trace", "line.py"]) == 0
    out = capsys.readouterr().out
    assert "Blocks: none, the model is one piece" in out
    assert "Cuts: none\nThe model has no" in out
    assert "per sample" not in out


def test_json_has_the_figures_and_nothing_else_on_stdout(traced, gpt, capsys):
    document = json.loads(answer(capsys, "--json"))
    assert capsys.readouterr().err == ""
    assert document["model"].endswith("gpt.py:build_model")
    assert document["parameters"] == document["trainable_parameters"] == gpt.num_parameters
    assert document["forward_flop"] == gpt.forward_flop
    assert document["backward_flop"] == gpt.backward_flop
    assert document["forward_masked_flop"] == 8 * 4 * 64 * (64 * 63 // 2)
    assert document["backward_masked_flop"] == phase_masked_flop(gpt.graph, Phase.BACKWARD)
    assert document["saved_bytes"] == gpt.saved_bytes
    assert document["recomputation"] == {
        way: {
            "saved_bytes": retained_bytes(gpt.graph, way),
            "recompute_flop": recompute_flop(gpt.graph, way),
        }
        for way in ("none", "selective", "full")
    }
    assert (
        document["ops"]
        == document["forward_ops"] + document["backward_ops"]
        == len(gpt.graph.nodes)
    )
    assert (document["microbatch_size"], document["tokens_per_sample"]) == (1, 64)
    assert document["dtype"] == "float32"
    assert document["block_pattern"] == "8 A"
    assert document["warnings"] == []


def test_blocks_and_the_rest_of_a_json_make_up_the_whole(traced, capsys):
    document = json.loads(answer(capsys, "--json"))
    (block,) = document["blocks"]
    assert (block["kind"], block["count"], block["first"]) == ("A", 8, "transformer.h.0")
    assert [each["kind"] for each in document["outside"]] == ["prologue", "epilogue"]
    for key in ("forward_flop", "backward_flop", "saved_bytes", "ops"):
        outside = sum(each[key] for each in document["outside"])
        assert outside + block["count"] * block[key] == document[key]
    # The embedding is read by both of them.
    outside = sum(each["parameters"] for each in document["outside"])
    assert outside + 8 * block["parameters"] == document["parameters"] + 128 * 64


def test_cuts_of_a_json_say_what_crosses(traced, capsys):
    document = json.loads(answer(capsys, "--json"))
    assert [cut["after"] for cut in document["cuts"]] == [
        "prologue",
        *(f"transformer.h.{block}" for block in range(8)),
    ]
    first = document["cuts"][0]
    assert first["bytes"] == 64 * 64 * 4
    assert first["tensors"] == [
        {"shape": [1, 64, 64], "dtype": "float32", "bytes": 64 * 64 * 4, "made_by": None}
    ]
    assert first["tied_parameters"] == ["transformer.wte.weight"]


def test_equal_traces_give_equal_json(capsys):
    first = answer(capsys, "--json", "--seq-len", "16")
    assert answer(capsys, "--json", "--seq-len", "16") == first


def test_operators_are_written_as_csv(traced, gpt, workplace, capsys):
    out = answer(capsys, "--ops", "tables/ops.csv")
    assert "Wrote tables/ops.csv\n" in out
    with (workplace / "tables" / "ops.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["id"]) for row in rows] == [op.id for op in gpt.graph.nodes]
    assert [row["name"] for row in rows] == [op.name for op in gpt.graph.nodes]
    assert sum(int(row["flop"]) for row in rows) == gpt.forward_flop + gpt.backward_flop


def test_a_picture_is_written_for_graphviz(traced, workplace, capsys):
    answer(capsys, "--dot", "gpt.dot")
    text = (workplace / "gpt.dot").read_text()
    assert text.startswith("digraph")


def test_with_json_the_files_are_told_on_stderr(traced, workplace, capsys):
    assert run(["trace", GPT, "--json", "--ops", "a.csv", "--dot", "a.dot"]) == 0
    assert capsys.readouterr().err == "wrote a.csv, a.dot\n"
    assert run(["trace", GPT, "--json", "--ops", "a.csv", "--force", "-q"]) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("option", ["--ops", "--dot"])
def test_no_file_is_overwritten_unasked(traced, workplace, capsys, option):
    (workplace / "mine").write_text("mine")
    assert run(["trace", GPT, option, "mine"]) == 2
    assert f"error: {option} mine: the file exists" in capsys.readouterr().err
    assert traced == []
    assert (workplace / "mine").read_text() == "mine"
    assert run(["trace", GPT, option, "mine", "--force"]) == 0
    assert (workplace / "mine").read_text() != "mine"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--ops", "/proc/none/ops.csv"], "--ops /proc/none/ops.csv: the file cannot be written"),
        (["--dot", "."], "--dot .: this is a folder"),
        (["--ops", "same", "--dot", "same"], "both are the same file"),
        (["--microbatch-size", "0"], "--microbatch-size 0: it must be at least 1"),
        (["--microbatch-size", "one"], "'one' is not a valid integer"),
        (["--seq-len", "-1"], "--seq-len -1: it must be at least 1"),
        (["--dtype", "bf16"], "Did you mean bfloat16?"),
        (["--gpus", "8"], "No such option"),
        (["other.py"], "unexpected extra argument"),
    ],
)
def test_bad_requests_are_refused_before_the_trace(traced, capsys, arguments, words):
    assert run(["trace", GPT, *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert words in err
    assert traced == []


def test_a_missing_model_is_a_usage_error(capsys):
    assert run(["trace"]) == 2
    assert "Missing argument 'MODEL'" in capsys.readouterr().err


def test_a_model_that_fails_is_told_without_a_traceback(workplace, capsys):
    (workplace / "broken.py").write_text(
        "def build_model(): raise ValueError('no')\ndef example_batch(size): pass\n"
    )
    assert run(["trace", "broken.py", "--ops", "ops.csv"]) == ModelError.exit_code
    out, err = capsys.readouterr()
    assert out == ""
    assert "ValueError: no" in err
    assert "Traceback" not in err
    assert not (workplace / "ops.csv").exists()


def test_warnings_go_to_stderr_unless_quiet(workplace, capsys):
    (workplace / "branch.py").write_text(
        "from torch import nn, randn\n"
        "class Model(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)\n"
        "    def forward(self, x): return self.a(x)\n"
        "build_model = Model\n"
        "def example_batch(size): return randn(size, 2), None\n"
        "def loss_fn(output, targets): return output.float().mean()\n"
    )
    assert run(["trace", "branch.py", "--json"]) == 0
    out, err = capsys.readouterr()
    assert err.startswith("warning: 2 of 4 parameters are read by no operator (b.weight, b.bias)")
    assert len(json.loads(out)["warnings"]) == 1
    assert run(["trace", "branch.py", "--json", "-q"]) == 0
    assert capsys.readouterr().err == ""


def shown(events, **options):
    """What a terminal of 80 columns gets of some events."""
    stream = StringIO()
    console = Console(file=stream, force_terminal=True, width=80, color_system=None)
    with ProgressLine(console, verbose=False, quiet=False, **options) as line:
        for event in events:
            line(event)
            if line._bar:
                line._bar._progress.refresh()
    return stream.getvalue(), line.phases_s


def test_on_a_terminal_a_bar_shows_how_far_it_is():
    text, phases_s = shown(
        [
            PhaseEvent(phase="load", elapsed_s=None),
            PhaseEvent(phase="load", elapsed_s=1.5),
            PhaseEvent(phase="trace", elapsed_s=None),
            PhaseEvent(phase="trace", elapsed_s=None, fraction=0.5, detail="forward, 9 operators"),
            PhaseEvent(phase="trace", elapsed_s=2.5),
        ]
    )
    assert "load ..." in text
    assert "trace ..." in text
    assert "forward, 9 operators" in text
    assert "\u2501" * 10 in text
    assert phases_s == {"load": 1.5, "trace": 2.5}
    # The line is taken away at the end.
    assert text.rstrip("\n").endswith(("\x1b[2K", "\x1b[?25h"))


def test_elsewhere_there_is_no_bar():
    stream = StringIO()
    with ProgressLine(Console(file=stream), verbose=False, quiet=False) as line:
        line(PhaseEvent(phase="trace", elapsed_s=None, fraction=0.5))
    assert stream.getvalue() == ""
