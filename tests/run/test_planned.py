"""Scripts of plans that the search itself made: what the plan says, the script does."""

import functools
import math
import re
import sys
from collections import defaultdict
from pathlib import Path

import pytest
from launch import (
    arguments_of,
    largest_difference,
    largest_weight_difference,
    outcome_of,
    run,
    run_jobs,
    torchrun,
)

import planner
from planner.hardware.profiles import PROFILES_FOLDER

pytestmark = pytest.mark.run

EXAMPLES = Path(__file__).parents[2] / "examples"
FILES = {
    name: Path(__file__).with_name(f"{name}.py")
    for name in (
        *("joint_streams", "odd_vocabulary", "own_weights", "packed_attention", "whole_rows"),
        *("called_again", "experts_first", "grouped_attention", "lone_layers"),
        *("complex_positions", "routed_attention", "routed_experts", "scaled_loss"),
        *("shallow_gpt", "shallow_llama", "shared_keys"),
    )
}
"""Models that are no examples."""

CASES = {
    "gpt-dp_shard_4": (
        "shallow_gpt",
        {"dp_shard": 4, "reshard_after_forward": True, "microbatch_size": 2},
    ),
    "gpt-tp_4_sequence": ("shallow_gpt", {"tp": 4, "sequence_parallel": True}),
    "gpt-pp_4": ("shallow_gpt", {"pp": 4, "schedule": "1F1B"}),
    "gpt-full": ("shallow_gpt", {"tp": 2, "dp_shard": 2, "activation_checkpointing": "full"}),
    "gpt-chunks_pp_2": (
        "shallow_gpt",
        {"pp": 2, "dp_shard": 2, "schedule": "1F1B", "loss_chunks": 4},
    ),
    "gpt-chunks_full": (
        "shallow_gpt",
        {
            **{"dp_shard": 4, "loss_chunks": 16, "microbatch_size": 2},
            **{"reshard_after_forward": True, "activation_checkpointing": "full"},
        },
    ),
    "llama-stages_4": (
        "llama",
        {"pp": 2, "dp_shard": 2, "virtual_stages": 4, "loss_chunks": 8},
    ),
    "llama-hsdp": ("shallow_llama", {"dp_replicate": 2, "dp_shard": 2}),
    "llama-chunks_tp_2": (
        "shallow_llama",
        {"tp": 2, "dp_shard": 2, "sequence_parallel": True, "loss_chunks": 4},
    ),
    "llama-chunks_cp_2": (
        "shallow_llama",
        {"cp": 2, "dp_shard": 2, "microbatch_size": 2, "loss_chunks": 8},
    ),
    "llama-chunks_cp_2_tp_2_zero_bubble": (
        "shallow_llama",
        {
            **{"cp": 2, "tp": 2, "pp": 2, "sequence_parallel": False},
            **{"schedule": "ZBVZeroBubble", "loss_chunks": 4},
        },
    ),
    # a sum over the samples of a microbatch: of equally many in all
    "scaled_loss-cp_2": ("scaled_loss", {"cp": 2, "dp_shard": 2, "microbatch_size": 4}),
    "scaled_loss-chunks_cp_2_tp_2": (
        "scaled_loss",
        {"cp": 2, "tp": 2, "loss_chunks": 4, "microbatch_size": 4},
    ),
    "odd_vocabulary-chunks_tp_2": ("odd_vocabulary", {"tp": 2, "pp": 2, "loss_chunks": 2}),
    "routed_attention-chunks_cp_2_ep_2": (
        "routed_attention",
        {"cp": 2, "ep": 2, "microbatch_size": 2, "loss_chunks": 4},
    ),
    "llama-tp_4": ("shallow_llama", {"tp": 4, "sequence_parallel": False}),
    "llama-tp_2_sequence": ("shallow_llama", {"tp": 2, "sequence_parallel": True}),
    "llama-pp_2_tp_2": ("shallow_llama", {"pp": 2, "tp": 2, "schedule": "Interleaved1F1B"}),
    "llama-selective": ("shallow_llama", {"tp": 2, "activation_checkpointing": "selective"}),
    "llama-cp_4": ("shallow_llama", {"cp": 4}),
    "grouped_attention-cp_4": ("grouped_attention", {"cp": 4}),
    "grouped_attention-cp_2_dp_2": ("grouped_attention", {"cp": 2, "dp_shard": 2}),
    "llama-cp_2_pp_2": ("shallow_llama", {"cp": 2, "pp": 2, "schedule": "Interleaved1F1B"}),
    "llama-cp_2_zero_bubble": ("shallow_llama", {"cp": 2, "pp": 2, "schedule": "ZBVZeroBubble"}),
    "gpt-cp_2": (
        "shallow_gpt",
        {"cp": 2, "dp_replicate": 2, "activation_checkpointing": "selective"},
    ),
    "gpt-cp_2_full": (
        "shallow_gpt",
        {
            **{"cp": 2, "dp_shard": 2, "microbatch_size": 2},
            **{"reshard_after_forward": True, "activation_checkpointing": "full"},
        },
    ),
    "llama-cp_2_tp_2": ("shallow_llama", {"cp": 2, "tp": 2, "sequence_parallel": True}),
    "llama-tp_around_cp": (
        "shallow_llama",
        {"cp": 2, "tp": 2, "sequence_parallel": False, "mesh_order": "tp-cp"},
    ),
    "llama-cp_2_tp_2_zero_bubble": (
        "shallow_llama",
        {"cp": 2, "tp": 2, "pp": 2, "sequence_parallel": True, "schedule": "ZBVZeroBubble"},
    ),
    "gpt-cp_2_tp_2_full": (
        "shallow_gpt",
        {
            **{"cp": 2, "tp": 2, "dp_replicate": 2, "sequence_parallel": True},
            **{"activation_checkpointing": "full", "microbatch_size": 2},
        },
    ),
    "grouped_attention-cp_2_tp_2": ("grouped_attention", {"cp": 2, "tp": 2}),
    "mlp-pp_4": ("mlp", {"pp": 4}),
    "called_again-pp_4": ("called_again", {"pp": 4, "schedule": "1F1B"}),
    "called_again-tp_2_pp_2": ("called_again", {"pp": 2, "tp": 2, "virtual_stages": 2}),
    "shared_keys-zero_bubble": ("shared_keys", {"pp": 2, "schedule": "ZBVZeroBubble"}),
    "shared_keys-zero_bubble_dp": (
        "shared_keys",
        {"pp": 2, "dp_shard": 2, "schedule": "InterleavedZeroBubble"},
    ),
    "odd_vocabulary-tp_2": ("odd_vocabulary", {"tp": 2}),
    "odd_vocabulary-tp_2_pp_2": ("odd_vocabulary", {"tp": 2, "pp": 2}),
    "joint_streams-tp_2": ("joint_streams", {"tp": 2}),
    "joint_streams-tp_2_pp_2": ("joint_streams", {"tp": 2, "pp": 2}),
    "own_weights-tp_2": ("own_weights", {"tp": 2, "sequence_parallel": False}),
    "own_weights-tp_2_sequence": ("own_weights", {"tp": 2, "pp": 2, "sequence_parallel": True}),
    "packed_attention-tp_2": (
        "packed_attention",
        {"tp": 2, "dp_shard": 2, "sequence_parallel": False},
    ),
    "packed_attention-cp_2": ("packed_attention", {"cp": 2}),
    "packed_attention-tp_2_sequence": (
        "packed_attention",
        {"tp": 2, "pp": 2, "sequence_parallel": True},
    ),
    "routed_experts-ep_2": ("routed_experts", {"dp_shard": 2, "ep": 2}),
    "routed_experts-ep_2_of_4": (
        "routed_experts",
        {
            **{"dp_shard": 4, "ep": 2, "microbatch_size": 2},
            **{"reshard_after_forward": True, "activation_checkpointing": "full"},
        },
    ),
    "routed_experts-ep_2_hsdp": (
        "routed_experts",
        {"dp_replicate": 2, "dp_shard": 2, "ep": 2, "activation_checkpointing": "selective"},
    ),
    "routed_experts-ep_2_pp_2": (
        "routed_experts",
        {"dp_shard": 2, "ep": 2, "pp": 2, "schedule": "Interleaved1F1B"},
    ),
    "routed_experts-ep_2_zero_bubble": (
        "routed_experts",
        {"dp_shard": 2, "ep": 2, "pp": 2, "schedule": "InterleavedZeroBubble"},
    ),
    "routed_attention-tp_2_ep_2": (
        "routed_attention",
        {"tp": 2, "ep": 2, "sequence_parallel": False, "microbatch_size": 2},
    ),
    "experts_first-tp_2_ep_2_selective": (
        "experts_first",
        {
            **{"tp": 2, "ep": 2, "sequence_parallel": True, "microbatch_size": 2},
            "activation_checkpointing": "selective",
        },
    ),
    "routed_attention-tp_2_ep_4_full": (
        "routed_attention",
        {
            **{"tp": 2, "dp_shard": 2, "ep": 4, "sequence_parallel": True, "microbatch_size": 2},
            **{"reshard_after_forward": True, "activation_checkpointing": "full"},
        },
    ),
    "routed_attention-tp_2_ep_2_of_4": (
        "routed_attention",
        {
            **{"tp": 2, "dp_shard": 2, "ep": 2, "sequence_parallel": True},
            "activation_checkpointing": "selective",
        },
    ),
    "routed_attention-tp_2_ep_4_pp_2": (
        "routed_attention",
        {
            **{"tp": 2, "dp_shard": 2, "ep": 4, "sequence_parallel": True},
            **{"pp": 2, "schedule": "Interleaved1F1B"},
        },
    ),
    "routed_attention-tp_2_ep_2_hsdp": (
        "routed_attention",
        {"tp": 2, "dp_replicate": 2, "dp_shard": 2, "ep": 2, "sequence_parallel": False},
    ),
    "routed_attention-cp_2_ep_4_full": (
        "routed_attention",
        {
            **{"cp": 2, "dp_shard": 2, "ep": 4, "microbatch_size": 2},
            **{"reshard_after_forward": True, "activation_checkpointing": "full"},
        },
    ),
    "routed_attention-cp_2_ep_2_of_4": (
        "routed_attention",
        {"cp": 2, "dp_shard": 2, "ep": 2, "activation_checkpointing": "selective"},
    ),
    "routed_attention-cp_2_tp_2_ep_4": (
        "routed_attention",
        {"cp": 2, "tp": 2, "ep": 4, "sequence_parallel": True, "microbatch_size": 2},
    ),
    "experts_first-cp_2_tp_2_ep_4_whole_stream": (
        "experts_first",
        {
            **{"cp": 2, "tp": 2, "ep": 4, "sequence_parallel": False, "mesh_order": "tp-cp"},
            **{"activation_checkpointing": "selective", "microbatch_size": 4},
        },
    ),
    "routed_attention-cp_2_tp_2_ep_8_full": (
        "routed_attention",
        {
            **{"cp": 2, "tp": 2, "dp_shard": 2, "ep": 8, "sequence_parallel": True},
            **{"activation_checkpointing": "full", "reshard_after_forward": True},
        },
    ),
    "routed_attention-cp_2_tp_2_ep_4_of_8": (
        "routed_attention",
        {"cp": 2, "tp": 2, "dp_shard": 2, "ep": 4, "sequence_parallel": False},
    ),
    "routed_attention-cp_2_tp_2_ep_4_pp_2": (
        "routed_attention",
        {
            **{"cp": 2, "tp": 2, "ep": 4, "sequence_parallel": True},
            **{"pp": 2, "schedule": "InterleavedZeroBubble", "loss_chunks": 2},
        },
    ),
    "routed_attention-cp_2_tp_2_ep_4_hsdp": (
        "routed_attention",
        {"cp": 2, "tp": 2, "dp_replicate": 2, "ep": 4, "sequence_parallel": True},
    ),
    "routed_attention-cp_2_ep_4_pp_2": (
        "routed_attention",
        {**{"cp": 2, "dp_shard": 2, "ep": 4}, **{"pp": 2, "schedule": "Interleaved1F1B"}},
    ),
    "llama-tp_around_pp": (
        "shallow_llama",
        {"tp": 2, "pp": 2, "sequence_parallel": True, "mesh_order": "tp-pp"},
    ),
    "llama-cp_around_dp_shard": (
        "shallow_llama",
        {"cp": 2, "dp_shard": 2, "mesh_order": "cp-dp_shard"},
    ),
    "gpt-cp_around_dp_replicate": (
        "shallow_gpt",
        {"cp": 2, "dp_replicate": 2, "mesh_order": "cp-dp_replicate"},
    ),
    "routed_experts-ep_2_around_pp": (
        "routed_experts",
        {"dp_shard": 4, "ep": 2, "pp": 2, "schedule": "1F1B", "mesh_order": "dp_shard-pp"},
    ),
    "gpt-offload": ("shallow_gpt", {"dp_shard": 2, "cpu_offload": True, "microbatch_size": 4}),
    "gpt-offload_pp_2": ("shallow_gpt", {"pp": 2, "dp_shard": 2, "cpu_offload": True}),
    "llama-offload_tp_2": (
        "shallow_llama",
        {
            **{"tp": 2, "dp_shard": 2, "cpu_offload": True, "sequence_parallel": True},
            "reshard_after_forward": True,
        },
    ),
    "gpt-offload_hsdp": (
        "shallow_gpt",
        {
            **{"dp_replicate": 2, "dp_shard": 2, "cpu_offload": True, "microbatch_size": 2},
            "reshard_after_forward": True,
        },
    ),
    "routed_experts-offload_ep_2": (
        "routed_experts",
        {"dp_shard": 2, "ep": 2, "cpu_offload": True, "microbatch_size": 4},
    ),
    "complex_positions-cp_2_tp_2": ("complex_positions", {"cp": 2, "tp": 2}),
    "llama-inputs_on_host": (
        "shallow_llama",
        {
            **{"tp": 2, "cp": 2, "activation_checkpointing": "full"},
            **{"activation_offload": True, "cpu_offload": True},
        },
    ),
    "routed_experts-inputs_on_host_ep_2": (
        "routed_experts",
        {
            **{"dp_shard": 2, "ep": 2, "microbatch_size": 4, "activation_offload": True},
            "activation_checkpointing": "full",
        },
    ),
    "lone_layers-tp_2_full": (
        "lone_layers",
        {
            **{"tp": 2, "dp_shard": 2, "microbatch_size": 2, "sequence_parallel": False},
            **{"reshard_after_forward": True, "activation_checkpointing": "full"},
        },
    ),
    "lone_layers-tp_2_selective": (
        "lone_layers",
        {"tp": 2, "pp": 2, "schedule": "1F1B", "activation_checkpointing": "selective"},
    ),
    "lone_layers-cp_2_full": ("lone_layers", {"cp": 2, "activation_checkpointing": "full"}),
    "whole_rows-tp_2": ("whole_rows", {"tp": 2, "sequence_parallel": False}),
    "whole_rows-tp_2_sequence": ("whole_rows", {"tp": 2, "sequence_parallel": True}),
}
SLOW_LINKS = {
    "gpt-slow": ("shallow_gpt", {"tp": 2, "sequence_parallel": False}),
    "gpt-slow_sequence": ("shallow_gpt", {"tp": 2, "dp_shard": 2, "sequence_parallel": True}),
    "llama-slow": ("shallow_llama", {"tp": 2, "pp": 2, "sequence_parallel": False}),
}
"""On the CPU's own links the search keeps parts of these models whole."""
KINDS = {
    "gpt-kinds_pp_2": ("shallow_gpt", {"pp": 2, "dp_shard": 2, "schedule": "1F1B"}),
    "llama-kinds_tp_2": (
        "llama",
        {**{"pp": 4, "tp": 2, "sequence_parallel": False}, "schedule": "1F1B"},
    ),
    "llama-kinds_cp_2": ("llama", {"pp": 2, "cp": 2, "activation_checkpointing": "full"}),
}
"""Half of the ranks are slow with fast links; the others have the CPU's own."""
CASES |= SLOW_LINKS | KINDS
SIBLINGS = {
    *("gpt-pp_4", "gpt-full", "gpt-chunks_pp_2", "gpt-cp_2", "gpt-cp_around_dp_replicate"),
    *("gpt-offload_pp_2", "gpt-offload_hsdp", "llama-hsdp", "llama-tp_4", "llama-pp_2_tp_2"),
    *("llama-chunks_cp_2", "llama-cp_4", "llama-cp_2_pp_2", "llama-cp_2_zero_bubble"),
    *("llama-cp_2_tp_2", "llama-cp_around_dp_shard", "scaled_loss-cp_2", "odd_vocabulary-tp_2"),
    *("joint_streams-tp_2", "own_weights-tp_2", "packed_attention-tp_2", "whole_rows-tp_2"),
    *("grouped_attention-cp_2_dp_2", "lone_layers-tp_2_selective", "routed_experts-ep_2"),
    *("routed_experts-ep_2_hsdp", "routed_experts-offload_ep_2", "routed_attention-cp_2_ep_2_of_4"),
    *("routed_attention-tp_2_ep_2_of_4", "routed_attention-tp_2_ep_2_hsdp"),
    *("routed_attention-cp_2_ep_4_pp_2", "routed_experts-ep_2_pp_2", "gpt-kinds_pp_2"),
    *("llama-tp_2_sequence", "llama-cp_2_tp_2_zero_bubble", "packed_attention-cp_2"),
    *("gpt-dp_shard_4", "gpt-tp_4_sequence", "odd_vocabulary-tp_2_pp_2", "gpt-slow"),
    *("routed_attention-tp_2_ep_2", "routed_attention-tp_2_ep_4_full"),
    *("experts_first-cp_2_tp_2_ep_4_whole_stream", "routed_attention-cp_2_tp_2_ep_8_full"),
    *("routed_attention-cp_2_tp_2_ep_4_of_8", "routed_attention-cp_2_tp_2_ep_4_pp_2"),
    *("routed_attention-cp_2_tp_2_ep_4_hsdp", "shared_keys-zero_bubble_dp"),
}
"""What another case, or one of ``test_layouts``, has all mechanisms of: run in the bench."""


