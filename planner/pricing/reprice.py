"""A plan priced again from scratch: the check on the ILP's objective."""

import math
from collections.abc import Sequence

from planner.cost.kinds import CostsOfKinds, kinds_of_stages, links_between
from planner.cost.model_units import ModelWork
from planner.cost.stage_costs import StageCosts
from planner.cost.step import StageChoice, StepPrice, price_step, rank_spec
from planner.errors import VerificationError
from planner.framework.script import SCRIPT
from planner.framework.spec import FrameworkSpec
from planner.graph.sizes.family import GraphFamily
from planner.hardware.mixed import as_if_all
from planner.hardware.spec import ClusterSpec
from planner.plan.devices import cluster_of
from planner.plan.types import Plan
from planner.plan.verify import REPORT
from planner.pricing.model_pricing import ModelPricer
from planner.pricing.op_rows import plan_choice
from planner.strategy.configuration import Configuration
from planner.strategy.placement import ranks_per_core


def verify_price(
    plan: Plan, graphs: GraphFamily, cluster: ClusterSpec, framework: FrameworkSpec
) -> None:
    """Hold a plan's step time to its price from scratch.

    Args:
        plan: What was found.
        graphs: Its model.
        cluster: Its devices and links.
        framework: What runs it.

    Raises:
        VerificationError: They differ.
    """
    again_s = reprice_s(plan, graphs, cluster, framework)
    if not math.isclose(again_s, plan.costs.step_time_s, rel_tol=1e-6):
        raise VerificationError(
            f"the best plan breaks the rule 'price': it takes {plan.costs.step_time_s:.9g} s, "
            f"but {again_s:.9g} s when it is priced again",
            rule="price",
            hint=REPORT,
        )


def reprice_s(
    plan: Plan, graphs: GraphFamily, cluster: ClusterSpec, framework: FrameworkSpec
) -> float:
    """Step time of a plan, from its degrees, layouts and stages alone.

    Args:
        plan: What to price.
        graphs: Its model.
        cluster: Its devices and links.
        framework: What runs it.
    """
    works = plan_works(plan, graphs, cluster, framework)
    return price_plan(plan, works, cluster, framework).costs.step_time_s


def plan_works(
    plan: Plan, graphs: GraphFamily, cluster: ClusterSpec, framework: FrameworkSpec
) -> tuple[ModelWork, ...]:
    """Count the work of a plan's units, with the layouts that it was made with.

    By kind of device, in the order of its ranks.

    Args:
        plan: The plan.
        graphs: Its model.
        cluster: Devices and links that the layouts were chosen for.
        framework: What runs it.
    """
    found = []
    for kind in _kinds(plan, cluster):
        pricer = ModelPricer(
            graphs,
            kind,
            plan.dtype,
            kernels=framework.kernels,
            collective_host_s=framework.collective_host_s,
            is_tried=framework.name == SCRIPT,
        )
        work = pricer.work(plan_choice(plan))
        assert work is not None
        found.append(work)
    return tuple(found)


def _kinds(plan: Plan, cluster: ClusterSpec) -> list[ClusterSpec]:
    """The cluster as though all its devices were of each kind, in the order of a plan's ranks."""
    ordered = cluster_of(plan, cluster)
    return [as_if_all(ordered, place) for place in range(len(ordered.kinds))]


def price_plan(
    plan: Plan, works: Sequence[ModelWork], cluster: ClusterSpec, framework: FrameworkSpec
) -> StepPrice:
    """Price a plan whose work is counted.

    Args:
        plan: What to price.
        works: Those of its units, as ``plan_works`` counts them.
        cluster: Devices and links.
        framework: What runs it.
    """
    configuration = plan_configuration(plan, cluster)
    choices = [
        StageChoice(
            first=stage.first_unit, end=stage.end_unit, kinds=stage.activation_checkpointing
        )
        for stage in plan.stages
    ]
    between = links_between(cluster_of(plan, cluster), configuration)
    by_kind = [
        StageCosts(
            work.priced(rank_spec(kind, framework, configuration, plan.dtype)),
            configuration,
            kind,
            framework,
            between=between,
        )
        for work, kind in zip(works, _kinds(plan, cluster), strict=True)
    ]
    if not cluster.parts:
        return price_step(by_kind[0], choices)
    kinds = kinds_of_stages(cluster_of(plan, cluster), configuration)
    return price_step(CostsOfKinds(by_kind, kinds), choices)


def plan_configuration(plan: Plan, cluster: ClusterSpec) -> Configuration:
    """The configuration of a plan on its cluster."""
    return Configuration(
        degrees=plan.degrees,
        schedule=plan.schedule,
        virtual_stages=plan.virtual_stages,
        microbatch_size=plan.microbatch_size,
        num_microbatches=plan.num_microbatches,
        reshard_after_forward=plan.reshard_after_forward,
        sequence_parallel=plan.sequence_parallel,
        compile=plan.compile,
        float8=plan.float8,
        loss_chunks=plan.loss_chunks,
        cpu_offload=plan.cpu_offload,
        activation_offload=plan.activation_offload,
        mesh_order=plan.mesh_order,
        ranks_per_core=ranks_per_core(cluster, plan.degrees, plan.mesh_order),
        device_order=plan.device_order,
        state_form=plan.state_form,
    )
