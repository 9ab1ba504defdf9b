"""First weights of models that are too large to be built whole, as one process would draw them."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Self, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map, tree_map_only

from .meshes import copy_share
from .model import UserModel, in_one_thread
from .part import Part, named_parameters
from .trees import Args, Function, Kwargs, Tree, tensors_of

SMALLEST_DEFERRED = 2**16
"""Elements from which a tensor is not kept while the model is built, but made again later."""

_aten = torch.ops.aten

_OVERWRITING = frozenset(
    {
        *(_aten.normal_.default, _aten.uniform_.default, _aten.log_normal_.default),
        *(_aten.exponential_.default, _aten.cauchy_.default, _aten.geometric_.default),
        *(_aten.random_.default, _aten.random_.to, _aten.random_.__getattr__("from")),
        *(_aten.bernoulli_.float, _aten.zero_.default, _aten.fill_.Scalar),
    }
)
"""Ops that read nothing of the tensor that they fill."""


@dataclass(frozen=True, slots=True)
class _Place:
    """A deferred tensor: a view of a storage."""

    storage: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: Tensor) -> "_Place":
        shape, stride = tuple(map(int, tensor.shape)), tuple(map(int, tensor.stride()))
        return cls(_storage(tensor), tensor.dtype, shape, stride, int(tensor.storage_offset()))

    def scratch(self) -> Tensor:
        """Return a real tensor of this geometry, of any content."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype)

    def view_of(self, storage: torch.UntypedStorage) -> Tensor:
        whole = torch.empty(0, dtype=self.dtype)
        return whole.set_(storage, self.offset, self.shape, self.stride)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Op:
    """An op that fills or makes deferred tensors."""

    func: Function
    args: Args
    kwargs: Kwargs
    made: tuple[_Place | None, ...]
    """Its results, None for those that lie in storages made earlier."""
    storages: frozenset[int]
    """Storages of deferred tensors that it reads, writes or makes."""
    state: Tensor | None
    """State of the random number generator before it, None where it draws nothing."""
    overwrites: int | None
    """The storage that it fills whole, whatever was in it."""


_Storages: TypeAlias = dict[int, torch.UntypedStorage]


