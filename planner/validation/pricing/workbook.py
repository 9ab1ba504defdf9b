"""The work of every model, layout and microbatch size among some runs, counted once each."""

from dataclasses import dataclass, replace
from functools import lru_cache

from planner.cost.model_units import ModelWork
from planner.framework.spec import KernelForms
from planner.graph.sizes.family import GraphFamily, trace_family
from planner.hardware.profiles import load_cluster
from planner.pricing.choice import ShardingChoice
from planner.pricing.model_pricing import ModelPricer
from planner.validation.pricing.models import ModelShape, loaded

TRACED_LAYERS = 3
"""Blocks of the traced model: the first, one that stands for all between, the last."""


_NODE = "a100-80gb-sxm"
"""A cluster profile; layouts that are wired in do not depend on it."""


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
    float8: bool = False
    """Linear layers of blocks multiply in float8."""


@lru_cache(maxsize=256)
def traced(shape: ModelShape, dtype: str) -> GraphFamily:
    """Trace a model, once in a process.

    Raises:
        ModelError: It cannot be traced.
    """
    return trace_family(loaded(shape), dtype=dtype)


class WorkBook:
    """Counts the work of models of three blocks; equal questions are answered once."""

    def __init__(self) -> None:
        self._works: dict[WorkKey, ModelWork] = {}

    def work(self, key: WorkKey) -> ModelWork:
        """The work of a microbatch of a model with three blocks, whatever the key's number.

        Raises:
            ModelError: The model cannot be traced.
        """
        key = replace(key, shape=replace(key.shape, layers=TRACED_LAYERS))
        if key not in self._works:
            self._works[key] = self._count(key)
        return self._works[key]

    def _count(self, key: WorkKey) -> ModelWork:
        family = traced(key.shape, key.dtype)
        cluster = load_cluster(_NODE, gpus=key.tp, gpus_per_node=key.tp)
        pricer = ModelPricer(family, cluster, key.dtype, kernels=key.kernels)
        work = pricer.work(
            ShardingChoice(
                tp=key.tp,
                sequence_parallel=key.sequence_parallel,
                split_tables=key.tp > 1,
                microbatch_size=key.microbatch_size,
                float8=key.float8,
            )
        )
        assert work is not None, f"a dense decoder always has a layout: {key}"
        return work
