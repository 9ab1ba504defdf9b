"""Holds the cost model to measured blocks.

    python tests/bench/gpu/compare.py profiles/measured/h200-sxm

Traces the blocks of blocks.csv, prices them with the device's profile (the cluster of the
folder's name, or ``--cluster``) and prints predicted over measured, row by row, and the medians.
"""

import argparse
import csv
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path

import torch
from gpu_blocks import RECOMPUTATIONS, BlockRow, BlockShape

from planner.cost.liveness import unit_peaks
from planner.cost.work import Shares
from planner.errors import PlannerError, RequestError
from planner.graph.analysis.lifetimes import live_bytes, moments_of
from planner.graph.analysis.retained import saved_values
from planner.graph.loading.load import wrap_module
from planner.graph.operator_graph import OperatorGraph
from planner.graph.sizes.family import trace_family
from planner.hardware.profiles import load_cluster
from planner.hardware.spec import ClusterSpec
from planner.pricing.choice import ShardingChoice
from planner.pricing.model_pricing import ModelPricer, PricedModel
from planner.vocabulary import Recomputation

VOCABULARY = 128
"""Of the models of ``examples`` as they are built here."""

BLOCK = 2
"""Unit that stands for all blocks: the first one also makes what all share."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A measured stack and what the cost model says of it."""

    measured: BlockRow
    forward_s: float
    backward_s: float
    peak_memory_bytes: float

    @property
    def forward_ratio(self) -> float:
        """Predicted over measured."""
        return self.forward_s / self.measured.forward_s

    @property
    def backward_ratio(self) -> float:
        """Predicted over measured, recomputation included."""
        return self.backward_s / self.measured.backward_s

    @property
    def time_ratio(self) -> float:
        """Predicted over measured, forward and backward."""
        measured_s = self.measured.forward_s + self.measured.backward_s
        return (self.forward_s + self.backward_s) / measured_s

    @property
    def memory_ratio(self) -> float:
        """Predicted over measured."""
        return self.peak_memory_bytes / self.measured.peak_memory_bytes


def read_blocks(folder: Path) -> list[BlockRow]:
    """Read blocks.csv.

    Raises:
        RequestError: There is no such file, or it lacks a column.
    """
    path = folder / "blocks.csv"
    if not path.is_file():
        raise RequestError(f"{path} is missing", hint="tests/bench/gpu/measure.py writes it.")
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    columns = {field.name: field.type for field in fields(BlockRow)}
    missing = set(columns) - set(rows[0] if rows else ())
    if missing:
        raise RequestError(f"{path} has no rows with {', '.join(sorted(missing))}")
    return [
        BlockRow(**{name: kind(row[name]) for name, kind in columns.items()})  # type: ignore[operator, arg-type]
        for row in rows
    ]


def compare(rows: Iterable[BlockRow], cluster: ClusterSpec) -> list[Comparison]:
    """Price each measured stack."""
    return [_compared(row, cluster) for row in rows]


def _compared(row: BlockRow, cluster: ClusterSpec) -> Comparison:
    shape = BlockShape(**{each.name: getattr(row, each.name) for each in fields(BlockShape)})
    priced = _priced_model(shape, cluster)
    block = priced.model.units[BLOCK]
    kept_bytes = row.num_blocks * block.activation_bytes[row.recompute]
    running_bytes = block.temporary_bytes[row.recompute] + weight_gradient_bytes(priced.graph)
    return Comparison(
        measured=row,
        forward_s=block.forward_s,
        backward_s=block.backward_s + block.recompute[row.recompute].compute_s,
        peak_memory_bytes=kept_bytes + running_bytes,
    )


