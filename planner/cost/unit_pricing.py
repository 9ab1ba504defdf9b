"""A unit with its layouts chosen: what one microbatch of it costs, in seconds and bytes."""

from collections.abc import Mapping
from dataclasses import dataclass

from planner.cost.node_pricing import RankSpec, comm_s
from planner.cost.op import op_s
from planner.cost.unit_work import RankWork, UnitWork
from planner.strategy.mesh import BESIDE
from planner.units import DTYPE_BYTES
from planner.vocabulary import Dtype, Recomputation

Beside = tuple[float, ...]
"""Seconds over each of ``BESIDE``."""
NOTHING_BESIDE: Beside = (0.0,) * len(BESIDE)
"""Where the split axis is the only one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recompute:
    """What recomputing a unit in backward costs."""

    compute_s: float
    """Kernels run again, and copies of its input to host memory and back."""
    comm_s: float
    """Collectives run again."""
    beside_comm_s: Beside = NOTHING_BESIDE
    """Those of them that are over axes beside the split one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedUnit:
    """One microbatch through one unit on one rank."""

    structure: str
    """Hash of what it computes."""
    forward_s: float
    """Forward kernels."""
    backward_s: float
    """Backward kernels, without recomputation."""
    weight_backward_s: float
    """The part of ``backward_s`` that only the parameters' gradients need."""
    forward_comm_s: float
    """Collectives of the forward pass over the split axis and those beside it."""
    backward_comm_s: float
    """Those of the backward pass."""
    recompute: Mapping[str, Recompute]
    """By kind of recomputation."""
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
    trained_bytes: int
    """Its trained parameters on one tp rank in the dtype of the optimiser, before data-parallel
    sharding."""
    gathered_bytes: int
    """All its parameters in the compute dtype, as gathered for its forward."""
    summed_gradient_bytes: int
    """Gradients of whole parameters on a split stream, summed over tp once a step."""
    forward_beside_s: Beside = NOTHING_BESIDE
    """Those of ``forward_comm_s`` that are over axes beside the split one."""
    backward_beside_s: Beside = NOTHING_BESIDE
    """Those of ``backward_comm_s``."""
    last_trained_bytes: int = 0
    """Those of ``trained_bytes`` that the last trained parameter of the module has."""
    outer_trained_bytes: int = 0
    """Those of ``trained_bytes`` that lie outside of its block, if it is one: it runs code that
    comes behind that."""
    outer_gathered_bytes: int = 0
    """Those of ``gathered_bytes`` that do."""
    outer_frozen_bytes: int = 0
    """Those of ``frozen_bytes`` that do."""
    experts_trained_bytes: int = 0
    """Those of ``trained_bytes`` that are of experts which other ranks have not."""
    experts_gathered_bytes: int = 0
    """Those of ``gathered_bytes`` that are."""
    experts_frozen_bytes: int = 0
    """Those of ``frozen_bytes`` that are."""
    trained_tensors: int = 0
    """Its trained parameters, each counted once whatever its size."""
    frozen_bytes: int = 0
    """Its frozen parameters on one tp rank in the compute dtype, in which they are held."""
    waiting_gradient_bytes: int = 0
    """Gradients that the part of a divided backward for the weights starts from."""
    released_bytes: int = 0
    """Of ``activation_bytes`` without recomputation, what goes before that part."""
    pinned_bytes: int = 0
    """Host memory that full recomputation keeps its input in; 0 where that stays on the device."""
    lasting_bytes: int = 0
    """Of ``activation_bytes``, what stays until the backward of all units before it is over."""

    @property
    def inner_gathered_bytes(self) -> int:
        """What a block gathers of its own."""
        return self.gathered_bytes - self.outer_gathered_bytes


