"""The layouts of one model on a cluster of several kinds of device.

A stage lies on one kind of device, so that pp is the outermost axis and the ranks of a stage divide
those of each kind. Every order of the kinds is looked at: which of them has the first stages, which
hold the most microbatches. Layouts are chosen and priced on each kind as though all devices were of
it (``hardware.mixed.as_if_all``); a configuration takes each stage's prices from its own
(``MixedSearch``).
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial

from planner.cost.kinds import kinds_of_stages, links_between
from planner.graph.sizes.family import GraphFamily
from planner.hardware.mixed import as_if_all, in_order, orders
from planner.hardware.spec import ClusterSpec
from planner.plan.types import Plan, Reason, Rejection, StagePlan
from planner.pricing.choice import Axes, ShardingChoice, layout_choice
from planner.pricing.least_work import LeastWork
from planner.pricing.model_pricing import ModelPricer
from planner.search.configuration_search import ConfigurationSearch
from planner.search.mixed_search import MixedSearch
from planner.search.prospects import Group, Prospect
from planner.search.refusals import refusal
from planner.search.search_request import SearchRequest
from planner.search.space import LayoutSpace
from planner.strategy.configuration import Configuration
from planner.vocabulary import Schedule

_ONE_STAGE_EACH = "one stage on each rank where devices are of several kinds"
"""What a searched set leaves out."""


class MixedSpace(LayoutSpace):
    """Configurations of one model with their prices, on devices of several kinds."""

    def __init__(
        self,
        graphs: GraphFamily,
        cluster: ClusterSpec,
        request: SearchRequest,
        *,
        tries_all: bool = False,
    ) -> None:
        """Set up a space for each kind of device; nothing is priced yet.

        Args:
            graphs: The model at every microbatch size.
            cluster: One with parts.
            request: What is fixed and what is open.
            tries_all: As in ``LayoutSpace``.
        """
        super().__init__(graphs, cluster, request, tries_all=tries_all)
        self._of_kind = {
            part.device.name: LayoutSpace(graphs, as_if_all(cluster, place), request)
            for place, part in enumerate(cluster.parts)
        }
        self._least_work = LeastWork(
            graphs,
            [space.pricer.solver for space in self._of_kind.values()],
            [part.device for part in cluster.parts],
        )
        self._ordered = {order: in_order(cluster, order) for order in orders(cluster)}

    @property
    def limits(self) -> tuple[str, ...]:
        """What the searched set leaves out."""
        return (*super().limits, _ONE_STAGE_EACH)

    def legal(self) -> tuple[list[Configuration], list[Rejection]]:
        """Configurations with one stage on each rank, in all orders of the kinds of device."""
        found, refused = super().legal()
        alone = [each for each in found if each.virtual_stages == 1]
        if not alone:
            rule = "stages of a rank on kinds of device"
            refused += [refusal(each, rule=rule, why=partial(_shared, each)) for each in found]
        ordered = (replace(each, device_order=order) for each in alone for order in self._ordered)
        return list(ordered), refused

    def confirm(self, choice: ShardingChoice) -> bool:
        """Try a choice on each kind of device; False where that changes what it costs on one."""
        return all([space.confirm(choice) for space in self._of_kind.values()])

    def pricers(self, plan: Plan) -> list[tuple[ModelPricer, Sequence[StagePlan]]]:
        """Prices of the stages of a plan, by kinds of device."""
        cluster, ranks = (
            self._ordered[plan.device_order],
            plan.degrees.world_size // plan.degrees.pp,
        )
        left = list(plan.stages)
        found: list[tuple[ModelPricer, Sequence[StagePlan]]] = []
        for part in cluster.parts:
            number = part.num_gpus // ranks
            found.append((self._of_kind[part.device.name].pricer, left[:number]))
            left = left[number:]
        return found

    def reason(self, axes: Axes) -> str | None:
        """Why the script cannot run a layout over axes, as it was found on one kind of device."""
        return next(filter(None, (space.reason(axes) for space in self._of_kind.values())), None)

    def is_unpaid(self, axes: Axes) -> bool:
        """Whether modules could be split, and each is faster whole on some kind of device."""
        return any(space.is_unpaid(axes) for space in self._of_kind.values())

    def searches(
        self, configuration: Configuration, *, kind: str | None = None
    ) -> Iterator[ConfigurationSearch]:
        """Price a configuration; one without an order of the kinds in their own."""
        if not configuration.device_order:
            configuration = replace(configuration, device_order=next(iter(self._ordered)))
        for split in self._splits(configuration):
            found = self._mixed(configuration, split=split, kind=kind)
            if found is not None:
                yield found

    def prospects(self, configurations: Sequence[Configuration]) -> list[Prospect]:
        """Bound configurations by their choices of layouts, none of which is priced yet."""
        groups: dict[ShardingChoice, list[Group]] = {}
        for each in configurations:
            for split in self._splits(each):
                groups.setdefault(layout_choice(each, split=split), []).append([each])
        for choice in groups:
            self._least_work.expect(choice)
        return [
            Prospect(
                found,
                choice=choice,
                least_work=self._least_work if self._bounds_choices else None,
                once_s=self.framework.step_s,
                price=partial(self._priced, split=choice.split_tables),
            )
            for choice, found in groups.items()
        ]

    def in_other_orders(self, search: ConfigurationSearch) -> Iterator[ConfigurationSearch]:
        """Price what was priced in one order of the mesh in all others."""
        configuration, split = search.configuration, search.priced.choice.split_tables
        changed = (
            replace(configuration, mesh_order=order)
            for order in self.orders.of(configuration.degrees)
            if order != configuration.mesh_order
        )
        return self._priced(changed, split=split)

    def _priced(
        self, configurations: Iterable[Configuration], *, split: bool
    ) -> Iterator[ConfigurationSearch]:
        found = (self._mixed(each, split=split) for each in configurations)
        return (search for search in found if search is not None)

    def _mixed(
        self, configuration: Configuration, *, split: bool, kind: str | None = None
    ) -> MixedSearch | None:
        """Price a configuration, None where it has no layout on some kind of device."""
        cluster = self._ordered[configuration.device_order]
        between = links_between(cluster, configuration)
        by_kind = []
        for name in configuration.device_order:
            space = self._of_kind[name]
            parts = space.priced_parts(configuration, split=split, kind=kind, between=between)
            if parts is None:
                return None
            by_kind.append(ConfigurationSearch(configuration, *parts))
        return MixedSearch(by_kind, kinds_of_stages(cluster, configuration))


def layout_space(
    graphs: GraphFamily, cluster: ClusterSpec, request: SearchRequest, *, tries_all: bool = False
) -> LayoutSpace:
    """The layouts of a model on a cluster, of one or several kinds of device."""
    kind = MixedSpace if cluster.parts else LayoutSpace
    return kind(graphs, cluster, request, tries_all=tries_all)


def _shared(configuration: Configuration) -> Reason:
    words = f"schedule {configuration.schedule} with {configuration.virtual_stages} stages on each"
    works = f"{Schedule.GPIPE} or {Schedule.ONE_F_ONE_B}"
    return Reason(
        detail=f"{words} rank: where devices are of several kinds a rank holds one; schedule can "
        f"be {works}"
    )
