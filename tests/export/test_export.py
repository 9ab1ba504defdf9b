"""Plans as files of other frameworks: what they say, what they lose, what the targets read."""

import json
import shutil
import subprocess
import sys
import types
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from plan_factory import NUM_BLOCKS, make_cluster, make_outcome, make_plan, make_record

from planner.cli.main import run
from planner.errors import CodegenError
from planner.export.export import TARGETS, export_plan
from planner.plan.serialize import SavedPlan
from planner.strategy.mesh import ParallelDegrees
from planner.version import VERSION

DATA_PARALLEL = make_plan(ParallelDegrees(dp_shard=8), policy="full")
PIPELINE = make_plan(
    ParallelDegrees(dp_shard=2, pp=4), microbatch_size=4, policy="full", reshard_after_forward=False
)
INTERLEAVED = make_plan(ParallelDegrees(dp_replicate=2, pp=2, tp=2), virtual_stages=2)
OFFLOADED = replace(DATA_PARALLEL, cpu_offload=True)
TENSOR = make_plan(ParallelDegrees(dp_replicate=2, dp_shard=2, tp=2))


def saved(plan, *, gpus_per_node=8):
    record = make_record(make_outcome(plan))
    return SavedPlan(
        file=Path("plan.json"),
        digest="0123456789abcdef",
        planner_version=VERSION,
        plan=plan,
        cluster=make_cluster(plan.degrees.world_size, gpus_per_node),
        model=record.model,
        request=record.request,
        traffic=(),
    )


def with_modes(plan, *modes):
    """The plan with these recomputed of the first blocks, none of the others."""
    left = list(modes)
    stages = tuple(
        replace(
            stage,
            activation_checkpointing=tuple(
                left.pop(0) if left and "layers" in plan.units[unit] else "none"
                for unit in range(stage.first_unit, stage.end_unit)
            ),
        )
        for stage in plan.stages
    )
    return replace(plan, stages=stages)


@pytest.mark.parametrize("name", TARGETS)
def test_compiled_blocks_are_said(name):
    plan = replace(DATA_PARALLEL, compile=True)
    if name == "torchtitan":
        assert "the plan's price is with blocks compiled" in " ".join(text_of(plan, name).split())
    else:
        with pytest.raises(CodegenError, match="blocks run by torch"):
            text_of(plan, name)


def test_states_in_host_memory_are_said(monkeypatch):
    zero = json.loads(text_of(OFFLOADED, "deepspeed"))["zero_optimization"]
    place = {"device": "cpu", "pin_memory": True}
    assert zero == {"stage": 3, "offload_optimizer": place, "offload_param": place}
    kept = replace(OFFLOADED, reshard_after_forward=False)
    zero = json.loads(text_of(kept, "deepspeed"))["zero_optimization"]
    assert zero == {"stage": 1, "offload_optimizer": place}
    assert yaml.safe_load(text_of(OFFLOADED, "accelerate"))["fsdp_config"]["fsdp_offload_params"]
    assert titan_config(text_of(OFFLOADED, "torchtitan"), 12, monkeypatch)
    assert "training.enable_cpu_offload = True" in text_of(OFFLOADED, "torchtitan")
    with pytest.raises(CodegenError, match="optimiser states in host memory"):
        text_of(OFFLOADED, "megatron")
    for name in ("deepspeed", "accelerate", "torchtitan"):
        assert "offload" not in text_of(DATA_PARALLEL, name)


@pytest.mark.parametrize("name", TARGETS)
def test_inputs_in_host_memory_are_lost_where_some_lie_there(name):
    on_host = {"activation_offload": True, "host_bytes_by_rank": (2**30,)}
    with pytest.raises(CodegenError, match="recomputed in full in host memory"):
        text_of(replace(DATA_PARALLEL, **on_host), name)
    kept = replace(make_plan(ParallelDegrees(dp_shard=8), policy="none"), **on_host)
    assert "host memory" not in text_of(kept, name, allow_lossy=True)


def text_of(plan, name, **options):
    return export_plan(saved(plan), name, **options).text


