"""Buffers for what neighbouring stages send, and what of a stage's activations lies in them.

torch's pipeline stages keep a buffer for every microbatch of the step. What a stage's first unit
counts of its own input, since its backward or a checkpoint reads it, lies there already. That hangs
on how it is recomputed: a block whose first op saves nothing of what it reads (a norm that casts it
first) keeps its input for a checkpoint alone.
"""

from planner.cost.model_units import ModelUnits
from planner.strategy.configuration import Configuration


class ReceiveBuffers:
    """Those of the stages of one configuration; none but of the training script's."""

    def __init__(self, model: ModelUnits, configuration: Configuration) -> None:
        """Keep what is handed over at each boundary."""
        is_script = configuration.state_form != "replicated"
        self._exist = is_script and configuration.degrees.pp > 1
        self._entering = (*model.entering_bytes, 0)
        self._received = model.received_bytes
        self._microbatches = configuration.num_microbatches

    def size_bytes(self, first: int, end: int) -> int:
        """Those of the stage [first, end), for activations and for gradients."""
        entering = self._entering[first] if first > 0 else 0
        return self._exist * self._microbatches * (entering + self._entering[end])

    def least_bytes(self, first: int) -> int:
        """What the first unit of a stage counts of a microbatch that lies there, at the least."""
        return min(self._of(first))

    def most_bytes(self, first: int) -> int:
        """The same at the most."""
        return max(self._of(first))

    def more_bytes(self, first: int) -> tuple[int, ...]:
        """What more than the least it is under each of RECOMPUTATIONS; () where it is the same."""
        received = self._of(first)
        more = tuple(each - min(received) for each in received)
        return more if any(more) else ()

    def _of(self, first: int) -> tuple[int, ...]:
        """By recomputation; 0 for the end of the model, where a stage without units begins."""
        return self._received[first] if self._exist and first < len(self._received) else (0,)
