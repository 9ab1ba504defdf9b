"""The picture of a model, read back by what it says and, where there is one, by Graphviz."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from torch import nn

import planner
from planner.report.dot import dot_text

EXAMPLES = Path(__file__).parents[2] / "examples"
NODE = re.compile(r'^\s*(op\d+|blocks\d+|value\d+) \[label="((?:[^"\\]|\\.)*)"', re.M)
EDGE = re.compile(r'^  (\w+) -> (\w+)(?: \[label="([^"]*)"\])?;$', re.M)


def nodes_of(text):
    return {name: label.split("\\n") for name, label in NODE.findall(text)}


def edges_of(text):
    return {(source, target): label for source, target, label in EDGE.findall(text)}


@pytest.fixture(scope="module")
def llama():
    result = planner.trace(str(EXAMPLES / "llama.py"), dtype="float32")
    return result, dot_text(result.graph)


def test_blocks_that_repeat_are_one_box(llama):
    result, text = llama
    nodes = nodes_of(text)
    boxes = {name: label for name, label in nodes.items() if name.startswith("blocks")}
    assert list(boxes.values()) == [["layers.1 to layers.7", "7 A"]]
    products = [label for label in nodes.values() if "mm" in label]
    assert [label[0] for label in products] == ["wq", "wk", "wv", "wo", "w1", "w3", "w2", "output"]
    assert text.count("subgraph cluster_") == 3 + 2
    assert 'label="layers.0 (A): ' in text
    assert str(result.block_pattern) == "8 A"


def test_every_edge_joins_drawn_nodes_and_crossings_say_their_bytes(llama):
    _, text = llama
    nodes, edges = nodes_of(text), edges_of(text)
    assert {end for edge in edges for end in edge} <= set(nodes)
    (box,) = (name for name in nodes if name.startswith("blocks"))
    (into,) = (label for (_, target), label in edges.items() if target == box)
    (out,) = (label for (source, _), label in edges.items() if source == box)
    assert into == out == "16.0 KiB"


def test_the_loss_is_reached_from_the_input(llama):
    _, text = llama
    nodes, edges = nodes_of(text), edges_of(text)
    (start,) = (name for name, label in nodes.items() if label[0] == "input0")
    reached, grown = {start}, True
    while grown:
        found = {target for source, target in edges if source in reached} - reached
        reached, grown = reached | found, bool(found)
    (loss,) = (name for name, label in nodes.items() if "nll_loss_forward" in label)
    assert loss in reached


def test_different_blocks_are_all_drawn():
    result = planner.trace(
        nn.Sequential(*(nn.Linear(a, b) for a, b in ((4, 8), (8, 8), (8, 8), (8, 4), (4, 8)))),
        example_batch=lambda size: (torch.randn(size, 4), None),
        loss_fn=lambda output, _: output.float().mean(),
    )
    boxes = [
        label for name, label in nodes_of(dot_text(result.graph)).items() if name[:6] == "blocks"
    ]
    assert boxes == [["2", "B"]]


def test_names_are_quoted():
    def build():
        return nn.Linear(3, 5)

    build.__name__ = 'a "b" \\c'
    result = planner.trace(
        build,
        example_batch=lambda size: (torch.randn(size, 3), None),
        loss_fn=lambda output, _: output.float().mean(),
    )
    assert r'label="a \"b\" \\c: ' in dot_text(result.graph)


@pytest.mark.skipif(shutil.which("dot") is None, reason="Graphviz is not installed")
def test_graphviz_draws_it(llama):
    done = subprocess.run(["dot", "-Tsvg"], input=llama[1], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert "layers.1 to layers.7" in done.stdout
