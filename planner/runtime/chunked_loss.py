"""The cross-entropy of a language model a chunk of rows at a time, so that logits never lie whole.

The product of the last states with the table of classes, what is done to the logits, and the loss
work on each row alone. So a chunk of rows goes through all of it, forward and backward, before the
next one. What stays is a summand of the loss, a part of the gradient of the states, and a summand
of the gradient of the table; backward only scales these by the gradient of the loss.

The user's code runs as written: the module that makes the logits returns a stand-in for them, which
notes what is done to it until the loss is asked for.
"""

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from .part import Part
from .processes import RunError
from .promise import Promise
from .trees import Args, Function, Kwargs, Tree, tensors_of

_COPIES = frozenset({"_to_copy", "clone"})
"""Ops that may change the dtype, but no value's place."""
_RESHAPES = frozenset({"view", "_unsafe_view", "_reshape_alias", "unsqueeze", "squeeze", "alias"})
"""Ops that keep rows in order, where the last dim stays as it is."""

LOSSES: dict[type[Tensor], Callable[["Ending", Tensor], Tensor]] = {}
"""How a loss is taken of logits whose sketch has a type of its own."""


@dataclass(frozen=True, slots=True)
class Product:
    """Logits before they are made."""

    states: Tensor
    """(rows, features)."""
    table: Tensor
    """(classes, features)."""
    bias: Tensor | None
    """(classes,)."""
    num_chunks: int
    """How many parts the rows are taken in."""
    steps: tuple[Callable[[Tensor], Tensor], ...] = ()
    """What is then done to each logit by itself."""

    def of(self, logits: Tensor) -> Tensor:
        """Return what the steps make of the product of some rows."""
        for step in self.steps:
            logits = step(logits)
        return logits

    def whole(self) -> Tensor:
        """Return all rows at once."""
        return self.of(functional.linear(self.states, self.table, self.bias))