def shell_options(text):
    """The array of a Megatron file, option by option."""
    inside = text.partition("PLAN_OPTIONS=(\n")[2].partition("\n)")[0]
    return [line.strip() for line in inside.splitlines()]


def titan_config(text, layers, monkeypatch):
    """What the function of a torchtitan file makes of a bare configuration."""

    def bare():
        spec = types.SimpleNamespace(model=types.SimpleNamespace(layers=[None] * layers))
        names = ("training", "parallelism")
        return types.SimpleNamespace(
            model_spec=spec, **{name: types.SimpleNamespace() for name in names}
        )

    policies = types.SimpleNamespace(
        FullAC=types.SimpleNamespace(Config=lambda: "full"),
        SelectiveAC=types.SimpleNamespace(Config=lambda: "selective"),
    )
    trainer = types.SimpleNamespace(Trainer=types.SimpleNamespace(Config=object))
    modules = {
        **{f"torchtitan{name}": types.SimpleNamespace() for name in ("", ".distributed")},
        "torchtitan.distributed.activation_checkpoint": policies,
        "torchtitan.trainer": trainer,
        "base_of_test": types.SimpleNamespace(bare=bare),
    }
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setenv("BASE", "base_of_test:bare")
    scope = {}
    exec(compile(text, "titan_plan.py", "exec"), scope)
    return scope["planned"]()


@pytest.mark.parametrize("name", TARGETS)
def test_each_file_opens_with_its_origin_and_what_to_do(name):
    text = text_of(DATA_PARALLEL, name)
    head = " ".join(text[:900].split())
    assert f"planner {VERSION} from the plan 0123456789abcdef" in head
    assert TARGETS[name].version in head
    assert head.index("Run it:") < head.index("Check it:")
    assert text == text_of(DATA_PARALLEL, name)


def test_torchtitan_gets_the_layout_of_a_pipeline(monkeypatch):
    config = titan_config(text_of(PIPELINE, "torchtitan"), NUM_BLOCKS, monkeypatch)
    assert vars(config.training) == {
        "local_batch_size": 32,
        "global_batch_size": 64,
        "seq_len": 1024,
        "mixed_precision_param": "bfloat16",
        "disable_cuda_graphs": True,
    }
    parallelism = config.parallelism
    assert parallelism.pipeline_parallel_degree == 4
    assert parallelism.pipeline_parallel_schedule == "1F1B"
    assert parallelism.pipeline_parallel_microbatch_size == 4
    assert parallelism.data_parallel_shard_degree == 2
    assert parallelism.fsdp_reshard_after_forward == "never"
    parts = parallelism.module_fqns_per_model_part
    assert len(parts) == 4
    assert parts[0][:2] == ["tok_embeddings", "layers.0"]
    assert parts[-1][-3:] == [f"layers.{NUM_BLOCKS - 1}", "norm", "lm_head"]
    assert sum(len(part) for part in parts) == NUM_BLOCKS + 3
    assert config.activation_checkpoint == "full"


def test_torchtitan_accumulates_without_a_pipeline(monkeypatch):
    config = titan_config(text_of(TENSOR, "torchtitan"), NUM_BLOCKS, monkeypatch)
    assert config.training.local_batch_size == 2
    assert config.parallelism.data_parallel_replicate_degree == 2
    assert config.parallelism.data_parallel_shard_degree == 2
    assert config.parallelism.tensor_parallel_degree == 2
    assert config.parallelism.enable_sequence_parallel is True
    assert config.activation_checkpoint is None


def test_a_configuration_of_another_model_is_refused(monkeypatch):
    with pytest.raises(ValueError, match="for 12 blocks, the model of BASE has 6"):
        titan_config(text_of(TENSOR, "torchtitan"), 6, monkeypatch)


def test_megatron_gets_uneven_stages_and_recomputation():
    options = shell_options(text_of(PIPELINE, "megatron"))
    assert "--pipeline-model-parallel-size 4" in options
    assert "--micro-batch-size 4" in options
    assert "--global-batch-size 64" in options
    assert "--pipeline-model-parallel-layout 'Et*3|t*3|t*3|t*3L'" in options
    assert "--use-distributed-optimizer" in options
    assert "--use-megatron-fsdp" not in options
    assert "--recompute-granularity full" in options
    assert "--recompute-num-layers 3" in options


