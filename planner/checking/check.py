"""Holds a plan to what its script does: memory and collectives of one rank per pipeline stage."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf
from pathlib import Path
from tempfile import TemporaryDirectory

from planner.checking.share import ShareCheck, check_shares, require_gpu
from planner.checking.trained import MOST_LOSS_DIFFERENCE, Trained, check_size, train_here
from planner.checking.workers import ONE_THREAD, Seen, Workers, grown_evenly, reads_of
from planner.codegen.files import script_files
from planner.cost.breakdown import MemoryBreakdown
from planner.errors import CheckError
from planner.hardware.spec import ClusterSpec
from planner.plan.record import TrafficRow
from planner.plan.serialize import load_saved_plan
from planner.plan.types import Plan
from planner.report.folder import write_folder
from planner.strategy.placement import mesh_axis
from planner.strategy.schedules import microbatches_per_round
from planner.units import format_bytes
from planner.vocabulary import SHARED_SCHEDULES, V_SCHEDULES, Axis, Schedule

MOST_MEMORY_ERROR = 0.05
"""Of a stage's tracked peak, beyond which a plan does not pass."""

LEAST_MEMORY_BYTES = 2 * 2**20
"""What an allocator of CUDA takes of a device at the least: a plan that is off by less is not off
to a device, whatever the share."""

_KEEP_FREE = "Keep as much of the device free with --memory-margin, and report it."

_WORKER = "planner.checking.rank_run"

COMPONENTS = ("params", "optimizer", "grads_and_buffers", "activations")
"""Of memory. Gradients are partly whole, in buffers, until they are reduced; and a tracker cannot
tell activations from transients."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCheck:
    """Peak memory of the ranks that hold a pipeline rank's stages; without what is in reserve."""

    pp_rank: int
    """Pipeline rank."""
    predicted_peak_bytes: int
    """By the plan."""
    tracked_peak_bytes: int
    """Of live tensors of the script."""
    predicted_bytes: Mapping[str, int]
    """By component, as in COMPONENTS."""
    tracked_bytes: Mapping[str, int]
    """By component."""

    @property
    def error(self) -> float:
        """How far the plan is off, relative to what was tracked."""
        return self.predicted_peak_bytes / self.tracked_peak_bytes - 1.0

    @property
    def is_off_by_little(self) -> bool:
        """Whether that is a large share, and less than LEAST_MEMORY_BYTES."""
        off_bytes = abs(self.predicted_peak_bytes - self.tracked_peak_bytes)
        return abs(self.error) > MOST_MEMORY_ERROR and off_bytes < LEAST_MEMORY_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficCheck:
    """Collectives of one kind and group size in a step of a pipeline rank."""

    pp_rank: int
    """Pipeline rank."""
    kind: str
    """As in ``TrafficRow``."""
    group_size: int
    """Ranks that take part."""
    predicted_count: int
    """How many by the plan."""
    counted_count: int
    """How many in the script."""
    predicted_bytes: int
    """Their bytes by the plan."""
    counted_bytes: int
    """Their bytes in the script."""

    @property
    def is_equal(self) -> bool:
        """Whether the counts are equal, and bytes within 1%."""
        off_bytes = abs(self.predicted_bytes - self.counted_bytes)
        return self.predicted_count == self.counted_count and off_bytes <= self.counted_bytes / 100


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanCheck:
    """A plan beside its script."""

    num_microbatches: tuple[int, ...]
    """Microbatches that were run; of two numbers the rest follows, since all grows evenly."""
    stages: tuple[StageCheck, ...]
    """Memory by pipeline rank."""
    collectives: tuple[TrafficCheck, ...]
    """Traffic by pipeline rank."""
    as_written: bool = False
    """Whether the script compiles blocks, and here they ran as written, which hold no less."""
    trained: Trained | None = None
    """Losses on this machine, where that was asked for."""

    shares: tuple[ShareCheck, ...] = ()
    """Shares by pipeline rank on a GPU of this machine, where that was asked for."""

    @property
    def worst(self) -> StageCheck:
        """The stage whose memory is off most; of blocks as written, where the plan says most.

        One that is off by little only where all are.
        """
        return max(self.stages, key=self._off)

    def _off(self, stage: StageCheck) -> float:
        if stage.is_off_by_little:
            return -inf
        return stage.error if self.as_written else abs(stage.error)

    @property
    def worst_share(self) -> ShareCheck | None:
        """The share whose memory is off most, None where none was run."""
        return max(self.shares, key=lambda share: abs(share.memory_error), default=None)

    @property
    def memory_holds(self) -> bool:
        """Whether the memory of every stage and share is as planned."""
        off = [self._off(self.worst), *(abs(share.memory_error) for share in self.shares)]
        return max(off) <= MOST_MEMORY_ERROR

    @property
    def traffic_holds(self) -> bool:
        """Whether all collectives are as planned."""
        return all(each.is_equal for each in self.collectives)

    @property
    def holds(self) -> bool:
        """Whether memory and collectives are as planned, and losses where they were compared."""
        losses_hold = self.trained is None or self.trained.is_equal
        return self.memory_holds and self.traffic_holds and losses_hold

    def demand(self) -> None:
        """Refuse a plan that does not hold.

        Raises:
            CheckError: Memory is off by more than MOST_MEMORY_ERROR, and LEAST_MEMORY_BYTES;
                collectives are others; losses differ, or are none.
        """
        self._demand_memory()
        self._demand_traffic()
        if self.trained is not None:
            self._demand_losses(self.trained)

    def _demand_memory(self) -> None:
        if self._off(self.worst) > MOST_MEMORY_ERROR:
            raise CheckError(
                f"pipeline rank {self.worst.pp_rank} holds "
                f"{format_bytes(self.worst.tracked_peak_bytes)} at its fullest, and the plan says "
                f"{format_bytes(self.worst.predicted_peak_bytes)}: {self.worst.error:+.1%}, more "
                f"than {MOST_MEMORY_ERROR:.0%}",
                hint=_KEEP_FREE,
            )
        share = self.worst_share
        if share is not None and abs(share.memory_error) > MOST_MEMORY_ERROR:
            raise CheckError(
                f"on {share.device}, pipeline rank {share.pp_rank} had "
                f"{format_bytes(share.measured_peak_bytes or 0)} allocated, and the plan says "
                f"{format_bytes(share.predicted_peak_bytes)}: {share.memory_error:+.1%}, more "
                f"than {MOST_MEMORY_ERROR:.0%}",
                hint=_KEEP_FREE,
            )

    def _demand_traffic(self) -> None:
        first = next((each for each in self.collectives if not each.is_equal), None)
        if first is not None:
            raise CheckError(
                f"pipeline rank {first.pp_rank} has {first.counted_count} {first.kind} of "
                f"{first.group_size} ranks in a step, {format_bytes(first.counted_bytes)} in all, "
                f"and the plan says {first.predicted_count} of "
                f"{format_bytes(first.predicted_bytes)}",
                hint="Numbers must be equal, and bytes within 1%. Report it.",
            )

    def _demand_losses(self, trained: Trained) -> None:
        step = trained.first_not_finite
        if step is not None:
            raise CheckError(
                f"the plain model on one process has a loss of "
                f"{trained.reference_losses[step]} in step {step + 1}: nothing is compared",
                hint="Its inputs, its weights or the learning rate make it so, with no plan.",
            )
        if not trained.is_equal:
            raise CheckError(
                f"the losses of the script and of one process differ by "
                f"{trained.difference:.1e}, more than {MOST_LOSS_DIFFERENCE:.0e}",
                hint="Random layers (dropout) draw other numbers on several ranks; else report it.",
            )