class _Logits(Promise):
    """Looks like logits that are made when the loss is asked for."""

    product: Product

    @staticmethod
    def __new__(cls: type["_Logits"], product: Product, sketch: Tensor) -> "_Logits":
        made: _Logits = torch.Tensor._make_wrapper_subclass(
            cls, sketch.shape, dtype=sketch.dtype, device=product.states.device
        )
        made.product, made.sketch = product, sketch
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        return f"_Logits({tuple(self.sketch.shape)})"

    @classmethod
    def __torch_function__(
        cls, func: Function, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> Tree:
        kwargs = kwargs or {}
        if func is functional.cross_entropy:
            loss = _cross_entropy(args, kwargs)
            if loss is not None:
                return loss
        first = args[0] if args else None
        if isinstance(first, _Logits) and len(tensors_of((args, kwargs))) == 1:
            found = first._after(func, args[1:], kwargs)
            if found is not None:
                return found
        args, kwargs = _made((args, kwargs), func)
        return func(*args, **kwargs)

    def _after(self, func: Function, args: Args, kwargs: Kwargs) -> Tree:
        """Apply a function that reads a property, reshapes, or changes each element by itself.

        Returns:
            None where it does something else.
        """
        here = functools.partial(_in_place_of, self.sketch.device)
        with _OpNames() as seen:
            sketch = func(self.sketch, *map(here, args), **{k: here(v) for k, v in kwargs.items()})
        if not seen.ops:
            with torch._C.DisableTorchFunctionSubclass():
                return func(self, *args, **kwargs)
        if not isinstance(sketch, Tensor) or sketch.shape[-1:] != self.sketch.shape[-1:]:
            return None
        if all(op.overloadpacket.__name__ in _RESHAPES for op in seen.ops):
            return _Logits(self.product, sketch)
        if sketch.shape == self.sketch.shape and all(map(_is_elementwise, seen.ops)):
            step = functools.partial(_applied, func, args, kwargs)
            product = replace(self.product, steps=(*self.product.steps, step))
            return _Logits(product, sketch)
        return None

    def made(self, func: Function) -> Tensor:
        """Return the logits themselves, where no gradient is asked for.

        Raises:
            RunError: One is: they would lie whole until backward.
        """
        if torch.is_grad_enabled():
            raise RunError(
                f"the plan takes the loss in {self.product.num_chunks} chunks of rows, and "
                f"{getattr(func, '__name__', func)} needs all logits at once: plan with "
                "--fix loss_chunks=1"
            )
        return self.product.whole().reshape(self.sketch.shape)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Function, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> Tree:
        args, kwargs = _made((args, kwargs or {}), func)
        return func(*args, **kwargs)


class _OpNames(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the ops that run."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ops: list[Function] = []

    def __torch_dispatch__(
        self, func: Function, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> Tree:
        if func.namespace == "aten":  # others ask what a fake tensor is
            self.ops.append(func)
        return func(*args, **(kwargs or {}))


def _is_elementwise(op: Function) -> bool:
    if op.overloadpacket.__name__ in _COPIES:
        return True
    return torch.Tag.pointwise in op.tags and not op._schema.is_mutable


def _applied(func: Function, args: Args, kwargs: Kwargs, logits: Tensor) -> Tensor:
    done: Tensor = func(logits, *args, **kwargs)
    return done


def _in_place_of(device: torch.device, value: Tree) -> Tree:
    """A device among the arguments becomes that of the sketch."""
    return device if isinstance(value, torch.device) else value


def _made(tree: Tree, func: Function) -> Tree:
    return tree_map_only(_Logits, lambda logits: logits.made(func), tree)


def _cross_entropy(args: Args, kwargs: Kwargs) -> Tensor | None:
    """Take ``torch.nn.functional.cross_entropy`` in chunks; None where it is no sum over rows."""
    asked = inspect.signature(functional.cross_entropy).bind(*args, **kwargs)
    asked.apply_defaults()
    given = asked.arguments
    logits, target, reduction = given["input"], given["target"], given["reduction"]
    plain = given["weight"] is given["size_average"] is given["reduce"] is None
    if not plain or given["label_smoothing"] or reduction not in ("mean", "sum"):
        return None
    if not isinstance(logits, _Logits) or (logits.ndim, target.ndim) != (2, 1):
        return None
    ignored = given["ignore_index"]
    counted = (target != ignored).sum() if reduction == "mean" else target.new_ones(())
    ending = Ending(product=logits.product, target=target, ignored=ignored, counted=counted)
    return loss_of(ending, logits.sketch)


def loss_of(ending: "Ending", sketch: Tensor) -> Tensor:
    """Take a loss of logits that lie as their sketch does."""
    return LOSSES.get(type(sketch), loss_on_rank)(ending, sketch)


def loss_on_rank(ending: "Ending", _: Tensor) -> Tensor:
    """Take the loss of what this rank has."""
    product = ending.product
    loss: Tensor = _Loss.apply(  # type: ignore[no-untyped-call]
        product.states, product.table, product.bias, ending
    )
    return loss


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """A loss over rows."""

    product: Product
    target: Tensor
    """Class of each row."""
    ignored: int
    """Class of rows that do not count."""
    counted: Tensor
    """By what the sum over rows is divided."""
    shown: Callable[[Tensor], Tensor] = _as_it_is
    """How logits of some rows are shown to what reads them."""

    def of(self, rows: slice, *, with_gradient: bool) -> tuple[Tensor, Tensor | None]:
        """Return the summand of some rows, and the gradient of their product."""
        product = self.product
        leaf = functional.linear(product.states[rows], product.table, product.bias).detach()
        with torch.set_grad_enabled(with_gradient):
            loss = functional.cross_entropy(  # no name holds what it reads
                product.of(self.shown(leaf.requires_grad_(with_gradient))),
                self.target[rows],
                ignore_index=self.ignored,
                reduction="sum",
            )
            loss = loss / self.counted
        gradient = torch.autograd.grad(loss, leaf)[0] if with_gradient else None
        return loss.detach(), gradient


class _Loss(torch.autograd.Function):
    """A loss whose gradients are made with it."""

    @staticmethod
    def forward(
        ctx: Function, states: Tensor, table: Tensor, bias: Tensor | None, ending: Ending
    ) -> Tensor:
        needed = ctx.needs_input_grad[:3]
        with_gradient = any(needed)
        gradients = [
            torch.zeros_like(each) if wanted and each is not None else None
            for each, wanted in zip((states, table, bias), needed, strict=True)
        ]
        of_states, of_table, of_bias = gradients
        size = -(-len(states) // ending.product.num_chunks)
        total = torch.zeros((), dtype=torch.promote_types(states.dtype, torch.float32),
                            device=states.device)  # fmt: skip
        dtype = total.dtype
        for first in range(0, len(states), size):
            rows = slice(first, first + size)
            loss, gradient = ending.of(rows, with_gradient=with_gradient)
            total, dtype = total + loss, loss.dtype
            if gradient is None:
                continue
            if of_states is not None:
                torch.mm(gradient, table, out=of_states[rows])
            if of_table is not None:
                of_table.addmm_(gradient.t(), states[rows])
            if of_bias is not None:
                of_bias += gradient.sum(0)
            del gradient  # before the next chunk is made
        ctx.save_for_backward(*gradients)
        return total.to(dtype)

    @staticmethod
    def backward(ctx: Function, gradient: Tensor) -> tuple[Tensor | None, ...]:
        scaled = [None if each is None else each * gradient for each in ctx.saved_tensors]
        return (*scaled, None)


def take_loss_in_chunks(part: Part, path: str, num_chunks: int) -> None:
    """Take the loss of what a rank trains in chunks of rows, where it has one.

    Args:
        part: The model, or a stage of it.
        path: Path of the ``nn.Linear`` that makes the logits.
        num_chunks: How many.

    Raises:
        RunError: It is none.
    """
    module = part.model.get_submodule(path)
    if not part.holds(module):
        return
    if not isinstance(module, nn.Linear) or type(module).forward is not nn.Linear.forward:
        raise RunError(f"{path} is no torch.nn.Linear: plan with --fix loss_chunks=1")
    part.model.get_submodule(path).forward = functools.partial(_deferred, module, num_chunks)


def _deferred(module: nn.Linear, num_chunks: int, states: Tensor) -> Tensor:
    """The forward of a linear module that waits for the loss."""
    rows = states.reshape(-1, states.shape[-1])
    product = Product(rows, module.weight, module.bias, num_chunks)
    with torch.no_grad():
        bias = None if product.bias is None else product.bias.to("meta")
        sketch = functional.linear(states.to("meta"), product.table.to("meta"), bias)
    return _Logits(product, sketch)
