"""A loss in chunks of rows where ranks have some of the rows, or some of the classes."""

import functools
from dataclasses import replace

from torch import Tensor

from .chunked_loss import LOSSES, Ending, loss_of, loss_on_rank
from .chunked_loss import take_loss_in_chunks as take_on_rank
from .layout import PARTIAL, shard
from .part import Part
from .split_tensor import SplitTensor, unwrapped, wrapped
from .unread import SplitError


def take_loss_in_chunks(part: Part, path: str, num_chunks: int) -> None:
    """Take the loss of what a rank trains in chunks of its rows; arguments as on one rank."""
    LOSSES[SplitTensor] = _over_ranks
    take_on_rank(part, path, num_chunks)


def _over_ranks(ending: Ending, sketch: Tensor) -> Tensor:
    """Return this rank's summand where each has some rows; the whole where each has some classes.

    What ranks have of the rows may be split in turn.

    Raises:
        SplitError: Logits lie otherwise.
    """
    assert isinstance(sketch, SplitTensor)
    ranks, layout, product = sketch.ranks, sketch.layout_over_ranks, ending.product
    bias = None if product.bias is None else unwrapped(product.bias)
    states, table = unwrapped(product.states), unwrapped(product.table)
    own = replace(ending, product=replace(product, states=states, table=table, bias=bias))
    if layout.is_shard and layout.dim == 0:
        rows = replace(own, target=ranks.part(ending.target, layout))
        return wrapped(loss_of(rows, sketch.local), PARTIAL, ranks)
    if layout == shard(1):
        shown = functools.partial(wrapped, layout=layout, ranks=ranks)
        return loss_on_rank(replace(own, shown=shown), sketch.local)
    raise SplitError(f"a loss in chunks of rows does not run on logits that are {layout}")
