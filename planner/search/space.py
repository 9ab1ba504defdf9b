"""The layouts of one model on one cluster: what is legal, and what each costs."""

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import fields, replace
from functools import cached_property, partial
from operator import attrgetter

from planner.cost.stage_costs import StageCosts
from planner.cost.step import rank_spec
from planner.cost.unit_pricing import master_bytes
from planner.framework.script import SCRIPT
from planner.framework.spec import StateForm
from planner.graph.sizes.family import GraphFamily
from planner.hardware.spec import ClusterSpec, LinkSpec
from planner.plan.types import Plan, Reason, Rejection, StagePlan
from planner.pricing.choice import Axes, ShardingChoice, layout_choice
from planner.pricing.model_pricing import ModelPricer, PricedModel
from planner.search.column_maker import ColumnMaker
from planner.search.columns import KnownMixes
from planner.search.configuration_search import ConfigurationSearch
from planner.search.decode import PlanContext
from planner.search.orders import MeshOrders
from planner.search.prospects import Group, Prospect
from planner.search.relaxation import Relaxation, widest
from planner.search.search_request import SearchRequest
from planner.strategy.configuration import Configuration
from planner.strategy.facts import model_facts, tried_facts
from planner.strategy.fixed_rules import (
    chunk_rule,
    compile_rule,
    float8_rule,
    inputs_rule,
    offload_rule,
    recomputation_rule,
    stream_rule,
)
from planner.strategy.mesh import ParallelDegrees
from planner.strategy.parameter_rules import changed_rule, complex_rule
from planner.strategy.rules import (
    LONG_SEQUENCE,
    BrokenRule,
    broken_rule,
    configurations,
    enumerate_degrees,
    heads_rule,
)
from planner.units import DTYPE_BYTES
from planner.vocabulary import RECOMPUTATIONS, Axis, Recomputation

_BESIDE_DEGREES = attrgetter(*({f.name for f in fields(Configuration)} - {"degrees"}))
_BESIDE_DP = attrgetter(
    *({f.name for f in fields(ParallelDegrees)} - {Axis.DP_REPLICATE, Axis.DP_SHARD})
)


_ONE_STAGE_EACH = "one stage on each rank with cpu_offload"
"""What a searched set with states in host memory leaves out."""
_ROOM_FOR_ALL = "host memory for the inputs of all blocks"
"""What one with inputs there asks for."""


