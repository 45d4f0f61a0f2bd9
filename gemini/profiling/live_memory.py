"""Live memory on devices whose allocator keeps no statistics: storages counted from birth to death.

A dispatch mode sees the results of every kernel, in backward too. A storage counts from the kernel that returns it
until its last reference goes. What a kernel takes and gives back inside itself is not seen.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gemini.profiling.flop_count import tensors_of
from gemini.profiling.measured_device import MB


class LiveMemory(TorchDispatchMode):  # type: ignore[misc]
    """Counts the bytes of storages made inside it; a `MemoryWatch`."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and to say so would load the compiler

    def __init__(self) -> None:
        super().__init__()
        self.live = self.most = 0
        self.known: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a kernel and count what it returns."""
        kwargs = kwargs or {}
        given = {key for leaf in tensors_of((*args, *kwargs.values())) if (key := storage_key(leaf))}
        out = func(*args, **kwargs)
        for leaf in tensors_of((out,)):
            key = storage_key(leaf)
            if key and key not in given:
                self._count(key, leaf.untyped_storage())
        return out

    def _count(self, key: int, storage: Any) -> None:
        if key in self.known:
            return
        size = int(storage.nbytes())

        def gone(_: Any) -> None:
            self.known.pop(key, None)
            self.live -= size

        self.known[key] = weakref.ref(storage, gone)
        self.live += size
        self.most = max(self.most, self.live)

    def peak_mb(self) -> float:
        """The most that was in use at once since the start or the last `restart`."""
        return self.most / MB

    def restart(self) -> None:
        """Look for the peak anew."""
        self.most = self.live


def storage_key(value: Any) -> int:
    """The identity of a tensor's memory while it lives; 0 for what has none."""
    if not isinstance(value, torch.Tensor):
        return 0
    try:
        return int(value.untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError):  # sparse and other tensors without a storage
        return 0
