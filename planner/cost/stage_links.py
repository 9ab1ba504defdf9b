"""Links between neighbouring stages of one configuration, and what transfers over them take.

torch's schedules send to a neighbour and receive from it in one batch and wait for both, so that
each boundary costs one transfer per microbatch on both its sides, and what the host takes for each
of the tensors that cross it.
"""

from collections.abc import Sequence
from functools import cached_property, lru_cache
from itertools import pairwise
from operator import attrgetter

from planner.cost.collective import point_to_point_s
from planner.cost.model_units import ModelUnits
from planner.framework.spec import FrameworkSpec
from planner.hardware.spec import ClusterSpec, LinkSpec
from planner.hardware.topology import MeshAxis, joining_link, units_of
from planner.strategy.configuration import Configuration
from planner.strategy.placement import axis_group, mesh_axis
from planner.strategy.schedules import rank_of_stage
from planner.vocabulary import Axis

Links = tuple[LinkSpec | None, LinkSpec | None]
"""To the stage before and to the stage behind; None to one on the same rank."""


class StageLinks:
    """The links of every stage."""

    def __init__(
        self,
        model: ModelUnits,
        configuration: Configuration,
        cluster: ClusterSpec,
        framework: FrameworkSpec,
        between: Sequence[LinkSpec],
    ) -> None:
        """Keep where stages lie.

        Args:
            model: What is handed over at each boundary.
            configuration: Degrees, schedule and order of the mesh.
            cluster: Devices and links.
            framework: What a message takes beside its bytes.
            between: Links in front of all stages but the first; () for those of the cluster.
        """
        self._model = model
        self._configuration = configuration
        self._cluster = cluster
        self._between = tuple(between)
        stalled = cluster.num_nodes >= framework.congested_nodes
        self._message_s = framework.congested_message_s if stalled else framework.message_s

    @cached_property
    def _boundaries(self) -> tuple[LinkSpec | None, ...]:
        """The link in front of each stage and behind the last, None within a rank."""
        configuration, cluster = self._configuration, self._cluster
        axis = mesh_axis(configuration.degrees, Axis.PP, configuration.mesh_order)
        places = _places(units_of(cluster), axis, configuration.schedule, configuration.num_stages)
        links = tuple(None if place is None else cluster.links[place] for place in places)
        return (links[0], *self._between, links[-1]) if self._between else links

    @cached_property
    def slowest(self) -> LinkSpec:
        """The slowest of them."""
        if self._between:
            return min(self._between, key=attrgetter("bandwidth_bytes_per_s"))
        degrees, order = self._configuration.degrees, self._configuration.mesh_order
        return axis_group(self._cluster, degrees, Axis.PP, order).slowest

    def of_stage(self, stage: int) -> Links:
        """The links of a stage; where they are equal, runs of units cost the same."""
        return self._boundaries[stage], self._boundaries[stage + 1]

    def transfers_s(self, first: int, end: int, stage: int | None) -> float:
        """Transfers of one microbatch, activations and gradients.

        Args:
            first: First unit of the stage.
            end: One past its last unit.
            stage: Its position, None for the slowest link on both sides.
        """
        if self._configuration.degrees.pp == 1 or first == end:
            return 0.0
        links = (self.slowest,) * 2 if stage is None else self.of_stage(stage)
        return sum(
            self._transfer_s(*self._sent(cut), link)
            for cut, link in zip((first, end), links, strict=True)
            if 0 < cut < len(self._model.units) and link is not None
        )

    def _sent(self, cut: int) -> tuple[int, int]:
        """Bytes that enter a unit, and the tensors that they are."""
        tensors = self._model.entering_tensors
        return self._model.entering_bytes[cut], tensors[cut] if tensors else 1

    def _transfer_s(self, num_bytes: int, num_tensors: int, link: LinkSpec) -> float:
        return point_to_point_s(num_bytes, link) + num_tensors * self._message_s

    def least_transfers_s(self, cuts: Sequence[int]) -> list[float]:
        """Transfers of each stage for one microbatch, at the least.

        Args:
            cuts: Units that a stage may begin with, all but the first.
        """
        if self._configuration.degrees.pp == 1:
            return [0.0]
        sizes = {self._sent(cut) for cut in cuts}
        links = self._boundaries[1:-1]
        distinct = {id(link): link for link in links}
        by_link = {
            key: 0.0 if link is None else min(self._transfer_s(*each, link) for each in sizes)
            for key, link in distinct.items()
        }
        between = [0.0, *(by_link[id(link)] for link in links), 0.0]
        return [before + behind for before, behind in pairwise(between)]


@lru_cache(maxsize=4096)
def _places(
    units: tuple[int, ...], axis: MeshAxis, schedule: str, num_stages: int
) -> tuple[int | None, ...]:
    """Places of the links in front of each stage and behind the last, None within a rank."""
    found: list[int | None] = []
    for stage in range(num_stages + 1):
        # Nothing crosses the ends of a model.
        first, second = (
            rank_of_stage(schedule, s % num_stages, axis.size) for s in (stage - 1, stage)
        )
        inside = first == second and 0 < stage < num_stages
        found.append(None if inside else joining_link(units, axis, first, second))
    return tuple(found)
