"""The text of an emitted script."""

import ast
import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest
from crossing_models import T5, UNET
from example_plans import EXAMPLES, GPT, LLAMA, MLP, Crossing, make_plan, module_sharding

from planner.codegen.emit import emit_script
from planner.codegen.files import RUNTIME_FOLDER, script_files
from planner.codegen.model_files import CONFIG_MODEL_FILE
from planner.errors import CodegenError
from planner.graph.operator_graph import DataRead
from planner.hardware.mixed import joined
from planner.hardware.profiles import load_cluster
from planner.plan.serialize import plan_digest
from planner.runtime.log import Expected
from planner.strategy.mesh import ParallelDegrees
from planner.strategy.sharding import UnitSharding

FOLDER = Path("/plans/run1")
HOOKED = dataclasses.replace(GPT, file=EXAMPLES.parent / "tests" / "run" / "hooked_gpt.py")
NOT_COPIED = ("__init__.py", "plan_folder.py")


def constants_of(script):
    """Return the source of each constant by its name."""
    nodes = [node for node in ast.parse(script).body if isinstance(node, ast.Assign)]
    return {node.targets[0].id: ast.unparse(node.value) for node in nodes}


READ = DataRead(file="gpt.py", line=1, answers=(4.0,), repeats=(2,))


def changed(plan, **changes):
    return dataclasses.replace(plan, **changes)


def with_groups(plan):
    return changed(plan, model=changed(plan.model, has_groups=True))


def test_script_holds_what_the_plan_predicts():
    plan = make_plan(GPT, pp=2, tp=2)
    cluster = load_cluster("h100-sxm", gpus=4)
    expected = constants_of(emit_script(plan, cluster=cluster, folder=FOLDER))["EXPECTED"]
    found = Expected(**{each.arg: ast.literal_eval(each.value) for each in arguments_of(expected)})
    fullest = max(plan.memory_by_rank, key=lambda memory: memory.total_bytes)
    assert found == Expected(
        plan=plan_digest(plan),
        dtype=plan.dtype,
        step_time_s=plan.costs.step_time_s,
        peak_memory_bytes=fullest.total_bytes,
        reserve_bytes=fullest.reserve_bytes,
        items_per_step=plan.tokens_per_step,
        item="tokens",
        flop_per_step=plan.flop_per_step,
        peak_flop_per_s=4 * cluster.device.peak_flop_per_s.get(plan.dtype),
    )
    alone = constants_of(emit_script(plan, folder=FOLDER))["EXPECTED"]
    assert "peak_flop_per_s" not in alone
    assert "item='samples'" in constants_of(emit_script(make_plan(MLP), folder=FOLDER))["EXPECTED"]


def arguments_of(call):
    return ast.parse(call, mode="eval").body.keywords


@pytest.mark.parametrize(("case", "has_tokens"), [(GPT, True), (MLP, False)])
def test_the_batch_has_tokens_where_samples_have(case, has_tokens):
    plan = make_plan(case)
    batch = f"Batch      {plan.global_batch_size} samples"
    script = emit_script(plan, folder=FOLDER)
    assert f"{batch} (" in script if has_tokens else f"{batch}: " in script


def test_script_holds_the_plan():
    plan = make_plan(GPT, pp=2, dp_shard=2, tp=2, sequence_parallel=True, global_batch_size=32)
    constants = constants_of(emit_script(plan, folder=FOLDER))
    assert constants["MESH"] == "{'pp': 2, 'dp_shard': 2, 'tp': 2}"
    assert constants["STAGES"] == "(StageSpec(0, 0, 4), StageSpec(1, 4, 8))"
    assert constants["SCHEDULE"] == "'1F1B'"
    assert constants["NUM_MICROBATCHES"] == "8"
    assert constants["SEQUENCE_DIM"] == "1"


def test_repeated_blocks_are_written_once():
    script = emit_script(make_plan(GPT, tp=2), folder=FOLDER)
    assert script.count('"attn.c_attn"') == 1
    constants = constants_of(script)
    assert constants["BLOCKS"] == "tuple((f'transformer.h.{i}' for i in range(8)))"
    assert constants["BLOCK_SHARDINGS"].startswith("((range(8), (ModuleSharding('attn.c_attn'")


