"""The command line around a search that is played by a hand-made outcome."""

import json
import os
import subprocess
import sys

import pytest
from plan_factory import make_outcome, make_plan, make_record

from planner import api
from planner.cli.main import run
from planner.cli.plan_runner import model_folder_name
from planner.errors import CodegenError, InfeasiblePlanError, ModelError, SolverError
from planner.plan.types import ModelRef
from planner.progress import timed_phase
from planner.report.document import plan_json


@pytest.fixture(autouse=True)
def workplace(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    return tmp_path


@pytest.fixture
def searched(monkeypatch):
    """Requests that reached the search, which answers with a hand-made outcome."""
    requests = []

    def search(request, model_object, *, estimate_only, progress):
        with timed_phase(progress, "search"):
            requests.append((request, estimate_only))
        return make_record(model="model.py")

    monkeypatch.setattr(api, "plan_record", search)
    return requests


@pytest.fixture
def failing(monkeypatch):
    """Makes the search raise."""

    def fail_with(error):
        def search(*args, **kwargs):
            raise error

        monkeypatch.setattr(api, "plan_record", search)

    return fail_with


def written(folder):
    return sorted(file.name for file in folder.iterdir())


def test_the_main_job_prints_the_answer_and_writes_the_folder(searched, workplace, capsys):
    assert run(["model.py", "--gpus", "8"]) == 0
    out, err = capsys.readouterr()
    assert "Plan         dp_shard 4, tp 2" in out
    assert "torchrun --standalone --nproc-per-node 8 plans/model/train.py" in out
    assert err == ""
    assert written(workplace / "plans" / "model") == [
        "launch",
        "memory.csv",
        "model",
        "ops.csv",
        "plan.json",
        "report.csv",
        "requirements.txt",
        "runtime",
        "train.py",
    ]
    (request, estimate_only) = searched[0]
    assert request.gpus == 8
    assert not estimate_only


def test_options_reach_the_request(searched):
    arguments = (
        "--gpus 16 --cluster a100-80gb-sxm --gpus-per-node 4 --global-batch-size 128 "
        "--seq-len 512 --dtype float32 --fix tp=2 --fix schedule=1F1B --top 3 --time-limit 5 "
        "--hint model.py:57=true --hint model.py:60=0.5"
    )
    assert run(["model.py", *arguments.split()]) == 0
    (request, _) = searched[0]
    assert request.model == "model.py"
    assert request.cluster == "a100-80gb-sxm"
    assert request.gpus_per_node == 4
    assert request.global_batch_size == 128
    assert request.seq_len == 512
    assert request.dtype == "float32"
    assert request.fixed == (("tp", "2"), ("schedule", "1F1B"))
    assert request.hints == (("model.py:57", True), ("model.py:60", 0.5))
    assert request.top == 3
    assert request.time_limit_s == 5.0


def test_options_may_come_before_the_model(searched):
    assert run(["--gpus", "8", "model.py", "--json"]) == 0
    assert searched[0][0].model == "model.py"


def test_json_is_plan_json_and_nothing_else(searched, workplace, capsys):
    assert run(["model.py", "--gpus", "8", "--json"]) == 0
    out, err = capsys.readouterr()
    assert out == plan_json(make_record(model="model.py"))
    assert err == ""
    assert list(workplace.iterdir()) == []


def test_json_with_out_writes_the_same(searched, workplace, capsys):
    assert run(["model.py", "--gpus", "8", "--json", "--out", "here"]) == 0
    out, err = capsys.readouterr()
    assert (workplace / "here" / "plan.json").read_text() == out
    assert err == "wrote here\n"


def test_estimate_has_the_same_output_and_writes_on_demand(searched, workplace, capsys):
    arguments = ["estimate", "model.py", "--gpus", "8", "--fix", "tp=2"]
    assert run(arguments) == 0
    assert "Plan         dp_shard 4, tp 2" in capsys.readouterr().out
    assert list(workplace.iterdir()) == []
    assert searched[0][1]
    assert run([*arguments, "--out", "here"]) == 0
    assert "train.py" in written(workplace / "here")


def test_a_second_run_takes_a_free_folder(searched, workplace, capsys):
    assert run(["model.py", "--gpus", "8"]) == 0
    assert run(["model.py", "--gpus", "8"]) == 0
    assert "plans/model-2/" in capsys.readouterr().out
    assert run(["model.py", "--gpus", "8", "--force"]) == 0
    assert written(workplace / "plans") == ["model", "model-2"]


def test_a_folder_with_files_is_refused_before_the_search(searched, workplace, capsys):
    (workplace / "notes.txt").write_text("mine")
    assert run(["model.py", "--gpus", "8", "--out", "."]) == 2
    assert "not empty" in capsys.readouterr().err
    assert searched == []
    assert written(workplace) == ["notes.txt"]
    assert run(["model.py", "--gpus", "8", "--out", ".", "--force"]) == 0
    assert (workplace / "notes.txt").read_text() == "mine"


def test_a_folder_that_cannot_be_written_is_refused_before_the_search(searched, capsys):
    assert run(["model.py", "--gpus", "8", "--out", "/proc/plan"]) == 2
    assert "cannot be written" in capsys.readouterr().err
    assert searched == []


def test_verbose_tells_the_seconds_of_each_phase(searched, capsys):
    assert run(["model.py", "--gpus", "8", "-v", "--json"]) == 0
    assert capsys.readouterr().err.startswith("search ")


def test_warnings_go_to_stderr_unless_quiet(searched, capsys):
    arguments = ["model.py", "--gpus", "8", "--json", "--fix", "schedule=1F1B"]
    assert run(arguments) == 0
    assert "warning: --fix schedule=1F1B has no effect" in capsys.readouterr().err
    assert run([*arguments, "-q"]) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ModelError("model.py raised ValueError: no", hint="Try it alone."), 5),
        (SolverError("no plan within 1 s", hint="Give --time-limit 60."), 4),
        (InfeasiblePlanError("short by 3 GiB on stage 0", hint="--gpus 16 would fit"), 3),
    ],
)
def test_errors_are_told_without_a_traceback(failing, workplace, capsys, error, code):
    failing(error)
    assert run(["model.py", "--gpus", "8"]) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err == f"error: {error.args[0]}\n{error.hint}\n"
    assert list(workplace.iterdir()) == []


