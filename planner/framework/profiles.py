"""Reading framework profiles: TOML files become ``FrameworkSpec``.

``planner.hardware.fields`` has the form of a number.
"""

import math
from pathlib import Path

from planner.errors import ProfileError
from planner.framework.spec import FrameworkSpec, KernelForms, RunMatch, StateBytes
from planner.hardware.fields import FieldReader, near_names, read_toml
from planner.hardware.profiles import PROFILES_FOLDER
from planner.units import GIB, MIB, us_to_s

_CHOICES = {
    "attention": ("fused", "unfused"),
    "attention_kernels": ("flash_attention_2", "newest"),
    "selective_recomputation": ("matmul_outputs", "every_second_matmul", "attention"),
    "model_code": ("fused_kernels", "plain_torch"),
    "pointwise": ("as_written", "by_hand", "compiled"),
    "loss_kernels": ("as_written", "fused"),
    "float8_rounding": ("as_written", "by_hand"),
    "collective_operands": ("in_place", "copied"),
    "float8_gathers": ("compute_dtype", "float8"),
    "split_loss": ("loss_parallel", "in_place"),
    "zero_gather": ("all_gather", "broadcasts"),
    "gathered_inputs": ("kept", "gathered_again"),
    "stage_transfers": ("whole", "split_over_tp"),
    "backward_collectives": ("exposed", "beside_weight_gradients"),
    "recomputation_ends": ("last_needed_tensor", "block"),
    "collectives_beside_network": ("at_once", "by_rank"),
    "state_form": ("fsdp", "replicated"),
    "stage_cuts": ("even_blocks", "even_with_ends", "by_flop"),
    "memory_stated": ("fullest_rank", "first_rank"),
    "memory_counts": ("reserved", "live_tensors"),
    "backward": ("whole", "split"),
    "layouts": ("column_row", "searched"),
}

_DEFAULTS = {
    "attention_kernels": "flash_attention_2",
    "backward_collectives": "exposed",
    "model_code": "fused_kernels",
    "pointwise": "as_written",
    "loss_kernels": "as_written",
    "float8_rounding": "as_written",
    "collective_operands": "in_place",
    "float8_gathers": "compute_dtype",
    "split_loss": "in_place",
    "zero_gather": "all_gather",
    "collectives_beside_network": "at_once",
    "memory_counts": "reserved",
    "backward": "whole",
    "layouts": "column_row",
}
"""What holds where a profile does not say."""


_UNCALIBRATED = "step_time_error_not_calibrated"


def list_frameworks() -> tuple[str, ...]:
    """Name the frameworks that ship with the planner."""
    return tuple(sorted(path.stem for path in (PROFILES_FOLDER / "frameworks").glob("*.toml")))


def load_framework(name_or_path: str) -> FrameworkSpec:
    """Read a framework profile.

    Args:
        name_or_path: Name of a shipped profile, or path of a TOML file.

    Raises:
        ProfileError: There is no such profile, or a field of it is wrong.
    """
    path = _find(name_or_path)
    reader = FieldReader(path=path, table=read_toml(path))
    reader.asked |= {"format", "description"}
    spec = _spec(reader)
    reader.finish()
    return spec


