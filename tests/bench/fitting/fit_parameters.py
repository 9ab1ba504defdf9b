"""The constants that the joint fit finds, and what each belongs to."""

import math
from dataclasses import dataclass

from planner.framework.constants import Owner

FSDP = ("composer-fsdp", "composer-fsdp-pure", "torchtitan", "torchtitan-compile",
        "torchtitan-async-tp", "planner")  # fmt: skip
"""FSDP in torch: what the emitted script is nearest to, and so where its constants are from."""

MEGATRON = ("megatron", "megatron-sc21", "megatron-zero-bubble", "megatron-deepspeed-vtrain",
            "megatron-deepspeed-bigscience", "megatron-deepspeed-bigscience-bf16")  # fmt: skip
"""Megatron-LM and its forks."""

BIGSCIENCE = MEGATRON[-2:]
COMPOSER = FSDP[:2]

BUCKETED = ("nanotron", "internevo")
"""Those that reduce whole gradients in buckets behind backward."""

A100 = ("a100-80gb-sxm", "a100-40gb-sxm", "a800-80gb-sxm")
H100 = ("h100-sxm", "h200-sxm")
"""Profiles of one chip: what its kernels reach is one number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One number of the fit."""

    owner: Owner
    """What it belongs to."""
    key: str
    """One of ``planner.framework.constants.KEYS``."""
    names: tuple[str, ...]
    """Profiles that share it."""
    start: float
    """What is assumed of it, or what single kernels and collectives show."""
    spread: float
    """Logarithm of the factor by which it may well differ from that."""
    most: float = math.inf
    """Largest value, of shares."""

    @property
    def label(self) -> str:
        """How it is called in print."""
        others = f" and {len(self.names) - 1} like it" if len(self.names) > 1 else ""
        return f"{self.owner} {self.names[0]}{others}: {self.key}"


def _device(key: str, names: tuple[str, ...], start: float, spread: float) -> Parameter:
    return Parameter(owner="device", key=key, names=names, start=start, spread=spread, most=1.0)


def _cluster(key: str, name: str, *, spread: float = 0.5, most: float = math.inf) -> Parameter:
    return Parameter(owner="cluster", key=key, names=(name,), start=1.0, spread=spread, most=most)


def _framework(
    key: str, names: tuple[str, ...], start: float, *, spread: float = 1.0, most: float = math.inf
) -> Parameter:
    return Parameter(owner="framework", key=key, names=names, start=start, spread=spread, most=most)


PARAMETERS = (
    _device("training_fraction_of_sustained", A100, 0.9, 0.15),
    _device("training_fraction_of_sustained", H100, 0.9, 0.15),
    _device("training_fraction_of_sustained", ("h100-96gb-sxm",), 0.9, 0.15),
    _device("pointwise_fraction_of_bandwidth", A100, 0.92, 0.2),
    _cluster("inner_bandwidth_share", "a100-80gb-sxm-ib-4x200", most=1 / 0.78),
    _cluster("outer_bandwidth_share", "a100-80gb-sxm-ib-4x200", most=1 / 0.9),
    _cluster("inner_bandwidth_share", "a100-80gb-sxm-opa-4x100", most=1 / 0.78),
    _cluster("outer_bandwidth_share", "a100-80gb-sxm-opa-4x100", most=1 / 0.9),
    _framework("host_dispatch_us", (*FSDP, *MEGATRON, "nanotron", "internevo"), 40.0),
    _framework("step_us", FSDP[:-1], 30000.0),  # the script's own was measured
    _framework("accumulated_bytes_per_parameter", FSDP, 20.0),
    _framework("attention_share", COMPOSER, 0.6, spread=0.5, most=1.0),
    _framework("launch_wait_us", BIGSCIENCE, 12.0),
    _framework("message_us", (*FSDP, *MEGATRON, "nanotron", "internevo"), 50.0),
    _framework("collective_host_us", ("nanotron",), 100.0),
    _framework("congested_message_us", ("nanotron",), 300000.0),
    _framework("gradient_overlap", BUCKETED, 0.5, most=1.0),
    _framework("step_us", BUCKETED, 20000.0),
)
"""All that the fit moves for step times."""

RESERVES = (("nanotron",), *((name,) for name in BIGSCIENCE), ("megatron-zero-bubble",),
            ("torchtitan",), ("torchtitan-compile", "torchtitan-async-tp"))  # fmt: skip
"""Frameworks whose ``reserve_gib`` is the median of what their runs hold beyond what is counted."""

RELATIVES = {
    "a100-80gb-sxm": ("a40", "a10g"),
    "h100-sxm": ("h100-pcie", "b200-sxm", "l40s", "rtx4090", "mi300x"),
}
"""Devices without runs, by the device with runs that is nearest: of the same generation, or the
newest there is."""

CHIPS = (A100, (*H100, "h100-96gb-sxm"))
"""Devices of one generation: where none of its runs are there, one takes what another shows."""
