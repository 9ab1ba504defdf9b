import json
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_factory import make_plan, make_record

from planner.cost.breakdown import CostBreakdown, MemoryBreakdown
from planner.errors import RequestError
from planner.graph.operator_graph import ModuleOutput
from planner.plan.serialize import (
    checkpointing_word,
    dump_json,
    load_plan,
    load_saved_plan,
    plan_digest,
    plan_document,
    plan_from_document,
)
from planner.plan.types import ModelRef, Plan, StagePlan
from planner.report.document import plan_json
from planner.strategy.mesh import ParallelDegrees
from planner.strategy.sharding import ModuleSharding, SplitParameter, UnitSharding

counts = st.integers(min_value=1, max_value=2**40)
seconds = st.floats(min_value=0, max_value=1e9)
names = st.text(max_size=12)
optional_names = st.none() | names
memories = st.builds(MemoryBreakdown, **dict.fromkeys(MemoryBreakdown.__slots__, counts))
costs = st.builds(CostBreakdown, **dict.fromkeys(CostBreakdown.__slots__, seconds))
degrees = st.builds(ParallelDegrees, **dict.fromkeys(ParallelDegrees.__slots__, counts))
modules = st.builds(
    ModuleSharding,
    module=names,
    style=names,
    input_layout=names,
    output_layout=names,
    split=st.lists(st.builds(SplitParameter, name=names, dim=counts, fused=counts), max_size=2).map(
        tuple
    ),
)
shardings = st.builds(
    UnitSharding,
    units=st.lists(counts, max_size=3).map(tuple),
    modules=st.lists(modules, max_size=2).map(tuple),
)
outputs = st.builds(ModuleOutput, module=names, index=counts)


@st.composite
def stages(draw, num_units):
    cuts = draw(st.sets(st.integers(1, num_units - 1), max_size=3)) if num_units > 1 else set()
    edges = [0, *sorted(cuts), num_units]
    return tuple(
        StagePlan(
            index=index,
            pp_rank=draw(st.integers(0, 3)),
            first_unit=first,
            end_unit=end,
            activation_checkpointing=tuple(
                draw(st.sampled_from(("none", "selective", "full"))) for _ in range(first, end)
            ),
            forward_s=draw(seconds),
            backward_s=draw(seconds),
            memory=draw(memories),
            carried=draw(st.lists(outputs, max_size=2).map(tuple)),
            stream_output=draw(st.none() | outputs),
        )
        for index, (first, end) in enumerate(pairwise(edges))
    )


@st.composite
def plans(draw):
    units = draw(st.lists(names, min_size=1, max_size=6).map(tuple))
    return Plan(
        model=draw(
            st.builds(
                ModelRef,
                file=optional_names,
                module=optional_names,
                factory=names,
                seq_len=st.none() | counts,
            )
        ),
        degrees=draw(degrees),
        mesh_order=draw(st.lists(names, max_size=5).map(tuple)),
        schedule=draw(names),
        virtual_stages=draw(counts),
        microbatch_size=draw(counts),
        num_microbatches=draw(counts),
        global_batch_size=draw(counts),
        dtype=draw(names),
        reshard_after_forward=draw(st.booleans()),
        sequence_parallel=draw(st.booleans()),
        sequence_dim=draw(counts),
        units=units,
        tied_parameters=draw(st.lists(st.tuples(names, names), max_size=2).map(tuple)),
        shardings=draw(st.lists(shardings, max_size=2).map(tuple)),
        stages=draw(stages(len(units))),
        memory_by_rank=draw(st.lists(memories, min_size=1, max_size=3).map(tuple)),
        costs=draw(costs),
        tokens_per_step=draw(counts),
        flop_per_step=draw(counts),
    )


def written_plan(plan):
    return json.loads(dump_json(plan_document(plan)))


