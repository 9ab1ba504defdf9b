"""The direction of imports, and the budget of lines, read from the source.

An import counts wherever it stands: at the top, inside a function, for types alone.
"""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import networkx as nx
import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "planner"

LAYERS = (
    (
        *("collector", "errors", "progress", "rendering", "runtime", "units", "version"),
        "vocabulary",
    ),
    ("picture", "request", "solver"),
    ("hardware",),
    ("framework",),
    ("graph",),
    ("strategy",),
    ("cost",),
    ("plan", "profiling"),
    ("pricing",),
    ("search",),
    ("codegen", "export", "report", "validation"),
    ("checking", "fix_rules"),
    ("request_rules", "result", "trace_result", "model_argument"),
    ("planning",),
    ("questions",),
    ("api", "questions_api", "trace_api"),
    ("cli",),
)
"""A module imports from its own line and the lines above; those of one line are strangers."""

ORDERS = {
    "runtime": (
        (
            *("collectives", "float64_groups", "layout", "meshes", "processes", "stored_order"),
            "trees",
        ),
        ("answers", "failures", "mesh_order", "promise", "traced_collectives", "unread"),
        (
            *("checkpoint_folders", "context_mesh", "lost_ranks", "model", "op_call", "options"),
            *("device_kinds", "own_experts", "split_tensor", "streams"),
        ),
        ("data", "experts", "fused", "known_data", "log", "op_rules", "part"),
        (
            "anatomy",
            "checkpoint",
            "chunked_loss",
            "compiled",
            "first_weights",
            "float8",
            "host_inputs",
            "loaders",
            "module_edge",
            "offload",
            "product_rules",
            "scalars",
            "unused",
        ),
        ("gradients", "recompute"),
        ("split_attention", "split_decisions", "split_part", "stand_ins"),
        ("split_compiled", "split_ops"),
        (
            *("expert_mesh", "parallel_model", "split_chunks", "split_float8", "split_loss"),
            "stages",
        ),
        ("pipeline", "plan_folder", "shared_parameters", "tensor_parallel"),
        ("dry_run",),
    ),
    "hardware": (
        ("spec",),
        ("fields", "mixed", "nodes", "sharing", "topology"),
        ("host_fields", "measured_fields"),
        ("profiles",),
        ("runs", "template"),
    ),
    "framework": (
        ("spec",),
        ("constants", "profiles"),
        ("calibration",),
        ("script",),
    ),
    "graph": (
        ("operator_graph", "torch_private"),
        ("analysis", "loading"),
        ("recording",),
        ("division",),
        ("block_twice", "trace"),
        ("trial",),
        ("sizes",),
    ),
    "graph/analysis": (
        (
            *("causal", "changed_buffers", "float8", "loss_rows", "patterns", "retained"),
            "trace_warnings",
        ),
        ("lifetimes", "shared", "summary"),
        ("ops",),
    ),
    "graph/division": (
        ("blocks", "cuts", "structure"),
        ("units",),
    ),
    "graph/loading": (
        ("batch", "fixed_seed", "hf_model", "hints", "own_place", "packed_sequences"),
        ("source", "user_module"),
        ("stray_tensors", "user_code"),
        ("devices",),
        ("build",),
        ("loaded_model",),
        ("hf_load",),
        ("load",),
    ),
    "graph/recording": (
        ("recording", "autocast", "choices", "flex_attention", "grouped_heads", "meta_results"),
        ("held_names",),
        ("kernels", "work"),
        ("assumed", "refusals", "value_table"),
        ("known_values", "gradients", "raw_op"),
        ("data_reads", "operand_forms", "real_tensors", "replaced_buffers", "saved_tensors"),
        ("recorder",),
        ("trace_progress",),
    ),
    "graph/sizes": (
        ("grown",),
        ("affine",),
        ("fewer_blocks",),
        ("family",),
        ("lengths",),
    ),
    "strategy": (
        ("mesh", "parameter_readers", "sharding", "unit_context", "zero_bubble"),
        ("schedules",),
        ("conversion", "moments", "nodes", "placement"),
        ("configuration",),
        ("propagation",),
        ("module_strategies",),
        ("expert_strategies", "inner_strategies", "region_strategies"),
        ("problem",),
        ("inside_context",),
        ("facts",),
        ("rules",),
        ("fixed_rules", "parameter_rules"),
    ),
    "cost": (
        (
            "breakdown",
            "collective",
            "op",
            "pattern_search",
            "selective",
            "stage_cuts",
            "stage_seconds",
            "zero_bubble",
        ),
        ("attention", "held_stage", "pipeline", "unit_work", "work"),
        ("memory_pieces", "shared_cores"),
        ("divided_backward", "fusion", "liveness", "tables", "unit_comm", "unit_parameters"),
        ("float8",),
        ("chunked_work", "node_pricing"),
        ("device_fit", "unit_extraction", "unit_pricing"),
        ("link_budget", "link_fit", "model_units", "offload"),
        ("receive_buffers", "sections"),
        ("calibrate", "fsdp_root", "gradient_times", "stage_links"),
        ("transients",),
        ("gathered",),
        ("stage_memory",),
        ("unit_traffic",),
        ("data_parallel",),
        ("stage_costs",),
        ("kinds",),
        ("step",),
    ),
    "profiling": (
        ("clock", "host_model", "live_bytes", "points"),
        ("collective_timing", "kernels"),
        ("host_terms", "kernel_cases"),
        ("cpu_cases", "dispatch_terms", "residue"),
        ("rank",),
        ("node",),
        ("op_fit",),
        ("host_fit", "links"),
        ("document",),
        ("fitted", "measure"),
    ),
    "plan": (
        ("types",),
        ("devices", "layout_rules", "record"),
        ("price_rules",),
        ("draws", "model_rules"),
        ("verify",),
        ("serialize",),
        ("saved_model",),
    ),
    "pricing": (
        ("graph_sizes",),
        ("choice", "sharding_ilp"),
        ("instructions",),
        ("unit_layouts",),
        ("least_work",),
        ("model_pricing",),
        ("op_rows",),
        ("module_rows", "reprice", "traffic_rows"),
    ),
    "search": (
        (
            *("bounds", "even_cut", "fronts", "knapsack", "linear_program", "orders", "rank_units"),
            "search_request",
        ),
        ("columns", "knapsack_bounds", "run_ends"),
        ("knapsack_choices",),
        ("many_kinds",),
        ("column_maker", "stage_ilp"),
        ("configuration_search",),
        ("column_tables",),
        ("rank_totals",),
        (
            "combination",
            "decode",
            "first_choices",
            "fitting",
            "holdings",
            "incumbents",
            "interleaving",
            "least_memory",
            "mixed_search",
            "prospects",
            "reach",
            "relaxation",
            "stage_program",
        ),
        ("partition",),
        ("refusals", "space", "stage_branching", "stage_problem", "stage_relaxation"),
        ("mixed_space",),
        ("visits",),
        ("decide", "framework_estimate", "infeasible", "rule_of_thumb"),
        ("run",),
    ),
    "codegen": (
        ("source", "undrawn"),
        ("expected", "model_files", "reads"),
        ("imports", "splits"),
        ("emit", "kernels"),
        ("divided_trial", "split_trial"),
        ("trial",),
        ("files",),
    ),
    "export": (
        ("facts", "terms"),
        ("own_models",),
        ("accelerate", "deepspeed", "launch", "megatron", "torchtitan"),
        ("export",),
    ),
    "checking": (
        ("failures", "fake_world", "forks", "known_reads", "script_rank"),
        ("trained", "workers"),
        ("share", "watch"),
        ("check", "rank_run", "share_run"),
        ("document",),
    ),
    "validation": (
        ("plot", "scoring", "types"),
        ("pricing", "reading"),
        ("compare", "fitting", "validate"),
        ("view",),
    ),
    "validation/reading": (
        ("assume", "cell_words", "torch_trace"),
        ("cells",),
        ("contradictions",),
        ("table",),
        ("logs",),
        ("source",),
    ),
    "validation/pricing": (
        ("models", "plan_case"),
        ("cases", "workbook"),
        ("case_price",),
        ("predict",),
    ),
    "validation/scoring": (
        ("metrics",),
        ("ranking",),
        ("scores",),
    ),
    "questions": (
        ("objectives", "values"),
        ("sweep",),
        ("explain", "sweep_table", "sweep_view"),
        ("document", "explain_view", "sweep_plot"),
        ("sweep_result",),
    ),
    "report": (
        ("figures", "folder"),
        ("dot", "trace_document", "trace_view"),
        ("document", "tables", "words"),
        ("view",),
        ("html",),
    ),
    "cli": (
        ("option_types", "pieces", "progress_bar"),
        ("options", "terminal"),
        (
            "check_screen",
            "compare_screen",
            "explain_screen",
            "plan_screen",
            "profiles",
            "sweep_screen",
            "trace_screen",
            "validate_screen",
        ),
        ("check_command", "compare_command", "explain_command", "export_command"),
        ("plan_runner", "profile_runner", "sweep_runner", "trace_runner", "validate_runner"),
        ("profile_command", "sweep_command"),
        ("commands",),
        ("main",),
    ),
}
"""The same inside folders: their files and folders, line by line."""

