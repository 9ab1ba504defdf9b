"""A plan priced again from scratch: the check on the ILP's objective."""

from planner.cost.stage_table import StageTable
from planner.graph.sizes.family import GraphFamily
from planner.hardware.spec import ClusterSpec
from planner.plan.types import Plan
from planner.search.decode import step_costs
from planner.search.model_pricing import ModelPricer
from planner.search.op_rows import plan_choice
from planner.strategy.configuration import Configuration


def reprice_s(plan: Plan, graphs: GraphFamily, cluster: ClusterSpec) -> float:
    """Step time of a plan, from its degrees, layouts and stages alone.

    Args:
        plan: What to price.
        graphs: Its model.
        cluster: Its devices and links.
    """
    pricer = ModelPricer(graphs, cluster, plan.dtype, time_limit_s=60.0)
    priced = pricer.priced(plan_choice(plan))
    assert priced is not None
    configuration = plan_configuration(plan)
    table = StageTable(priced.model, configuration, cluster)
    seconds = [
        table.seconds(stage.first_unit, stage.end_unit, stage.activation_checkpointing)
        for stage in plan.stages
    ]
    return step_costs(configuration, seconds).step_time_s


def plan_configuration(plan: Plan) -> Configuration:
    """The configuration of a plan."""
    return Configuration(
        degrees=plan.degrees,
        schedule=plan.schedule,
        virtual_stages=plan.virtual_stages,
        microbatch_size=plan.microbatch_size,
        num_microbatches=plan.num_microbatches,
        reshard_after_forward=plan.reshard_after_forward,
        sequence_parallel=plan.sequence_parallel,
    )
