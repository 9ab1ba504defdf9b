"""A tensor that is not there yet."""

from torch import Tensor


class Promise(Tensor):
    """A tensor that is made when it is asked for."""

    sketch: Tensor
    """Its shape, and how it will lie over ranks: without data."""
