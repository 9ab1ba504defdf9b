"""Bytes of storages that are alive, and their peak."""

import weakref

import torch


class _Storage:
    """A storage that is alive."""

    __slots__ = ("is_elsewhere", "num_bytes", "reference")

    def __init__(self) -> None:
        self.is_elsewhere = False
        self.num_bytes = 0
        self.reference: weakref.ref[torch.UntypedStorage] | None = None


class LiveStorages:
    """Bytes of all storages that were seen and are still alive, and their peak.

    A storage is known by its identity and forgotten when it dies.
    """

    def __init__(self) -> None:
        """Count from nothing."""
        self.now_bytes = 0
        """Bytes alive."""
        self.peak_bytes = 0
        """Most of them so far."""
        self._live: dict[int, _Storage] = {}

    def holds(self, storage: torch.UntypedStorage) -> bool:
        """Say whether one at its address counts."""
        return storage._cdata in self._live

    def bytes_of(self, storage: torch.UntypedStorage) -> int:
        """Return what counts of a storage."""
        return self._live[storage._cdata].num_bytes

    def see_storage(self, storage: torch.UntypedStorage) -> bool:
        """Count a storage as large as it is now, and say whether the peak rose."""
        key, size = storage._cdata, storage.nbytes()
        known = self._live.get(key)
        if known is None or known.reference is None or known.reference() is not storage:
            if known is not None:
                self._forget(key, known)  # the address was used before
            entry = known = _Storage()
            entry.reference = weakref.ref(storage, lambda _: self._forget(key, entry))
            self._live[key] = entry
        if size == known.num_bytes or known.is_elsewhere:
            return False
        self.now_bytes += size - known.num_bytes
        known.num_bytes = size
        rose = self.now_bytes > self.peak_bytes
        self.peak_bytes = max(self.peak_bytes, self.now_bytes)
        return rose

    def leave_out(self, storage: torch.UntypedStorage) -> None:
        """Count a storage no more, which lies elsewhere from now on."""
        self.see_storage(storage)
        known = self._live[storage._cdata]
        self.now_bytes -= known.num_bytes
        known.num_bytes, known.is_elsewhere = 0, True

    def _forget(self, key: int, entry: _Storage) -> None:
        if self._live.get(key) is entry:
            del self._live[key]
            self.now_bytes -= entry.num_bytes
