"""Operator graphs of one model at every sequence length, from traces at three of them.

With the microbatch size b fixed, every number of a step is a polynomial of second degree in the
sequence length s: attention with its s x s scores, work per token, work per sample. Together with
``affine.py`` that is a polynomial in 1, b, s, b s, s^2, b s^2 for each integer of each op. Three
lengths fix it, a trace at a fourth proves it; all is exact (rational) arithmetic. A model that
follows no such polynomial (windows, buckets, chunks) is traced at each length.
"""

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from functools import cached_property

from planner.errors import RequestError
from planner.graph.division.units import assemble, find_layout
from planner.graph.loading.loaded_model import LoadedModel
from planner.graph.operator_graph import OperatorGraph, OpNode, Storage, TensorValue
from planner.graph.recording.recording import Recording
from planner.graph.sizes.affine import fixed_owner, fixed_part, wiring
from planner.graph.sizes.family import GraphFamily
from planner.graph.trace import record_step, trace_model

_PROVING_SIZE = 2
"""Microbatch size at which a further length is traced for proof."""


class NotQuadraticError(Exception):
    """Steps of several lengths are not the same program."""


class LengthFamily:
    """The operator graphs of one model by microbatch size and length."""

    def __init__(self, model: LoadedModel, *, longest: int, dtype: str) -> None:
        """Keep the model; it is traced when a graph is asked for.

        Args:
            model: The model; its ``example_batch`` takes a ``seq_len``.
            longest: Longest sequence that will be asked for. Anchors are an eighth, a quarter
                and a half of it, the proof is at three quarters; what is shorter than the
                anchors, or as long as this or longer, is traced when it is asked for.
            dtype: Compute dtype: "bfloat16", "float32" or "float64".
        """
        self._model = model
        self._dtype = dtype
        self._families: dict[int, GraphFamily] = {}
        self._longest = longest
        # Not the longest itself: a model can be another program at the end of its tables.
        self._anchors = tuple(sorted({max(1, longest // part) for part in (8, 4, 2)}))

    def at(self, microbatch_size: int, seq_len: int) -> OperatorGraph:
        """Return the graph at a microbatch size and a length.

        From the shortest anchor up to the longest length it is evaluated where the model allows
        that, else traced.

        Raises:
            RequestError: A size is below 1, or the model's data has no length.
            ModelError: The model cannot run at this size.
        """
        if seq_len < 1:
            raise RequestError(
                f"A sequence of {seq_len} tokens was asked for; it has at least 1.",
                hint="Use a length of 1 or more.",
            )
        inside = self._anchors[0] < seq_len < self._longest
        if seq_len in self._anchors:
            return self._family(seq_len).at(microbatch_size)
        if inside and self.is_quadratic and self._all_evaluate(microbatch_size):
            try:
                recording = self._evaluated(microbatch_size, seq_len)
            except NotQuadraticError:
                pass  # it halves its length, say, and this one is odd
            else:
                return assemble(recording, find_layout(recording))
        model = self._model.with_seq_len(seq_len)
        return trace_model(model, microbatch_size=microbatch_size, dtype=self._dtype)

    @cached_property
    def is_quadratic(self) -> bool:
        """Whether lengths from the anchors up to the longest are evaluated instead of traced."""
        if len(self._anchors) < 3 or not self._all_evaluate(_PROVING_SIZE):
            return False
        further = 3 * self._longest // 4
        try:
            evaluated = self._evaluated(_PROVING_SIZE, further)
        except NotQuadraticError:
            return False
        model = self._model.with_seq_len(further)
        return evaluated == record_step(model, microbatch_size=_PROVING_SIZE, dtype=self._dtype)

    def _all_evaluate(self, microbatch_size: int) -> bool:
        return all(self._family(length).evaluates(microbatch_size) for length in self._anchors)

    def _evaluated(self, microbatch_size: int, seq_len: int) -> Recording:
        recordings = [self._family(length).recording(microbatch_size) for length in self._anchors]
        return _Mixture(_weights(self._anchors, seq_len)).recording(recordings)

    def _family(self, seq_len: int) -> GraphFamily:
        if seq_len not in self._families:
            model = self._model.with_seq_len(seq_len)
            self._families[seq_len] = GraphFamily(model, dtype=self._dtype)
        return self._families[seq_len]


def _weights(anchors: Sequence[int], point: int) -> tuple[Fraction, ...]:
    """Lagrange's weights of the values at the anchors for the value at a point."""
    weights = []
    for anchor in anchors:
        weight = Fraction(1)
        for other in anchors:
            if other != anchor:
                weight *= Fraction(point - other, anchor - other)
        weights.append(weight)
    return tuple(weights)


class _Mixture:
    """Evaluates the polynomials through recordings at the anchors."""

    def __init__(self, weights: tuple[Fraction, ...]) -> None:
        self._weights = weights

    def recording(self, recordings: Sequence[Recording]) -> Recording:
        """Evaluate a step.

        Raises:
            NotQuadraticError: The recordings are different programs.
        """
        first = recordings[0]
        frames = [(r.parameters, r.lists, r.calls, r.accumulations) for r in recordings]
        sizes = [(len(r.ops), len(r.values), len(r.storages)) for r in recordings]
        if any(frame != frames[0] for frame in frames) or any(size != sizes[0] for size in sizes):
            raise NotQuadraticError
        return replace(
            first,
            tokens_per_sample=self._integer([r.tokens_per_sample for r in recordings]),
            values=tuple(map(self._value, *[r.values for r in recordings])),
            storages=tuple(map(self._storage, *[r.storages for r in recordings])),
            ops=tuple(map(self._op, *[r.ops for r in recordings])),
        )

    def _integer(self, numbers: Sequence[int]) -> int:
        if all(number == numbers[0] for number in numbers):
            return numbers[0]
        mixed = sum(
            (weight * number for weight, number in zip(self._weights, numbers, strict=True)),
            Fraction(0),
        )
        if mixed.denominator != 1:
            raise NotQuadraticError
        return mixed.numerator

    def _anything(self, items: Sequence[object]) -> object:
        """Evaluate an argument: a number, or a tuple of arguments; others must be equal."""
        first = items[0]
        if all(item == first for item in items):
            return first
        if all(type(item) is int for item in items):
            return self._integer([item for item in items if isinstance(item, int)])
        tuples = [item for item in items if isinstance(item, tuple)]
        if len(tuples) == len(items) and len({len(item) for item in tuples}) == 1:
            return self._tuple(tuples)
        raise NotQuadraticError

    def _tuple(self, tuples: Sequence[tuple[object, ...]]) -> tuple[object, ...]:
        return tuple([self._anything(items) for items in zip(*tuples, strict=True)])

    def _value(self, *values: TensorValue) -> TensorValue:
        first = values[0]
        if any(fixed_part(value) != fixed_part(first) for value in values):
            raise NotQuadraticError
        shape = tuple(
            [self._integer(sizes) for sizes in zip(*[v.shape for v in values], strict=True)]
        )
        return replace(first, shape=shape) if shape != first.shape else first

    def _storage(self, *storages: Storage) -> Storage:
        first = storages[0]
        if any(fixed_owner(each) != fixed_owner(first) for each in storages):
            raise NotQuadraticError
        return replace(first, size_bytes=self._integer([each.size_bytes for each in storages]))

    def _op(self, *ops: OpNode) -> OpNode:
        first = ops[0]
        if all(op == first for op in ops):
            return first
        if any(wiring(op) != wiring(first) for op in ops):
            raise NotQuadraticError
        names = [tuple(name for name, _ in op.keyword_arguments) for op in ops]
        if any(each != names[0] for each in names):
            raise NotQuadraticError
        keywords = self._tuple([tuple(item for _, item in op.keyword_arguments) for op in ops])
        return replace(
            first,
            arguments=self._anything_tuple([op.arguments for op in ops]),
            keyword_arguments=tuple(zip(names[0], keywords, strict=True)),
            flop=self._integer([op.flop for op in ops]),
            read_bytes=self._integer([op.read_bytes for op in ops]),
            write_bytes=self._integer([op.write_bytes for op in ops]),
        )

    def _anything_tuple(self, tuples: Sequence[tuple[object, ...]]) -> tuple[object, ...]:
        if len({len(each) for each in tuples}) != 1:
            raise NotQuadraticError
        return self._tuple(tuples)
