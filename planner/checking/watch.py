"""What runs, seen op by op: bytes of live tensors, and collectives.

One mode tells all observers, since each mode costs time with every op.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from planner.checking.fake_world import fake_device, named_group_size
from planner.profiling.live_bytes import LiveStorages

Op: TypeAlias = Any
"""An overload of an ATen op, or of an op of the same form."""

Result: TypeAlias = Any
"""What an op takes or returns."""

_SUBCLASSES = frozenset({"DTensor", "SplitTensor"})
"""Tensors whose ops come again on what they consist of."""


class Observer(Protocol):
    """Is told of every op."""

    def see(self, func: Op, args: tuple[Result, ...], out: Result) -> None:
        """Look at an op that has run."""


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Tells observers of every op on tensors that are not made of others."""

    def __init__(self, *observers: Observer) -> None:
        """Keep the observers."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._observers = observers

    def __torch_dispatch__(
        self,
        func: Op,
        types: Iterable[type],
        args: tuple[Result, ...] = (),
        kwargs: dict[str, Result] | None = None,
    ) -> Result:
        """Run an op."""
        if any(kind.__name__ in _SUBCLASSES for kind in types):
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        for observer in self._observers:
            observer.see(func, args, out)
        return out


Held: TypeAlias = Mapping[str, Iterable[Tensor]]
"""Tensors by the component that they belong to."""

_NOTED_STEP = 0.005
"""Rise of a peak at which its components are noted again."""

OTHERS = "activations"
"""Component of all that is in no other."""


class LiveBytes(LiveStorages):
    """Bytes of all storages that ops have made and that are still alive, and their peak.

    What runs on meta tensors, to know shapes, has no memory and does not count.
    """

    def __init__(self) -> None:
        """Count from nothing."""
        super().__init__()
        self._held: Callable[[], Held] = dict
        self._noted_bytes = 0
        self._at_noted: Counter[str] = Counter()

    @property
    def at_peak(self) -> dict[str, int]:
        """The peak by component."""
        found = dict(self._at_noted)
        found[OTHERS] = self.peak_bytes - sum(found.values())
        return found

    def restart(self, held: Callable[[], Held]) -> None:
        """Begin to look for a peak.

        Args:
            held: Gives the tensors of components at any time.
        """
        self._held = held
        for tensors in held().values():
            for tensor in tensors:
                self.see_tensor(tensor)
        self.peak_bytes = self.now_bytes
        self._note()

    @contextmanager
    def resizes_seen(self) -> Iterator[None]:
        """See storages that are freed and allocated again in place, as FSDP does with gathered."""
        own = torch.UntypedStorage.resize_

        def resized(storage: torch.UntypedStorage, size: int) -> Result:
            done = own(storage, size)
            if self.holds(storage):
                self._see(storage)
            return done

        torch.UntypedStorage.resize_ = resized  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            torch.UntypedStorage.resize_ = own  # type: ignore[method-assign]

    def see(self, func: Op, args: tuple[Result, ...], out: Result) -> None:
        """Look at what an op returns."""
        if func.namespace == "prim":
            return
        for leaf in (out,) if isinstance(out, Tensor) else tree_leaves(out):
            if isinstance(leaf, Tensor):
                self.see_tensor(leaf)

    def see_tensor(self, tensor: Tensor) -> None:
        """Count a tensor."""
        for part in _parts(tensor):
            if not _is_meta(part):
                self._see(part.untyped_storage())

    def leave_out_tensor(self, tensor: Tensor | None) -> None:
        """Count a tensor no more, which lies in host memory."""
        for part in () if tensor is None else _parts(tensor):
            self.leave_out(part.untyped_storage())

    def _see(self, storage: torch.UntypedStorage) -> None:
        rose = self.see_storage(storage)
        if rose and self.peak_bytes > self._noted_bytes * (1 + _NOTED_STEP):
            self._note()

    def _note(self) -> None:
        """Note the components of what is alive now."""
        self._noted_bytes, self._at_noted = self.now_bytes, Counter()
        seen: set[int] = set()
        for component, tensors in self._held().items():
            for part in (part for tensor in tensors for part in _parts(tensor)):
                storage = part.untyped_storage()
                if self.holds(storage) and storage._cdata not in seen:
                    seen.add(storage._cdata)
                    self._at_noted[component] += self.bytes_of(storage)


def _is_meta(tensor: Tensor) -> bool:
    device = fake_device(tensor) or tensor.device
    return device.type == "meta"


def _parts(tensor: Tensor) -> Iterable[Tensor]:
    """What a tensor consists of, itself where it is a plain one."""
    if fake_device(tensor) is not None or not is_traceable_wrapper_subclass(tensor):
        return (tensor,)
    names, _ = tensor.__tensor_flatten__()
    inner = [getattr(tensor, name) for name in names]
    return [part for each in inner if isinstance(each, Tensor) for part in _parts(each)]


_KINDS = {
    "allreduce_": "all_reduce",
    "_allgather_base_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "alltoall_base_": "all_to_all",
    "send": "send",
    "recv_": "receive",
    "all_reduce": "all_reduce",
}
"""By op of c10d or its functional form; those for whole lists of tensors are not used in a step."""

_LOCAL = frozenset({"wait_tensor", "_wrap_tensor_autograd"})
"""What moves nothing."""


class Traffic:
    """Collectives and transfers that this rank takes part in."""

    def __init__(self) -> None:
        """Count from nothing."""
        self.found: dict[tuple[str, int], tuple[int, int]] = defaultdict(lambda: (0, 0))
        """Number and bytes by kind and ranks of the group. Bytes are those of the whole tensor on
        one rank: what is gathered, reduced, sent."""

    def see(self, func: Op, args: tuple[Result, ...], out: Result) -> None:
        """Count an op that is a collective."""
        name = func.overloadpacket.__name__
        if func.namespace not in ("c10d", "_c10d_functional") or name in _LOCAL:
            return
        size = max(_bytes(args[:1]), _bytes(args[1:2]))
        is_functional = func.namespace != "c10d"  # its last argument is the name of the group
        ranks = named_group_size(args[-1]) if is_functional else _group_size(args)
        key = _KINDS.get(name, name), ranks
        count, num_bytes = self.found[key]
        self.found[key] = count + 1, num_bytes + size


def _bytes(tree: Result) -> int:
    return sum(leaf.nbytes for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))


def _group_size(args: tuple[Result, ...]) -> int:
    for each in args:
        if isinstance(each, torch.ScriptObject):
            try:
                return dist.ProcessGroup.unbox(each).size()
            except RuntimeError:
                continue  # it says how to reduce
    return dist.get_world_size()
