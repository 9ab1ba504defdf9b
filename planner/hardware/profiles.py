"""Reading device and cluster profiles: TOML files in human units become SI specs.

Profiles ship in the folder ``profiles``; a path reads a user's own file. The units stand in
the key names, and every number has its provenance and source beside it:
``hbm_gib = { value = 79.1, provenance = "measured", source = "..." }``.
"""

from collections.abc import Mapping
from dataclasses import replace
from itertools import combinations, pairwise
from pathlib import Path

from planner.errors import ProfileError, RequestError
from planner.hardware.fields import FieldReader, near_names, read_toml
from planner.hardware.host_fields import read_host
from planner.hardware.measured_fields import read_measured, read_ops
from planner.hardware.sharing import share_node
from planner.hardware.spec import (
    ATTENTION_FILL_KEYS,
    ClusterSpec,
    DeviceSpec,
    EfficiencySpec,
    LinkSpec,
    MeasuredError,
)
from planner.units import (
    MIB,
    gb_per_s_to_bytes_per_s,
    gib_to_bytes,
    tflop_per_s_to_flop_per_s,
    us_to_s,
)
from planner.vocabulary import MODEL_AXES, Axis, Dtype

PROFILES_FOLDER = Path(__file__).resolve().parents[2] / "profiles"
"""Shipped profiles; they lie beside the package in a checkout and in an installed wheel."""

PEAK_KEYS: Mapping[str, str] = {
    "peak_bf16_dense_tflop_per_s": Dtype.BFLOAT16,
    "peak_fp16_dense_tflop_per_s": Dtype.FLOAT16,
    "peak_fp32_tflop_per_s": Dtype.FLOAT32,
    "peak_fp64_tflop_per_s": Dtype.FLOAT64,
}
"""Keys of matmul peaks by dtype; a device leaves out what it does not support."""

_FLOAT8_PEAK = "peak_float8_dense_tflop_per_s"

LINK_CONSTANTS = (
    *("inner_bandwidth_share", "inner_latency_factor"),
    *("outer_bandwidth_share", "outer_latency_factor"),
)
"""What training reaches of the innermost and the outermost links of a cluster, over what the links'
own numbers say."""

RUN_AXES: Mapping[str, tuple[Axis, ...]] = {
    " x ".join(axes) or "none": axes
    for count in range(len(MODEL_AXES) + 1)
    for axes in combinations(MODEL_AXES, count)
}
"""Axes that divide the model in a kind of run, as profiles name them: "tp x pp", "none"."""

_ERRORS = "step_time_errors"

_FULL_SPEED = "full_speed_ranks_per_node"

BITS_PER_BYTE = 8

_NO_LINK = LinkSpec(
    name="none",
    ranks=None,
    bandwidth_bytes_per_s=1.0,
    latency_s=0.0,
    base_latency_s=0.0,
    ramp_bytes=0.0,
    switch_all_reduce_fraction=0.0,
    numbers={},
)
"""Where a rank is alone: nothing is sent, so no number of it counts."""

_LINK_RATE_KEYS = (
    "peak_gb_per_s_per_gpu_unidirectional",
    "peak_gbit_per_s_per_gpu_unidirectional",
)


def list_clusters() -> tuple[str, ...]:
    """Name the clusters that ship with the planner."""
    return _shipped_names("clusters")


def list_devices() -> tuple[str, ...]:
    """Name the devices that ship with the planner."""
    return _shipped_names("devices")


def load_device(name_or_path: str, *, base: Path | None = None) -> DeviceSpec:
    """Read a device profile.

    Args:
        name_or_path: Name of a shipped profile, or path of a TOML file.
        base: Folder that a relative path starts from.

    Raises:
        ProfileError: There is no such profile, or a field of it is wrong.
    """
    path = _find("devices", name_or_path, base=base)
    reader = FieldReader(path=path, table=read_toml(path))
    reader.asked |= {"format", "description"}
    peaks = {
        dtype: tflop_per_s_to_flop_per_s(reader.positive(key))
        for key, dtype in PEAK_KEYS.items()
        if reader.has(key)
    }
    if not peaks:
        raise reader.error("peak_bf16_dense_tflop_per_s", "is missing, and so is any other peak")
    memory_bytes = gib_to_bytes(reader.positive("memory_gib"))
    device = DeviceSpec(
        name=reader.text("name"),
        memory_bytes=memory_bytes,
        reserve_bytes=gib_to_bytes(reader.number("reserve_gib")),
        allocator_share=reader.number("allocator_share") if reader.has("allocator_share") else 0.0,
        peak_flop_per_s=peaks,
        float8_flop_per_s=tflop_per_s_to_flop_per_s(_number_or(reader, _FLOAT8_PEAK, 0.0)),
        memory_bandwidth_bytes_per_s=gb_per_s_to_bytes_per_s(
            reader.positive("memory_bandwidth_gb_per_s")
        ),
        num_sms=reader.count("num_sms"),
        kernel_launch_s=us_to_s(reader.number("kernel_launch_us")),
        training_fraction=reader.positive("training_fraction_of_sustained", most=1.0),
        efficiency=_read_efficiency(reader),
        op_curves=read_ops(reader),
        step_time_errors=_read_errors(reader),
        numbers=reader.numbers,
    )
    reader.finish()
    if device.usable_bytes <= 0:
        raise reader.error("reserve_gib", "leaves nothing of memory_gib")
    return device