def test_stages_cut_anywhere_between_units():
    script = emit_script(make_plan(GPT, pp=4, cuts=(1, 3, 9)), folder=FOLDER)
    assert constants_of(script)["STAGES"] == (
        "(StageSpec(0, 0, 0), StageSpec(1, 0, 2), StageSpec(2, 2, 8), StageSpec(3, 8, 8))"
    )


def test_stages_say_what_they_receive_beside_the_stream():
    constants = constants_of(emit_script(make_plan(UNET, pp=4, cuts=(3, 7, 13)), folder=FOLDER))
    assert constants["BLOCKS"] == (
        "(*(f'down.{i}' for i in range(5)), 'middle.0', 'middle.1', *(f'up.{i}' for i in range(6)))"
    )
    assert constants["STAGES"] == (
        "(StageSpec(0, 0, 2), StageSpec(1, 2, 6, receives=(('conv_in', 0), ('down.0', 0),"
        " ('time', 0), ('pooled', 0)), stream_output=('down.1', 0)), StageSpec(2, 6, 12,"
        " receives=(('conv_in', 0), ('down.0', 0), ('down.1', 0), ('down.2', 0), ('down.3', 0),"
        " ('down.4', 0), ('time', 0), ('pooled', 0))), StageSpec(3, 12, 13,"
        " receives=(('conv_in', 0), ('time', 0), ('pooled', 0))))"
    )


def test_more_than_the_stream_is_refused_under_sequence_parallelism():
    plan = make_plan(T5, pp=2, tp=2)
    assert "receives=" in emit_script(plan, folder=FOLDER)
    with pytest.raises(CodegenError, match="output of encoder_norm beside its first block") as it:
        emit_script(changed(plan, sequence_parallel=True))
    assert "sequence_parallel=false" in it.value.hint
    both = Crossing(stream_output=T5.crossings[4].carried[0])
    case = changed(T5, crossings={4: both})
    with pytest.raises(CodegenError, match="encoder_norm"):
        emit_script(make_plan(case, pp=2, tp=2, sequence_parallel=True))


def test_recomputation_is_written_per_block():
    words = ("full", "full", "none", "selective", "none", "none", "none", "none")
    script = emit_script(make_plan(GPT, recompute=words), folder=FOLDER)
    assert (
        "('full',) * 2 + ('none',) + ('selective',) + ('none',) * 4"
        in (constants_of(script)["RECOMPUTE"])
    )


def test_plain_layout_has_no_word_of_tensor_parallelism():
    script = emit_script(make_plan(MLP, dp_shard=2), folder=FOLDER)
    assert "SHARDING" not in script
    assert "SEQUENCE_DIM" not in script
    assert "TensorParallel" not in script


ONE_NODE, TWO_NODES = (load_cluster("h100-sxm", gpus=gpus) for gpus in (2, 16))


def plain(case=GPT, *, cluster=ONE_NODE, has_scalars=False, has_groups=False):
    """Names of the runtime's modules beside a data-parallel script, and lines of it and them."""
    plan = make_plan(case, dp_shard=2)
    plan = changed(plan, model=changed(plan.model, has_scalars=has_scalars, has_groups=has_groups))
    files = script_files(plan, cluster=cluster, folder=FOLDER)
    own = {n: text for n, text in files.items() if n.startswith("runtime/") or n == "train.py"}
    names = {Path(name).stem for name in own}
    return names - {"train", "__init__"}, sum(text.count("\n") for text in own.values())