class DeferredInit(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs the code that builds a model without keeping its large tensors.

    A large tensor lies on the meta device, and what is done to it is noted. Random numbers are
    drawn into memory that is freed at once, so that all that follows gets the numbers that it
    would get in a plain build; the generator's state before each draw is kept, and ``value``
    repeats what made one tensor. So any process can have any parameter, at the price of drawing it
    twice, and holds no more than the largest one.
    """

    def __init__(self, smallest: int = SMALLEST_DEFERRED) -> None:
        """Defer floating-point tensors of at least ``smallest`` elements."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._smallest = smallest
        self._ops: list[_Op] = []
        self._alive: dict[int, Tensor] = {}  # so that no other storage gets its address
        self._parent: dict[int, int] = {}

    def __enter__(self) -> Self:
        """Begin; ``is_meta`` is False until the end, since torch's own init skips such tensors."""
        torch.Tensor.is_meta = property(lambda _: False)  # type: ignore[assignment]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: object) -> None:
        """End."""
        del torch.Tensor.is_meta
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Function, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> Tree:
        """Run an op, or note it."""
        kwargs = kwargs or {}
        deferred = [tensor for tensor in tensors_of((args, kwargs)) if _on_meta(tensor)]
        if not deferred and not self._makes_deferred(func, args, kwargs):
            return func(*args, **kwargs)
        if deferred and _needs_data(func, args, kwargs):
            return func(*self._real(args), **self._real(kwargs))
        try:
            output = func(*_to_meta(args), **_to_meta(_on(kwargs, func, "meta")))
        except RuntimeError:  # it needs data
            return func(*self._real(args), **self._real(kwargs))
        self._note(func, args, kwargs, output)
        return output

    def value(self, tensor: Tensor) -> Tensor:
        """Return the content of a deferred tensor on the CPU."""
        with torch.no_grad():
            return self._content(_Place.of(tensor), {})

    def _makes_deferred(self, func: Function, args: Args, kwargs: Kwargs) -> bool:
        """Say whether an op without deferred arguments makes a tensor that is to be deferred."""
        if all(argument.name != "device" for argument in func._schema.arguments):
            return False
        device = torch.device(kwargs.get("device") or "cpu")
        if device.type == "meta":
            return True  # a deferred tensor was asked for its device
        if device.type != "cpu" or tensors_of((args, kwargs)):
            return False
        like = func(*args, **{**_without_generator(kwargs), "device": "meta"})
        is_tensor = isinstance(like, Tensor) and like.is_floating_point()
        return is_tensor and like.numel() >= self._smallest

    def _note(self, func: Function, args: Args, kwargs: Kwargs, output: Tree) -> None:
        inputs = [tensor for tensor in tensors_of((args, kwargs)) if _on_meta(tensor)]
        known = {_storage(tensor) for tensor in inputs}
        results = tensors_of(output)
        made = tuple(None if _storage(t) in known else _Place.of(t) for t in results)
        if not _written(func, args, kwargs) and not any(made):
            return  # a view
        for tensor in (*inputs, *results):
            self._alive.setdefault(_storage(tensor), tensor)
        storages = frozenset(known | {place.storage for place in made if place is not None})
        first, *others = storages
        for other in others:
            self._parent[self._root(other)] = self._root(first)
        target = _storage(inputs[0]) if func in _OVERWRITING else None
        if target is not None and inputs[0].nbytes < inputs[0].untyped_storage().nbytes():
            target = None
        draws = torch.Tag.nondeterministic_seeded in func.tags
        op = _Op(
            func=func,
            args=_described(args),
            kwargs=_described(_on(kwargs, func, "cpu")),
            made=made,
            storages=storages,
            state=_generator(kwargs).get_state() if draws else None,
            overwrites=target,
        )
        if draws:
            self._draw(op)
        self._ops.append(op)

    def _draw(self, op: _Op) -> None:
        """Let the generator go on as the op does, and drop the numbers."""
        reads_shape_alone = op.func in _OVERWRITING or "_like" in op.func.__name__
        made: _Storages = {}

        def argument(leaf: Tree) -> Tree:
            if not isinstance(leaf, _Place):
                return leaf
            return leaf.scratch() if reads_shape_alone else self._content(leaf, made)

        op.func(*tree_map(argument, op.args), **tree_map(argument, op.kwargs))

    def _root(self, storage: int) -> int:
        while (parent := self._parent.get(storage, storage)) != storage:
            storage = parent
        return storage

    def _real(self, tree: Tree) -> Tree:
        return tree_map_only(Tensor, lambda t: self.value(t) if _on_meta(t) else t, tree)

    def _content(self, place: _Place, made: _Storages) -> Tensor:
        """Repeat what made a tensor and all that it hangs together with.

        Args:
            place: The tensor.
            made: _Storages that have been made already; gets the new ones.
        """
        if place.storage not in made:
            root = self._root(place.storage)
            ops = [op for op in self._ops if self._root(next(iter(op.storages))) == root]
            if all(op.storages == {place.storage} for op in ops):
                filled = [i for i, op in enumerate(ops) if op.overwrites is not None]
                makes = [op for op in ops[: filled[-1]] if any(op.made)] if filled else []
                ops = [*map(_empty, makes), *ops[filled[-1] :]] if filled else ops
            for op in ops:
                _repeat(op, made)
        return place.view_of(made[place.storage])


def _on_meta(tensor: Tensor) -> bool:
    return tensor.device.type == "meta"


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _generator(kwargs: Kwargs) -> torch.Generator:
    return kwargs.get("generator") or torch.default_generator


def _without_generator(kwargs: Kwargs) -> Kwargs:
    return {**kwargs, **({"generator": None} if "generator" in kwargs else {})}


def _on(kwargs: Kwargs, func: Function, device: str) -> Kwargs:
    """Ask for a device where the op takes one."""
    takes_device = any(argument.name == "device" for argument in func._schema.arguments)
    given = _without_generator(kwargs) if device == "meta" else kwargs
    return {**given, "device": torch.device(device)} if takes_device else given


def _to_meta(tree: Tree) -> Tree:
    return tree_map_only(Tensor, lambda t: t if _on_meta(t) else t.to("meta"), tree)


def _written(func: Function, args: Args, kwargs: Kwargs) -> list[Tensor]:
    """Return the tensors that an op writes into."""
    written = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            named = kwargs.get(argument.name)
            written += tensors_of(args[position] if position < len(args) else named)
    return written


def _needs_data(func: Function, args: Args, kwargs: Kwargs) -> bool:
    """Say whether an op takes data of deferred tensors to where there are data."""
    device = kwargs.get("device")
    leaves = device is not None and torch.device(device).type != "meta"
    return leaves or any(not _on_meta(tensor) for tensor in _written(func, args, kwargs))


def _described(tree: Tree) -> Tree:
    """Put places for deferred tensors; others are copied, since they may change later."""
    return tree_map_only(
        Tensor, lambda t: _Place.of(t) if _on_meta(t) else t.detach().clone(), tree
    )


def _empty(op: _Op) -> _Op:
    """Return an op that makes the same tensors without content."""
    (place,) = op.made
    assert place is not None
    return _Op(
        func=lambda: place.scratch(),
        args=(),
        kwargs={},
        made=op.made,
        storages=op.storages,
        state=None,
        overwrites=None,
    )


def _repeat(op: _Op, made: _Storages) -> None:
    """Run a noted op on real tensors."""

    def argument(leaf: Tree) -> Tree:
        return leaf.view_of(made[leaf.storage]) if isinstance(leaf, _Place) else leaf

    args, kwargs = tree_map(argument, op.args), tree_map(argument, op.kwargs)
    generator = _generator(kwargs)
    now = generator.get_state()
    if op.state is not None:
        generator.set_state(op.state)
    results = tensors_of(op.func(*args, **kwargs))
    generator.set_state(now)
    for place, result in zip(op.made, results, strict=True):
        if place is not None:
            if result.stride() != place.stride:
                result = place.scratch().copy_(result)
            made[place.storage] = result.untyped_storage()


class DrawnWeights:
    """The weights that the model's own code draws, made again tensor by tensor."""

    def __init__(self, deferred: DeferredInit, model: nn.Module) -> None:
        """Take the parameters of a model that was just built."""
        self._deferred = deferred
        self._parameters = {name: p.detach() for name, p in model.named_parameters()}

    def fill(self, parts: Sequence[Part]) -> None:
        """Give each parameter this rank's share of its weight as one process would draw it."""
        for part in parts:
            for name, parameter in named_parameters(part):
                whole = self._parameters[name]
                if whole.is_meta:
                    with in_one_thread():
                        whole = self._deferred.value(whole)
                order = part.orders.get(name)
                whole = order.by_rank(whole) if order else whole
                copy_share(whole.to(parameter.device, parameter.dtype), parameter.detach())
            part.has_weights = True


def build_deferred(model: UserModel, seed: int) -> tuple[nn.Module, DrawnWeights]:
    """Build a model whose parameters lie on the meta device, and its weights for later.

    Buffers are real.
    """
    deferred = DeferredInit()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        with deferred:
            factory = model.function(model.factory)
            with in_one_thread():
                built: nn.Module = factory()
    weights = DrawnWeights(deferred, built)
    _make_real(built, deferred)
    return built, weights


def _make_real(model: nn.Module, deferred: DeferredInit) -> None:
    """Make all but the parameters real, and put these on the meta device without exception."""
    on_meta: dict[int, nn.Parameter] = {}

    def real(value: Tensor) -> Tensor:
        is_deferred = value.is_meta and not isinstance(value, nn.Parameter)
        return deferred.value(value) if is_deferred else value

    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and id(parameter) not in on_meta:
                data = parameter.detach().to("meta")
                on_meta[id(parameter)] = nn.Parameter(data, parameter.requires_grad)
            if parameter is not None:
                module._parameters[name] = on_meta[id(parameter)]
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else real(buffer)
        for name, value in list(vars(module).items()):
            if not name.startswith("_") and any(t.is_meta for t in tensors_of(value)):
                module.__dict__[name] = tree_map_only(Tensor, real, value)


@contextlib.contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Put parameters on the meta device as modules register them; buffers stay real."""
    register = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:
            param = nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)
        register(module, name, param)

    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]
