"""What is known of the data in meta tensors: constants, computed only when they are asked for."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from planner.graph import torch_private
from planner.graph.recording.assumed import Assumed, Assumption, Make, assumed_values
from planner.graph.recording.value_table import ViewKey
from planner.graph.torch_private import TorchOp

MAX_CONSTANT_ELEMENTS = 1 << 24
"""Larger tensors are never computed for their values."""

_CACHED_ELEMENTS = 1 << 24
"""Elements of computed tensors that are kept between two questions."""

SHAPE_ONLY_OPS = frozenset(
    {
        "empty_like",
        "full_like",
        "new_empty",
        "new_full",
        "new_ones",
        "new_zeros",
        "ones_like",
        "zeros_like",
    }
)
"""Ops whose result has nothing of their input but its shape."""


@dataclass(frozen=True, slots=True)
class _Recipe:
    """How to compute values, all of one op at once, from others."""

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    make: Callable[[list[Tensor]], Sequence[Tensor] | None]
    ends: tuple[Make, Make] | None = None
    """Make it at the ends of a draw's range; None for what is no draw."""


class KnownValues:
    """Real values of the tensors that depend on nothing but constants and the example batch.

    A model asks for data with ``.item()``, ``bool(tensor)`` or ``nonzero``. Where the answer
    follows from constants (arange, zeros, tensor literals, the example's inputs), the chain of
    ops is run for real on the CPU; where it depends on weights or activations, tracing cannot
    know it. Some data is assumed (see ``recording.assumed``); what follows from it is known
    together with the assumptions it rests on. Tensors are named by their value number, so an
    in-place change never leaves a stale constant.
    """

    def __init__(self) -> None:
        self._given: dict[int, Tensor] = {}
        self._computed: dict[int, Tensor] = {}
        self._computed_elements = 0
        self._recipes: dict[int, _Recipe] = {}
        self._assumptions: dict[int, frozenset[Assumption]] = {}

    def seed(self, value: int, real: Tensor) -> None:
        """Remember the data of a value."""
        if real.numel() <= MAX_CONSTANT_ELEMENTS:
            self._given[value] = real

    def seed_later(self, value: int, make: Callable[[], Tensor | None]) -> None:
        """Remember how the first data of a buffer can be had; None where it cannot."""

        def made(_: list[Tensor]) -> Sequence[Tensor] | None:
            real = make()
            return None if real is None else [real]

        self._recipes[value] = _Recipe((), (value,), made)
        self._assumptions[value] = frozenset({Assumption.BUFFER})

    def knows(self, value: int) -> bool:
        """Tell whether the data of a value can be computed."""
        return value in self._given or value in self._recipes

    def assumptions(self, values: Iterable[int]) -> frozenset[Assumption]:
        """Return what the data of known values rests on beside constants and the batch."""
        return frozenset().union(*(self._assumptions.get(value, ()) for value in values))

    def observe(
        self,
        func: TorchOp,
        arguments: tuple[Sequence[Any], dict[str, Any]],
        inputs: tuple[int, ...],
        outputs: Sequence[int],
        made: Sequence[Tensor],
    ) -> None:
        """Remember how an op makes its outputs, where that is known or assumed.

        Args:
            func: An op that writes to none of its inputs.
            arguments: Its positional and keyword arguments.
            inputs: Values of the tensors in the arguments, in order.
            outputs: Values of its results.
            made: Its results, without data.
        """
        if sum([tensor.numel() for tensor in made]) > MAX_CONSTANT_ELEMENTS:
            return
        if not torch_private.is_random(func) and all([self.knows(value) for value in inputs]):
            self._keep(inputs, tuple(outputs), _run(func, *arguments))
            return
        name = torch_private.packet_name(func)
        if name in SHAPE_ONLY_OPS:
            self._keep((), tuple(outputs), _run(func, *arguments))
            return
        assumed = assumed_values(name, arguments, inputs, made)
        if assumed is not None:
            self._assume(outputs[assumed.position], assumed, inputs)

    def observe_write(
        self,
        func: TorchOp,
        arguments: tuple[Sequence[Any], dict[str, Any]],
        inputs: tuple[int, ...],
        written: int,
        target: Tensor,
    ) -> None:
        """Remember what an in-place op leaves in the tensor that it writes to.

        Args:
            func: An op that writes to its first argument alone.
            arguments: Its positional and keyword arguments.
            inputs: Values of the tensors in the arguments before the op, in order.
            written: Value of the tensor after the op.
            target: The tensor.
        """
        if not torch_private.is_random(func) and all([self.knows(value) for value in inputs]):
            self._keep(inputs, (written,), _write(func, *arguments))
            return
        name = torch_private.packet_name(func)
        assumed = assumed_values(name, arguments, inputs, [target])
        if assumed is not None:
            self._assume(written, assumed, inputs)

    def observe_renewal(
        self, value: int, old: int, written: Sequence[int], forms: Sequence[ViewKey]
    ) -> None:
        """Remember what other writes leave in a view of their memory.

        Args:
            value: Value of the view after the writes.
            old: Its value before them.
            written: Values of what was written to, in order.
            forms: How the view and then each of these lie in the memory.
        """
        needed = (old, *written)
        one_dtype = len({dtype for *_, dtype in forms}) == 1
        dense = all(min((1, *shape, *stride)) > 0 for _, _, shape, stride, _ in forms)
        if one_dtype and dense and all([self.knows(each) for each in needed]):
            self._keep(needed, (value,), lambda known: [_overlay(known, forms)])

    def _assume(self, value: int, assumed: Assumed, inputs: tuple[int, ...]) -> None:
        needed = inputs if assumed.needs_inputs else ()
        if all([self.knows(each) for each in needed]):
            made = _Recipe(needed, (value,), lambda known: [assumed.make(known)], ends=assumed.ends)
            self._recipes[value] = made
            self._assumptions[value] = self.assumptions(needed) | {assumed.assumption}

    def compute(self, value: int) -> Tensor | None:
        """Compute the data of a value on the CPU, None where it is unknown."""
        pending = [value]
        while pending:
            current = pending[-1]
            if self._find(current) is not None:
                pending.pop()
                continue
            recipe = self._recipes.get(current)
            if recipe is None:
                return None
            missing = [needed for needed in recipe.inputs if self._find(needed) is None]
            if missing:
                pending.extend(missing)
                continue
            with torch_private.modes_disabled():
                results = recipe.make([self._data(needed) for needed in recipe.inputs])
            if results is None:
                return None
            self._computed.update(zip(recipe.outputs, results, strict=True))
            self._computed_elements += sum(tensor.numel() for tensor in results)
        found = self._find(value)
        if self._computed_elements > _CACHED_ELEMENTS:
            self._computed.clear()
            self._computed_elements = 0
        return found

    def at_ends(self, value: int) -> tuple[Tensor | None, Tensor | None]:
        """Compute the data of a value where all draws are at the low, and at the high end.

        None where it is unknown.
        """
        return self._at_end(value, 0), self._at_end(value, 1)

    def _at_end(self, value: int, end: int) -> Tensor | None:
        known: dict[int, Tensor] = {}
        pending = [value]
        while pending:
            current = pending[-1]
            results: Sequence[Tensor | None] | None
            outputs: tuple[int, ...]
            if current in known:
                pending.pop()
                continue
            if Assumption.MEAN not in self.assumptions([current]):
                results, outputs = [self.compute(current)], (current,)
            else:
                recipe = self._recipes[current]
                missing = [needed for needed in recipe.inputs if needed not in known]
                if missing:
                    pending.extend(missing)
                    continue
                inputs, outputs = [known[needed] for needed in recipe.inputs], recipe.outputs
                with torch_private.modes_disabled():
                    results = [recipe.ends[end](inputs)] if recipe.ends else recipe.make(inputs)
            for output, result in zip(outputs, results or (None,), strict=False):
                if result is None:
                    return None
                known[output] = result
        return known[value]

    def _find(self, value: int) -> Tensor | None:
        given = self._given.get(value)
        return self._computed.get(value) if given is None else given

    def _data(self, value: int) -> Tensor:
        found = self._find(value)
        assert found is not None, "inputs are computed before what needs them"
        return found

    def _keep(
        self,
        inputs: tuple[int, ...],
        outputs: tuple[int, ...],
        make: Callable[[list[Tensor]], Sequence[Tensor] | None],
    ) -> None:
        recipe = _Recipe(inputs, outputs, make)
        assumptions = self.assumptions(inputs) if self._assumptions else frozenset()
        for value in outputs:
            self._recipes[value] = recipe
            if assumptions:
                self._assumptions[value] = assumptions