def load_cluster(name_or_path: str, *, gpus: int, gpus_per_node: int | None = None) -> ClusterSpec:
    """Read a cluster profile and lay ``gpus`` ranks out on its nodes.

    Args:
        name_or_path: Name of a shipped profile, or path of a TOML file (its ``device`` is a
            shipped name or a path relative to it).
        gpus: Ranks in all.
        gpus_per_node: Ranks per node, None for the profile's.

    Raises:
        ProfileError: There is no such profile, or a field of it is wrong.
        RequestError: Nothing joins the ranks, or a link joins parts of nodes.
    """
    path = _find("clusters", name_or_path, base=None)
    reader = FieldReader(path=path, table=read_toml(path))
    reader.asked |= {"format", "description", "runs"}
    measured = read_measured(reader)
    name = reader.text("name")
    device = load_device(reader.text("device"), base=path.parent)
    profile_gpus_per_node = reader.count("gpus_per_node")
    full_speed = reader.positive(_FULL_SPEED) if reader.has(_FULL_SPEED) else None
    links = _read_links(reader, name, gpus)
    host = "host_time_factor"
    host_time_factor = reader.number(host) if reader.has(host) else 1.0
    in_training = {key: reader.positive(key) for key in LINK_CONSTANTS if reader.has(key)}
    per_node = profile_gpus_per_node if gpus_per_node is None else gpus_per_node
    host_spec = read_host(reader, min(gpus, per_node))
    numbers = reader.finish()
    if gpus < 1 or per_node < 1:
        raise RequestError(f"{gpus} GPUs with {per_node} per node: both must be at least 1")
    links = tuple(_on_nodes(link, profile_gpus_per_node, per_node, name) for link in links)
    cluster = ClusterSpec(
        name=name,
        device=device,
        gpus_per_node=min(gpus, per_node),
        links=links,
        num_gpus=gpus,
        host_time_factor=host_time_factor,
        host=host_spec,
        **measured,
        in_training=in_training,
        step_time_errors=device.step_time_errors,
        numbers=numbers,
    )
    return cluster if full_speed is None else share_node(cluster, full_speed)


def _shipped_names(kind: str) -> tuple[str, ...]:
    return tuple(sorted(path.stem for path in (PROFILES_FOLDER / kind).glob("*.toml")))


def _find(kind: str, name_or_path: str, *, base: Path | None) -> Path:
    """Turn the name of a shipped profile or a path into a path."""
    if name_or_path in _shipped_names(kind):
        return PROFILES_FOLDER / kind / f"{name_or_path}.toml"
    path = Path(name_or_path).expanduser()
    if path.suffix == ".toml" or len(path.parts) > 1:
        path = path if base is None or path.is_absolute() else base / path
        if not path.is_file():
            raise ProfileError(
                f"{kind.removesuffix('s')} profile {name_or_path!r}: there is no file {path}",
                hint=near_names(path.stem, _shipped_names(kind)),
            )
        return path
    raise ProfileError(
        f"{kind.removesuffix('s')} profile {name_or_path!r}: no profile of that name is shipped",
        hint=f"{near_names(name_or_path, _shipped_names(kind))} (or give the path of a TOML file)",
    )


def _read_efficiency(reader: FieldReader) -> EfficiencySpec:
    return EfficiencySpec(
        matmul_fraction=reader.positive("matmul_fraction_of_peak", most=1.0),
        matmul_tiles=reader.tiles("matmul_tiles_m_n"),
        matmul_tile_overhead=reader.number("matmul_tile_overhead_elements"),
        matmul_k_overhead=reader.number("matmul_k_overhead_elements"),
        matmul_setup_s=us_to_s(reader.number("matmul_setup_us")),
        matmul_bandwidth_fraction=reader.positive("matmul_fraction_of_bandwidth", most=1.0),
        pointwise_bandwidth_fraction=reader.positive("pointwise_fraction_of_bandwidth", most=1.0),
        strided_elements_per_s=_elements_or_none(reader, "strided_gelements_per_s"),
        cast_elements_per_s=_elements_or_none(reader, "cast_gelements_per_s"),
        reduction_bandwidth_fraction=reader.positive("reduction_fraction_of_bandwidth", most=1.0),
        embedding_bandwidth_fraction=reader.positive("embedding_fraction_of_bandwidth", most=1.0),
        attention_forward_fraction=reader.positive("attention_forward_fraction_of_peak", most=1.0),
        attention_backward_fraction=reader.positive(
            "attention_backward_fraction_of_peak", most=1.0
        ),
        newest_attention_forward_fraction=_share_or_none(
            reader, "newest_attention_forward_fraction_of_peak"
        ),
        newest_attention_backward_fraction=_share_or_none(
            reader, "newest_attention_backward_fraction_of_peak"
        ),
        sustained_fraction=reader.positive("sustained_fraction_of_peak", most=1.0),
        float8_sustained_fraction=reader.positive("sustained_fraction_of_float8_peak", most=1.0)
        if reader.has(_FLOAT8_PEAK)
        else 1.0,
        attention_fill_keys=_number_or(reader, "attention_fill_keys", ATTENTION_FILL_KEYS),
        attention_head_overhead=_number_or(reader, "attention_head_overhead_elements", 0.0),
        attention_masked_share=_number_or(reader, "attention_masked_share", 0.0),
    )


