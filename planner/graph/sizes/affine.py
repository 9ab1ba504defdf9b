"""A recorded step at every microbatch size, from two of them.

Sizes, bytes and FLOPs of a step are affine in the microbatch size: part belongs to the samples,
part to the parameters. Two recordings fix the affine function of every integer.
"""

from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, replace
from functools import partial

from planner.graph.operator_graph import OpNode, Storage, StorageKind, TensorValue
from planner.graph.recording.recording import Recording
from planner.graph.sizes.grown import Grown


class NotAffineError(Exception):
    """Two steps are not the same program at different sizes."""


Delta = int | float | tuple["Delta | None", ...]
"""Growth per sample of a number, or of each item of a tuple (None where it does not grow)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _OpGrowth:
    flop: int
    read_bytes: int
    write_bytes: int
    arguments: Delta | None
    keyword_arguments: Delta | None


class AffineSteps:
    """A recorded step whose numbers are affine functions of the microbatch size."""

    def __init__(self, low: Recording, high: Recording) -> None:
        """Fit the functions through two recordings.

        Raises:
            NotAffineError: The recordings are different programs.
        """
        self.low = low
        self._per_sample = high.microbatch_size - low.microbatch_size
        if (low.parameters, low.calls, low.lists) != (high.parameters, high.calls, high.lists):
            raise NotAffineError
        if low.accumulations != high.accumulations:
            raise NotAffineError
        if low.tokens_per_sample != high.tokens_per_sample:
            raise NotAffineError
        lengths = [len(part) for part in (low.ops, low.values, low.storages)]
        if lengths != [len(part) for part in (high.ops, high.values, high.storages)]:
            raise NotAffineError
        self._shapes = self._fit_shapes(high)
        self._sizes = self._fit_sizes(high)
        self._ops = self._fit_ops(high)

    def at(self, microbatch_size: int) -> Recording:
        """Evaluate the step at a microbatch size; what does not grow is shared."""
        steps = microbatch_size - self.low.microbatch_size
        low = self.low
        return replace(
            low,
            microbatch_size=microbatch_size,
            values=Grown(low.values, self._shapes, partial(_grown_value, steps=steps)),
            storages=Grown(low.storages, self._sizes, partial(_grown_storage, steps=steps)),
            ops=Grown(low.ops, self._ops, partial(_grown_op, steps=steps)),
        )

    def of_whole(self, whole: Recording, twins: Mapping[int, int]) -> "AffineSteps":
        """Let another step grow as this one does.

        Args:
            whole: A step with the same ops, more often, at the same microbatch size.
            twins: For each of its ops that of this step that it grows with.

        Raises:
            NotAffineError: Ops that share a tensor grow it differently.
        """
        steps = copy(self)
        steps.low, steps._ops = whole, {}
        values: dict[int, tuple[int, ...] | None] = {}
        storages: dict[int, int | None] = {}
        for op, twin in twins.items():
            mine, its = whole.ops[op], self.low.ops[twin]
            growth = self._ops.get(twin)
            if growth is not None:
                if growth.arguments is not None and mine.arguments != its.arguments:
                    raise NotAffineError
                steps._ops[op] = growth
            pairs = zip((*mine.inputs, *mine.outputs), (*its.inputs, *its.outputs), strict=True)
            for value, like in pairs:
                grown = self._shapes.get(like)
                if values.setdefault(value, grown) != grown:
                    raise NotAffineError
                storage = whole.values[value].storage
                growth_bytes = self._sizes.get(self.low.values[like].storage)
                if storages.setdefault(storage, growth_bytes) != growth_bytes:
                    raise NotAffineError
        kept = (StorageKind.PARAMETER, StorageKind.BUFFER)
        if any(each.kind not in kept and each.id not in storages for each in whole.storages):
            raise NotAffineError  # no op says how it grows
        steps._shapes = {value: grown for value, grown in values.items() if grown is not None}
        steps._sizes = {each: grown for each, grown in storages.items() if grown is not None}
        return steps

    @property
    def shares_work(self) -> bool:
        """Whether n times the samples are at most n times the work, for every op and tensor.

        What does not belong to the samples is at least nothing then.
        """
        size = self.low.microbatch_size
        pairs = [
            pair
            for position, deltas in self._shapes.items()
            for pair in zip(self.low.values[position].shape, deltas, strict=True)
        ]
        for position, growth in self._ops.items():
            op = self.low.ops[position]
            pairs += [
                (op.flop, growth.flop),
                (op.read_bytes, growth.read_bytes),
                (op.write_bytes, growth.write_bytes),
            ]
        return all(growth >= 0 and growth * size <= low for low, growth in pairs)

    def _fit_shapes(self, other: Recording) -> dict[int, tuple[int, ...]]:
        deltas: dict[int, tuple[int, ...]] = {}
        for low_value, high_value in zip(self.low.values, other.values, strict=True):
            if fixed_part(low_value) != fixed_part(high_value):
                raise NotAffineError
            if low_value.shape != high_value.shape:
                sizes = zip(low_value.shape, high_value.shape, strict=True)
                deltas[low_value.id] = tuple([self._per_step(high - low) for low, high in sizes])
        return deltas

    def _fit_sizes(self, high: Recording) -> dict[int, int]:
        deltas: dict[int, int] = {}
        for low_storage, high_storage in zip(self.low.storages, high.storages, strict=True):
            if fixed_owner(low_storage) != fixed_owner(high_storage):
                raise NotAffineError
            if low_storage.size_bytes != high_storage.size_bytes:
                growth = high_storage.size_bytes - low_storage.size_bytes
                deltas[low_storage.id] = self._per_step(growth)
        return deltas

    def _fit_ops(self, high: Recording) -> dict[int, _OpGrowth]:
        growths: dict[int, _OpGrowth] = {}
        for low_op, high_op in zip(self.low.ops, high.ops, strict=True):
            if wiring(low_op) != wiring(high_op):
                raise NotAffineError
            growth = _OpGrowth(
                flop=self._per_step(high_op.flop - low_op.flop),
                read_bytes=self._per_step(high_op.read_bytes - low_op.read_bytes),
                write_bytes=self._per_step(high_op.write_bytes - low_op.write_bytes),
                arguments=self._delta(low_op.arguments, high_op.arguments),
                keyword_arguments=self._delta(low_op.keyword_arguments, high_op.keyword_arguments),
            )
            if growth != _NO_GROWTH:
                growths[low_op.id] = growth
        return growths

    def _per_step(self, growth: int) -> int:
        steps, rest = divmod(growth, self._per_sample)
        if rest:
            raise NotAffineError
        return steps

    def _delta(self, low: object, high: object) -> Delta | None:
        """Return the growth per sample of a number or tuple, None where there is none."""
        if low == high:
            return None
        if isinstance(low, tuple) and isinstance(high, tuple) and len(low) == len(high):
            return tuple([self._delta(left, right) for left, right in zip(low, high, strict=True)])
        if type(low) is int and type(high) is int:
            return self._per_step(high - low)
        if type(low) is float and type(high) is float:
            return (high - low) / self._per_sample
        raise NotAffineError


_NO_GROWTH = _OpGrowth(flop=0, read_bytes=0, write_bytes=0, arguments=None, keyword_arguments=None)


def fixed_part(value: TensorValue) -> tuple[object, ...]:
    """What of a value no size changes."""
    return value.storage, value.dtype, value.requires_grad, len(value.shape)


def fixed_owner(storage: Storage) -> tuple[object, ...]:
    """What of a storage no size changes."""
    return storage.kind, storage.name, storage.gradient_of


def wiring(op: OpNode) -> tuple[object, ...]:
    """What of an op no size changes."""
    return (
        op.name,
        op.module,
        op.phase,
        op.is_view,
        op.is_pointwise,
        op.inputs,
        op.outputs,
        op.forward_op,
        op.saved_inputs,
        op.saved_outputs,
        op.saved_in_vain,
    )


def _grow(item: object, delta: Delta | None, steps: int) -> object:
    if delta is None:
        return item
    if isinstance(delta, tuple):
        assert isinstance(item, tuple), "a tuple of growths belongs to a tuple"
        return tuple([_grow(each, part, steps) for each, part in zip(item, delta, strict=True)])
    assert isinstance(item, (int, float)), "a growth belongs to a number"
    return item + delta * steps


def _grow_tuple(items: tuple[object, ...], delta: Delta | None, steps: int) -> tuple[object, ...]:
    grown = _grow(items, delta, steps)
    assert isinstance(grown, tuple), "a grown tuple is a tuple"
    return grown


def _grown_value(value: TensorValue, delta: tuple[int, ...], steps: int) -> TensorValue:
    return TensorValue(
        id=value.id,
        storage=value.storage,
        shape=tuple([size + part * steps for size, part in zip(value.shape, delta, strict=True)]),
        dtype=value.dtype,
        requires_grad=value.requires_grad,
    )


def _grown_storage(storage: Storage, growth_bytes: int, steps: int) -> Storage:
    return Storage(
        id=storage.id,
        size_bytes=storage.size_bytes + growth_bytes * steps,
        kind=storage.kind,
        name=storage.name,
        gradient_of=storage.gradient_of,
        named_until=storage.named_until,
    )


def _grown_op(op: OpNode, growth: _OpGrowth, steps: int) -> OpNode:
    # Spelled out because dataclasses.replace is several times slower on tens of thousands.
    return OpNode(
        id=op.id,
        name=op.name,
        module=op.module,
        phase=op.phase,
        is_view=op.is_view,
        is_pointwise=op.is_pointwise,
        operands=op.operands,
        inputs=op.inputs,
        outputs=op.outputs,
        arguments=_grow_tuple(op.arguments, growth.arguments, steps),
        keyword_arguments=_grow_keywords(op, growth.keyword_arguments, steps),
        flop=op.flop + growth.flop * steps,
        read_bytes=op.read_bytes + growth.read_bytes * steps,
        write_bytes=op.write_bytes + growth.write_bytes * steps,
        forward_op=op.forward_op,
        is_of_function=op.is_of_function,
        saved_inputs=op.saved_inputs,
        saved_outputs=op.saved_outputs,
        saved_in_vain=op.saved_in_vain,
    )


def _grow_keywords(op: OpNode, delta: Delta | None, steps: int) -> tuple[tuple[str, object], ...]:
    if delta is None:
        return op.keyword_arguments
    assert isinstance(delta, tuple), "keyword arguments grow by a tuple"
    return tuple(
        (name, _grow(item, part[1] if isinstance(part, tuple) else None, steps))
        for (name, item), part in zip(op.keyword_arguments, delta, strict=True)
    )