def _run(
    func: TorchOp, args: Sequence[Any], kwargs: dict[str, Any]
) -> Callable[[list[Tensor]], list[Tensor] | None]:
    return lambda known: run_for_real(func, args, kwargs, known)


def _write(
    func: TorchOp, args: Sequence[Any], kwargs: dict[str, Any]
) -> Callable[[list[Tensor]], list[Tensor] | None]:
    def make(known: list[Tensor]) -> list[Tensor] | None:
        target = known[0].clone()
        done = run_for_real(func, args, kwargs, [target, *known[1:]])
        return None if done is None else [target]

    return make


def _overlay(known: Sequence[Tensor], forms: Sequence[ViewKey]) -> Tensor:
    """Lay pieces of memory over each other, the last on top, and cut out the first."""
    ends = [
        offset + sum((size - 1) * step for size, step in zip(shape, stride, strict=True)) + 1
        for _, offset, shape, stride, _ in forms
    ]
    memory = torch.empty(max(ends), dtype=forms[0][-1])
    views = [memory.as_strided(shape, stride, offset) for _, offset, shape, stride, _ in forms]
    for view, data in zip(views, known, strict=True):
        view.copy_(data)
    return views[0]


def run_for_real(
    func: TorchOp, args: Sequence[Any], kwargs: dict[str, Any], inputs: Sequence[Tensor]
) -> list[Tensor] | None:
    """Run an op on the CPU with its tensors replaced, in argument order, by ``inputs``.

    Where ``inputs`` are fewer, the op sees tensors of the same shape whose data is meaningless.

    Returns:
        The tensors of its result, None where the op cannot run on a CPU.
    """
    remaining = iter(inputs)

    def replace(tensor: Tensor) -> Tensor:
        real = next(remaining, None)
        return torch.empty((), dtype=tensor.dtype).expand(tensor.shape) if real is None else real

    with torch_private.modes_disabled():
        real_args, real_kwargs = torch_private.tree_map_only(
            Tensor, replace, (tuple(args), dict(kwargs))
        )
        if "device" in real_kwargs:
            real_kwargs["device"] = torch.device("cpu")
        try:
            result = func(*real_args, **real_kwargs)
        except RuntimeError:
            return None
    if isinstance(result, Tensor):
        return [result]
    if isinstance(result, (tuple, list)):
        return [item for item in result if isinstance(item, Tensor)]
    return [torch.tensor(result)]
