"""What a stage holds for a while in a backward: of its units, and of gradients that are new.

FSDP takes the gradients of a block when its backward is over. Until then they lie in the compute
dtype beside those of the optimiser's that they are added to, or that they are reduced into.
"""

import sys
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from functools import cached_property
from itertools import accumulate

from planner.cost.gradient_times import GradientTimes
from planner.cost.held_stage import HeldStage
from planner.cost.model_units import ModelUnits
from planner.cost.sections import Sections
from planner.cost.unit_pricing import PricedUnit
from planner.strategy.configuration import Configuration
from planner.vocabulary import RECOMPUTATIONS, Recomputation


class Transients:
    """Highest transients of the stages of one configuration."""

    def __init__(self, model: ModelUnits, configuration: Configuration) -> None:
        """Keep what they depend on."""
        self._tied = model.tied
        self._shared = model.shared
        self.sections = Sections(model)
        """Of whose blocks nothing counts as gone before others of theirs."""
        self._units = model.units
        self._blocks = model.blocks
        self._held_by_code = model.held_by_code
        self._configuration = configuration
        self.gradients = GradientTimes(model, configuration)
        """When gradients come and are reduced."""
        self._like = model.first_alike_pair
        self._highest: dict[tuple[int, str], int] = {}
        self._of_stages: dict[Hashable, int] = {}
        self._left: dict[range, int] = {}

    @property
    def key(self) -> Hashable:
        """What they depend on besides the priced units: equal where that is."""
        configuration = self._configuration
        has_one = configuration.num_microbatches == 1
        form = configuration.state_form, configuration.reshard_after_forward
        degrees = configuration.degrees
        shared = configuration.cpu_offload or len(self.sections.of(0, len(self._units))) > 1
        times = self.gradients
        shares = (degrees.shards, degrees.expert_shards, times.may_be_missing) if shared else ()
        return (*form, has_one, times.pipelined, times.are_reduced, *shares)

    def of(self, stage: HeldStage) -> int:
        """That of a stage at its moment, 0 where another one of its rank runs."""
        if not stage.moment.is_running:
            return 0
        is_early = stage.moment.is_ending or stage.moment.is_dividing
        key = stage.first, stage.end, stage.kinds, is_early
        if key not in self._of_stages:
            highest = self.end_bytes if is_early else self.start_bytes
            self._of_stages[key] = highest(stage.first, stage.end, stage.kinds)
        return self._of_stages[key]

    def start_bytes(self, first: int, end: int, kinds: Sequence[str]) -> int:
        """When a backward starts: the epilogue's, or a block's when the epilogue's are gone.

        Or the prologue's when all are gone; or just before, what the forward has held to its end.
        """
        highest, released = self.before_bytes(first, end), 0
        for index in reversed(range(max(first, self._blocks.stop), end)):
            own_bytes = self.unit_bytes(index, Recomputation.NONE)
            highest = max(highest, own_bytes - released)
            released += self.released_bytes(index)
        return max(highest, self._before_end_bytes(first, end, kinds) - released)

    def before_bytes(self, first: int, end: int) -> int:
        """What a forward of a stage has held to its end beside what is kept.

        A stage behind the first runs the model's code, which holds inputs, and what it has made of
        them for units, until it returns.
        """
        held_bytes = self.last_gather_bytes
        if first > 0 and self.gradients.is_script:
            mine = range(first, end)
            held_bytes += sum(size for size, keep in self._held_by_code if keep.isdisjoint(mine))
        return held_bytes

    def _before_end_bytes(self, first: int, end: int, kinds: Sequence[str]) -> int:
        """Highest transient of the units before the epilogue, less what is gone of those behind."""
        highest, kept = -sys.maxsize, 0
        for section in self.sections.of(first, end):
            sizes, own = 0, 0
            for index in section:
                kind = kinds[index - first]
                sizes += self._units[index].activation_bytes[kind]
                more = self.joined_at_start(index, first, end)
                own = max(own, self.unit_bytes(index, kind) + more)
            highest -= max(0, sizes - self.left_of(section)) - self.come_of(section)
            highest = max(highest, own + self.reduced_behind(section, end))
            kept += sizes
        if first < min(end, self._blocks.start):
            highest = max(highest, self.prologue_bytes(end) - kept)
        return highest

    def left_of(self, section: range) -> int:
        """What of a section's activations is not gone when the one before it runs its backward.

        That keeps what it handed on, as this does no more. In place of others there are gradients
        of what was read from further back; under a pipeline its own, where the first backward may
        be the fullest, and what it keeps that may have been sent on. What ``reduced_bytes`` of the
        block before takes for gone is no more.
        """
        if section not in self._left:
            units = [self._units[index] for index in section]
            read = (e for e in self._shared if not (e.units - e.handed).isdisjoint(section))
            left = sum(each.size_bytes for each in read)
            left += self.handed_bytes(section.start - 1) - self.handed_bytes(section.stop - 1)
            times = self.gradients
            if times.is_script and times.pipelined:
                kept = (each for each in self._shared if not each.owners.isdisjoint(section))
                left += sum(each.size_bytes for each in kept if each.is_sent_far)
            if times.is_script and times.pipelined and times.may_be_missing:
                left += sum(unit.trained_bytes for unit in units)
            if times.free_each_time and self._configuration.degrees.shards > 1:
                left += min(units[0].activation_bytes.values())
            self._left[section] = left
        return self._left[section]

    def handed_bytes(self, index: int) -> int:
        """What a unit keeps to its backward that is counted with the unit behind.

        Nothing where that may copy it to host memory, while this unit still has it.
        """
        return 0 if self._configuration.activation_offload else self._handed.get(index, 0)

    @cached_property
    def _handed(self) -> Mapping[int, int]:
        found: dict[int, int] = defaultdict(int)
        for each in self._shared:
            for index in each.handed:
                found[index] += each.size_bytes
        return found

    def prologue_bytes(self, end: int) -> int:
        """Highest transient of the prologue of a stage, with gradients that wait.

        Less what is not gone of activations behind it, as it hands that on.
        """
        joined = self.joined_at_start(0, 0, end)
        blocks, has_rest = self._blocks, end > self._blocks.stop
        handed = self.handed_bytes(0) - self.handed_bytes(blocks.stop - 1) * has_rest
        return self.unit_bytes(0, Recomputation.NONE) + joined + handed

    def come_of(self, section: range) -> int:
        """What has come of its gradients by then, less what is no longer gathered of it.

        Of a step of one backward: others have gradients from the start. Parameters that were
        gathered for all blocks go with each.
        """
        times, alone = self.gradients, self._configuration.num_microbatches == 1
        if not times.is_script or times.pipelined or not alone:
            return 0
        units = [self._units[index] for index in section]
        goes = sum(unit.inner_gathered_bytes for unit in units) * times.end_gathers
        return round(sum(map(self._share_bytes, units))) - goes

    def reduced_behind(self, section: range, end: int) -> int:
        """What a section has beside its transients: the input of the reduction of the block behind.

        ``reduced_bytes`` takes it for what was gathered of that, and ``come_of`` that for gone.
        """
        if section.stop >= min(end, self._blocks.stop) or not self.gradients.end_gathers:
            return 0
        return self._units[section.stop].inner_gathered_bytes

    @cached_property
    def most_before_bytes(self) -> int:
        """More than any block has when its backward starts, with what comes of those behind it."""
        each = [range(index, index + 1) for index in self._blocks]
        own = (self.unit_bytes(index, kind) for index in self._blocks for kind in RECOMPUTATIONS)
        beside = (self.reduced_behind(block, len(self._units)) for block in each)
        joined = 2 * sum(tied.gathered_bytes for tied in self._tied)
        come = sum(max(0, self.come_of(block)) + 1 for block in each)
        return max(own, default=0) + max(beside, default=0) + joined + come

    def _share_bytes(self, unit: PricedUnit) -> float:
        """A rank's share of what is trained of a unit."""
        degrees, experts = self._configuration.degrees, unit.experts_trained_bytes
        return (unit.trained_bytes - experts) / degrees.shards + experts / degrees.expert_shards

    @cached_property
    def last_gather_bytes(self) -> int:
        """The buffer of the last gather of a forward, out of which its parameters are copied.

        FSDP holds it until the next is copied out of, or to the end of the forward. Of several
        microbatches without resharding the first alone gathers, when gradients have not come; and a
        backward that gathers has more by then, a block and the next.
        """
        times = self.gradients
        if times.pipelined or not times.is_script or not times.are_reduced or times.add_up:
            return 0
        blocks = [
            unit for unit in map(self._units.__getitem__, self._blocks) if unit.inner_gathered_bytes
        ]
        if not blocks:
            every = range(len(self._units))
            copies = sum(tied.copies(every) * tied.gathered_bytes for tied in self._tied)
            return sum(unit.gathered_bytes for unit in self._units) - copies
        if self._configuration.reshard_after_forward:
            return 0
        sizes = [unit.experts_gathered_bytes or unit.inner_gathered_bytes for unit in blocks[-2:]]
        return max(sizes[-1], sum(sizes) - min(blocks[-1].activation_bytes.values()))

    def end_bytes(self, first: int, end: int, kinds: Sequence[str]) -> int:
        """When a backward has one block to go: of the units before the epilogue."""
        return max(
            (
                self._ending_bytes(index, kind) + self.joined_bytes(index, first, end)
                for index, kind in zip(range(first, end), kinds, strict=True)
                if index < self._blocks.stop
            ),
            default=0,
        )

    def joined_bytes(self, index: int, first: int, end: int) -> int:
        """Gradients beside a unit's own, of weights that several units of a stage read.

        From the last reader's backward to the first one's their sum waits, and is added to by each.
        It is counted already where it lies behind the blocks to the end of the backward.
        """
        times = self.gradients
        if not (times.lie_beside or times.are_added_at_once or times.reduce_root_last):
            return 0
        joined = 0
        for tied in self._tied:
            readers = [unit for unit in tied.units if first <= unit < end]
            if tied.trained_bytes and readers and readers[0] <= index < readers[-1]:
                is_kept = self.gradients.keep_root_to_end and readers[-1] >= self._blocks.stop
                joined += tied.gathered_bytes * ((not is_kept) + (index in readers))
        return joined

    def joined_at_start(self, index: int, first: int, end: int) -> int:
        """The same beyond activations of blocks behind in its section: the least of what is gone.

        Those of all blocks are gone when the prologue runs its backward, whatever they are.
        """
        joined = self.joined_bytes(index, first, end)
        if not joined or index not in self._blocks:
            return joined
        least = self._least_kept
        stop = next(each.stop for each in self.sections.of(first, end) if index in each)
        return max(0, joined - (least[stop] - least[index + 1]))

    @cached_property
    def _least_kept(self) -> Sequence[int]:
        """Prefix sums over the units of the least activations that each may keep."""
        return [0, *accumulate(min(unit.activation_bytes.values()) for unit in self._units)]

    def _ending_bytes(self, index: int, kind: str) -> int:
        """Highest transient of a unit among the last of a backward.

        Gradients that are kept as they come are among those of the stage by then.
        """
        if self._configuration.state_form == "plain" and not self.gradients.are_added_at_once:
            return self._units[index].temporary_bytes[kind]
        return self.unit_bytes(index, kind)

    def unit_bytes(self, index: int, kind: str) -> int:
        """Highest transient of a unit."""
        key = (self._like[index], kind)
        if key not in self._highest:
            self._highest[key] = self._new_unit_bytes(index, kind)
        return self._highest[key]

    def _new_unit_bytes(self, index: int, kind: str) -> int:
        unit = self._units[index]
        own = unit.temporary_bytes
        if self.gradients.lie_beside or (self.gradients.free_each_time and index in self._blocks):
            own = unit.gradient_temporary_bytes
        elif self.gradients.are_added_at_once:
            own = unit.added_temporary_bytes
        highest = own[kind] + self.reduced_bytes(index, kind)
        return max(highest, self._reducing_bytes(index), self._copied_bytes(index))

    def _copied_bytes(self, index: int) -> int:
        """A rank's share of a unit on its way from host memory, out of which it is gathered."""
        if not (self._configuration.cpu_offload and self._configuration.reshard_after_forward):
            return 0
        return round(self._share_bytes(self._units[index]))

    def by_kind(self, index: int) -> tuple[tuple[int, int], ...]:
        """Highest transients of a unit by its recomputation, as RECOMPUTATIONS has them.

        When a backward starts, and among the last of one; but for ``joined_at_start``, and
        ``joined_bytes``.
        """
        return tuple(
            (self.unit_bytes(index, kind), self._ending_bytes(index, kind))
            for kind in RECOMPUTATIONS
        )

    def reduced_bytes(self, index: int, kind: str) -> int:
        """What FSDP has of gradients beside new ones of a block, where it reduces in each backward.

        The input of the reduction before, of the block behind, which it holds until the next
        begins, and whose activations are gone. Experts that ranks share are reduced apart. Where
        parameters were gathered for all blocks, a block whose gradients are reduced is no longer
        gathered: what an input is more than that counts.
        """
        if not self.gradients.are_reduced_each_time or index not in self._blocks:
            return 0
        (new, own), (new_behind, behind) = map(self._reduction_bytes, (index, index + 1))
        if not self._configuration.reshard_after_forward:
            return max(0, own - new, behind - new_behind)
        if self._configuration.degrees.shards == 1:
            return 0  # a rank by itself has nothing to wait for
        return max(0, behind - self._gone_bytes(index, kind))

    def _reducing_bytes(self, index: int) -> int:
        """The input of a block's reduction, when its parameters and new gradients are gone."""
        if not self.gradients.free_each_time:
            return 0
        new, own = self._reduction_bytes(index)
        return max(0, own - new)

    def _gone_bytes(self, index: int, kind: str) -> int:
        """Activations that are gone when a unit runs its backward: those of the block behind it.

        Of alike blocks it recomputes no more than this one.
        """
        if index + 1 not in self._blocks:
            return 0
        unit, behind = self._units[index], self._units[index + 1]
        if unit.structure == behind.structure:
            return behind.activation_bytes[kind] - self.handed_bytes(index)
        return min(behind.activation_bytes.values()) - self.handed_bytes(index)

    def _reduction_bytes(self, index: int) -> tuple[int, int]:
        """New gradients of a block, and the input of their reduction; none of other units."""
        if index not in self._blocks:
            return 0, 0
        unit = self._units[index]
        experts = unit.experts_gathered_bytes - unit.experts_frozen_bytes
        frozen = unit.frozen_bytes - unit.outer_frozen_bytes
        others = unit.inner_gathered_bytes - frozen - experts
        trained = unit.trained_bytes - unit.outer_trained_bytes
        reduced = max(unit.experts_trained_bytes, trained - unit.experts_trained_bytes)
        return max(experts, others), reduced

    def released_bytes(self, index: int) -> int:
        """What a unit behind the blocks no longer holds when the units before it run backward.

        Its gradients last in the compute dtype to the end of the backward, when FSDP takes those of
        the root; what chunks of a loss make is there before it.
        """
        unit = self._units[index]
        released = unit.activation_bytes[Recomputation.NONE] - unit.lasting_bytes
        released -= self.handed_bytes(index - 1)
        if self.gradients.keep_root_to_end and not unit.lasting_bytes:
            released -= unit.gathered_bytes - unit.frozen_bytes
        return released

    def left_gradient_bytes(self, first: int, end: int) -> int:
        """What of that the units of a stage behind the blocks have left to its end."""
        if not self.gradients.keep_root_to_end:
            return 0
        behind = self._units[max(first, self._blocks.stop) : end]
        return sum(unit.gathered_bytes - unit.frozen_bytes for unit in behind)
