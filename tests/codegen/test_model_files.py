"""The user's code beside a script: copies and pins."""

import hashlib
from importlib.metadata import version

import pytest

from planner.codegen.model_files import model_files
from planner.errors import CodegenError
from planner.plan.types import ModelRef

SOURCES = {
    "net.py": "import json\nimport torch\nimport layers.norm\nfrom tools import lazy, half\n",
    "layers/norm.py": "import jinja2\n",
    "layers/unused.py": "",
    "tools/__init__.py": "from . import deep\n",
    "tools/deep.py": "def f():\n    from tools.lazy import g\n",
    "tools/lazy.py": "g = 1\n",
    "other.py": "",
}


@pytest.fixture
def sources(tmp_path):
    for name, text in SOURCES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def ref(*, file=None, module=None):
    path = None if file is None else str(file)
    return ModelRef(file=path, module=module, factory="build_model", seq_len=None, num_parameters=0)


def test_a_file_comes_with_what_it_imports_from_its_folder(sources):
    found = model_files(ref(file=sources / "net.py"), None)
    names = ("layers/norm.py", "net.py", "tools/__init__.py", "tools/deep.py", "tools/lazy.py")
    assert found.copies == {f"model/{name}": SOURCES[name] for name in names}
    digest = hashlib.sha256(SOURCES["net.py"].encode()).hexdigest()
    assert f"model/net.py {digest}" in found.provenance
    assert found.arguments == ('file=Path(__file__).resolve().parent / "model/net.py"',)


def test_installed_packages_that_it_imports_are_pinned(sources):
    lines = model_files(ref(file=sources / "net.py"), None).requirements().splitlines()
    torch = version("torch").partition("+")[0]
    assert lines[1:] == [f"Jinja2=={version('jinja2')}", f"torch=={torch}"]


def test_a_module_of_no_distribution_is_copied(sources, monkeypatch):
    monkeypatch.chdir(sources)
    found = model_files(ref(module="layers.norm"), None)
    assert set(found.copies) == {"model/layers/norm.py"}
    assert found.arguments[0] == 'module="layers.norm"'
    assert found.arguments[1].startswith("folder=")
    with pytest.raises(CodegenError, match="not found any more"):
        model_files(ref(module="nowhere.norm"), None)


def test_an_installed_module_is_pinned():
    found = model_files(ref(module="jinja2.environment"), None)
    assert (found.copies, found.arguments) == ({}, ('module="jinja2.environment"',))
    assert f"Jinja2=={version('jinja2')}" in found.requirements()


def test_code_that_looks_around_runs_from_its_own_place_while_that_is_there(sources):
    file = sources / "net.py"
    file.write_text("DATA = __file__\n")
    found = model_files(ref(file=file), sources / "plans" / "net")
    assert found.arguments[1] == 'original=Path(__file__).resolve().parent / "../../net.py"'
    assert "model/net.py" in found.copies


def test_what_cannot_be_copied_is_refused(sources):
    (sources / "net.py").write_text("import runtime\n")
    (sources / "runtime.py").write_text("")
    with pytest.raises(CodegenError, match="a package of that name") as caught:
        model_files(ref(file=sources / "net.py"), None)
    assert "another name" in caught.value.hint
    with pytest.raises(CodegenError, match=r"gone\.py, which cannot be read"):
        model_files(ref(file=sources / "gone.py"), None)