def check_plan(path: str | Path, *, run: bool = False, gpu: bool = False) -> PlanCheck:
    """Run the script of a plan without its cluster: no process group, no data, fake tensors.

    Blocks that the script compiles run as written where tensors are fake, which torch.compile does
    not take: collectives are the same, and memory is no less.

    Args:
        path: Folder of a plan, or its plan.json. Where no script lies beside it, one is written
            for the check.
        run: Train two steps on this machine too, and the plain model on one process.
        gpu: Time one rank's share of each pipeline rank on this machine's GPU too, the other ranks
            not there.

    Raises:
        RequestError: There is no plan, it is too large to be run here, or there is no GPU.
        ModelError: Its model is gone, which ``gpu`` needs to price it.
        VerificationError: It breaks a rule.
        CodegenError: It has no script.
        CheckError: The script does not run.
    """
    saved = load_saved_plan(path)
    plan = saved.plan
    numbers = checked_microbatches(plan.schedule, pp=plan.degrees.pp, number=plan.num_microbatches)
    if gpu:
        require_gpu()
    if run:
        check_size(saved)
    with _script_folder(Path(path), plan, saved.cluster) as folder:
        seen = _seen_ranks(plan, folder, numbers)
        trained = train_here(plan, folder) if run else None
        shares = check_shares(saved, folder, numbers, on_gpu=True) if gpu else ()
    return PlanCheck(
        num_microbatches=numbers,
        stages=tuple(_stage(plan, rank, each) for rank, each in enumerate(seen)),
        collectives=tuple(
            row for rank, each in enumerate(seen) for row in _traffic(rank, saved.traffic, each)
        ),
        as_written=plan.compile,
        trained=trained,
        shares=shares,
    )