def _spec(reader: FieldReader) -> FrameworkSpec:
    """Take all fields."""
    dropout = reader.number("dropout", most=0.99)
    heads, reserve = "heads_where_not_stated", "reserve_gib"
    return FrameworkSpec(
        name=reader.text("name"),
        kernels=_kernels(reader, drops=dropout > 0),
        model_code=_choice(reader, "model_code"),  # type: ignore[arg-type]  # one of its choices
        dropout=dropout,
        state_form=_choice(reader, "state_form"),  # type: ignore[arg-type]  # one of its choices
        state=StateBytes(
            gradient=reader.number("gradient_bytes_per_parameter"),
            optimizer=reader.number("optimizer_bytes_per_parameter"),
        ),
        gradient_wire_bytes=reader.number("gradient_wire_bytes_per_parameter"),
        broadcasts_shards=_choice(reader, "zero_gather") == "broadcasts",
        bucket_bytes=_bucket_bytes(reader),
        gradient_overlap=reader.number("gradient_overlap", most=1.0),
        tp_overlap=reader.number("tp_overlap", most=1.0),
        hides_backward_collectives=(
            _choice(reader, "backward_collectives") == "beside_weight_gradients"
        ),
        host_dispatch_s=us_to_s(reader.number("host_dispatch_us")),
        launch_wait_s=us_to_s(_or(reader, "launch_wait_us", 0.0)),
        newest_attention=_choice(reader, "attention_kernels") == "newest",
        attention_share=_or(reader, "attention_share", 1.0),
        split_host_share=_or(reader, "split_host_share", 0.0),
        selective_host_share=_or(reader, "selective_host_share", 0.0),
        collective_host_s=us_to_s(reader.number("collective_host_us")),
        issues_by_rank=_choice(reader, "collectives_beside_network") == "by_rank",
        stage_cuts=_choice(reader, "stage_cuts"),  # type: ignore[arg-type]  # one of its choices
        default_vocab_size=reader.count("vocab_size_where_not_stated"),
        default_heads=reader.count(heads) if reader.has(heads) else 0,
        message_s=us_to_s(reader.number("message_us")),
        congested_nodes=_or(reader, "congested_nodes", math.inf),
        congested_message_s=us_to_s(_or(reader, "congested_message_us", 0.0)),
        step_s=us_to_s(reader.number("step_us")),
        optimizer_moved_bytes=reader.number("optimizer_moved_bytes_per_parameter"),
        accumulated_bytes=reader.number("accumulated_bytes_per_parameter"),
        measures_first_rank=_choice(reader, "memory_stated") == "first_rank",
        unusable_bytes=reader.number("unusable_gib") * GIB,
        reserve_bytes=reader.number(reserve, least=-8) * GIB if reader.has(reserve) else None,
        holds_gradient_shards=_choice(reader, "memory_counts") == "reserved",
        splits_backward=_choice(reader, "backward") == "split",
        uncalibrated_error=(
            reader.number(_UNCALIBRATED, most=1.0) if reader.has(_UNCALIBRATED) else None
        ),
        matches=_matches(reader),
        numbers=reader.numbers,
    )


def _find(name_or_path: str) -> Path:
    """The file of a shipped profile, or the path itself."""
    for path in (PROFILES_FOLDER / "frameworks" / f"{name_or_path}.toml", Path(name_or_path)):
        if path.is_file():
            return path
    raise ProfileError(
        f"there is no framework profile {name_or_path!r}",
        hint=near_names(name_or_path, list_frameworks()),
    )


def _choice(reader: FieldReader, key: str) -> str:
    """One of the key's choices; its default where the profile leaves it out."""
    if key in _DEFAULTS and not reader.has(key):
        return _DEFAULTS[key]
    return reader.text(key, choices=_CHOICES[key])


def _bucket_bytes(reader: FieldReader) -> float:
    """Size of a bucket of whole gradients; FSDP reduces block by block."""
    if _choice(reader, "state_form") == "replicated":
        return reader.positive("bucket_mib") * MIB
    for key in ("bucket_mib", "zero_gather"):
        if reader.has(key):
            raise reader.error(key, 'has no effect where state_form is "fsdp"', hint="leave it out")
    return math.inf


def _or(reader: FieldReader, key: str, absent: float) -> float:
    """A number, and what holds where the profile leaves it out."""
    return reader.positive(key) if reader.has(key) else absent


def _kernels(reader: FieldReader, *, drops: bool) -> KernelForms:
    return KernelForms(
        attention=_choice(reader, "attention"),  # type: ignore[arg-type]  # one of its choices
        attention_dropout=drops,
        selective=_choice(reader, "selective_recomputation"),  # type: ignore[arg-type]
        keeps_gathered_inputs=_choice(reader, "gathered_inputs") == "kept",
        splits_transfers=reader.has("stage_transfers")
        and _choice(reader, "stage_transfers") == "split_over_tp",
        recompute_stops_early=_choice(reader, "recomputation_ends") == "last_needed_tensor",
        pointwise=_choice(reader, "pointwise"),  # type: ignore[arg-type]  # one of its choices
        rounds_by_hand=_choice(reader, "float8_rounding") == "by_hand",
        copies_operands=_choice(reader, "collective_operands") == "copied",
        gathers_float8=_choice(reader, "float8_gathers") == "float8",
        fuses_loss=_choice(reader, "loss_kernels") == "fused",
        wired_layouts=_choice(reader, "layouts") == "column_row",
        loss_apart=_choice(reader, "stage_cuts") == "by_flop",
        splits_loss_in_place=_choice(reader, "split_loss") == "in_place",
    )


def _matches(reader: FieldReader) -> tuple[RunMatch, ...]:
    found = []
    for index, table in enumerate(reader.tables("runs")):
        each = FieldReader(path=reader.path, table=table, prefix=f"runs[{index}].")
        found.append(
            RunMatch(
                framework=each.text("framework"),
                source=each.text("source_has") if each.has("source_has") else "",
                notes=each.text("notes_have") if each.has("notes_have") else "",
            )
        )
        each.finish()
    return tuple(found)
