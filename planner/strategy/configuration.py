"""One point of the outer search: everything but stage cuts, recomputation and layouts."""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from planner.framework.spec import StateForm
from planner.strategy.mesh import ParallelDegrees
from planner.strategy.moments import (
    MeanStarts,
    Moments,
    RankMoment,
    StateMoves,
    fullest_moments,
    mean_starts,
    moment_rows,
    some_moments,
)
from planner.strategy.placement import MeshOrder
from planner.strategy.schedules import rank_of_stage, stages_of_rank
from planner.vocabulary import MESH_ORDER, ZERO_BUBBLE_SCHEDULES


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """Degrees, schedule and microbatches."""

    degrees: ParallelDegrees
    """Size of each mesh axis."""
    schedule: str
    """"none" where pp is 1."""
    virtual_stages: int
    """Stages per pipeline rank."""
    microbatch_size: int
    """Samples per microbatch and data-parallel rank."""
    num_microbatches: int
    """Microbatches per step and data-parallel rank."""
    reshard_after_forward: bool
    """ZeRO-3 (True) or ZeRO-2."""
    sequence_parallel: bool
    """The stream is split over the sequence on tp."""
    compile: bool = False
    """Blocks run compiled (``torch.compile``)."""
    float8: bool = False
    """Linear layers of blocks multiply in float8."""
    loss_chunks: int = 1
    """Chunks of rows that the loss of a microbatch is taken in."""
    cpu_offload: bool = False
    """Parameters, gradients and optimiser states lie in host memory, where they are updated."""
    activation_offload: bool = False
    """Inputs of blocks that are recomputed in full lie in host memory until backward."""
    mesh_order: MeshOrder = MESH_ORDER
    """Axes from outermost to innermost."""
    ranks_per_core: float = 1.0
    """Ranks on a core, where the ranks of a pipeline share cores (``placement.ranks_per_core``)."""
    device_order: tuple[str, ...] = ()
    """Kinds of device in the order of their ranks; () where all are alike."""
    state_form: StateForm = "fsdp"
    """What dp_shard divides: parameters, gradients and optimiser states ("fsdp"), or the
    optimiser's states alone ("replicated": ZeRO-1, and DDP where dp_shard is 1). Where one rank has
    all of them and computes in their dtype, they are tensors as any others ("plain")."""

    @property
    def in_default_order(self) -> "Configuration":
        """The same under ``MESH_ORDER``: what is told of one layout, whatever its orders."""
        is_usual = self.mesh_order == MESH_ORDER and not self.device_order
        return self if is_usual else replace(self, mesh_order=MESH_ORDER, device_order=())

    @property
    def num_stages(self) -> int:
        """Stages in all."""
        return self.degrees.pp * self.virtual_stages

    @property
    def shares_cores(self) -> bool:
        """Whether ranks of a pipeline use what of cores others of it leave."""
        return self.ranks_per_core > 1

    @property
    def waiting_share(self) -> float:
        """Share of its time that a rank takes at the least, while others of its node wait."""
        return 1 / min(self.ranks_per_core, self.degrees.pp)

    @property
    def rank_passes(self) -> float:
        """Microbatches that a rank takes one after the other, in its times, at the least."""
        return self.num_microbatches * self.waiting_share

    @property
    def work_passes(self) -> float:
        """Passes of a microbatch through all stages that are a share of all work of shared cores.

        0 where each rank has a core of its own.
        """
        return self.num_microbatches / self.degrees.pp if self.shares_cores else 0.0

    @property
    def divides_backward(self) -> bool:
        """Whether backwards may come in two parts."""
        return self.schedule in ZERO_BUBBLE_SCHEDULES

    @property
    def ends_meet(self) -> bool:
        """Whether the first and the last stage lie on one rank."""
        return self.rank_of(0) == self.rank_of(self.num_stages - 1)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Stages of a pipeline rank, in model order."""
        return stages_of_rank(self.schedule, rank, pp=self.degrees.pp, num_stages=self.num_stages)

    def rank_of(self, stage: int) -> int:
        """Pipeline rank of a stage."""
        return rank_of_stage(self.schedule, stage, self.degrees.pp)

    def fullest_moments(self, rank: int) -> tuple[RankMoment, ...]:
        """Moments at which a pipeline rank may hold most."""
        return fullest_moments(
            self.schedule,
            pp=self.degrees.pp,
            virtual_stages=self.virtual_stages,
            num_microbatches=self.num_microbatches,
            rank=rank,
            moves=self._moves,
        )

    def moment_rows(self, rank: int) -> Moments:
        """``fullest_moments`` as an array."""
        return moment_rows(
            self.schedule,
            pp=self.degrees.pp,
            virtual_stages=self.virtual_stages,
            num_microbatches=self.num_microbatches,
            rank=rank,
            moves=self._moves,
        )

    @property
    def some_moments(self) -> NDArray[np.float64]:
        """Of each rank, the mean of its fullest moments, and some of them."""
        return some_moments(
            self.schedule,
            pp=self.degrees.pp,
            virtual_stages=self.virtual_stages,
            num_microbatches=self.num_microbatches,
            moves=self._moves,
        )

    @property
    def mean_starts(self) -> MeanStarts:
        """What each stage holds when a backward of its rank starts, on the mean."""
        return mean_starts(
            self.schedule,
            pp=self.degrees.pp,
            virtual_stages=self.virtual_stages,
            num_microbatches=self.num_microbatches,
            moves=self._moves,
        )

    @property
    def _moves(self) -> StateMoves:
        reshards = self.state_form == "fsdp" and self.reshard_after_forward
        return StateMoves(reshards=reshards, accumulates=self.state_form != "replicated")
