"""Parameters of a stage outside its blocks: the root of FSDP2, gathered and reduced as one."""

from planner.cost.model_units import ModelUnits

_KINDS = ("gathered", "trained", "frozen")


class FsdpRoot:
    """Sizes on one tp rank; what several units read is outside all blocks."""

    def __init__(self, model: ModelUnits) -> None:
        """Keep the model's units."""
        self._units = model.units
        self._blocks = model.blocks
        self._tied = model.tied
        sums = model.byte_sums
        self._before = tuple(sums[f"root_{name}_bytes"] for name in _KINDS)

    def sizes(self, first: int, end: int) -> tuple[int, int, int]:
        """``gathered_bytes``, ``trained_bytes``, and what is frozen in the compute dtype."""
        gathered, trained, frozen = (sums[end] - sums[first] for sums in self._before)
        for tied in self._tied:
            copies = tied.copies(range(first, end))
            gathered -= copies * tied.gathered_bytes
            trained -= copies * tied.trained_bytes
            frozen -= copies * tied.frozen_bytes
        return gathered, trained, frozen

    def gathered_bytes(self, first: int, end: int) -> int:
        """Parameters in the compute dtype, tied ones once."""
        return self.sizes(first, end)[0]

    def trained_bytes(self, first: int, end: int) -> int:
        """Trained parameters in the optimiser's dtype, tied ones once."""
        return self.sizes(first, end)[1]

    def new_gradient_bytes(self, first: int, end: int) -> int:
        """Gradients of trained parameters in the compute dtype, tied ones once."""
        gathered, _, frozen = self.sizes(first, end)
        return gathered - frozen

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
