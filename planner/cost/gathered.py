"""What a run of units has gathered of the parameters that FSDP2 shards, through a backward."""

from planner.cost.fsdp_root import FsdpRoot
from planner.cost.model_units import ModelUnits
from planner.cost.unit_pricing import PricedUnit
from planner.strategy.configuration import Configuration


class GatheredParameters:
    """Sizes on one tp rank, in the compute dtype."""

    def __init__(
        self, model: ModelUnits, configuration: Configuration, *, adds_up_gradients: bool
    ) -> None:
        """Keep what they depend on.

        Args:
            model: Units priced for the configuration.
            configuration: Degrees, schedule and form of the state.
            adds_up_gradients: Whether microbatches add up whole gradients, reduced once a step.
        """
        self._model = model
        self._blocks = model.blocks
        self._tied = model.tied
        self._before = model.byte_sums["gathered_bytes"]
        self.root = FsdpRoot(model)
        """What is gathered as one."""
        self._gathers = configuration.state_form == "fsdp"
        self._reshards = configuration.reshard_after_forward
        self._pipelined = configuration.degrees.pp > 1
        self._adds_up_gradients = adds_up_gradients
        self._shards_here = (not configuration.cpu_offload) / configuration.degrees.shards

    def whole_bytes(self, first: int, end: int) -> int:
        """All parameters of a stage, tied ones once."""
        copies = sum(t.copies(range(first, end)) * t.gathered_bytes for t in self._tied)
        return self._before[end] - self._before[first] - copies

    def start_bytes(self, first: int, end: int) -> int:
        """Gathered parameters when a backward of FSDP starts.

        With resharding the root and two blocks, the one that runs and the next; without it all.
        Experts that ranks share are gathered apart, when those of the block before are gone.
        """
        everything = self.whole_bytes(first, end) if self._gathers else 0
        if not self._reshards:
            return everything
        inside = self._model.blocks_inside(first, end)
        largest = max((unit.inner_gathered_bytes for unit in inside), default=0)
        # What of a block is gathered with the rest of it.
        others = (unit.inner_gathered_bytes - unit.experts_gathered_bytes for unit in inside)
        following = max(others, default=0)
        return min(everything, self.root.gathered_bytes(first, end) + largest + following)

    def late_bytes(self, first: int, end: int) -> int:
        """How that changes while a backward runs.

        torch's pipeline schedules reshard nothing after a backward, so that those of all its
        blocks come together while the activations of its microbatch go, until the next forward.
        Without a pipeline those of a single microbatch go with its blocks. (Of those that were all
        gathered one block more is left: ``Transients.reduced_bytes`` takes it for gone already.)

        Beside ``start_bytes`` it grows with the run: the search takes a run that exceeds a rank's
        memory for proof that no longer one fits.
        """
        if not self._gathers or (self._adds_up_gradients and not self._pipelined):
            return 0
        if self._pipelined:
            return self.whole_bytes(first, end) - self.start_bytes(first, end)
        alone = min(end, self._blocks.stop) - max(first, self._blocks.start) == 1
        inside = self._model.blocks_inside(first, end)
        blocks = max((self._left_bytes(unit, alone=alone) for unit in inside), default=0)
        left = self.root.gathered_bytes(first, end) + blocks
        return min(0, left - self.start_bytes(first, end))

    def uncertain_bytes(self) -> int:
        """What stages may lack of the whole model's ``start_bytes`` together, however cut.

        It is certain of blocks that a stage has the largest.
        """
        if not self._gathers or not self._reshards:
            return 0
        whole = 0, len(self._model.units)
        inside = self._model.blocks_inside(*whole)
        largest = max((unit.inner_gathered_bytes for unit in inside), default=0)
        return self.start_bytes(*whole) - self.root.gathered_bytes(*whole) - largest

    def _left_bytes(self, unit: PricedUnit, *, alone: bool) -> int:
        """What two blocks like one have at the end of a backward, beside all shards of gradients.

        With resharding that is one block earlier, when neither has its shards.
        """
        size = unit.inner_gathered_bytes
        if not self._reshards:
            return 2 * size
        trained = unit.trained_bytes - unit.outer_trained_bytes
        shards = round(2 * trained * self._shards_here)
        return size + max(0, size - shards) * (not alone)