@settings(max_examples=60, deadline=None)
@given(plan=plans())
def test_a_plan_survives_json_exactly(plan):
    assert plan_from_document(written_plan(plan)) == plan


def test_equal_plans_give_equal_bytes():
    assert dump_json(plan_document(make_plan())) == dump_json(plan_document(make_plan()))


def test_a_stage_names_its_units_and_totals_are_written():
    document = written_plan(make_plan(ParallelDegrees(pp=2), policy="full"))
    assert document["stages"][0]["units"] == ["prologue", *(f"layers.{i}" for i in range(6))]
    assert document["costs"]["step_time_s"] == pytest.approx(0.412)
    assert document["peak_memory_bytes"] == max(
        memory["total_bytes"] for memory in document["memory_by_rank"]
    )
    assert document["activation_checkpointing"] == "full"


def test_mixed_checkpointing_is_spelled_with_counts():
    plan = make_plan(ParallelDegrees(pp=2), policy="full")
    first, second = plan.stages
    first = replace(first, activation_checkpointing=("none",) * 7)
    mixed = replace(plan, stages=(first, second))
    assert checkpointing_word(mixed) == "full:6+none:6"
    assert plan_from_document(written_plan(mixed)) == mixed


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda d: d["degrees"].update(tp=4), "world_size"),
        (lambda d: d["stages"][0].update(units=["layers.0"]), "units"),
        (lambda d: d["costs"].update(compute_s=0.001), "step_time_s"),
        (lambda d: d.update(activation_checkpointing="full"), "activation_checkpointing"),
        (lambda d: d["stages"][0].update(activation_checkpointing=["none"]), "another number"),
        (lambda d: d.pop("schedule"), "lacks the field 'schedule': an older version"),
        (lambda d: d.update(shedule="1F1B"), "Did you mean 'schedule'"),
        (lambda d: d.update(microbatch_size="2"), "must be int"),
        (lambda d: d.update(microbatch_size=True), "must be int"),
        (lambda d: d.update(reshard_after_forward=1), "must be bool"),
        (lambda d: d.update(stages={}), "must be a list"),
        (lambda d: d.update(costs=[]), "must be an object"),
    ],
)
def test_an_edited_plan_is_refused_with_the_place(edit, words):
    document = written_plan(make_plan())
    edit(document)
    with pytest.raises(RequestError) as caught:
        plan_from_document(document)
    assert words in str(caught.value)
    assert caught.value.hint


def test_a_saved_plan_has_its_request_its_model_and_a_name_of_its_own(tmp_path):
    record = make_record(fixed=(("tp", "2"),), hints=(("model.py:5", True),), gpus_per_node=8)
    (tmp_path / "plan.json").write_text(plan_json(record))
    saved = load_saved_plan(tmp_path)
    assert (saved.request, saved.model, saved.cluster) == (
        record.request,
        record.model,
        record.cluster,
    )
    assert saved.digest == plan_digest(record.outcome.best)
    assert saved.digest != plan_digest(record.outcome.candidates[1])


def test_load_plan_reads_the_best_plan_of_a_file_or_its_folder(tmp_path):
    record = make_record()
    (tmp_path / "plan.json").write_text(plan_json(record))
    assert load_plan(tmp_path / "plan.json") == record.outcome.best
    assert load_plan(str(tmp_path)) == record.outcome.best


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "is not JSON"),
        ("[]", "schema_version None"),
        ('{"schema_version": 99}', "schema_version 99, this version reads 3"),
        ('{"schema_version": 3}', "best must be an object, not null"),
    ],
)
def test_load_plan_refuses_what_is_no_plan(tmp_path, text, words):
    file = tmp_path / "plan.json"
    file.write_text(text)
    with pytest.raises(RequestError, match=words):
        load_plan(file)


def test_load_plan_names_a_missing_file(tmp_path):
    with pytest.raises(RequestError, match=r"cannot read the plan .*nothing\.json"):
        load_plan(tmp_path / "nothing.json")
