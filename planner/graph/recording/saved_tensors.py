"""What autograd keeps for backward, on behalf of which op, and whether a gradient asks for it.

Inputs are packed after the op's autograd node is made and before the op is dispatched; outputs
after the dispatch, before the next node is made. A custom autograd function packs after all of its
ops.
"""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from planner.graph import torch_private
from planner.graph.recording.raw_op import RawOp
from planner.graph.recording.refusals import SavedVersions
from planner.graph.recording.value_table import ValueTable


class _Save(NamedTuple):
    """One tensor that a node keeps."""

    value: int
    tensor: int
    """``id`` of the tensor object."""
    node: int
    """Sequence number of the node."""


class SavedTensors:
    """Attributes saved tensors to ops."""

    def __init__(self, table: ValueTable, ops: Sequence[RawOp]) -> None:
        """Keep what it looks up.

        Args:
            table: Values of tensors.
            ops: Recorded ops, to which more are added.
        """
        self._table = table
        self._ops = ops
        self._versions = SavedVersions()
        self._pending: list[_Save] = []
        self._attributed: list[tuple[_Save, RawOp, bool]] = []
        """With the op, and whether it is one of its outputs."""
        self._taken: set[int] = set()
        """``id`` of tensors that backward asked for."""

    def note(self, tensor: Tensor, last_sequence: int, *, forward: bool) -> None:
        """Note a tensor that a node keeps.

        Args:
            tensor: The tensor.
            last_sequence: Number of the next node when the last op was dispatched.
            forward: Whether the step is in its forward.
        """
        self._versions.note(tensor)
        if not forward or torch_private.is_transformed(tensor):
            return
        sequence = torch_private.next_sequence_number()
        save = _Save(self._table.read(tensor, keep=True), id(tensor), sequence - 1)
        if sequence == last_sequence:
            self._attribute(save)
        else:
            self._pending.append(save)

    def take(self, tensor: Tensor) -> None:
        """Note that backward asks for a tensor."""
        self._versions.check(tensor)
        self._taken.add(id(tensor))
        self._table.recall(tensor)

    def attribute_to(self, op: RawOp) -> None:
        """Attribute what was noted before an op, which has run now."""
        pending, self._pending = self._pending, []
        for save in pending:
            if save.value in op.inputs:
                self._add(save, op, is_output=False)
            else:
                self._attribute(save)

    def end_forward(self) -> None:
        """Attribute what no op came after."""
        for save in self._pending:
            self._attribute(save)
        self._pending = []

    def end_backward(self, loss: Tensor) -> None:
        """Set apart what was kept by nodes that no gradient of the loss reaches.

        Autograd frees them with the results of their ops. A node that runs may ask for less than
        it keeps; one that works on a view in place runs as part of another.
        """
        if all(save.tensor in self._taken for save, *_ in self._attributed):
            return
        reached = torch_private.reached_nodes(loss)
        for save, op, is_output in self._attributed:
            if save.tensor not in self._taken and save.node not in reached:
                (op.saved_outputs if is_output else op.saved_inputs).remove(save.value)
                op.saved_in_vain.append(save.value)

    def _attribute(self, save: _Save) -> None:
        for op in reversed(self._ops):
            if save.value in op.outputs or save.value in op.renewed:
                self._add(save, op, is_output=True)
                return
            if save.value in op.inputs:
                self._add(save, op, is_output=False)
                return

    def _add(self, save: _Save, op: RawOp, *, is_output: bool) -> None:
        (op.saved_outputs if is_output else op.saved_inputs).append(save.value)
        self._attributed.append((save, op, is_output))