def _seen_ranks(plan: Plan, folder: Path, numbers: Sequence[int]) -> "list[_Rank]":
    """Run the script as the first rank of each pipeline rank, on tensors without data."""
    stride = mesh_axis(plan.degrees, Axis.PP, plan.mesh_order).stride
    jobs = [
        (rank * stride, number) for number in reversed(numbers) for rank in range(plan.degrees.pp)
    ]
    workers = Workers(module=_WORKER, folder=folder, reads=reads_of(plan), environment=ONE_THREAD)
    found = workers.side_by_side(jobs)
    return [
        _grown(plan, [found[rank * stride, number] for number in numbers], numbers)
        for rank in range(plan.degrees.pp)
    ]


@contextmanager
def _script_folder(path: Path, plan: Plan, cluster: ClusterSpec) -> Iterator[Path]:
    folder = path if path.is_dir() else path.parent
    if (folder / "train.py").is_file():
        yield folder.resolve()
        return
    with TemporaryDirectory() as made:
        write_folder(Path(made), script_files(plan, cluster=cluster, folder=Path(made)), force=True)
        yield Path(made)


def checked_microbatches(schedule: str, *, pp: int, number: int) -> tuple[int, ...]:
    """Numbers of microbatches to run: the plan's, or two from which all others follow.

    Once the pipeline is full, each further group of microbatches adds the same. Without one the
    first and the last are unlike those between: gradients have not come, or are reduced.

    Args:
        schedule: The plan's.
        pp: Pipeline ranks.
        number: Microbatches of the plan.
    """
    group, full = 1, {Schedule.NONE: 3, Schedule.ONE_F_ONE_B: pp + 1}.get(Schedule(schedule), 2)
    if schedule in V_SCHEDULES:
        full = 2 * (pp + 1)
    elif schedule in SHARED_SCHEDULES:  # torch takes whole rounds of these
        group = microbatches_per_round(schedule, pp, number)
        full = 2 * group
    few = (full, full + group)
    return few if sum(few) < number else (number,)


# -- comparing -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rank:
    """What a rank does with all microbatches of the plan."""

    peak_bytes: int
    components: Mapping[str, int]
    collectives: Mapping[tuple[str, int], tuple[int, int]]


def _grown(plan: Plan, seen: Sequence[Seen], numbers: Sequence[int]) -> _Rank:
    """Go on evenly from the numbers of microbatches that were run to that of the plan."""
    first, last = seen[0], seen[-1]

    def grown(before: int, after: int) -> int:
        return round(grown_evenly([before, after], numbers, plan.num_microbatches))

    counted = [
        {(c["kind"], c["group_size"]): (c["count"], c["bytes"]) for c in each["collectives"]}
        for each in (first, last)
    ]
    names = {*first["components"], *last["components"]}
    none = (0, 0)
    return _Rank(
        peak_bytes=grown(first["peak_bytes"], last["peak_bytes"]),
        components={
            name: grown(first["components"].get(name, 0), last["components"].get(name, 0))
            for name in names
        },
        collectives={
            key: (
                grown(counted[0].get(key, none)[0], counted[1].get(key, none)[0]),
                grown(counted[0].get(key, none)[1], counted[1].get(key, none)[1]),
            )
            for key in {*counted[0], *counted[1]}
        },
    )


def _stage(plan: Plan, rank: int, seen: _Rank) -> StageCheck:
    planned = plan.memory_by_rank[rank]
    return StageCheck(
        pp_rank=rank,
        predicted_peak_bytes=planned.tensor_bytes,
        tracked_peak_bytes=seen.peak_bytes,
        predicted_bytes=_components(planned),
        tracked_bytes={name: seen.components.get(name, 0) for name in COMPONENTS},
    )


def _components(memory: MemoryBreakdown) -> dict[str, int]:
    return {
        "params": memory.params_bytes,
        "optimizer": memory.optimizer_bytes,
        "grads_and_buffers": memory.grads_bytes + memory.buffers_bytes,
        "activations": memory.activations_bytes + memory.temporary_bytes,
    }


def _traffic(rank: int, planned: Sequence[TrafficRow], seen: _Rank) -> Iterator[TrafficCheck]:
    """Set planned beside counted; axes of one size are one group here."""
    counts: Counter[tuple[str, int]] = Counter()
    sizes: Counter[tuple[str, int]] = Counter()
    for row in planned:
        if row.pp_rank == rank:
            counts[row.kind, row.group_size] += row.count
            sizes[row.kind, row.group_size] += row.bytes
    counted = {key: value for key, value in seen.collectives.items() if key[1] > 1}
    for kind, size in sorted({*counts, *counted}):
        count, num_bytes = counted.get((kind, size), (0, 0))
        yield TrafficCheck(
            pp_rank=rank,
            kind=kind,
            group_size=size,
            predicted_count=counts[kind, size],
            counted_count=count,
            predicted_bytes=sizes[kind, size],
            counted_bytes=num_bytes,
        )
