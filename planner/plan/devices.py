"""Which devices the stages of a plan run on."""

from planner.hardware.mixed import in_order, part_of_rank
from planner.hardware.spec import ClusterSpec, DeviceSpec
from planner.plan.types import Plan


def cluster_of(plan: Plan, cluster: ClusterSpec) -> ClusterSpec:
    """The cluster with its kinds of device in the order of a plan's ranks."""
    return in_order(cluster, plan.device_order)


def kinds_of_ranks(plan: Plan, cluster: ClusterSpec) -> tuple[ClusterSpec, ...]:
    """The part of a cluster that each pipeline rank of a plan lies in; itself where it has none."""
    if not cluster.parts:
        return (cluster,) * plan.degrees.pp
    ordered, ranks = cluster_of(plan, cluster), cluster.num_gpus // plan.degrees.pp
    return tuple(
        ordered.parts[part_of_rank(ordered, rank * ranks)] for rank in range(plan.degrees.pp)
    )


def devices_of_ranks(plan: Plan, cluster: ClusterSpec) -> tuple[DeviceSpec, ...]:
    """What each pipeline rank of a plan runs on."""
    return tuple(kind.device for kind in kinds_of_ranks(plan, cluster))
