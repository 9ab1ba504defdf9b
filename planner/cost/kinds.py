"""Stages of one configuration that run on several kinds of device."""

from collections.abc import Sequence

from planner.cost.stage_costs import StageCosts
from planner.hardware.mixed import between_parts, part_of_rank
from planner.hardware.spec import ClusterSpec, LinkSpec
from planner.hardware.topology import MeshAxis, joining_link, units_of
from planner.strategy.configuration import Configuration


class CostsOfKinds:
    """Prices stages, each by the kind of device that it runs on."""

    def __init__(self, by_kind: Sequence[StageCosts], kind_of_stage: Sequence[int]) -> None:
        """Keep prices.

        Args:
            by_kind: Prices of the configuration on each kind.
            kind_of_stage: Place of its kind among them, by stage.
        """
        self._by_kind = by_kind
        self._kind_of_stage = kind_of_stage
        self.configuration = by_kind[0].configuration
        """Theirs."""
        self.model = by_kind[0].model
        """Units as on the first kind."""

    def of_stage(self, stage: int) -> StageCosts:
        """Prices of a stage by its position."""
        return self._by_kind[self._kind_of_stage[stage]]


def kinds_of_stages(cluster: ClusterSpec, configuration: Configuration) -> tuple[int, ...]:
    """Place of the kind of device that each stage runs on.

    Args:
        cluster: Its parts in the order of their ranks.
        configuration: One whose stages are neighbours in rank order, one on a rank.
    """
    pp = configuration.degrees.pp
    ranks = cluster.num_gpus // pp
    return tuple(part_of_rank(cluster, stage * ranks) for stage in range(pp))


def links_between(cluster: ClusterSpec, configuration: Configuration) -> tuple[LinkSpec, ...]:
    """The links in front of all stages but the first: those of a part, or between two parts."""
    ranks = cluster.num_gpus // configuration.degrees.pp
    found: list[LinkSpec] = []
    for part in cluster.parts:
        units = units_of(part)
        axis = MeshAxis(size=part.num_gpus // ranks, stride=ranks)
        found.append(between_parts(cluster))
        places = (joining_link(units, axis, at - 1, at) for at in range(1, axis.size))
        found += (part.links[place] for place in places)
    return tuple(found[1:])
