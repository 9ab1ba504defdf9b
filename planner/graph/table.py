"""Which value a tensor object stands for, while a step is recorded."""

from dataclasses import dataclass

import torch
from torch import Tensor

from planner.graph import torch_private
from planner.graph.operator_graph import StorageKind

ViewKey = tuple[int, int, torch.Size, tuple[int, ...], torch.dtype]


@dataclass(slots=True)
class StorageEntry:
    """A storage while it is being recorded."""

    size_bytes: int
    kind: StorageKind
    name: str
    handle: torch.UntypedStorage
    """Keeps the C++ object alive, so that its address stays unique."""
    objects: list[int]
    """Identities of the kept tensor objects on it."""
    views: list[ViewKey]
    """Views of it that have been seen."""


class ValueTable:
    """Numbers storages and values (SSA) as ops read and write tensor objects.

    Forward tensors are kept alive (they hold no data), so that the object itself names the value
    and its ``requires_grad`` can be read at the end. Gradients are not kept: a second owner would
    make autograd copy instead of move them. They, and tensors that autograd rebuilds, are found
    by storage, offset, sizes, strides and dtype.
    """

    def __init__(self) -> None:
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
            return value
        # Memory that no op of the step has made is a constant of the model.
        key = self._key(tensor, StorageKind.BUFFER)
        value = self._by_view.get(key)
        if value is None:
            return self._new(tensor, key, keep=keep)
        if keep:
            self._hold(tensor, key[0], value)
        return value

    def write(self, tensor: Tensor, *, keep: bool) -> int:
        """Make a new value for an op's output."""
        return self._new(tensor, self._key(tensor, StorageKind.ACTIVATION), keep=keep)

    def overwrite(self, tensor: Tensor, *, keep: bool) -> list[int]:
        """Make new values for a tensor that was changed in place and for its other views.

        Returns:
            The new value of the tensor itself, then those of the other views of its storage.
        """
        key = self._key(tensor, StorageKind.BUFFER)
        entry = self.storages[key[0]]
        replaced: dict[int, int] = {}
        own = self._by_object.get(id(tensor), self._by_view.get(key))
        first = self._new(tensor, key, keep=keep)
        if own is not None:
            replaced[own] = first
        others = [view for view in entry.views if view != key]
        for view in others:
            old = self._by_view[view]
            if old not in replaced:
                replaced[old] = self._renew(old)
            self._by_view[view] = replaced[old]
        for identity in entry.objects:
            old = self._by_object[identity]
            if old == first:
                continue
            if old not in replaced:
                replaced[old] = first if self.keys[old] == key else self._renew(old)
            self._by_object[identity] = replaced[old]
        return [first, *sorted(set(replaced.values()) - {first})]

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

    def _renew(self, old: int) -> int:
        """Make a new value like an old one, after its memory has changed."""
        value = len(self.keys)
        self.keys.append(self.keys[old])
        self._tensors.append(self._tensors[old])
        return value

    def _new(self, tensor: Tensor, key: ViewKey, *, keep: bool) -> int:
        value = len(self.keys)
        self.keys.append(key)
        self._tensors.append(tensor if keep else None)
        if key not in self._by_view:
            self.storages[key[0]].views.append(key)
        self._by_view[key] = value
        if keep:
            self._hold(tensor, key[0], value)
        return value

    def _hold(self, tensor: Tensor, storage: int, value: int) -> None:
        old = self._by_object.get(id(tensor))
        if old is None:
            self.storages[storage].objects.append(id(tensor))
        else:
            self._requires_grad[old] = tensor.requires_grad
        self._by_object[id(tensor)] = value
        if self._tensors[value] is not tensor:
            self._twins.append(tensor)

    def _key(self, tensor: Tensor, kind: StorageKind) -> ViewKey:
        handle, address = torch_private.storage_key(tensor)
        storage = self._by_address.get(address)
        if storage is None:
            storage = len(self.storages)
            self._by_address[address] = storage
            entry = StorageEntry(
                size_bytes=handle.nbytes(), kind=kind, name="", handle=handle, objects=[], views=[]
            )
            self.storages.append(entry)
        return storage, int(tensor.storage_offset()), tensor.shape, tensor.stride(), tensor.dtype