LEVELS = {name: level for level, names in enumerate(LAYERS) for name in names}

ONLY_IN = {
    "pulp": {"solver.py"},
    "click": {"cli"},
    "rich": {"cli"},
    "pandas": {
        *("graph/analysis/ops.py", "report", "result.py", "trace_result.py"),
        *("questions/sweep_result.py", "questions/sweep_table.py"),
        "cost/calibrate.py",
        "validation",
    },
    "torch": {
        *("checking", "graph", "profiling", "runtime"),
        *("api.py", "model_argument.py", "questions_api.py", "trace_api.py"),
        *(
            "codegen/divided_trial.py",
            "codegen/kernels.py",
            "codegen/split_trial.py",
            "codegen/trial.py",
            "codegen/undrawn.py",
            "validation/pricing/models.py",
        ),
    },
    "matplotlib": {"picture.py", "questions/sweep_plot.py", "validation/plot.py"},
    "transformers": {"graph/loading/hf_load.py", "graph/loading/hf_model.py"},
}
"""Heavy or narrow libraries, and the folders or files that may import them."""

MOST_LINES = 400
MOST_FUNCTION_LINES = 50
USUAL_FUNCTION_LINES = 25
"""What nine functions of ten stay within."""

LONG_FUNCTIONS = {
    ("api.py", "plan"): "signature and documentation of the public call",
    ("api.py", "estimate"): "signature and documentation of the public call",
    ("questions_api.py", "sweep"): "signature and documentation of the public call",
}

