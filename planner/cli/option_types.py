"""What click hands to each verb."""

from pathlib import Path
from typing import NotRequired, TypedDict


class TraceOptions(TypedDict):
    """Parsed options of ``plan trace MODEL``."""

    model: str
    seq_len: int | None
    microbatch_size: int
    dtype: str
    hint: tuple[str, ...]
    hints: Path | None
    as_json: bool
    ops: Path | None
    dot: Path | None
    force: bool
    verbose: int
    quiet: bool
    no_color: bool


class ValidateOptions(TypedDict):
    """Parsed options of ``plan validate RUNS``."""

    runs: tuple[Path, ...]
    failed: Path | None
    plan: Path | None
    calibration: Path | None
    assume: tuple[tuple[str, str], ...]
    keep_going: bool
    capacity_gib: float | None
    min_group: int
    out: Path | None
    failed_out: Path | None
    plot: Path | None
    force: bool
    as_json: bool
    verbose: int
    quiet: bool
    no_color: bool


class CalibrateOptions(TypedDict):
    """Parsed options of ``plan calibrate RUNS``."""

    runs: tuple[Path, ...]
    out: Path
    plan: Path | None
    assume: tuple[tuple[str, str], ...]
    keep_going: bool
    force: bool
    verbose: int
    quiet: bool
    no_color: bool


class CompareOptions(TypedDict):
    """Parsed options of ``plan compare PLAN.json``."""

    plan: Path
    other: Path | None
    measured: Path | None
    as_json: bool
    verbose: int
    quiet: bool
    no_color: bool


class ProfileOptions(TypedDict):
    """Parsed options of ``plan profile``."""

    device: str
    processes: int | None
    hosts: str | None
    remote: str
    out: Path
    quick: bool
    force: bool
    verbose: int
    quiet: bool
    no_color: bool


class SweepOptions(TypedDict):
    """Parsed options of ``plan sweep MODEL``."""

    model: str
    gpus: str
    cluster: tuple[str, ...]
    gpus_per_node: int | None
    calibration: Path | None
    global_batch_size: str | None
    seq_len: str | None
    dtype: str | None
    memory_margin: str | None
    fix: tuple[str, ...]
    hint: tuple[str, ...]
    hints: Path | None
    price: tuple[str, ...]
    tokens: str | None
    objective: str
    within: str
    time_limit: float | None
    out: Path | None
    plot: Path | None
    force: bool
    as_json: bool
    verbose: int
    quiet: bool
    no_color: bool


class ExplainOptions(TypedDict):
    """Parsed options of ``plan explain PLAN.json``."""

    plan: Path
    why_not: tuple[str, ...]
    as_json: bool
    verbose: int
    quiet: bool
    no_color: bool


class PlanOptions(TypedDict):
    """Parsed options of ``plan MODEL`` and ``plan estimate MODEL``."""

    model: str
    gpus: int
    cluster: str
    gpus_per_node: int | None
    calibration: Path | None
    global_batch_size: int | None
    seq_len: int | None
    dtype: str | None
    memory_margin: str | None
    fix: tuple[str, ...]
    hint: tuple[str, ...]
    hints: Path | None
    framework: NotRequired[str | None]
    top: NotRequired[int]
    time_limit: NotRequired[float | None]
    out: Path | None
    force: bool
    as_json: bool
    verbose: int
    quiet: bool
    no_color: bool
