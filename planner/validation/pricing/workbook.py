"""The work of every model, layout and microbatch size among some runs, drawn once each."""

from dataclasses import dataclass, replace

from planner.cost.node_pricing import Pricing
from planner.cost.stage_memory import ModelUnits, TiedWeight
from planner.cost.unit_pricing import price_unit
from planner.cost.unit_work import UnitWork
from planner.framework.spec import KernelForms
from planner.graph.sizes.family import GraphFamily, trace_family
from planner.hardware.profiles import load_cluster
from planner.hardware.spec import ClusterSpec
from planner.search.model_pricing import ModelPricer, ShardingChoice, drawn_units
from planner.units import DTYPE_BYTES
from planner.validation.pricing.models import ModelShape, loaded

_TRACED_LAYERS = 3
"""Blocks of the traced model: the first, one that stands for all between, the last."""

_SOLVER_LIMIT_S = 60.0

_REFERENCE = "a100-80gb-sxm"
"""Cluster profile of the node by whose prices layouts are chosen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkKey:
    """What the work of a microbatch depends on."""

    shape: ModelShape
    """The model."""
    dtype: str
    """Compute dtype."""
    kernels: KernelForms
    """How the framework computes."""
    tp: int
    """Tensor-parallel ranks."""
    sequence_parallel: bool
    """The stream is split between the sharded regions."""
    microbatch_size: int
    """Sequences."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelWork:
    """The work of one microbatch through a model of any number of blocks."""

    prologue: UnitWork
    """Embedding."""
    block: UnitWork
    """Every block."""
    head: UnitWork
    """Last norm and head."""
    loss: UnitWork
    """Loss of the logits."""
    entering_bytes: int
    """Bytes on a rank that a stage of blocks, or of the head, receives from the one before."""
    logits_bytes: int
    """Bytes on a rank that a stage of the loss alone receives."""
    tied: tuple[TiedWeight, ...]
    """Weights that prologue and head share."""

    def priced(self, pricing: Pricing) -> ModelUnits:
        """Price a model of one block."""
        works = (self.prologue, self.block, self.head, self.loss)
        return ModelUnits(
            units=tuple(price_unit(work, pricing) for work in works),
            entering_bytes=(0, self.entering_bytes, self.entering_bytes, self.logits_bytes),
            tied=self.tied,
            shared=(),
        )


class WorkBook:
    """Draws the work of models; equal questions are answered once.

    Layouts inside a unit are chosen by the prices of one reference node whose collectives have no
    latency. This gives the column-row pattern that the frameworks have wired in: they split small
    models as well, where it does not pay. What it costs on their cluster is priced afterwards.
    """

    def __init__(self) -> None:
        self._families: dict[tuple[ModelShape, str], GraphFamily] = {}
        self._works: dict[WorkKey, ModelWork] = {}

    def work(self, key: WorkKey) -> ModelWork:
        """The work of a microbatch of a model with any number of blocks.

        Raises:
            ModelError: The model cannot be traced.
        """
        key = replace(key, shape=replace(key.shape, layers=_TRACED_LAYERS))
        if key not in self._works:
            self._works[key] = self._draw(key)
        return self._works[key]

    def _draw(self, key: WorkKey) -> ModelWork:
        family = self._families.get((key.shape, key.dtype))
        if family is None:
            family = trace_family(loaded(key.shape), dtype=key.dtype)
            self._families[key.shape, key.dtype] = family
        pricer = ModelPricer(
            family, _reference_node(key.tp), key.dtype, time_limit_s=_SOLVER_LIMIT_S
        )
        choice = ShardingChoice(
            tp=key.tp,
            sequence_parallel=key.sequence_parallel,
            split_tables=key.tp > 1,
            microbatch_size=key.microbatch_size,
        )
        priced = pricer.priced(choice)
        assert priced is not None, f"a dense decoder always has a layout: {key}"
        works = drawn_units(priced, choice, key.kernels)
        return ModelWork(
            prologue=works[0],
            block=works[1],
            head=works[-2],
            loss=works[-1],
            entering_bytes=_sent_bytes(priced.model.entering_bytes[2], key),
            logits_bytes=key.microbatch_size
            * key.shape.seq_len
            * key.shape.vocab_size
            * DTYPE_BYTES[key.dtype]
            // key.tp,
            tied=priced.model.tied,
        )


def _reference_node(gpus: int) -> ClusterSpec:
    """A node whose devices are slow for its links, so that splitting pays."""
    cluster = load_cluster(_REFERENCE, gpus=gpus, gpus_per_node=gpus)
    links = [
        replace(link, latency_s=0.0, base_latency_s=0.0, ramp_bytes=0.0) for link in cluster.links
    ]
    return replace(cluster, links=tuple(links))


def _sent_bytes(stream_bytes: int, key: WorkKey) -> int:
    """Bytes of the stream that a rank sends to the next stage.

    The gather inside the node that follows a split transfer is not priced: its links are some
    ten times as fast.
    """
    whole = key.sequence_parallel or not key.kernels.splits_transfers
    return stream_bytes if whole else stream_bytes // key.tp