FILES = sorted(PACKAGE.rglob("*.py"))

FOLDERS = sorted({file.parent for file in FILES})


def name_of(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def module_of(file: Path) -> str:
    parts = ("planner", *file.relative_to(PACKAGE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(file): file for file in FILES}


def layer_of(file: Path) -> str:
    return file.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_modules(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if node.level:
                relative = file.parent == PACKAGE / "runtime" and node.level == 1
                assert relative, f"{name_of(file)} has a relative import"
                module = f"planner.runtime.{module}"
            for name in [f"{module}.{alias.name}" for alias in node.names]:
                yield name if name in MODULES or module == "planner" else module


@cache
def import_graph() -> "nx.DiGraph[str]":
    """All modules of the package, with an edge from each to those that it imports."""
    graph = nx.DiGraph()
    for module, file in MODULES.items():
        graph.add_node(module)
        graph.add_edges_from((module, each) for each in imported_modules(file) if each in MODULES)
    return graph


def parts_of(folder: Path) -> "nx.DiGraph[str]":
    """The files and folders of a folder, with an edge from each to those that it imports from."""
    graph, prefix = nx.DiGraph(), f"{module_of(folder / '__init__.py')}."

    def part(module: str) -> str:
        return module.removeprefix(prefix).partition(".")[0]

    inside = [module for module in MODULES if module.startswith(prefix)]
    graph.add_nodes_from(map(part, inside))
    for module, imported in import_graph().subgraph(inside).edges:
        if part(module) != part(imported):
            graph.add_edge(part(module), part(imported))
    return graph


def circles(graph: "nx.DiGraph[str]") -> list[list[str]]:
    return [sorted(each) for each in nx.strongly_connected_components(graph) if len(each) > 1]


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


def test_no_circle_of_imports_is_left():
    assert len(import_graph()) == len(FILES)
    assert import_graph().number_of_edges() > len(FILES)
    assert circles(import_graph()) == []


@pytest.mark.parametrize("folder", FOLDERS, ids=name_of)
def test_the_parts_of_a_folder_stand_in_no_circle(folder):
    assert circles(parts_of(folder)) == []


def test_every_folder_of_several_parts_has_an_order():
    several = {name_of(folder) for folder in FOLDERS if len(parts_of(folder)) > 2}
    assert set(ORDERS) == several - {"."}


@pytest.mark.parametrize("name", ORDERS)
def test_the_parts_of_a_folder_keep_their_order(name):
    parts = parts_of(PACKAGE / name)
    level = {part: level for level, line in enumerate(ORDERS[name]) for part in line}
    assert set(level) == set(parts), f"{name}: ORDERS and the folder hold different parts"
    for part, imported in parts.edges:
        assert level[imported] < level[part], f"{name}: {part} imports {imported}"


def test_an_import_counts_wherever_it_stands(tmp_path):
    file = tmp_path / "module.py"
    file.write_text(
        "from typing import TYPE_CHECKING\n"
        "from planner.graph import trace\n"
        "if TYPE_CHECKING:\n"
        "    from planner.units import GIB\n"
        "def f():\n"
        "    import planner.errors\n"
    )
    assert set(imported_modules(file)) == {
        *("typing", "planner.graph.trace", "planner.units", "planner.errors")
    }


def test_the_runtime_imports_nothing_else_of_ours():
    """It is copied beside scripts."""
    for file in (PACKAGE / "runtime").iterdir():
        if file.suffix == ".py":
            ours = [name for name in imported_modules(file) if name.startswith("planner.")]
            assert all(name.startswith("planner.runtime.") for name in ours)


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
    assert text.count("\n") <= MOST_LINES, f"{name} asks for a better cut"
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if (name, node.name) in LONG_FUNCTIONS:
            continue
        length = (node.end_lineno or node.lineno) - node.lineno + 1
        assert length <= MOST_FUNCTION_LINES, f"{name}: {node.name} has {length} lines"


def test_most_functions_are_shorter():
    lengths = [
        (node.end_lineno or node.lineno) - node.lineno + 1
        for file in FILES
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    short = sum(length <= USUAL_FUNCTION_LINES for length in lengths)
    assert short >= 0.9 * len(lengths)


def test_the_exceptions_are_still_needed():
    for name, function in LONG_FUNCTIONS:
        tree = ast.parse((PACKAGE / name).read_text(encoding="utf-8"))
        lengths = [
            (node.end_lineno or node.lineno) - node.lineno + 1
            for node in ast.walk(tree)
            if isinstance(node, ast.FunctionDef) and node.name == function
        ]
        assert max(lengths) > MOST_FUNCTION_LINES
