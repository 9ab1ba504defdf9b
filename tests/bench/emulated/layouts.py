"""Plans of random layouts of the planner's own space, as scripts to run."""

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from planner.api import plan
from planner.cost.step import StageChoice
from planner.errors import PlannerError
from planner.framework.script import SCRIPT, framework_on_cluster
from planner.graph.loading.load import load_model
from planner.graph.sizes.family import trace_family
from planner.plan.types import Plan
from planner.pricing.traffic_rows import traffic_rows
from planner.result import PlanResult
from planner.search.configuration_search import ConfigurationSearch
from planner.search.decode import plan_of
from planner.search.partition import best_partition
from planner.search.search_request import SearchRequest
from planner.search.space import LayoutSpace
from planner.strategy.rules import FixedValues
from planner.vocabulary import RECOMPUTATIONS, Recomputation

MODELS_FOLDER = Path(__file__).parent / "models"

MODELS = {
    "gpt": MODELS_FOLDER / "wide_gpt.py",
    "llama": MODELS_FOLDER / "wide_llama.py",
    "moe": MODELS_FOLDER / "wide_moe.py",
    "mlp": MODELS_FOLDER / "uneven_mlp.py",
    "vit": MODELS_FOLDER / "wide_vit.py",
    "unet": MODELS_FOLDER / "wide_unet.py",
}

BATCH = 32
"""Samples per step."""

DTYPE = "float32"


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What is planned."""

    model: str
    """Key of ``MODELS``."""
    ranks: int
    """Ranks in all."""
    ranks_per_host: int
    """Ranks of a host."""
    cluster: str
    """Cluster profile."""

    def best(self) -> PlanResult:
        """The planner's own answer."""
        return plan(
            str(MODELS[self.model]),
            gpus=self.ranks,
            gpus_per_node=self.ranks_per_host,
            cluster=self.cluster,
            dtype=DTYPE,
            global_batch_size=BATCH,
        )


class Layouts:
    """The layouts that a task allows."""

    def __init__(self, task: Task) -> None:
        """Plan the task, and trace its model."""
        self.result = task.best()
        self.graphs = trace_family(load_model(str(MODELS[task.model]), seq_len=None), dtype=DTYPE)
        framework, cluster = framework_on_cluster(
            SCRIPT, task.cluster, gpus=task.ranks, gpus_per_node=task.ranks_per_host
        )
        self._space = LayoutSpace(
            self.graphs,
            cluster,
            SearchRequest(
                model=self.result.best.model,
                global_batch_size=BATCH,
                dtype=DTYPE,
                fixed=FixedValues(),
                top=1,
                framework=framework,
            ),
        )

    def known(self) -> Iterator[tuple[str, Plan]]:
        """The plan and the rule of thumb."""
        yield "pick", self.result.best
        thumb = self.result.outcome.rule_of_thumb
        if thumb is not None:
            yield "rule of thumb", thumb

    def at_random(self, seed: int) -> Iterator[Plan]:
        """Layouts in an order drawn by a seed: a legal configuration, and how all its blocks are
        recomputed."""
        legal, _ = self._space.legal()
        points = [(each, kind) for each in legal for kind in RECOMPUTATIONS]
        random.Random(seed).shuffle(points)
        for configuration, kind in points:
            search = next(self._space.searches(configuration, kind=kind), None)
            stages = None if search is None else self._stages(search, kind)
            if search is not None and stages is not None:
                yield plan_of(search.costs, search.laid_out(()), stages, self._space.context)

    def _stages(self, search: ConfigurationSearch, kind: str) -> list[StageChoice] | None:
        """Stages as the planner cuts them; even ones where ranks hold several."""
        if not search.shares_ranks:
            partition = best_partition(search)
            if partition is None:
                return None
            return [
                StageChoice(first=column.first, end=column.end, kinds=column.mix.kinds)
                for column in partition.columns
            ]
        places, count = search.positions, search.configuration.num_stages
        edges = [places[round(index * (len(places) - 1) / count)] for index in range(count + 1)]
        inner = range(1, search.num_units - 1)
        return [
            StageChoice(
                first=first,
                end=end,
                kinds=tuple(
                    kind if unit in inner else Recomputation.NONE for unit in range(first, end)
                ),
            )
            for first, end in pairwise(edges)
        ]

    def write(self, layout: Plan, folder: Path) -> bool:
        """Write the script of a layout; False where the planner refuses to."""
        layout = replace(layout, data_reads=self.graphs.data_reads(layout.microbatch_size))
        record = self.result.record
        step_s = layout.costs.step_time_s
        solver = replace(record.outcome.solver, objective_s=step_s, bound_s=step_s)
        outcome = replace(record.outcome, best=layout, candidates=(layout,), solver=solver)
        rows = traffic_rows(layout, self._space.pricer, layout.stages)
        record = replace(record, outcome=outcome, traffic_rows=rows, op_rows=(), module_rows=())
        try:
            PlanResult(record).save(folder, force=True)
        except PlannerError as error:
            print(f"    {folder.name}: refused: {str(error).splitlines()[0]}", flush=True)
            return False
        return True
