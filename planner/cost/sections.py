"""Blocks of a stage in sections, behind which activations count as gone.

When a block runs its backward, what the blocks behind it kept is gone. How a run of blocks is
recomputed is counted, by structure, and not said block by block: so it is certain of those alone
whose structures all lie behind.
"""

from collections.abc import Sequence

from planner.cost.model_units import ModelUnits


class Sections:
    """Sections of the runs of a model's units."""

    def __init__(self, model: ModelUnits) -> None:
        """Keep the model."""
        self._model = model
        self._known: dict[range, Sequence[range]] = {}

    def of(self, first: int, end: int) -> Sequence[range]:
        """Blocks of a run, cut where no structure lies on both sides."""
        blocks = self._blocks(first, end)
        if blocks not in self._known:
            self._known[blocks] = self._cut(blocks)
        return self._known[blocks]

    def _blocks(self, first: int, end: int) -> range:
        blocks = self._model.blocks
        return range(max(first, blocks.start), min(end, blocks.stop))

    def _cut(self, blocks: range) -> Sequence[range]:
        if not blocks:
            return []
        last = {self._model.units[index].structure: index for index in blocks}
        starts, reach = [blocks.start], blocks.start
        for index in blocks:
            if index > reach:
                starts.append(index)
            reach = max(reach, last[self._model.units[index].structure])
        ends = [*starts[1:], blocks.stop]
        return [range(*each) for each in zip(starts, ends, strict=True)]