def test_megatron_gets_virtual_stages_in_model_order():
    options = shell_options(text_of(INTERLEAVED, "megatron"))
    (layout,) = (option for option in options if "layout" in option)
    stages = layout.partition("'")[2].rstrip("'").split("|")
    assert len(stages) == 4
    assert stages[0].startswith("E")
    assert stages[-1].endswith("L")
    assert sum(int(stage.strip("EL").removeprefix("t*")) for stage in stages) == NUM_BLOCKS
    assert "--sequence-parallel" in options
    assert not any("optimizer" in option for option in options)


def test_megatron_shards_by_its_fsdp_where_there_is_no_pipeline():
    text = text_of(TENSOR, "megatron")
    options = shell_options(text)
    assert "--data-parallel-sharding-strategy optim_grads_params" in options
    assert "--num-distributed-optimizer-instances 2" in options
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in text
    replicated = make_plan(ParallelDegrees(dp_replicate=4, tp=2))
    assert "CUDA_DEVICE_MAX_CONNECTIONS=1" in text_of(replicated, "megatron")


@pytest.mark.parametrize(
    ("plan", "stage"),
    [
        (DATA_PARALLEL, 3),
        (make_plan(ParallelDegrees(dp_replicate=8)), 0),
        (make_plan(ParallelDegrees(dp_shard=8), reshard_after_forward=False), 1),
        (
            make_plan(
                ParallelDegrees(dp_shard=8),
                reshard_after_forward=False,
                microbatch_size=8,
            ),
            2,
        ),
    ],
)
def test_deepspeed_gets_the_stage_that_sends_what_the_plan_does(plan, stage):
    document = json.loads(text_of(plan, "deepspeed"))
    assert next(iter(document)) == "_planner"
    assert document["zero_optimization"] == {"stage": stage}
    assert document["train_batch_size"] == (
        document["train_micro_batch_size_per_gpu"] * document["gradient_accumulation_steps"] * 8
    )


def test_accelerate_gets_hybrid_sharding():
    plan = make_plan(ParallelDegrees(dp_replicate=2, dp_shard=4), policy="full")
    document = yaml.safe_load(export_plan(saved(plan, gpus_per_node=4), "accelerate").text)
    assert document["distributed_type"] == "FSDP"
    assert document["mixed_precision"] == "bf16"
    assert (document["num_machines"], document["num_processes"]) == (2, 8)
    assert document["fsdp_config"]["fsdp_version"] == 2
    assert document["fsdp_config"]["fsdp_reshard_after_forward"] is True
    assert document["fsdp_config"]["fsdp_activation_checkpointing"] is True
    assert document["parallelism_config"] == {
        "parallelism_config_dp_replicate_size": 2,
        "parallelism_config_dp_shard_size": 4,
        "parallelism_config_tp_size": 1,
    }
    replicated = make_plan(ParallelDegrees(dp_replicate=8))
    document = yaml.safe_load(text_of(replicated, "accelerate"))
    assert document["distributed_type"] == "MULTI_GPU"
    assert "parallelism_config" not in document


MIXED = with_modes(DATA_PARALLEL, "full", "full", "selective")
WHOLE = replace(make_plan(ParallelDegrees(dp_shard=4, tp=2)), shardings=())
LOSSES = [
    (MIXED, "torchtitan", "of 12 blocks 2 in full and 1 selectively"),
    (MIXED, "megatron", "selective recomputation of 1 blocks"),
    (MIXED, "deepspeed", "of 12 blocks 2 in full and 1 selectively"),
    (MIXED, "accelerate", "of 12 blocks 2 in full and 1 selectively"),
    (with_modes(PIPELINE, "full"), "megatron", "by stage 1, 0 x 3"),
    (replace(PIPELINE, reshard_after_forward=True), "megatron", "ZeRO-3 over 2 ranks beside 4"),
    (PIPELINE, "deepspeed", "4 pipeline stages of 3 x 4 blocks, 1F1B"),
    (TENSOR, "deepspeed", "2 replicas of 2 ranks"),
    (TENSOR, "deepspeed", "ZeRO-3 over 2 ranks beside 2 tensor-parallel ranks"),
    (TENSOR, "accelerate", "the stream split over the sequence on 2 ranks"),
    *((WHOLE, name, "12") for name in TARGETS),
    *((replace(DATA_PARALLEL, dtype="float64"), name, "float64") for name in TARGETS),
]


