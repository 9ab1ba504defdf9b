"""What the user asked for. "auto" is allowed here and nowhere below."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """A request to plan, as given; ``None`` means that the planner decides."""

    model: str
    """The MODEL argument as given, or a description of the object that was passed."""
    gpus: int
    """Devices in all."""
    cluster: str = "h100-sxm"
    """Name of a cluster profile or path of a TOML file; several, each with its number of GPUs."""
    gpus_per_node: int | None = None
    """Devices per node, None for the profile's."""
    calibration: str | None = None
    """Path of the constants that ``plan calibrate`` fitted, None for those that ship."""
    global_batch_size: int | None = None
    """Samples per optimiser step, None for 8 * gpus."""
    framework: str | None = None
    """Framework profile that an estimate is for, None for the emitted script."""
    seq_len: int | None = None
    """Sequence length, None for the model file's own."""
    dtype: str | None = None
    """Compute dtype, None for the best that the device has of bfloat16 and float32."""
    fixed: tuple[tuple[str, str], ...] = ()
    """``--fix`` settings by name: mesh axes, schedule, microbatch_size,
    activation_checkpointing, reshard_after_forward, sequence_parallel, virtual_stages,
    compile, float8, loss_chunks, cpu_offload, activation_offload, mesh_order."""
    hints: tuple[tuple[str, bool | int | float], ...] = ()
    """``--hint`` values by line of the model's code, "model.py:57": what it reads from a tensor
    that has data in training only."""
    memory_margin: float | None = None
    """Share of each device's memory that the plan keeps free, None for the default."""
    top: int = 5
    """Layouts to show."""
    time_limit_s: float | None = None
    """Limit for the solver."""