def weight_gradient_bytes(graph: OperatorGraph) -> int:
    """What gradients of weights add to the peak of a block.

    The cost model counts them with the optimiser's state, apart from what a block needs while it
    runs. In the measured stack each of them lives until its node of autograd is done: the block
    is replayed with them and without.
    """
    unit = graph.units[BLOCK]
    forward, backward = unit.forward_ops, unit.backward_ops
    shares = dict.fromkeys(forward, Shares())
    without = unit_peaks(graph, forward, backward, shares)[Recomputation.NONE]
    moments = [*moments_of(graph, forward), *moments_of(graph, backward)]
    last = {piece: at for at, moment in enumerate(moments) for piece in moment.touched}
    for value in saved_values(graph, forward):
        piece = graph.values[value].storage
        if last.get(piece, 0) < len(forward):
            last[piece] = len(moments)
    sizes = {each.id: each.size_bytes for each in graph.storages}
    highest_bytes = max(live_bytes(moments, sizes, last))
    return highest_bytes - max(without.forward_bytes, without.backward_bytes)


@cache
def _priced_model(shape: BlockShape, cluster: ClusterSpec) -> PricedModel:
    """Trace and price the whole model that has these blocks."""

    def example_batch(microbatch_size: int) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = torch.randint(0, VOCABULARY, (microbatch_size, shape.seq_len + 1))
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def loss_fn(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    loaded = wrap_module(shape.whole_model, example_batch=example_batch, loss_fn=loss_fn)
    family = trace_family(loaded, dtype=shape.dtype)
    pricer = ModelPricer(family, cluster, shape.dtype)
    choice = ShardingChoice(
        tp=1,
        sequence_parallel=False,
        split_tables=False,
        microbatch_size=shape.microbatch_size,
    )
    priced = pricer.priced(choice)
    assert priced is not None
    return priced


def report(found: Sequence[Comparison]) -> str:
    """Write the table: a line for each row, then the median errors of each part and of all."""
    lines = [
        f"{'model':6} {'hidden':>6} {'seq':>6} {'mb':>3} {'recompute':10} {'measured ms':>11} "
        f"{'forward':>8} {'backward':>8} {'both':>8} {'GiB':>7} {'memory':>8}"
    ]
    for each in found:
        row = each.measured
        lines.append(
            f"{row.model:6} {row.hidden:6} {row.seq_len:6} {row.microbatch_size:3} "
            f"{row.recompute:10} {(row.forward_s + row.backward_s) * 1e3:11.3f} "
            f"{each.forward_ratio - 1:+8.1%} {each.backward_ratio - 1:+8.1%} "
            f"{each.time_ratio - 1:+8.1%} {row.peak_memory_bytes / 2**30:7.3f} "
            f"{each.memory_ratio - 1:+8.1%}"
        )
    lines.append("median error   rows     time   memory")
    parts: list[tuple[str, Callable[[BlockRow], bool]]] = [("all", lambda _: True)]
    parts += [(model, lambda row, model=model: row.model == model) for model in ("gpt", "llama")]
    parts += [(kind, lambda row, kind=kind: row.recompute == kind) for kind in RECOMPUTATIONS]
    for name, belongs in parts:
        part = [each for each in found if belongs(each.measured)]
        if part:
            time_error = median_error(each.time_ratio for each in part)
            memory_error = median_error(each.memory_ratio for each in part)
            lines.append(f"{name:12} {len(part):6} {time_error:8.1%} {memory_error:8.1%}")
    return "\n".join(lines)


def median_error(ratios: Iterable[float]) -> float:
    """Median of |predicted / measured - 1|."""
    return statistics.median(abs(ratio - 1) for ratio in ratios)


def main(arguments: Sequence[str] | None = None) -> int:
    """Read the command line and compare."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, metavar="DIR", help="what measure.py wrote")
    parser.add_argument("--cluster", help="profile to price with (default: the folder's name)")
    options = parser.parse_args(arguments)
    try:
        rows = read_blocks(options.folder)
        name = options.cluster or options.folder.resolve().name
        found = compare(rows, load_cluster(name, gpus=1))
    except PlannerError as error:
        parser.error(str(error))
    print(report(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