@pytest.mark.parametrize(("plan", "name", "words"), LOSSES)
def test_what_is_lost_is_listed_and_refused(plan, name, words):
    with pytest.raises(CodegenError, match="cannot express all of the plan") as refusal:
        export_plan(saved(plan), name)
    assert refusal.value.exit_code == 7
    assert words in str(refusal.value)
    exported = export_plan(saved(plan), name, allow_lossy=True)
    for loss in exported.losses:
        assert loss.instead.split()[0] in exported.text
    assert "Not expressed" in exported.text


@pytest.mark.parametrize("name", TARGETS)
def test_another_order_of_the_mesh_is_lost(name):
    plan = replace(
        make_plan(ParallelDegrees(dp_replicate=2, dp_shard=4)),
        mesh_order=("pp", "dp_shard", "dp_replicate", "cp", "tp"),
    )
    text = text_of(plan, name, allow_lossy=True)
    assert "ranks in the order dp_shard around dp_replicate" in text


def test_a_last_node_that_is_not_full_is_named_or_refused():
    plan = make_plan(ParallelDegrees(dp_shard=12), global_batch_size=12, microbatch_size=1)
    for target in ("torchtitan", "megatron", "deepspeed"):
        text = export_plan(saved(plan), target, allow_lossy=True).text
        assert "--nnodes 2 --nproc-per-node ${PROCESSES:-8} " in text
        assert "node 1: 4 processes, PROCESSES there" in text
    with pytest.raises(CodegenError, match="starts as many processes on all nodes"):
        export_plan(saved(plan), "accelerate", allow_lossy=True)


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (PIPELINE, "no pipeline axis"),
        (make_plan(ParallelDegrees(dp_replicate=4, tp=2)), "tp beside FSDP only"),
    ],
)
def test_accelerate_has_no_file_for_some_degrees(plan, words):
    with pytest.raises(CodegenError, match=words):
        export_plan(saved(plan), "accelerate", allow_lossy=True)


def test_encoder_and_decoder_are_no_model_of_megatron():
    units = ("prologue", *(f"encoder.{i}" for i in range(6)), *(f"decoder.{i}" for i in range(6)))
    plan = replace(DATA_PARALLEL, units=(*units, "epilogue"))
    for name in ("torchtitan", "megatron"):
        with pytest.raises(CodegenError, match=r"blocks of 2 lists \(encoder, decoder\)"):
            export_plan(saved(plan), name)
    assert export_plan(saved(plan), "deepspeed").losses == ()


def test_the_command_writes_a_file_once_and_says_what_is_lost(tmp_path, capsys):
    from planner.report.document import plan_json

    folder = tmp_path / "plan"
    folder.mkdir()
    (folder / "plan.json").write_text(plan_json(make_record(make_outcome(TENSOR))))
    out = tmp_path / "deepspeed.json"
    command = ["export", str(folder), "--to", "deepspeed", "--out", str(out)]
    assert run(command) == 7
    assert not out.exists()
    assert "2 replicas of 2 ranks" in capsys.readouterr().err
    assert run([*command, "--allow-lossy"]) == 0
    assert "not expressed: 2 replicas of 2 ranks" in capsys.readouterr().err
    assert json.loads(out.read_text())["tensor_parallel"] == {"autotp_size": 2}
    assert run([*command, "--allow-lossy"]) == 2
    assert run(["export", str(folder), "--to", "megatron"]) == 0
    assert capsys.readouterr().out.startswith("#!/usr/bin/env bash")
    assert run(["export", str(tmp_path / "no.json"), "--to", "megatron"]) == 2