@pytest.mark.parametrize(("name", "is_gpu"), [("h100-sxm", True), ("cpu", False)])
def test_memory_of_gpus_is_kept_in_segments_that_grow(name, is_gpu):
    """torch reads it when it is imported; what a user has set stays, by either name."""
    cluster = load_cluster(name, gpus=2)
    script = emit_script(make_plan(GPT, dp_shard=2), cluster=cluster, folder=FOLDER)
    assert ("PYTORCH_ALLOC_CONF" in script) == is_gpu
    if is_gpu:
        head = script.partition("import torch\n")[0]
        for given, kept in (
            ({}, "expandable_segments:True"),
            ({"PYTORCH_CUDA_ALLOC_CONF": "old"}, "old"),
            ({"PYTORCH_ALLOC_CONF": "new", "PYTORCH_CUDA_ALLOC_CONF": "old"}, "new"),
        ):
            code = f"{head}\nprint(os.environ['PYTORCH_ALLOC_CONF'])"
            done = subprocess.run([sys.executable, "-c", code], env=given, capture_output=True)
            assert done.stdout.decode().strip() == kept


def test_a_plain_layout_gets_what_it_runs_and_not_more():
    names, num_lines = plain()
    assert names == {
        *("checkpoint", "checkpoint_folders", "data", "log", "model", "options"),
        *("parallel_model", "part", "processes", "trees"),
    }
    assert num_lines <= 1766


def test_modules_go_along_where_the_model_or_the_devices_need_them():
    least, _ = plain()
    assert plain(HOOKED)[0] - least == {"loaders"}
    assert plain(has_scalars=True)[0] - least == {"scalars", "stored_order", "meshes"}
    assert plain(has_groups=True)[0] - least == {"float64_groups"}
    assert plain(cluster=TWO_NODES)[0] - least == {"lost_ranks"}


def test_equal_plans_give_equal_bytes():
    plans = [make_plan(LLAMA, dp_shard=4, tp=2) for _ in range(2)]
    assert emit_script(plans[0], folder=FOLDER) == emit_script(plans[1], folder=FOLDER)


def test_every_line_is_short_ascii_and_without_trailing_blanks():
    plans = (
        make_plan(GPT, pp=2, tp=2, sequence_parallel=True),
        make_plan(UNET, pp=4, cuts=(3, 7, 13)),
    )
    for plan in plans:
        script = emit_script(plan, folder=FOLDER)
        assert script.isascii()
        lines = script.splitlines()
        assert max(map(len, lines)) <= 100
        assert all(line == line.rstrip() for line in lines)


def test_module_by_import_name():
    plan = make_plan(GPT)
    model = changed(plan.model, file=None, module="torch.nn", factory="Linear")
    assert 'module="torch.nn", factory="Linear"' in emit_script(changed(plan, model=model))


def test_a_config_lies_beside_the_script_with_a_model_file_that_reads_it(tmp_path):
    config = tmp_path / "llama" / "config.json"
    config.parent.mkdir()
    config.write_text('{"model_type": "llama"}')
    plan = make_plan(GPT)
    plan = changed(plan, model=changed(plan.model, file=str(config)))
    for folder in (tmp_path / "plans" / "llama", None):
        files = script_files(plan, folder=folder)
        own = {name for name in files if not name.startswith("runtime/")}
        assert own == {"train.py", "model.py", "config.json", "requirements.txt"}
        assert files["config.json"] == '{"model_type": "llama"}'
        assert files["model.py"] == CONFIG_MODEL_FILE.read_text()
        assert 'file=Path(__file__).resolve().parent / "model.py"' in files["train.py"]
        assert files["train.py"].startswith(f'"""Train {config} on')
    config.unlink()
    with pytest.raises(CodegenError, match=r"config\.json, which cannot be read"):
        script_files(plan)


def test_the_model_file_of_a_config_needs_torch_and_transformers_only():
    tree = ast.parse(CONFIG_MODEL_FILE.read_text())
    imported = {
        name.name.split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for name in node.names
    } | {
        str(node.module).split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
    }
    assert imported - set(sys.stdlib_module_names) == {"torch", "transformers"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"degrees": ParallelDegrees(pp=2), "schedule": "ZB-1p"},
            "schedule 'ZB-1p'",
        ),
    ],
)
def test_what_the_script_cannot_do_is_refused(changes, message):
    with pytest.raises(CodegenError, match=message) as caught:
        emit_script(changed(make_plan(GPT), **changes))
    assert caught.value.hint


