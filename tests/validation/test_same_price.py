"""``plan validate`` and ``plan estimate`` price the same run alike, bit for bit.

The estimate's side starts from the framework's name, the cluster's, a traced model and fixed
values; it knows nothing of the table. Its model is traced in full depth where that is shallow, and
stretched from three blocks otherwise (``test_workbook.py`` shows that these are the same).
"""

from dataclasses import dataclass, replace

import pytest

import planner
from planner.framework.script import framework_on_cluster
from planner.hardware.profiles import PROFILES_FOLDER
from planner.plan.types import ModelRef
from planner.pricing.model_pricing import ModelPricer
from planner.search.framework_estimate import FrameworkEstimate
from planner.search.search_request import SearchRequest
from planner.strategy.configuration import Configuration
from planner.strategy.mesh import ParallelDegrees
from planner.strategy.rules import FixedValues
from planner.validation.pricing.case_price import CasePricer
from planner.validation.pricing.cases import case_of
from planner.validation.pricing.models import build, example_batch, loss
from planner.validation.pricing.predict import predict_run
from planner.validation.pricing.workbook import TRACED_LAYERS, traced
from planner.validation.reading.table import read_table
from planner.validation.types import Prediction

RUNS = PROFILES_FOLDER / "published" / "runs"
FULL_DEPTH = 12
"""Blocks up to which a model is traced as it is."""
MOST_TOKENS = 2048
"""The same for its sequences: longer ones tell nothing else."""

MOST_RUNS = 40
"""Of one table, where not all are asked for."""

CASES = CasePricer()
SPACES: dict[object, FrameworkEstimate] = {}


class Stretched(ModelPricer):
    """Prices a model of more blocks than were traced."""

    blocks = TRACED_LAYERS

    def priced(self, choice, *, network_host_s=0.0):
        found = super().priced(choice, network_host_s=network_host_s)
        return replace(found, model=found.model.with_blocks(self.blocks))


@dataclass(frozen=True)
class Layout:
    """A run in the words of an estimate."""

    degrees: ParallelDegrees
    microbatches: int
    fixed: FixedValues


