"""Parameters of a stage outside its blocks: the root of FSDP2, gathered and reduced as one."""

from planner.cost.model_units import ModelUnits


class FsdpRoot:
    """Sizes on one tp rank; what several units read is outside all blocks."""

    def __init__(self, model: ModelUnits) -> None:
        """Keep the model's units."""
        self._units = model.units
        self._blocks = model.blocks
        self._tied = model.tied
        self._sums = model.byte_sums

    def gathered_bytes(self, first: int, end: int) -> int:
        """Parameters in the compute dtype, tied ones once."""
        return self._once("gathered_bytes", first, end)

    def trained_bytes(self, first: int, end: int) -> int:
        """Trained parameters in the optimiser's dtype, tied ones once."""
        return self._once("trained_bytes", first, end)

    def new_gradient_bytes(self, first: int, end: int) -> int:
        """Gradients of trained parameters in the compute dtype, tied ones once."""
        return self.gathered_bytes(first, end) - self._once("frozen_bytes", first, end)

    def _once(self, name: str, first: int, end: int) -> int:
        """Some parameters of the stage [first, end)."""
        sums, held = self._sums[f"root_{name}"], range(first, end)
        copies = sum(tied.copies(held) * getattr(tied, name) for tied in self._tied)
        return int(sums[end] - sums[first] - copies)

    def last_share(self, first: int, end: int) -> float:
        """Share that the last of its trained parameters has, 0 where there is none.

        A weight that an earlier stage has too comes by the name that it has here: last, perhaps.
        """
        every = self.trained_bytes(first, end)
        if not every:
            return 0.0
        last = next(index for index in reversed(range(first, end)) if self._has_some(index))
        tied = (each for each in self._tied if last in each.units and min(each.units) < first)
        others = max((each.trained_bytes for each in tied), default=0)
        return max(self._units[last].last_trained_bytes, others) / every

    def _has_some(self, index: int) -> bool:
        """Whether a unit trains some of them."""
        unit = self._units[index]
        return bool(unit.outer_trained_bytes if index in self._blocks else unit.trained_bytes)