def test_an_infeasible_request_has_a_json_answer(failing, capsys):
    failing(InfeasiblePlanError("short on stage 0", hint="more", shortfall_bytes_by_stage={0: 3}))
    assert run(["model.py", "--gpus", "8", "--json"]) == 3
    document = json.loads(capsys.readouterr().out)
    assert document["error"]["shortfall_bytes_by_stage"] == {"0": 3}


def test_our_own_bug_is_called_so_and_shows_more_on_demand(failing, capsys):
    failing(KeyError("layers.3"))
    assert run(["model.py", "--gpus", "8"]) == 1
    err = capsys.readouterr().err
    assert "bug of the planner" in err
    assert "Traceback" not in err
    assert run(["model.py", "--gpus", "8", "-vv"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_ctrl_c_is_clean(failing, workplace, capsys):
    failing(KeyboardInterrupt())
    assert run(["model.py", "--gpus", "8"]) == 130
    assert capsys.readouterr() == ("", "error: interrupted\n")
    assert list(workplace.iterdir()) == []


def test_a_plan_without_a_script_leaves_nothing(monkeypatch, workplace, capsys):
    unnamed = ModelRef(file=None, module=None, factory="", seq_len=None, num_parameters=0)
    record = make_record(make_outcome(make_plan(model=unnamed)))
    monkeypatch.setattr(api, "plan_record", lambda *args, **kwargs: record)
    assert run(["model.py", "--gpus", "8"]) == CodegenError.exit_code
    assert capsys.readouterr().out == ""
    assert not (workplace / "plans").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "Examples:"),
        (["model.py"], "Missing option '--gpus'"),
        (["--gpus", "8"], "Missing argument 'MODEL'"),
        (["model.py", "--gpus", "eight"], "'eight' is not a valid integer"),
        (["model.py", "--gpus", "8", "--gpuss", "8"], "No such option"),
        (["model.py", "other.py", "--gpus", "8"], "unexpected extra argument"),
        (["model.py", "--gpus", "0"], "--gpus 0: it must be at least 1"),
        (["model.py", "--gpus", "8", "--fix", "tp=x"], "tp is a whole number"),
        (["model.py", "--gpus", "8", "--fix", "tq=2"], "Did you mean tp?"),
        (["model.py", "--gpus", "8", "--fix", "tp=3"], "What divides 8"),
        (["estimate", "model.py", "--gpus", "8", "--fix", "tp=3"], "What divides 8"),
        (["model.py", "--gpus", "8", "--dtype", "int8"], "Choices: bfloat16"),
        (["model.py", "--gpus", "8", "--hint", "a.py=1"], "is no hint"),
        (["model.py", "--gpus", "8", "--hints", "none.toml"], "cannot read the hints none.toml"),
        (["estimate", "model.py"], "See plan estimate --help."),
        (["profiles", "explain"], "No such command"),
    ],
)
def test_bad_usage_ends_with_2_and_a_way_out(searched, workplace, capsys, arguments, words):
    assert run(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert words in err
    assert "Traceback" not in err
    assert searched == []
    assert list(workplace.iterdir()) == []


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("examples/gpt.py", "gpt"),
        ("gpt.py:build_model", "gpt"),
        ("examples/llama.py:llama_8b", "llama_8b"),
        ("zoo.models.llama", "llama"),
        ("zoo.llama:tiny", "tiny"),
        ("hf/Llama-3/config.json", "Llama-3"),
        ("hf/Llama-3.1-8B", "Llama-3-1-8B"),
        ("small.json", "small"),
        ("..", "model"),
    ],
)
def test_the_folder_is_named_after_the_model(workplace, model, name):
    (workplace / "hf" / "Llama-3.1-8B").mkdir(parents=True)
    assert model_folder_name(model) == name


@pytest.mark.skipif(os.name != "posix", reason="pipes")
def test_a_reader_that_goes_away_is_no_error():
    code = (
        "import sys\n"
        "from planner.cli.main import run\n"
        "sys.stdin.read()\n"
        "sys.exit(run(['profiles']))\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        process.stdout.close()
        process.stdin.close()
        assert process.stderr.read() == b""
        assert process.wait(timeout=60) == 141