def test_model_passed_as_an_object_is_refused():
    plan = make_plan(GPT)
    model = changed(plan.model, file=None)
    with pytest.raises(CodegenError, match="passed as an object"):
        emit_script(changed(plan, model=model))


def test_recomputing_the_epilogue_is_refused():
    plan = make_plan(GPT)
    stage = changed(plan.stages[0], activation_checkpointing=("none",) * 9 + ("full",))
    with pytest.raises(CodegenError, match="epilogue is to be recomputed"):
        emit_script(changed(plan, stages=(stage,)))


NORMS_ON_PARTS = UnitSharding(
    axis="cp",
    units=(1,),
    modules=(
        module_sharding("ln_1", "on_part", input_layout="Shard(1)", output_layout="Shard(1)"),
    ),
)


EXPERTS_APART = UnitSharding(
    axis="ep", units=(1,), modules=(module_sharding("ln_1", "experts", split=(("weight", 0),)),)
)


@pytest.mark.parametrize(
    ("degrees", "watches", "drops"),
    [
        ({"tp": 2}, False, False),  # ranks of tp share samples
        ({"dp_shard": 2}, True, True),
        ({"dp_replicate": 2, "tp": 2}, True, True),
    ],
)
def test_ranks_that_may_use_other_parameters_are_watched(degrees, watches, drops):
    plan = changed(make_plan(GPT, **degrees), data_reads=(READ,))
    script = emit_script(plan, folder=FOLDER)
    assert ("UnusedParameters(parts, mesh)" in script) == watches
    assert ("unused.leave_out" in script) == drops
    assert "Unused" not in emit_script(changed(plan, data_reads=()), folder=FOLDER)


def on_host(plan):
    """A plan whose states lie in host memory."""
    none = dict.fromkeys(("params_bytes", "grads_bytes", "optimizer_bytes"), 0)
    memories = tuple(changed(memory, **none) for memory in plan.memory_by_rank)
    return changed(plan, cpu_offload=True, host_bytes_by_rank=(1,), memory_by_rank=memories)


def test_runtime_is_copied_as_it_is_and_knows_nothing_of_the_planner():
    plans = (
        make_plan(HOOKED, dp_shard=2),
        make_plan(GPT, pp=2, tp=2, sequence_parallel=True, num_parameters=2 * 10**9),
        changed(make_plan(GPT, dp_shard=2), compile=True, float8=True),
        changed(make_plan(GPT, tp=2), float8=True),
        changed(make_plan(GPT, tp=2, recompute=("full",) * 8), compile=True),
        on_host(make_plan(GPT, dp_shard=2)),
        changed(
            make_plan(GPT, dp_shard=2, recompute=("full",) * 8),
            activation_offload=True,
            host_bytes_by_rank=(1,),
        ),
        changed(make_plan(GPT, dp_shard=2, cp=2), shardings=(NORMS_ON_PARTS,)),
        changed(make_plan(GPT, dp_shard=2, ep=2), shardings=(EXPERTS_APART,)),
        changed(make_plan(GPT, dp_shard=2), data_reads=(READ,)),
        with_groups(make_plan(GPT, dp_shard=2)),
    )
    files = {name: t for each in plans for name, t in script_files(each, folder=FOLDER).items()}
    kinds = joined([load_cluster("h100-sxm", gpus=2), load_cluster("a100-80gb-sxm", gpus=2)])
    mixed = changed(make_plan(GPT, pp=2, dp_shard=2), device_order=("a100-80gb-sxm", "h100-sxm"))
    files |= script_files(mixed, cluster=kinds, folder=FOLDER)
    assert '    ("a100-80gb-sxm", 2),\n    ("h100-sxm", 2),\n' in files["train.py"]
    for name in {*RUNTIME_FOLDER.glob("*.py")} - {RUNTIME_FOLDER / each for each in NOT_COPIED}:
        assert files[f"runtime/{name.name}"] == name.read_text()
    imports = [
        name.name if isinstance(node, ast.Import) else str(node.module)
        for file, text in files.items()
        if file.endswith(".py")
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in node.names
    ]
    assert not any(name.startswith("planner") for name in imports)