def chosen(names):
    """Cases as parameters, those with a sibling in the bench."""
    return [
        pytest.param(name, marks=pytest.mark.bench if name in SIBLINGS else ()) for name in names
    ]


def cases_with(*settings, but=""):
    """Those that fix some settings."""
    return chosen(
        name for name, (_, fix) in CASES.items() if {*settings} <= fix.keys() and but not in fix
    )


@pytest.fixture(scope="module")
def fast_links(tmp_path_factory):
    """The CPU cluster with links so fast that the layouts are those of large models."""
    text = (PROFILES_FOLDER / "clusters" / "cpu.toml").read_text()
    text = re.sub(r"(latency_us_per_\w+ = \{ value =) \d+", r"\1 0", text)
    text = re.sub(r"(unidirectional = \{ value =) [\d.]+", r"\1 10000", text)
    path = tmp_path_factory.mktemp("cluster") / "fast.toml"
    path.write_text(text)
    return str(path)


@pytest.fixture(scope="module")
def slow_devices(tmp_path_factory, fast_links):
    """That cluster with devices a third as fast."""
    folder = tmp_path_factory.mktemp("slow")
    files = {"clusters": Path(fast_links), "devices": PROFILES_FOLDER / "devices" / "cpu.toml"}
    for kind, file in files.items():
        text = file.read_text()
        text = text.replace('name = "cpu"', 'name = "slow"').replace(
            'device = "cpu"', 'device = "devices.toml"'
        )
        if kind == "devices":
            text, found = re.subn(
                r"(peak_fp\d+_tflop_per_s = \{ value = )([\d.]+)",
                lambda match: f"{match[1]}{float(match[2]) / 3}",
                text,
            )
            assert found == 2
        (folder / f"{kind}.toml").write_text(text)
    return str(folder / "clusters.toml")


