"""A model that is built without weights, of any size: nothing is drawn, and no memory taken."""

from torch import nn

from planner.runtime.first_weights import DeferredInit, build_deferred
from planner.runtime.model import UserModel


def undrawn_model(model: UserModel) -> nn.Module:
    """Build a model whose parameters lie on the meta device; buffers are real.

    Code that registers them first and asks for no device is not given memory for them either.
    """
    own = DeferredInit._draw
    DeferredInit._draw = lambda *_: None  # type: ignore[method-assign]
    try:
        return build_deferred(model, seed=0)[0]
    finally:
        DeferredInit._draw = own  # type: ignore[method-assign]
