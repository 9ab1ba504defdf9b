"""Numbers of a row that cannot be true together: units that were mixed up."""

from dataclasses import dataclass

from planner.units import GIB, MIB, TERA, format_s
from planner.validation.reading.cells import BadCellError, Cells

DISAGREEMENT = 0.2
"""Relative difference from which two statements of the same speed contradict each other."""

MOST_DEVICE_GIB = 1000.0
"""Ten times what a device of 2024 has, and above every device: no peak is as high."""

MOST_FLOP_PER_S = 10_000 * TERA
"""No device computes faster."""

LONGEST_STEP_S = 10_000.0
"""Nobody waits hours for an optimiser step; published ones stay below 1,000 seconds."""

LEAST_PEAK_FLOP_PER_S = TERA
"""Every accelerator can do more."""

SLOW_FLOP_PER_S = 0.1 * TERA
"""Below this a step time that is a larger number than the tokens per second is taken for it."""

FACTOR = 30.0
"""Conventions for counting FLOPs differ by less."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What the units of a row are held against."""

    num_gpus: int
    """Ranks in all."""
    global_batch_size: int
    """Sequences per step."""
    seq_len: int
    """Tokens per sequence."""
    flop_per_token: float
    """Forward and backward, six per parameter and the attention."""

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.global_batch_size * self.seq_len

    def flop_per_s(self, step_time_s: float) -> float:
        """Rate of one device."""
        return self.flop_per_token * self.tokens / step_time_s / self.num_gpus


def approximate_flop_per_token(
    *, layers: int, hidden: int, seq_len: int, num_parameters: float | None
) -> float:
    """Count the FLOPs of a token to within a few tens of percent, forward and backward.

    Six per parameter, and 12 * layers * hidden * seq_len for attention (Chowdhery et al. 2022,
    2204.02311, appendix B). Without the number of parameters a block has 12 * hidden ** 2.
    """
    parameters = num_parameters or 12 * layers * hidden**2
    return 6 * parameters + 12 * layers * hidden * seq_len


def check_units(cells: Cells, work: Work) -> None:
    """Hold the measured columns of a row against each other and against what devices can do.

    Raises:
        BadCellError: They contradict each other; the text says which unit it looks like.
    """
    mfu = cells.quantity("mfu")
    if mfu is not None and mfu > 1:
        raise BadCellError("mfu", f"{mfu:g} is above 1: it looks like percent")
    _check_memory(cells.quantity("peak_mem_gib"))
    step_time_s = cells.quantity("step_time_s")
    rate = cells.quantity("tokens_per_s_per_gpu")
    stated_tflop_per_s = cells.quantity("tflops_per_gpu")
    if step_time_s is None:
        return
    if rate is not None:
        _check_rate(step_time_s, rate, work)
    _check_speed(step_time_s, rate, work)
    if stated_tflop_per_s is not None:
        _check_stated(step_time_s, stated_tflop_per_s, work)
    if mfu is not None:
        _check_mfu(step_time_s, mfu, work)


def _check_memory(peak_gib: float | None) -> None:
    if peak_gib is None or peak_gib <= MOST_DEVICE_GIB:
        return
    in_mib = peak_gib * MIB <= MOST_DEVICE_GIB * GIB
    unit, unit_bytes = ("MiB", MIB) if in_mib else ("bytes", 1)
    raise BadCellError(
        "peak_mem_gib",
        f"{peak_gib:g} GiB is more than any device has: it looks like {unit}, which would be "
        f"{peak_gib * unit_bytes / GIB:.3g} GiB",
    )


def _check_rate(step_time_s: float, rate: float, work: Work) -> None:
    """Compare the step time with that which follows from the tokens per second."""
    implied_s = work.tokens / work.num_gpus / rate
    if abs(step_time_s / implied_s - 1) <= DISAGREEMENT:
        return
    column, guess = _guess(step_time_s, rate, implied_s, work)
    raise BadCellError(
        column,
        f"step_time_s {step_time_s:g} and tokens_per_s_per_gpu {rate:g} contradict each other: "
        f"{work.global_batch_size} sequences of {work.seq_len} tokens on {work.num_gpus} GPUs "
        f"take {format_s(implied_s)} at that rate; {guess}",
    )


def _guess(step_time_s: float, rate: float, implied_s: float, work: Work) -> tuple[str, str]:
    """Say which column is probably wrong, and what it looks like."""
    guesses = (
        ("step_time_s", "step_time_s looks like tokens per second", rate),
        ("step_time_s", "step_time_s looks like tokens", work.tokens),
        ("step_time_s", "step_time_s looks like milliseconds", implied_s * 1e3),
        ("step_time_s", "step_time_s looks like microseconds", implied_s * 1e6),
        (
            "tokens_per_s_per_gpu",
            f"tokens_per_s_per_gpu looks like the rate of all {work.num_gpus} GPUs",
            implied_s * work.num_gpus,
        ),
        (
            "tokens_per_s_per_gpu",
            "tokens_per_s_per_gpu looks like sequences per second",
            implied_s / work.seq_len,
        ),
    )
    for column, words, expected in guesses:
        if abs(step_time_s / expected - 1) <= DISAGREEMENT:
            return column, words
    return "step_time_s", "one of the two has another unit"


def _check_speed(step_time_s: float, rate: float | None, work: Work) -> None:
    """Compare the step time with what people wait for and devices can do."""
    flop_per_s = work.flop_per_s(step_time_s)
    words = f"{step_time_s:g} means {flop_per_s / TERA:.2g} TFLOP/s per GPU"
    if rate is not None and step_time_s > rate and flop_per_s < SLOW_FLOP_PER_S:
        raise BadCellError(
            "step_time_s",
            f"{words}: step_time_s and tokens_per_s_per_gpu look exchanged",
        )
    if step_time_s > LONGEST_STEP_S:
        raise BadCellError(
            "step_time_s",
            f"{step_time_s:g} would be {step_time_s / 3600:.1f} hours: it looks like tokens, "
            "tokens per second or milliseconds",
        )
    if flop_per_s > MOST_FLOP_PER_S:
        raise BadCellError("step_time_s", f"{words}, more than any device computes")


def _check_stated(step_time_s: float, stated_tflop_per_s: float, work: Work) -> None:
    """Compare the step time with the FLOPs per second that the row states."""
    tflop_per_s = work.flop_per_s(step_time_s) / TERA
    if not 1 / FACTOR <= tflop_per_s / stated_tflop_per_s <= FACTOR:
        raise BadCellError(
            "step_time_s",
            f"{step_time_s:g} and tflops_per_gpu {stated_tflop_per_s:g} contradict each other: the "
            f"step time means {tflop_per_s:.2g} TFLOP/s per GPU",
        )


def _check_mfu(step_time_s: float, mfu: float, work: Work) -> None:
    """Compare the peak that follows from step time and utilisation with what devices have."""
    peak_flop_per_s = work.flop_per_s(step_time_s) / mfu
    if peak_flop_per_s < LEAST_PEAK_FLOP_PER_S:
        raise BadCellError(
            "step_time_s",
            f"{step_time_s:g} and mfu {mfu:g} contradict each other: together they mean a device "
            f"with a peak of {peak_flop_per_s / TERA:.2g} TFLOP/s",
        )
