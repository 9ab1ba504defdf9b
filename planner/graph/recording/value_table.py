"""Which value a tensor object stands for, while a step is recorded."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from planner.graph import torch_private
from planner.graph.operator_graph import StorageKind
from planner.graph.recording.held_names import HeldNames

ViewKey = tuple[int, int, torch.Size, tuple[int, ...], torch.dtype]


@dataclass(slots=True)
class StorageEntry:
    """A storage while it is being recorded."""

    size_bytes: int
    kind: StorageKind
    name: str
    handle: torch.UntypedStorage
    """Keeps the C++ object alive, so that its address stays unique."""
    gradient_of: int | None = None
    """Forward value whose gradient it holds."""


@dataclass(frozen=True, slots=True)
class MemoryWrite:
    """A change of memory in place."""

    value: int
    """Value of the tensor that was written to, after the write."""
    renewed: list[int]
    """Values of other views of the memory after the write, those that are read later."""


Renewal = Callable[[int, int, Sequence[int], Sequence[ViewKey]], None]
"""Called with the new value of a view, its old value, the values of what was written to between
them, and how the view and each of these lie in the memory."""


class ValueTable:
    """Numbers storages and values (SSA) as ops read and write tensor objects.

    Forward tensors are kept alive (they hold no data), so that the object itself names the value
    and its ``requires_grad`` can be read at the end. Gradients are not kept: a second owner would
    make autograd copy instead of move them. They, and tensors that autograd rebuilds, are found
    by storage, offset, sizes, strides and dtype.

    An in-place op makes a new value of what it writes to. Other views of that memory get theirs,
    as results of the last op that wrote to it, when they are read again.
    """

    def __init__(self, on_renewal: Renewal, names: HeldNames) -> None:
        """Make an empty table.

        Args:
            on_renewal: Called when a view is read again after its memory has changed.
            names: Watches the tensors that are kept.
        """
        self.storages: list[StorageEntry] = []
        self.keys: list[ViewKey] = []
        """Storage, offset, sizes, strides and dtype by value."""
        self.parameter_names: dict[int, list[str]] = {}
        """Names by storage, several where parameters are tied."""
        self._tensors: list[Tensor | None] = []
        self._twins: list[Tensor] = []
        self._requires_grad: dict[int, bool] = {}
        self._by_object: dict[int, int] = {}
        self._by_view: dict[ViewKey, int] = {}
        self._by_address: dict[int, int] = {}
        self._writes: dict[int, list[MemoryWrite]] = {}
        self._writes_seen: dict[int, int] = {}
        self._on_renewal = on_renewal
        self._names = names

    def register(self, tensor: Tensor, kind: StorageKind, name: str) -> int:
        """Make a value for a tensor that exists before the step."""
        key = self._key(tensor, kind)
        entry = self.storages[key[0]]
        if not entry.name:
            entry.name = name
            entry.kind = kind
        if kind is StorageKind.PARAMETER:
            self.parameter_names.setdefault(key[0], []).append(name)
        value = self._by_object.get(id(tensor))
        return self._new(tensor, key, keep=True) if value is None else value

    def read(self, tensor: Tensor, *, keep: bool) -> int:
        """Return the value that a tensor stands for."""
        value = self._by_object.get(id(tensor))
        if value is not None:
            return self._newest(value, tensor) if self._writes else value
        # Memory that no op of the step has made is a constant of the model.
        key = self._key(tensor, StorageKind.BUFFER)
        value = self._by_view.get(key)
        if value is None:
            return self._new(tensor, key, keep=keep)
        value = self._newest(value, tensor)
        if keep:
            self._hold(tensor, value)
        return value

    def write(self, tensor: Tensor, *, keep: bool) -> int:
        """Make a new value for an op's output."""
        return self._new(tensor, self._key(tensor, StorageKind.ACTIVATION), keep=keep)

    def overwrite(self, tensor: Tensor, renewed: list[int], *, keep: bool) -> int:
        """Make a new value for a tensor that was changed in place.

        Args:
            tensor: What was written to.
            renewed: Takes the values of other views of its memory, when they are read later.
            keep: Whether to keep the tensor alive.
        """
        key = self._key(tensor, StorageKind.BUFFER)
        value = len(self.keys)
        self._writes.setdefault(key[0], []).append(MemoryWrite(value, renewed))
        return self._new(tensor, key, keep=keep)

    def _newest(self, value: int, tensor: Tensor) -> int:
        """Return the value of a view as it is now; it may have changed in place."""
        key = self.keys[value]
        writes = self._writes.get(key[0])
        if writes is None or self._writes_seen.get(value, 0) == len(writes):
            return value
        newest = self._by_view[key]
        seen = self._writes_seen.get(newest, 0)
        if seen != len(writes):
            old, newest = newest, self._renew(newest, writes)
            written = [write.value for write in writes[seen:]]
            self._on_renewal(newest, old, written, [key, *(self.keys[each] for each in written)])
        if id(tensor) in self._by_object:
            self._by_object[id(tensor)] = newest
        return newest

    def _renew(self, old: int, writes: Sequence[MemoryWrite]) -> int:
        value, key = len(self.keys), self.keys[old]
        self.keys.append(key)
        self._tensors.append(self._tensors[old])
        self._by_view[key] = value
        self._writes_seen[value] = len(writes)
        writes[-1].renewed.append(value)
        return value

    def recall(self, tensor: Tensor) -> None:
        """Let tensors rebuilt from this kept one stand for the same value."""
        value = self._by_object.get(id(tensor))
        if value is not None:
            self._by_view[self._key(tensor, StorageKind.BUFFER)] = value

    def tensor(self, value: int) -> Tensor:
        """Return the kept tensor of a forward value."""
        tensor = self._tensors[value]
        assert tensor is not None, "only forward values are kept"
        return tensor

    def held(self) -> Iterator[tuple[Tensor, int]]:
        """Forward tensors that are kept, each with the value that it stands for."""
        for tensor in (*self._tensors, *self._twins):
            if tensor is not None:
                yield tensor, self._by_object[id(tensor)]

    def size_bytes(self, value: int, tensor: Tensor) -> int:
        """Return the bytes behind a tensor: its elements, or less where they are expanded."""
        storage_bytes = self.storages[self.keys[value][0]].size_bytes
        return min(tensor.numel() * tensor.element_size(), storage_bytes)

    def name_of(self, value: int) -> str:
        """Return the name of the storage that a value views, "" for activations."""
        return self.storages[self.keys[value][0]].name

    def requires_grad(self, value: int) -> bool:
        """Tell whether a gradient flows through a value; autograd decides after each op."""
        if value in self._requires_grad:
            return self._requires_grad[value]
        tensor = self._tensors[value]
        return tensor is not None and tensor.requires_grad

    def _new(self, tensor: Tensor, key: ViewKey, *, keep: bool) -> int:
        value = len(self.keys)
        self.keys.append(key)
        self._tensors.append(tensor if keep else None)
        self._by_view[key] = value
        if self._writes and key[0] in self._writes:
            self._writes_seen[value] = len(self._writes[key[0]])
        if keep:
            self._hold(tensor, value)
        return value

    def _hold(self, tensor: Tensor, value: int) -> None:
        old = self._by_object.get(id(tensor))
        if old is not None:
            self._requires_grad[old] = tensor.requires_grad
        self._by_object[id(tensor)] = value
        if self._tensors[value] is not tensor:
            self._twins.append(tensor)
        storage = self.keys[value][0]
        if self.storages[storage].kind is StorageKind.ACTIVATION:
            self._names.watch(storage, tensor)

    def _key(self, tensor: Tensor, kind: StorageKind) -> ViewKey:
        handle, address = torch_private.storage_key(tensor)
        storage = self._by_address.get(address)
        if storage is None:
            storage = len(self.storages)
            self._by_address[address] = storage
            self.storages.append(
                StorageEntry(size_bytes=handle.nbytes(), kind=kind, name="", handle=handle)
            )
        return storage, int(tensor.storage_offset()), tensor.shape, tensor.stride(), tensor.dtype
