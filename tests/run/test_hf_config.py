"""Hugging Face configs as a user plans and trains them: the command, then torchrun."""

import json
import sys

import pytest
from launch import largest_difference, run, torchrun

from planner.cli.main import run as plan
from planner.plan.serialize import load_plan

pytestmark = pytest.mark.run

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "tie_word_embeddings": True,
}
BERT = {
    "model_type": "bert",
    "architectures": ["BertForMaskedLM"],
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}


def losses(log):
    return [json.loads(line)["loss"] for line in log.read_text().splitlines()]


@pytest.mark.parametrize(("config", "fix"), [(LLAMA, "pp=2"), (BERT, "tp=2")])
def test_a_config_trains_on_two_processes_as_on_one(config, fix, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    arguments = f"--gpus 2 --cluster cpu --dtype float32 --global-batch-size 8 --fix {fix}"
    assert plan(["model", *arguments.split(), "--out", "planned"]) == 0
    assert f"model/config.json:{config['architectures'][0]}" in capsys.readouterr().out
    if fix == "tp=2":
        # The head's bias has two names, and is split.
        modules = [each for group in load_plan("planned").shardings for each in group.modules]
        assert ("cls.predictions.decoder", "column") in {(m.module, m.style) for m in modules}

    # The folder is all that a run needs.
    folder = (tmp_path / "planned").rename(tmp_path / "moved")
    (tmp_path / "model" / "config.json").unlink()
    assert {"train.py", "runtime", "model.py", "config.json"} <= {
        file.name for file in folder.iterdir()
    }
    script = [str(folder / "train.py"), "--steps", "3", "--log-file"]
    run([sys.executable, *torchrun(2), *script, str(tmp_path / "run.jsonl")], timeout_s=120)
    reference = [*script, str(tmp_path / "reference.jsonl"), "--reference"]
    run([sys.executable, *reference], timeout_s=120)
    expected = losses(tmp_path / "reference.jsonl")
    assert len(expected) == 3
    assert largest_difference(losses(tmp_path / "run.jsonl"), expected) < 1e-5
