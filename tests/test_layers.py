"""The direction of imports, and the budget of lines, read from the source."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "planner"

LAYERS = (
    ("errors", "units", "progress"),
    ("request",),
    ("hardware",),
    ("framework",),
    ("graph",),
    ("strategy",),
    ("cost",),
    ("plan",),
    ("search",),
    ("codegen", "export", "report", "validation"),
    ("request_rules", "result", "model_argument"),
    ("api", "trace_api"),
    ("cli",),
)
"""A module imports from its own line and the lines above; those of one line are strangers."""

LEVELS = {name: level for level, names in enumerate(LAYERS) for name in names}

ONLY_IN = {
    "pulp": {"search/solver.py"},
    "click": {"cli"},
    "rich": {"cli"},
    "pandas": {
        *("graph/operator_graph.py", "graph/analysis/tables.py", "report", "result.py"),
        "cost/calibrate.py",
        "validation",
    },
    "torch": {
        *("graph", "codegen/runtime", "api.py", "model_argument.py", "trace_api.py"),
        "validation/pricing/models.py",
    },
    "matplotlib": {"validation/plot.py"},
    "transformers": {"graph/loading/hf_load.py", "graph/loading/hf_model.py"},
}
"""Heavy or narrow libraries, and the folders or files that may import them."""

MOST_LINES = 400
MOST_FUNCTION_LINES = 50

LONG_FILES = {"codegen/runtime/parallel.py": "copied beside every script as one file"}
LONG_FUNCTIONS = {
    ("api.py", "plan"): "signature and documentation of the public call",
    ("api.py", "estimate"): "signature and documentation of the public call",
}

FILES = sorted(PACKAGE.rglob("*.py"))


def name_of(file: Path) -> str:
    return file.relative_to(PACKAGE).as_posix()


def layer_of(file: Path) -> str:
    return file.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_modules(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name_of(file)} has a relative import"
            module = node.module or ""
            if module == "planner":
                yield from (f"planner.{alias.name}" for alias in node.names)
            else:
                yield module


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_imports_go_up_only(file):
    layer = layer_of(file)
    if layer == "__init__":
        return
    assert layer in LEVELS, f"{name_of(file)}: give the new layer a place in LAYERS"
    for module in imported_modules(file):
        parts = module.split(".")
        if parts[0] != "planner" or len(parts) == 1 or parts[1] == layer:
            continue
        assert LEVELS[parts[1]] < LEVELS[layer], f"{name_of(file)} imports {module}"


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_narrow_libraries_stay_in_their_place(file):
    name = name_of(file)
    for module in imported_modules(file):
        places = ONLY_IN.get(module.split(".")[0])
        if places is None:
            continue
        assert any(name == place or name.startswith(f"{place}/") for place in places), (
            f"{name} imports {module}, which belongs into {sorted(places)}"
        )


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_files_and_functions_stay_short(file):
    name = name_of(file)
    text = file.read_text(encoding="utf-8")
    if name not in LONG_FILES:
        assert text.count("\n") <= MOST_LINES, f"{name} asks for a better cut"
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if name in LONG_FILES or (name, node.name) in LONG_FUNCTIONS:
            continue
        length = (node.end_lineno or node.lineno) - node.lineno + 1
        assert length <= MOST_FUNCTION_LINES, f"{name}: {node.name} has {length} lines"


def test_the_exceptions_are_still_needed():
    for name in LONG_FILES:
        assert (PACKAGE / name).read_text(encoding="utf-8").count("\n") > MOST_LINES
    for name, function in LONG_FUNCTIONS:
        tree = ast.parse((PACKAGE / name).read_text(encoding="utf-8"))
        lengths = [
            (node.end_lineno or node.lineno) - node.lineno + 1
            for node in ast.walk(tree)
            if isinstance(node, ast.FunctionDef) and node.name == function
        ]
        assert max(lengths) > MOST_FUNCTION_LINES