def layout_of(case):
    run = case.run
    replicated = case.framework.state_form == "replicated"
    shards = 1 if replicated and run.data_parallel == "ddp" else run.shard_ranks or run.dp
    degrees = ParallelDegrees(dp_replicate=run.dp // shards, dp_shard=shards, tp=run.tp, pp=run.pp)
    return Layout(
        degrees=degrees,
        microbatches=round(run.global_batch_size / run.dp / run.microbatch_size),
        fixed=FixedValues(
            dp_replicate=degrees.dp_replicate,
            dp_shard=degrees.dp_shard,
            tp=degrees.tp,
            pp=degrees.pp,
            schedule=run.schedule if run.pp > 1 else None,
            virtual_stages=run.virtual_stages,
            microbatch_size=run.microbatch_size,
            activation_checkpointing=case.recompute,
            reshard_after_forward=run.data_parallel == "zero3" and run.pp == 1,
            sequence_parallel=run.sequence_parallel,
            float8=run.float8,
        ),
    )


def estimate_of(case, layout):
    """The estimate of a run: its space of layouts and its model."""
    run, shape = case.run, case.shape
    deep = shape.layers <= FULL_DEPTH and shape.seq_len <= MOST_TOKENS
    if not deep:
        shape = replace(shape, layers=TRACED_LAYERS)
    graphs = traced(shape, case.dtype)
    framework, cluster = framework_on_cluster(case.framework.name, case.cluster, gpus=run.num_gpus)
    request = SearchRequest(
        model=ModelRef(file=None, module=None, factory="build", seq_len=None, num_parameters=0),
        global_batch_size=layout.microbatches * run.dp * run.microbatch_size,
        dtype=case.dtype,
        fixed=layout.fixed,
        top=1,
        framework=framework,
    )
    found = FrameworkEstimate(graphs, cluster, request)
    key = (shape, case.dtype, framework.name, case.cluster, run.num_gpus, deep)
    if key in SPACES:
        found._space.pricer = SPACES[key]._space.pricer  # what was counted serves the next
    elif not deep:
        found._space.pricer = Stretched(
            graphs,
            cluster,
            case.dtype,
            kernels=framework.kernels,
            collective_host_s=framework.collective_host_s,
        )
    SPACES.setdefault(key, found)
    if not deep:
        found._space.pricer.blocks = case.shape.layers
        found._space.facts = replace(found._space.facts, max_stages=case.shape.layers + 3)
    return found


def configuration_of(found, layout, form):
    """The one that the estimate allows; runs that torch would not start are made by hand."""
    try:
        ((configuration, _),) = found.allowed()
    except planner.RequestError:
        fixed = layout.fixed
        return Configuration(
            degrees=layout.degrees,
            schedule=fixed.schedule or "none",
            virtual_stages=fixed.virtual_stages,
            microbatch_size=fixed.microbatch_size,
            num_microbatches=layout.microbatches,
            reshard_after_forward=fixed.reshard_after_forward and form == "fsdp",
            sequence_parallel=fixed.sequence_parallel and layout.degrees.tp > 1,
            float8=fixed.float8,
            state_form=form,
        ), False
    return configuration, True


def spread(runs, most):
    """Runs from all parts of a table."""
    return runs[:: max(1, len(runs) // most)]


@pytest.mark.parametrize("most", [MOST_RUNS, pytest.param(10**6, marks=pytest.mark.bench)])
@pytest.mark.parametrize("table", sorted(path.stem for path in RUNS.glob("*.csv")))
def test_validate_and_estimate_agree(table, most):
    asked = set()
    allowed = priced = 0
    for run in spread(read_table(RUNS / f"{table}.csv", keep_going=True).runs, most):
        answer = predict_run(run, CASES)
        if not isinstance(answer, Prediction):
            continue
        case = case_of(run)
        question = (case.framework.name, case.cluster, case.shape, layout_of(case), run.num_gpus)
        if question in asked:
            continue
        asked.add(question)
        layout = layout_of(case)
        found = estimate_of(case, layout)
        configuration, is_allowed = configuration_of(found, layout, case.framework.state_form)
        price = found.price(configuration, case.recompute)
        first = case.framework.measures_first_rank
        memory = price.memory_by_rank[0] if first else price.peak_memory
        assert price.costs.step_time_s == answer.step_time_s
        assert price.costs == answer.costs
        assert memory == answer.memory
        assert price.fits == answer.feasible
        allowed, priced = allowed + is_allowed, priced + 1
    assert priced
    assert allowed >= 0.5 * priced


@pytest.mark.parametrize(
    ("table", "row"), [("vtrain_single_node", 0), ("torchtitan", 0), ("zero_bubble_table4", 0)]
)
def test_the_public_call_gives_the_price_of_a_row(table, row):
    """A module of full depth through ``planner.estimate``."""
    run = next(r for r in read_table(RUNS / f"{table}.csv", keep_going=True).runs if r.row == row)
    case = case_of(run)
    answer = predict_run(run, CASES)
    layout = layout_of(case)
    fix = {
        name: str(value).lower() if isinstance(value, bool) else value
        for name in FixedValues.__dataclass_fields__
        if (value := getattr(layout.fixed, name)) is not None
    }
    result = planner.estimate(
        lambda: build(case.shape),
        gpus=run.num_gpus,
        cluster=case.cluster,
        global_batch_size=run.global_batch_size,
        dtype=case.dtype,
        framework=case.framework.name,
        fix=fix,
        example_batch=lambda size: example_batch(case.shape, size),
        loss_fn=loss,
    )
    assert result.best.costs == answer.costs
    assert max(result.best.memory_by_rank, key=lambda m: m.total_bytes) == answer.memory