AXES = ("dp_replicate", "dp_shard", "cp", "tp", "pp")
STEPS = 2
"""One after an update."""


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("planned")


@pytest.fixture(scope="module")
def plans(root, fast_links, slow_devices):
    """Return what plans a case and writes its folder, once."""

    @functools.cache
    def planned(name):
        model, fix = CASES[name]
        gpus = num_processes(name)
        result = planner.plan(
            str(FILES.get(model, EXAMPLES / f"{model}.py")), gpus=gpus, dtype="float64",
            global_batch_size=16, fix=fix,
            cluster="cpu" if name in SLOW_LINKS else
            f"cpu:{gpus // 2},{slow_devices}:{gpus // 2}" if name in KINDS else
            "h100-sxm" if fix.get("cpu_offload") or fix.get("activation_offload") else fast_links,
        )  # fmt: skip
        result.save(root / name)
        return result.best

    return planned


def num_processes(name):
    return math.prod(CASES[name][1].get(axis, 1) for axis in AXES)


@pytest.fixture(scope="module")
def outcomes(request, root, plans):
    """Run the cases that are asked for: the folder of each, and of its model's reference."""
    names = dict.fromkeys(
        item.callspec.params["name"]
        for item in request.session.items
        if item.path == request.path and "outcomes" in item.fixturenames
    )
    jobs, references = defaultdict(list), {}
    for name in names:
        plans(name)
        jobs[num_processes(name)].append((root / name, arguments_of(root / name, steps=STEPS)))
        references.setdefault(CASES[name][0], root / name)
    extra = ("--reference",)
    run_jobs(
        [
            (folder, arguments_of(folder, name="reference", steps=STEPS, extra=extra))
            for folder in references.values()
        ]
    )
    for number, listed in jobs.items():
        run_jobs(listed, num_processes=number)
    return {name: (root / name, references[CASES[name][0]]) for name in names}