class LayoutSpace:
    """Configurations of one model on one cluster with their prices."""

    def __init__(
        self,
        graphs: GraphFamily,
        cluster: ClusterSpec,
        request: SearchRequest,
        *,
        tries_all: bool = False,
    ) -> None:
        """Read the model's sizes; nothing is priced yet.

        Args:
            graphs: The model at every microbatch size.
            cluster: Devices and links.
            request: What is fixed and what is open.
            tries_all: Try also axes that are seldom worth it where they are left open.
        """
        self._tries_all = tries_all
        self.graphs = graphs
        self.cluster = cluster
        self.framework = framework = request.framework
        self.request = request
        if framework.name == SCRIPT:
            asked = request.fixed.activation_checkpointing
            self.facts = tried_facts(graphs, may_recompute=asked != Recomputation.NONE)
        else:
            unsaid = "how a framework computes stands in its profile"
            self.facts = replace(model_facts(graphs.smallest), loss=unsaid)
        loss = self.facts.loss
        self.context = PlanContext(
            model=request.model,
            global_batch_size=request.global_batch_size,
            dtype=request.dtype,
            loss_module="" if isinstance(loss, str) else loss.module,
        )
        self.orders = MeshOrders(cluster, request.fixed.mesh_order or ())
        self._tried_chunks = False
        self._known = defaultdict[tuple[ShardingChoice, Hashable], KnownMixes](KnownMixes)

    @cached_property
    def pricer(self) -> ModelPricer:
        """Prices of the model's units, on devices that are all alike."""
        return ModelPricer(
            self.graphs,
            self.cluster,
            self.request.dtype,
            kernels=self.framework.kernels,
            collective_host_s=self.framework.collective_host_s,
            is_tried=self.framework.name == SCRIPT,
        )

    @property
    def tries_contexts(self) -> bool:
        """Whether cp above 1 is tried: where it is left open, for long samples and for few.

        Else ranks that read samples of their own do what those of cp do, without exchanges.
        """
        sequence, fixed = self.facts.sequence, self.request.fixed
        if sequence is None or fixed.cp is not None or self.framework.name != SCRIPT:
            return (fixed.cp or 1) > 1
        if self._tries_all:
            return True
        is_few = self.request.global_batch_size < self.cluster.num_gpus
        return is_few or sequence >= LONG_SEQUENCE

    @property
    def tries_experts(self) -> bool:
        """Whether ep above 1 is tried where it is left open: for models with modules of experts."""
        is_open = self.request.fixed.ep is None and self.framework.name == SCRIPT
        return is_open and bool(self.facts.experts)

    def legal(self) -> tuple[list[Configuration], list[Rejection]]:
        """All configurations that the model's shapes allow, and the refused degrees.

        Chunks of a loss are tried once; where the script could not run them, none are offered.
        """
        found, refused = self._legal()
        chunked = [each for each in found if each.loss_chunks > 1]
        if chunked and not self._runs_chunks(chunked):
            return self._legal()
        return found, refused

    def _runs_chunks(self, chunked: Sequence[Configuration]) -> bool:
        """Try the chunks of a loss where layouts are tried, and remember that they do not run."""
        if self._tried_chunks:
            return True
        self._tried_chunks = True
        largest = max(chunked, key=lambda configuration: configuration.microbatch_size)
        trial = self.graphs.trial(self.graphs.size_of_trial(largest.microbatch_size))
        refusal = trial.loss(self.context.loss_module)
        if refusal is not None:
            self.facts = replace(self.facts, loss=refusal.reason)
        return refusal is None

    def _legal(self) -> tuple[list[Configuration], list[Rejection]]:
        found: list[Configuration] = []
        refused: list[Rejection] = []
        request = self.request
        for degrees in enumerate_degrees(
            self.cluster.num_gpus,
            request.fixed,
            contexts=self.tries_contexts,
            experts=self.tries_experts,
        ):
            rule = complex_rule(self.facts) if self.framework.name == SCRIPT else None
            rule = rule or broken_rule(degrees, self.facts, request.global_batch_size)
            is_plain = self.state_form(degrees) == "plain" or self.framework.name != SCRIPT
            rule = rule or changed_rule(self.facts, is_plain=is_plain)
            rule = rule or heads_rule(degrees, self.facts, request.fixed)
            rule = rule or recomputation_rule(self.facts, request.fixed)
            rule = rule or compile_rule(degrees, request.fixed)
            for kind in self.cluster.kinds:
                rule = rule or float8_rule(self.facts, request.fixed, kind.device, request.dtype)
            rule = rule or stream_rule(degrees, self.facts, request.fixed)
            rule = rule or chunk_rule(self.facts, request.fixed)
            rule = rule or offload_rule(request.fixed, self.cluster)
            rule = rule or inputs_rule(degrees, self.facts, request.fixed)
            rule = rule or self.orders.broken_rule(degrees)
            items: Iterator[Configuration | BrokenRule] = (
                configurations(degrees, self.facts, request.global_batch_size, request.fixed)
                if rule is None
                else iter([rule])
            )
            placed = self.orders.placement(degrees) if rule is None else {}
            for item in self._running(items):
                if isinstance(item, Configuration):
                    found.append(replace(item, **placed, state_form=self.state_form(degrees)))
                else:
                    why = partial(Reason, detail=item.detail)
                    refused.append(Rejection(degrees=degrees, rule=item.rule, why=why))
        return found, refused

    def _running(
        self, items: Iterator[Configuration | BrokenRule]
    ) -> Iterator[Configuration | BrokenRule]:
        """Leave out microbatches that the model refuses; a broken rule where none is left."""
        refused: BrokenRule | None = None
        for item in items:
            size = item.microbatch_size if isinstance(item, Configuration) else 0
            if size and (reason := self.graphs.refusal(size)):
                refused = refused or BrokenRule(
                    rule="microbatch_size",
                    detail=f"the model does not run with microbatch_size {size}: {reason}; the "
                    f"smallest that runs is {self.graphs.smallest.microbatch_size}",
                )
                continue
            refused = None
            yield item
        if refused is not None:
            yield refused

    def state_form(self, degrees: ParallelDegrees) -> StateForm:
        """How the script holds parameters: as they are where nothing is shared, split or cast."""
        dtype = self.request.dtype
        is_alone = degrees.pp == degrees.world_size and not self.request.fixed.cpu_offload
        is_cast = DTYPE_BYTES[dtype] != master_bytes(dtype)
        return "plain" if self.framework.name == SCRIPT and is_alone and not is_cast else "fsdp"

    def state_fits(self) -> bool:
        """Whether parameters, gradients and optimiser states fit, spread over all devices."""
        if self.request.fixed.cpu_offload:
            return True  # they lie elsewhere
        graph = self.graphs.smallest
        trained, dtype = graph.num_trainable_parameters, self.request.dtype
        state_bytes = 4 * master_bytes(dtype) * trained
        state_bytes += DTYPE_BYTES[dtype] * (graph.num_parameters - trained)
        return state_bytes <= sum(kind.num_gpus * self._room(kind) for kind in self.cluster.kinds)

    def _room(self, kind: ClusterSpec) -> float:
        """What tensors may take of a device of one kind."""
        own, device = self.framework.reserve_bytes, kind.device
        reserve_bytes = device.reserve_bytes if own is None else own
        return (device.capacity_bytes - reserve_bytes) / (1 + device.allocator_share)

    def pricers(self, plan: Plan) -> list[tuple[ModelPricer, Sequence[StagePlan]]]:
        """Prices of the stages of a plan, by kinds of device."""
        return [(self.pricer, plan.stages)]

    @property
    def limits(self) -> tuple[str, ...]:
        """What the searched set leaves out."""
        fixed = self.request.fixed
        offloads = (_ONE_STAGE_EACH, fixed.cpu_offload), (_ROOM_FOR_ALL, fixed.activation_offload)
        return tuple(words for words, is_used in offloads if is_used)

    def reason(self, axes: Axes) -> str | None:
        """Why the script cannot run a layout over axes, where it was tried and refused."""
        return self.pricer.reason(axes)

    def is_unpaid(self, axes: Axes) -> bool:
        """Whether modules could be split over axes, and each is faster whole."""
        return self.pricer.is_unpaid(axes)

    def confirm(self, choice: ShardingChoice) -> bool:
        """Try a choice as the script will run it; False where that changes what it costs."""
        if self.pricer.confirm(choice):
            return True
        for key in [key for key in self._known if key[0] == choice]:
            del self._known[key]
        return False

    def searches(
        self, configuration: Configuration, *, kind: str | None = None
    ) -> Iterator[ConfigurationSearch]:
        """Price a configuration, with vocabulary-sized weights whole and, where they can be, split.

        All blocks recompute ``kind``, where it is not None.
        """
        for split in self._splits(configuration):
            (each,) = self._with_loss_that_runs([configuration], split=split)
            parts = self.priced_parts(each, split=split, kind=kind)
            if parts is not None:
                yield ConfigurationSearch(each, *parts)

    def _with_loss_that_runs(self, alike: Group, *, split: bool) -> Group:
        """Take a loss whole where the chunks that nobody asked for do not run."""
        if self.request.fixed.loss_chunks is not None or alike[0].loss_chunks == 1:
            return alike
        if self.pricer.work(layout_choice(alike[0], split=split)) is not None:
            return alike
        return [replace(each, loss_chunks=1) for each in alike]

    def prospects(self, configurations: Sequence[Configuration]) -> list[Prospect]:
        """Bound configurations by their choices of layouts, none of which is priced yet."""
        groups: dict[ShardingChoice, list[Group]] = {}
        for group in self._alike(configurations):
            for split in self._splits(group[0]):
                groups.setdefault(layout_choice(group[0], split=split), []).append(group)
        for choice in groups:
            self.pricer.least_work.expect(choice)
        return [
            Prospect(
                found,
                choice=choice,
                least_work=self.pricer.least_work if self._bounds_choices else None,
                once_s=self.framework.step_s,
                price=partial(self._bounded, split=choice.split_tables),
            )
            for choice, found in groups.items()
        ]

    @property
    def _bounds_choices(self) -> bool:
        """Whether nothing of collectives hides, and modules are split over neighbours."""
        framework = self.framework
        hides = framework.tp_overlap > 0 or framework.hides_backward_collectives
        return not hides and not self.request.fixed.mesh_order

    def _alike(self, configurations: Sequence[Configuration]) -> Iterable[list[Configuration]]:
        """Configurations that differ in dp_shard alone."""
        alike: dict[Hashable, list[Configuration]] = {}
        for configuration in configurations:
            degrees = configuration.degrees
            key = _BESIDE_DEGREES(configuration), degrees.dp, _BESIDE_DP(degrees)
            alike.setdefault(key, []).append(configuration)
        return alike.values()

    def _bounded(self, alike: Group, *, split: bool) -> Iterator[ConfigurationSearch]:
        """Price configurations that differ in dp_shard alone, several as one that bounds them."""
        alike = self._with_loss_that_runs(alike, split=split)
        # Where an axis lies changes with others; and of gradients that hosts add up in every
        # microbatch, replicas send them once: those that share the most are not the fastest.
        differ = self.request.fixed.mesh_order or self.request.fixed.cpu_offload
        if len(alike) > 1 and not differ:
            parts = self.priced_parts(widest(alike), split=split, moves_state=False)
            if parts is not None:
                yield Relaxation(alike, *parts, search=partial(self._search, split=split))
            return
        for configuration in alike:
            parts = self.priced_parts(configuration, split=split)
            if parts is not None:
                yield ConfigurationSearch(configuration, *parts)

    def has_orders(self, configuration: Configuration) -> bool:
        """Whether there are several orders of its mesh."""
        return len(self.orders.of(configuration.degrees)) > 1

    def in_other_orders(self, search: ConfigurationSearch) -> Iterator[ConfigurationSearch]:
        """Price what was priced in one order of the mesh in all others."""
        configuration, split = search.configuration, search.priced.choice.split_tables
        for order in self.orders.of(configuration.degrees):
            if order != configuration.mesh_order:
                yield self._search(self.orders.placed(configuration, order), split=split)

    def _search(self, configuration: Configuration, *, split: bool) -> ConfigurationSearch:
        """Price a configuration of which another with the same choice was priced."""
        parts = self.priced_parts(configuration, split=split)
        assert parts is not None, configuration
        return ConfigurationSearch(configuration, *parts)

    def _splits(self, configuration: Configuration) -> tuple[bool, ...]:
        """Whether vocabulary-sized weights are split."""
        can_split = self.facts.can_split_tables(configuration.degrees.tp)
        return (True, False) if can_split else (False,)

    def _kinds(self, configuration: Configuration, kind: str | None) -> tuple[str, ...]:
        """Recomputations to choose from."""
        kind = kind or self.request.fixed.activation_checkpointing
        if configuration.divides_backward:
            kind = Recomputation.NONE
        return tuple(
            each
            for each in (RECOMPUTATIONS if kind is None else (kind,))
            if each not in self.facts.recompute_refusals
        )

    def priced_parts(
        self,
        configuration: Configuration,
        *,
        split: bool,
        kind: str | None = None,
        moves_state: bool = True,
        between: Sequence[LinkSpec] = (),
    ) -> tuple[PricedModel, StageCosts, ColumnMaker] | None:
        """Prices of a configuration, None where it has no layout or no recomputation."""
        kinds = self._kinds(configuration, kind)
        choice = layout_choice(configuration, split=split)
        rank = rank_spec(self.cluster, self.framework, configuration, self.request.dtype)
        host_s = rank.network_host_s
        strides = self.orders.strides(configuration.degrees, configuration.mesh_order)
        if not kinds:
            return None
        priced = self.pricer.priced(choice, network_host_s=host_s, strides=strides)
        if priced is None:
            return None
        table = StageCosts(
            priced.model,
            configuration,
            self.cluster,
            self.framework,
            moves_state=moves_state,
            between=between,
        )
        known = self._known[choice, (host_s, strides, table.recomputation_key)]
        return priced, table, ColumnMaker(table, kinds=kinds, known=known)
