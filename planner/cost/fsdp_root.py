"""Parameters of a stage outside its blocks: the root of FSDP2, gathered and reduced as one."""

from planner.cost.model_units import ModelUnits


class FsdpRoot:
    """Sizes on one tp rank."""

    def __init__(self, model: ModelUnits) -> None:
        """Keep the model's units."""
        self._units = model.units
        self._blocks = model.blocks
        self._tied = model.tied

    def units(self, first: int, end: int) -> tuple[int, ...]:
        """Units of the stage [first, end) whose parameters form it."""
        ends = {0, *range(self._blocks.stop, len(self._units))}  # of one unit alone, one
        return tuple(i for i in ends if first <= i < end)

    def gathered_bytes(self, first: int, end: int) -> int:
        """Parameters in the compute dtype, tied ones once."""
        units = self.units(first, end)
        copies = sum(tied.copies(units) * tied.gathered_bytes for tied in self._tied)
        return sum(self._units[i].gathered_bytes for i in units) - copies

    def trained_bytes(self, first: int, end: int) -> int:
        """Trained parameters in the optimiser's dtype, tied ones once."""
        units = self.units(first, end)
        copies = sum(tied.copies(units) * tied.trained_bytes for tied in self._tied)
        return sum(self._units[i].trained_bytes for i in units) - copies

    def last_share(self, first: int, end: int) -> float:
        """Share that the last of its trained parameters has, 0 where there is none.

        A weight that an earlier stage has too comes by the name that it has here: last, perhaps.
        """
        every, units = self.trained_bytes(first, end), self.units(first, end)
        if not every:
            return 0.0
        last = max(units)
        tied = (each for each in self._tied if last in each.units and min(each.units) not in units)
        others = max((each.trained_bytes for each in tied), default=0)
        return max(self._units[last].last_trained_bytes, others) / every