def price_unit(work: UnitWork, rank: RankSpec) -> PricedUnit:
    """Price a unit's work.

    A pass takes at least the time in which the host can issue its kernels and collectives.

    Args:
        work: What one microbatch does on one rank.
        rank: Device, dtype and tp group.
    """
    forward_s, forward_comm_s = _pass_s(work.forward, rank)
    weight = work.weight_backward
    whole = RankWork(
        ops=work.input_backward.ops + weight.ops, comm=work.input_backward.comm + weight.comm
    )
    backward_s, backward_comm_s = _pass_s(whole, rank)
    return PricedUnit(
        structure=work.structure,
        forward_s=forward_s,
        backward_s=backward_s,
        weight_backward_s=_pass_s(weight, rank)[0],
        forward_comm_s=forward_comm_s,
        backward_comm_s=backward_comm_s,
        forward_beside_s=_beside_s(work.forward, rank),
        backward_beside_s=_beside_s(whole, rank),
        recompute={kind: _recompute(work, kind, rank, forward_s) for kind in work.recompute},
        activation_bytes=work.activation_bytes,
        temporary_bytes=work.temporary_bytes,
        gradient_temporary_bytes=work.gradient_temporary_bytes,
        added_temporary_bytes=work.added_temporary_bytes,
        trained_bytes=work.trained_elements * master_bytes(rank.dtype),
        gathered_bytes=(work.trained_elements + work.frozen_elements) * DTYPE_BYTES[rank.dtype],
        summed_gradient_bytes=work.summed_gradient_elements * master_bytes(rank.dtype),
        last_trained_bytes=work.last_trained_elements * master_bytes(rank.dtype),
        outer_trained_bytes=work.outer_trained_elements * master_bytes(rank.dtype),
        outer_gathered_bytes=_outer_elements(work) * DTYPE_BYTES[rank.dtype],
        outer_frozen_bytes=work.outer_frozen_elements * DTYPE_BYTES[rank.dtype],
        experts_trained_bytes=work.experts_trained_elements * master_bytes(rank.dtype),
        experts_gathered_bytes=_experts_elements(work) * DTYPE_BYTES[rank.dtype],
        experts_frozen_bytes=work.experts_frozen_elements * DTYPE_BYTES[rank.dtype],
        trained_tensors=work.trained_tensors,
        frozen_bytes=work.frozen_elements * DTYPE_BYTES[rank.dtype],
        waiting_gradient_bytes=work.waiting_gradient_bytes,
        released_bytes=work.released_bytes,
        pinned_bytes=sum(map(_pinned_bytes, work.offloaded_bytes)),
        lasting_bytes=work.lasting_bytes,
    )


def _recompute(work: UnitWork, kind: str, rank: RankSpec, forward_s: float) -> Recompute:
    """Price what runs again, and what the forward takes longer than ``forward_s`` under it."""
    again = work.recompute[kind]
    more_s = 0.0 if rank.compiled else _again_dispatch_s(kind, rank)
    compute_s, again_comm_s = _pass_s(again, rank, more_s=more_s)
    if more_s and kind == Recomputation.SELECTIVE:
        compute_s += _pass_s(work.forward, rank, more_s=more_s)[0] - forward_s
    if kind == Recomputation.FULL:
        compute_s += _copies_s(work, rank)
    return Recompute(compute_s=compute_s, comm_s=again_comm_s, beside_comm_s=_beside_s(again, rank))


def _again_dispatch_s(kind: str, rank: RankSpec) -> float:
    """What the host takes more for an op that runs again, and of selective blocks in forward."""
    if kind == Recomputation.SELECTIVE:
        return rank.device.selective_dispatch_s
    return rank.device.full_dispatch_s if kind == Recomputation.FULL else 0.0


def _pinned_bytes(size_bytes: int) -> int:
    """Host memory of a copy of so many bytes: torch's pinned memory comes in powers of two."""
    return 1 << (size_bytes - 1).bit_length() if size_bytes else 0


def _copies_s(work: UnitWork, rank: RankSpec) -> float:
    """Copies of a block's input to host memory and back: the device computes nothing meanwhile."""
    if not work.offloaded_bytes:
        return 0.0
    assert rank.host is not None
    return 2 * sum(work.offloaded_bytes) / rank.host.link_bytes_per_s


def _outer_elements(work: UnitWork) -> int:
    return work.outer_trained_elements + work.outer_frozen_elements


def _experts_elements(work: UnitWork) -> int:
    return work.experts_trained_elements + work.experts_frozen_elements


def _pass_s(work: RankWork, rank: RankSpec, *, more_s: float = 0.0) -> tuple[float, float]:
    """Seconds of kernels, idle time of the device behind the host included, and collectives.

    Args:
        work: The pass.
        rank: Device and groups.
        more_s: What the host takes for an op beyond what it takes elsewhere.
    """
    kernels_s = sum(op_s(op, rank.device, rank.dtype) for op in work.ops)
    collectives_s = sum(comm_s(comm, rank) for comm in work.comm)
    each_s = rank.device.host_dispatch_s + more_s
    num_split = sum(op.is_split for op in work.ops) + len(work.comm)
    issued_s = (len(work.ops) + len(work.comm)) * each_s + num_split * rank.split_op_s
    if rank.tp_group.num_ranks > 1:
        issued_s += len(work.comm) * (rank.collective_host_s + rank.network_host_s)
    if rank.host_runs_ops:
        return kernels_s + issued_s, collectives_s
    return max(kernels_s, issued_s - collectives_s), collectives_s


def _beside_s(work: RankWork, rank: RankSpec) -> Beside:
    """Seconds of the collectives over each axis beside the split one."""
    by_axis = dict.fromkeys(BESIDE, 0.0)
    for comm in work.comm:
        if comm.beside is not None:
            by_axis[comm.beside] += comm_s(comm, rank)
    return tuple(by_axis.values())


def master_bytes(dtype: str) -> int:
    """Bytes per element of trained parameters, gradients and each optimiser state."""
    return DTYPE_BYTES[Dtype.FLOAT64 if dtype == Dtype.FLOAT64 else Dtype.FLOAT32]
