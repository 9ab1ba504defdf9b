"""How modules run under tensor parallelism: the vocabulary that search and script share."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitParameter:
    """A parameter that is split over tp."""

    name: str
    """Its name in its module: "weight"."""
    dim: int
    """Dim that is split, of the parameter as it is stored."""
    fused: int = 1
    """Equal projections that lie side by side along that dim, each of which is split (3 for fused
    qkv)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleSharding:
    """Tensor-parallel instructions for one module that owns parameters.

    Layouts are spelled as torch spells placements: "Replicate", "Shard(1)" (tensor dim 1,
    negative dims count from the end). The *stream* is what flows between modules outside
    sharded regions, in the unit's boundary layout.
    """

    module: str
    """Module path relative to the unit: "attn.c_attn", "mlp.c_fc"; for prologue and epilogue
    relative to the model: "transformer.wte"."""
    style: str
    """A ``Style``."""
    input_layout: str
    """Layout that the module's first input must have."""
    output_layout: str
    """Layout that its output leaves with (after the collective, where one is needed)."""
    split: tuple[SplitParameter, ...] = ()
    """Its parameters that are split; the others are whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeModule:
    """A module that stays whole though its shapes would let it be split."""

    module: str
    """Its path, as in ``ModuleSharding``."""
    reason: str
    """What the script cannot run where it is split."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitSharding:
    """Instructions for all units of one structure, over one axis."""

    axis: str
    """tp, cp or ep."""
    units: tuple[int, ...]
    """Units that run so."""
    modules: tuple[ModuleSharding, ...]
    """Modules that do not simply run replicated on the replicated stream."""
    whole: tuple[WholeModule, ...] = ()
    """Modules that the script could not run split."""
