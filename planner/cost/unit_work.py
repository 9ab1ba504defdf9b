"""What one microbatch of a unit with its layouts chosen computes, sends and keeps on one rank.

The work is all that a price depends on besides the device and the links: it is counted from the
graph once and can then be priced under many of them.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from planner.cost.op import OpWork
from planner.strategy.conversion import Collective
from planner.vocabulary import Axis


@dataclass(frozen=True, slots=True, kw_only=True)
class CommWork:
    """One collective over the split axis, tp, cp or ep, or over one beside it."""

    kind: Collective
    """Which."""
    num_bytes: float
    """Bytes of the whole tensor; of one that ranks exchange, what one of them hands out."""
    beside: Axis | None = None
    """Another axis that it is over: cp around tp, or ep."""
    copied_bytes: tuple[float, ...] = ()
    """Of each kernel that puts in order what it carries, before or behind it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankWork:
    """Kernels and collectives of one pass of a microbatch through a unit."""

    ops: tuple[OpWork, ...]
    """Kernels."""
    comm: tuple[CommWork, ...]
    """Collectives."""


NO_WORK = RankWork(ops=(), comm=())


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitWork:
    """One microbatch of a unit on one rank."""

    structure: str
    """Hash of what the unit computes."""
    forward: RankWork
    """Forward pass."""
    input_backward: RankWork
    """Backward pass, but for what only the parameters' gradients need."""
    weight_backward: RankWork
    """Kernels that only the parameters' gradients need, which split schedules put off."""
    recompute: Mapping[str, RankWork]
    """Forward work done again in backward, by kind of recomputation."""
    activation_bytes: Mapping[str, int]
    """Kept between forward and backward, by kind of recomputation; what it shares with other
    units apart."""
    temporary_bytes: Mapping[str, int]
    """Highest need while it runs, beyond ``activation_bytes``, by kind of recomputation."""
    gradient_temporary_bytes: Mapping[str, int]
    """The same with the gradients of its parameters, each from when it is made to the end of the
    backward."""
    added_temporary_bytes: Mapping[str, int]
    """The same with each of them only while it is made, beside one that it is added to."""
    trained_elements: int
    """Trained parameters on one tp rank."""
    frozen_elements: int
    """Frozen parameters on one tp rank."""
    last_trained_elements: int = 0
    """Those of ``trained_elements`` that the last trained parameter of the module has."""
    experts_trained_elements: int = 0
    """Those of ``trained_elements`` that are of experts which other ranks have not."""
    experts_frozen_elements: int = 0
    """Those of ``frozen_elements`` that are."""
    outer_trained_elements: int = 0
    """Those of ``trained_elements`` that lie outside of the unit's block: what runs behind it."""
    outer_frozen_elements: int = 0
    """Those of ``frozen_elements`` that do."""
    summed_gradient_elements: int = 0
    """Elements of whole trained parameters on a split stream; tp sums their gradients."""
    trained_tensors: int = 0
    """Trained parameters, each counted once whatever its size."""
    waiting_gradient_bytes: int = 0
    """Gradients that the part of a divided backward for the weights starts from."""
    released_bytes: int = 0
    """Of ``activation_bytes`` without recomputation, what goes before that part."""
    offloaded_bytes: tuple[int, ...] = ()
    """Inputs that full recomputation copies to host memory, and back for its backward."""
    lasting_bytes: int = 0
    """Of ``activation_bytes``, what stays until the backward of all units before it is over:
    gradients of weights that the forward pass has made."""
