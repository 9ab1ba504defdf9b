"""What the script's own code takes, from steps that differ in one thing each."""

from collections.abc import Sequence

import torch

from planner.cost.op import op_s
from planner.hardware.spec import DeviceSpec, ScriptHost
from planner.profiling.dispatch_terms import COLLECTIVES, SPLIT, SPLIT_LONGER
from planner.profiling.op_fit import works_of
from planner.profiling.points import Point
from planner.vocabulary import Dtype, Recomputation


def fit_script(device: DeviceSpec, points: Sequence[Point]) -> ScriptHost:
    """Solve for the terms by least squares of relative errors; none is below zero."""
    rows, bare = [], []
    for run in next(point["rows"] for point in points if point["kind"] == "script"):
        shape = run["shape"]
        ops_s = sum(op_s(work, device, Dtype.FLOAT32) for work in works_of(run["calls"]))
        rest_s = run["seconds"] - shape["microbatches"] * ops_s
        rows.append([each / run["seconds"] for each in _counts(shape)])
        bare.append(rest_s / run["seconds"])
    step_s, unit_s, collective_s, tensor_s, plain_tensor_s = _least_squares(rows, bare)
    updates = sorted((p["elements"], p["seconds"]) for p in points if p["kind"] == "update")
    (few, few_s), (many, many_s) = updates[0], updates[-1]
    found = next(point for point in points if point["kind"] == "dispatch")
    full_op_s, selective_op_s = _again_s(device, found)
    split_op_s, split_collective_s = _split_s(device, found)
    return ScriptHost(
        step_s=step_s,
        unit_s=unit_s,
        collective_s=collective_s,
        tensor_s=tensor_s,
        plain_tensor_s=plain_tensor_s,
        message_s=_message_s(device, points),
        full_op_s=full_op_s,
        selective_op_s=selective_op_s,
        split_op_s=split_op_s,
        split_collective_s=split_collective_s,
        element_s=max(0.0, (many_s - few_s) / (many - few)),
    )


def _again_s(device: DeviceSpec, found: Point) -> tuple[float, float]:
    """What an op takes more in a block that runs again, in full or selectively, beyond itself."""
    ways, work = _seconds(found), {}
    for key in ("forward", "again"):
        works = works_of(found[key])
        work[key] = len(works), sum(op_s(each, device, Dtype.FLOAT32) for each in works)
    (num_forward, forward_s), (num_again, again_s) = work["forward"], work["again"]
    plain_s = ways[Recomputation.NONE]
    full_s = ways[Recomputation.FULL] - plain_s - forward_s
    selective_s = ways[Recomputation.SELECTIVE] - plain_s - again_s
    return (
        max(0.0, full_s / num_forward),
        max(0.0, selective_s / (num_forward + num_again)),
    )


def _split_s(device: DeviceSpec, found: Point) -> tuple[float, float]:
    """What an op on parts takes more, and beyond it a collective with the ends of its modules."""
    ways, ops = _seconds(found), found["num_split"]
    if not ops:  # one rank
        return 0.0, 0.0
    more = ops[SPLIT_LONGER] - ops[SPLIT]
    each_s = max(0.0, (ways[SPLIT_LONGER] - ways[SPLIT]) / more - device.kernel_launch_s)
    split_s = ways[SPLIT] - ways[Recomputation.NONE]
    return each_s, max(0.0, split_s / COLLECTIVES - (ops[SPLIT] / COLLECTIVES + 1) * each_s)


def _seconds(found: Point) -> dict[str, float]:
    return {way: spread["seconds"] for way, spread in found["ways"].items()}


def _message_s(device: DeviceSpec, points: Sequence[Point]) -> float:
    """What a microbatch adds to a pipeline's step at a boundary of a stage, beyond its ops."""
    found = sorted(
        (p for p in points if p["kind"] == "pipeline"), key=lambda point: point["microbatches"]
    )
    if len(found) < 2:  # one rank
        return 0.0
    few, many = found[0], found[-1]
    ops_s = sum(op_s(work, device, Dtype.FLOAT32) for work in works_of(few["calls"]))
    each_s = (many["seconds"] - few["seconds"]) / (many["microbatches"] - few["microbatches"])
    boundaries = 2 * (few["stages"] - 1) / few["stages"]  # of a stage in the mean: ends have one
    return float(max(0.0, (each_s - ops_s) / boundaries))


def _counts(shape: dict[str, int]) -> list[float]:
    """Steps, passes of a block, pairs of a gather and a reduction, parameters of FSDP and plain."""
    blocks, microbatches = shape["blocks"], shape["microbatches"]
    if not shape.get("shares", True):
        return [1, 0, 0, 0, blocks * shape["tensors"]]
    # Gathered again in backward, and reduced, in every microbatch; or once each in a step.
    collectives = 3 * microbatches if shape["reshards"] else 2
    return [1, blocks * microbatches, blocks * collectives / 2, blocks * shape["tensors"], 0]


def _least_squares(rows: Sequence[Sequence[float]], wanted: Sequence[float]) -> list[float]:
    """Solve without what would be below zero, which is left at zero."""
    kept = list(range(len(rows[0])))
    while True:
        matrix = torch.tensor([[row[index] for index in kept] for row in rows]).double()
        right = torch.tensor(wanted).double().unsqueeze(1)
        found = torch.linalg.lstsq(matrix, right, driver="gelsd").solution.flatten().tolist()
        if min(found) >= 0:
            return [found[kept.index(i)] if i in kept else 0.0 for i in range(len(rows[0]))]
        kept.pop(found.index(min(found)))
