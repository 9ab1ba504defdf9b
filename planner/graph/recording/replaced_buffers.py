"""Buffers that a forward replaces (``self.mean = ...``), recorded as changes in place.

What training reads next is the same either way, and all that holds of a changed buffer is read off
the ops that write into it.
"""

import torch
from torch import Tensor, nn


class ReplacedBuffers:
    """Sees at the end of a module's forward which of its buffers are others than before."""

    def __init__(self, model: nn.Module) -> None:
        """Remember the buffers of all modules."""
        self._first = {id(each): dict(each._buffers) for each in model.modules()}
        self._last = {key: dict(buffers) for key, buffers in self._first.items()}

    def write(self, module: nn.Module) -> None:
        """Write what has taken a buffer's place into the buffer, where it is as large.

        A tensor of another shape is no state that goes on (a table that grows with its inputs).
        """
        last = self._last.get(id(module))
        if not last:
            return
        for name, buffer in self._first[id(module)].items():
            new = module._buffers.get(name)
            if new is last[name]:
                continue
            last[name] = new
            if isinstance(buffer, Tensor) and isinstance(new, Tensor) and buffer.shape == new.shape:
                # The version stays: backward may need the buffer as it was, and nobody changes it.
                with torch.no_grad():
                    buffer.data.copy_(new)