def test_shell_files_are_sound(tmp_path):
    checker = shutil.which("shellcheck")
    for number, plan in enumerate((TENSOR, PIPELINE, INTERLEAVED)):
        for gpus_per_node in (4, 8):
            file = tmp_path / f"{number}-{gpus_per_node}.sh"
            exported = export_plan(saved(plan, gpus_per_node=gpus_per_node), "megatron")
            file.write_text(exported.text)
            subprocess.run(["bash", "-n", file], check=True)
            if checker:
                subprocess.run([checker, file], check=True)


def test_megatrons_own_parser_reads_the_stages():
    layouts = pytest.importorskip(
        "megatron.core.transformer.pipeline_parallel_layer_layout", reason="megatron-core"
    )
    for plan in (PIPELINE, INTERLEAVED):
        (layout,) = (o for o in shell_options(text_of(plan, "megatron")) if "layout" in o)
        stages = layout.partition("'")[2].rstrip("'")
        read = layouts.PipelineParallelLayerLayout(stages, plan.degrees.pp)
        read.validate_layer_layout(NUM_BLOCKS, None)
        assert read.virtual_pipeline_model_parallel_size == plan.virtual_stages


def test_deepspeeds_own_parser_reads_the_file():
    config = pytest.importorskip("deepspeed.runtime.config", reason="deepspeed")
    for plan in (DATA_PARALLEL, TENSOR, OFFLOADED):
        document = json.loads(text_of(plan, "deepspeed", allow_lossy=True))
        document["train_batch_size"] //= plan.degrees.dp
        read = config.DeepSpeedConfig(document)
        assert read.gradient_accumulation_steps == plan.num_microbatches
        assert read.zero_optimization_stage == document["zero_optimization"]["stage"]
        assert read.grad_accum_dtype == "fp32"
        tensor_parallel = document.get("tensor_parallel", {"autotp_size": 0})
        assert read.tensor_parallel_config.autotp_size == tensor_parallel["autotp_size"]


def test_accelerates_own_parser_reads_the_file(tmp_path):
    config_args = pytest.importorskip("accelerate.commands.config.config_args", reason="accelerate")
    from accelerate import ParallelismConfig
    from accelerate.commands.launch import launch_command_parser

    options = vars(launch_command_parser().parse_args(["script.py"]))
    for plan in (DATA_PARALLEL, TENSOR, OFFLOADED):
        file = tmp_path / "accelerate.yaml"
        file.write_text(text_of(plan, "accelerate", allow_lossy=True))
        read = config_args.load_config_from_file(str(file))
        assert set(read.fsdp_config) <= set(options)
        sizes = {
            name.removeprefix("parallelism_config_"): size
            for name, size in read.parallelism_config.items()
        }
        assert ParallelismConfig(**sizes).total_size == plan.degrees.world_size


def test_torchtitans_own_parser_reads_the_file(tmp_path, monkeypatch):
    manager = pytest.importorskip("torchtitan.config.manager", reason="torchtitan")
    registry = pytest.importorskip("torchtitan.models.llama3.config_registry")
    dims = pytest.importorskip("torchtitan.distributed.parallel_dims")

    def deeper():
        config = registry.llama3_debugmodel()
        config.model_spec.model.layers = config.model_spec.model.layers * 2
        return config

    monkeypatch.setattr(registry, "deeper", deeper, raising=False)
    monkeypatch.setenv("BASE", "torchtitan.models.llama3.config_registry:deeper")
    monkeypatch.syspath_prepend(tmp_path)
    for number, plan in enumerate((DATA_PARALLEL, PIPELINE, INTERLEAVED, TENSOR, OFFLOADED)):
        (tmp_path / f"titan_{number}.py").write_text(text_of(plan, "torchtitan"))
        arguments = ["--module", f"titan_{number}", "--config", "planned"]
        config = manager.ConfigManager().parse_args(arguments)
        degrees = plan.degrees
        dims.ParallelDims.from_config(config.parallelism, degrees.world_size)
        assert plan.global_batch_size % (config.training.local_batch_size * degrees.dp) == 0
        assert config.parallelism.pipeline_parallel_degree == degrees.pp
        assert config.parallelism.tensor_parallel_degree == degrees.tp
        assert config.training.global_batch_size == plan.global_batch_size
