import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from plan_factory import make_outcome, make_plan, make_record

import planner
from planner.errors import CodegenError
from planner.plan.types import ModelRef
from planner.result import PlanResult
from planner.strategy.mesh import ParallelDegrees


@pytest.fixture
def result():
    return PlanResult(make_record())


def test_the_parts_are_there(result):
    assert result.best is result.outcome.best
    assert len(result.candidates) == 4
    assert len(result.rejected) == 5
    assert result.to_json().startswith('{\n  "schema_version": 3')


def test_repr_is_one_line(result):
    assert "\n" not in repr(result)
    assert "dp_shard 4, tp 2" in repr(result)
    assert "412 ms" in repr(result)


def test_nothing_is_printed(result, capsys):
    repr(result)
    result._repr_html_()
    result.to_json()
    assert capsys.readouterr() == ("", "")


class Checker(HTMLParser):
    """Counts open tags, and keeps those that fetch or run something."""

    def __init__(self):
        super().__init__()
        self.open = []
        self.active = []

    def handle_starttag(self, tag, attrs):
        if tag in {"script", "link", "img", "iframe"}:
            self.active.append(tag)
        self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_html_is_small_whole_and_inert():
    plan = make_plan(ParallelDegrees(dp_shard=2, pp=16), virtual_stages=1)
    html = PlanResult(make_record(make_outcome(plan)))._repr_html_()
    assert len(html.encode()) < 20_000
    checker = Checker()
    checker.feed(html)
    assert not checker.open
    assert not checker.active
    assert "http" not in html
    assert "Runner-up" in html
    assert "Rule of thumb" in html
    assert "5 ranks that need no more" not in html
    assert re.search(r"\d+ ranks that need no more are in memory.csv", html)


def test_html_escapes_what_it_shows(result):
    record = replace(
        result.record, model=replace(result.record.model, name="<script>alert(1)</script>")
    )
    html = PlanResult(record)._repr_html_()
    assert "<script>" not in html
    assert "&lt;script&gt;" in html


def test_save_writes_everything_that_is_promised(result, tmp_path):
    files = result.save(tmp_path / "run1")
    assert [file.name for file in files] == [
        "plan.json",
        "train.py",
        "runtime",
        "model",
        "requirements.txt",
        "launch",
        "report.csv",
        "memory.csv",
        "ops.csv",
    ]
    assert planner.load_plan(tmp_path / "run1") == result.best
    assert (tmp_path / "run1" / "plan.json").read_text() == result.to_json()
    compile((tmp_path / "run1" / "train.py").read_text(), "train.py", "exec")


def test_a_model_object_has_no_script_but_has_its_tables(tmp_path):
    unnamed = ModelRef(file=None, module=None, factory="", seq_len=None, num_parameters=0)
    result = PlanResult(make_record(make_outcome(make_plan(model=unnamed))))
    with pytest.raises(CodegenError):
        result.save(tmp_path / "a")
    assert not (tmp_path / "a").exists()
    names = [file.name for file in result.save(tmp_path / "b", script=False)]
    assert names == ["plan.json", "report.csv", "memory.csv", "ops.csv"]