@pytest.mark.parametrize("name", chosen(CASES))
def test_a_planned_layout_trains_as_one_process(outcomes, name):
    folder, reference = outcomes[name]
    expected = outcome_of(reference, name="reference", steps=STEPS)
    found = outcome_of(folder, steps=STEPS)
    assert largest_difference(found.losses, expected.losses) < 1e-8
    assert largest_difference(found.grad_norms, expected.grad_norms) < 1e-8
    assert largest_weight_difference(found.weights, expected.weights) < 1e-8


def test_stages_are_cut_and_laid_out_for_their_kind_of_device(plans):
    for name in KINDS:
        plan = plans(name)
        lengths = [stage.end_unit - stage.first_unit for stage in plan.stages]
        halves = sum(lengths[: len(lengths) // 2]), sum(lengths[len(lengths) // 2 :])
        assert halves[plan.device_order.index("cpu")] > halves[plan.device_order.index("slow")]
    plan = plans("llama-kinds_tp_2")
    split = {
        plan.device_order[stage.pp_rank // 2]: {
            module.module
            for sharding in plan.shardings
            if stage.first_unit + 1 in sharding.units
            for module in sharding.modules
            if module.style in ("column", "row")
        }
        for stage in plan.stages[:-1]
    }
    assert split["cpu"] < split["slow"]


def test_tensor_parallel_plans_split_attention_and_mlp(plans):
    styles = {
        module.module: module.style
        for sharding in plans("llama-tp_2_sequence").shardings
        for module in sharding.modules
    }
    assert styles["attention.wq"] == styles["feed_forward.w1"] == "column"
    assert styles["attention.wo"] == styles["feed_forward.w2"] == "row"
    assert styles["attention_norm"] == styles["ffn_norm"] == "on_part"


def test_context_parallel_plans_run_all_on_parts_of_the_sequence(plans):
    for name in ("llama-cp_4", "gpt-cp_2", "grouped_attention-cp_4"):
        modules = [each for sharding in plans(name).shardings for each in sharding.modules]
        assert {each.style for each in modules} == {"on_part"}
        assert {each.output_layout for each in modules} <= {"Shard(0)", "Shard(1)"}
    # It calls its attention as one module, which needs the whole sequence.
    packed = [each for sharding in plans("packed_attention-cp_2").shardings for each in
              sharding.modules]  # fmt: skip
    assert {each.module for each in packed if each.style == "replicate"} == {
        "attention", "crossing",
    }  # fmt: skip


@pytest.mark.parametrize("name", cases_with("tp", "cp", but="cpu_offload"))
def test_over_tp_and_cp_modules_are_split_on_parts_of_the_sequence(plans, name):
    """On links that cost nothing, as those to hosts do not."""
    styles = {
        axis: {
            module.style
            for sharding in plans(name).shardings
            for module in sharding.modules
            if sharding.axis == axis
        }
        for axis in ("tp", "cp")
    }
    model, fix = CASES[name]
    assert {"column", "row"} <= styles["tp"]
    if model != "grouped_attention" and "ep" not in fix:  # their tables are small
        assert "vocab_embedding" in styles["tp"]
    if model != "grouped_attention":  # whose heads have norms
        assert ("on_part" in styles["tp"]) == plans(name).sequence_parallel
    assert styles["cp"] == {"on_part", *(["experts"] if "ep" in fix else [])}


@pytest.mark.parametrize(
    "name", chosen(name for name, (model, _) in CASES.items() if model == "routed_experts")
)
def test_expert_parallel_plans_split_experts_alone(plans, name):
    (module,) = {each for sharding in plans(name).shardings for each in sharding.modules}
    assert (module.module, module.style) == ("ffn.experts", "experts")
    assert {(each.name, each.dim) for each in module.split} == {
        ("into", 0), ("out_of", 0), ("bias", 0)
    }  # fmt: skip


@pytest.mark.parametrize("name", cases_with("tp", "ep"))
def test_over_tp_and_ep_heads_are_split_and_experts_whole(plans, name):
    styles = {
        module.module: (module.style, module.output_layout)
        for sharding in plans(name).shardings
        for module in sharding.modules
        if sharding.axis == "tp"
    }
    assert styles["attention.query"] == ("column", "Shard(-1)")
    assert styles["ffn.experts"][0] == "experts"
    if CASES[name][1]["sequence_parallel"] and "cp" not in CASES[name][1]:
        assert styles["ffn.gate"] == ("on_part", "Shard(0)")


@pytest.mark.parametrize("name", cases_with("cp", "ep"))
def test_over_cp_and_ep_all_but_experts_run_on_a_part(plans, name):
    shardings = [each for each in plans(name).shardings if each.axis == "cp"]
    styles = {module.module: module.style for each in shardings for module in each.modules}
    assert styles.pop("ffn.experts") == "experts"
    assert set(styles.values()) == {"on_part"}
    assert {"attention.query", "ffn.gate"} <= styles.keys()


PACKED = {("in_proj_weight", 0, 3), ("in_proj_bias", 0, 3), ("out_proj.weight", 1, 1)}
INNER_SPLITS = {
    "own_weights": {
        "experts": {("into", 2, 2), ("out_of", 1, 1)},
        "perceptron": {("first", 1, 1), ("second", 1, 1)},
    },
    "packed_attention": {"attention": PACKED, "crossing": PACKED},
}


@pytest.mark.parametrize(
    "name",
    chosen(name for name, (model, fix) in CASES.items() if model in INNER_SPLITS and "tp" in fix),
)
def test_weights_of_no_linear_layer_are_split(plans, name):
    splits = {
        module.module: {(each.name, each.dim, each.fused) for each in module.split}
        for sharding in plans(name).shardings
        for module in sharding.modules
        if module.style == "inner"
    }
    assert splits == INNER_SPLITS[CASES[name][0]]


@pytest.mark.parametrize("name", ["whole_rows-tp_2", "whole_rows-tp_2_sequence"])
def test_what_lies_between_projections_is_split_only_where_a_rule_says_how(plans, name):
    plan = plans(name)
    leaving = {
        plan.units[unit]: (module.style, module.output_layout)
        for sharding in plan.shardings
        for unit in sharding.units
        for module in sharding.modules
        if module.module == "up"
    }
    split = [unit for unit, found in leaving.items() if found[1] != "Replicate"]
    assert leaving.pop("blocks.5") == ("column", "Shard(-1)")
    assert split == ["blocks.5"], "cummax, cumprod, logcumsumexp, tril and rot90 stay whole"


def test_two_axes_run_from_the_command_line(tmp_path, fast_links):
    """As a user does it: the command, torchrun on 4 processes, and the log held to the plan."""
    folder = tmp_path / "run"
    script = folder / "train.py"
    plan = [
        str(Path(sys.executable).with_name("plan")),
        *(str(FILES["shallow_llama"]), "--gpus", "4", "--cluster", fast_links),
        *("--dtype", "float32", "--global-batch-size", "16", "--out", str(folder)),
        *("--fix", "tp=2", "--fix", "pp=2"),
    ]
    run(plan, timeout_s=60)
    run(
        [sys.executable, *torchrun(4), str(script), "--steps", "5",
         "--log-file", str(folder / "run.jsonl")],
        timeout_s=200,
    )  # fmt: skip
    run(
        [sys.executable, str(script), "--reference", "--steps", "3",
         "--log", str(folder / "reference.jsonl")],
        timeout_s=100,
    )  # fmt: skip
    losses = [
        [float(loss) for loss in re.findall(r'"loss": ([\d.e-]+)', (folder / name).read_text())]
        for name in ("run.jsonl", "reference.jsonl")
    ]
    assert len(losses[0]) == 5
    assert largest_difference(losses[0][:3], losses[1]) < 1e-5
    (found,) = planner.validate(folder / "run.jsonl").runs.priced
    predicted = planner.load_plan(folder)
    assert found.step_time_s == pytest.approx(predicted.costs.step_time_s, rel=1e-9)
    assert found.peak_mem_bytes == predicted.peak_memory_bytes