def _share_or_none(reader: FieldReader, key: str) -> float | None:
    return reader.positive(key, most=1.0) if reader.has(key) else None


def _elements_or_none(reader: FieldReader, key: str) -> float | None:
    return 1e9 * reader.positive(key) if reader.has(key) else None


def _number_or(reader: FieldReader, key: str, default: float) -> float:
    return reader.number(key) if reader.has(key) else default


def _read_errors(reader: FieldReader) -> tuple[MeasuredError, ...]:
    """Read how far step times were off, by kind of run."""
    tables = reader.tables(_ERRORS) if reader.has(_ERRORS) else []
    errors = []
    for index, table in enumerate(tables):
        of_kind = FieldReader(path=reader.path, table=table, prefix=f"{_ERRORS}[{index}].")
        errors.append(
            MeasuredError(
                axes=RUN_AXES[of_kind.text("axes", tuple(RUN_AXES))],
                error=of_kind.number("mean_error", most=1.0),
                num_runs=of_kind.count("runs"),
                least_gpus=of_kind.count("least_gpus"),
                most_gpus=of_kind.count("most_gpus"),
                least_step_s=of_kind.positive("least_step_s"),
                most_step_s=of_kind.positive("most_step_s"),
                work=tuple(of_kind.text("work").split(", ")),
            )
        )
        of_kind.finish()
    return tuple(errors)


def _read_link(path: Path, index: int, table: Mapping[str, object]) -> LinkSpec:
    """Read one link class."""
    reader = FieldReader(path=path, table=table, prefix=f"links[{index}].")
    bits = reader.has(_LINK_RATE_KEYS[1])
    rate = reader.positive(_LINK_RATE_KEYS[bits])
    peak_bytes_per_s = gb_per_s_to_bytes_per_s(rate / BITS_PER_BYTE if bits else rate)
    link = LinkSpec(
        name=reader.text("name"),
        ranks=reader.count("ranks") if reader.has("ranks") else None,
        bandwidth_bytes_per_s=peak_bytes_per_s * reader.positive("achieved_fraction", most=1.0),
        latency_s=us_to_s(reader.number("latency_us_per_hop")),
        base_latency_s=us_to_s(reader.number("latency_us_per_collective")),
        ramp_bytes=reader.number("ramp_mib_per_rank") * MIB,
        switch_all_reduce_fraction=reader.number("switch_all_reduce_fraction", most=1.0),
        numbers=reader.numbers,
    )
    reader.finish()
    return link


def _read_links(reader: FieldReader, name: str, gpus: int) -> tuple[LinkSpec, ...]:
    """Read the links of a cluster, which one GPU alone does without."""
    tables = reader.tables("links") if reader.has("links") else []
    if not tables and gpus > 1:
        raise RequestError(
            f"{gpus} GPUs on cluster {name!r}, which has no link between GPUs ({reader.path})",
            hint="--gpus 1, or add [[links]]: plan profile --processes N measures them",
        )
    links = tuple(_read_link(reader.path, index, table) for index, table in enumerate(tables))
    if links:
        _check_links(reader.path, links)
    return links or (_NO_LINK,)


def _check_links(path: Path, links: tuple[LinkSpec, ...]) -> None:
    """Check that links go from the innermost outwards and that the last joins everything."""
    sizes = [link.ranks for link in links[:-1]]
    bounded = [size for size in sizes if size is not None]
    if links[-1].ranks is not None or len(bounded) != len(sizes):
        raise ProfileError(
            f"{path}: field 'links': every link but the last has 'ranks', the last has none",
            hint="order the links from the innermost outwards; the last joins any number of ranks",
        )
    for smaller, larger in pairwise(bounded):
        if larger % smaller or larger == smaller:
            raise ProfileError(
                f"{path}: field 'links': {larger} ranks around {smaller} ranks",
                hint="each link joins a multiple of the ranks of the link before it",
            )


def _on_nodes(link: LinkSpec, profile_per_node: int, per_node: int, name: str) -> LinkSpec:
    """A link where nodes have another number of GPUs than in the profile.

    What joins whole nodes joins as many of them as before.

    Raises:
        RequestError: A unit of the link would begin inside a node and end in another.
    """
    if link.ranks is not None and link.ranks % profile_per_node == 0:
        link = replace(link, ranks=link.ranks // profile_per_node * per_node)
    if link.ranks is not None and link.ranks % per_node and per_node % link.ranks:
        raise RequestError(
            f"{per_node} GPUs per node on cluster {name!r}, whose {link.name} joins {link.ranks} "
            "neighbours: some of them would be on two nodes",
            hint=f"--gpus-per-node with a multiple or a divisor of {link.ranks}",
        )
    return link
