"""Node memory: tensors that autograd saves between forward and backward, and live storages.

Several saved tensors may share one storage (views), and a saved tensor may be an input, an output or a parameter of the
node. Parameters are always alive and do not count; inputs and outputs are identified by position, since a value saved
by several nodes takes its memory once.
"""

from __future__ import annotations

import weakref
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gemini.profiling.flop_count import tensors_of
from gemini.profiling.measured_device import MB


@dataclass(frozen=True)
class NodeMemory:
    """The memory of a node (MB), beyond its parameters, buffers and inputs.

    `saved_own` is saved for backward and belongs to no input or output; `saved_inputs` and `saved_outputs` are the
    positions of saved inputs and outputs. `aliases` has, for every output, the position of the input whose memory it
    shares or -1.
    """

    forward_peak: float = 0.0
    backward_peak: float = 0.0
    saved_own: float = 0.0
    saved_inputs: tuple[int, ...] = ()
    saved_outputs: tuple[int, ...] = ()
    aliases: tuple[int, ...] = ()


class SavedTensors:
    """Collects the storages that autograd saves inside `recording`."""

    def __init__(self) -> None:
        self.sizes: dict[int, int] = {}

    def recording(self) -> AbstractContextManager[Any]:
        """Return a context that collects saved tensors."""
        hooks: AbstractContextManager[Any] = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda saved: saved)
        return hooks

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        key = storage_key(tensor)
        if key:
            self.sizes[key] = int(tensor.untyped_storage().nbytes())
        return tensor.detach()  # the tensor itself would form a reference cycle with its autograd history

    def summarize(self, inputs: list[Any], outputs: list[Any], used: list[torch.Tensor]) -> NodeMemory:
        """Return own memory and positions, without peaks."""
        input_keys = [storage_key(tensor) for tensor in inputs]
        output_keys = [storage_key(tensor) for tensor in outputs]
        known = {*input_keys, *output_keys, *(storage_key(tensor) for tensor in used)}
        own = sum(size for key, size in self.sizes.items() if key not in known)
        aliases = tuple(input_keys.index(key) if key and key in input_keys else -1 for key in output_keys)
        return NodeMemory(
            saved_own=own / MB,
            saved_inputs=tuple(at for at, key in enumerate(input_keys) if key in self.sizes),
            saved_outputs=tuple(at for at, key in enumerate(output_keys) if key in self.sizes and aliases[at] < 0),
            aliases=aliases,
        )


class LiveMemory(TorchDispatchMode):  # type: ignore[misc]
    """Counts live storages where the allocator has no statistics; a `MemoryWatch`.

    A dispatch mode sees the results of every kernel, in backward too. A storage counts from the kernel that returns it
    until its last reference is gone. Temporary memory inside a kernel is not seen.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # the default implementation would import the compiler

    def __init__(self) -> None:
        super().__init__()
        self.live = self.most = 0
        self.known: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a kernel and count the storages that it returns."""
        kwargs = kwargs or {}
        arguments = {key for leaf in tensors_of((*args, *kwargs.values())) if (key := storage_key(leaf))}
        out = func(*args, **kwargs)
        for leaf in tensors_of((out,)):
            key = storage_key(leaf)
            if key and key not in arguments:
                self._count(key, leaf.untyped_storage())
        return out

    def _count(self, key: int, storage: Any) -> None:
        if key in self.known:
            return
        size = int(storage.nbytes())

        def on_free(_: Any) -> None:
            self.known.pop(key, None)
            self.live -= size

        self.known[key] = weakref.ref(storage, on_free)
        self.live += size
        self.most = max(self.most, self.live)

    def peak_mb(self) -> float:
        """Return the peak since the start or the last `restart`."""
        return self.most / MB

    def restart(self) -> None:
        """Reset the peak to the current use."""
        self.most = self.live


def storage_key(value: Any) -> int:
    """Return the identity of a tensor's storage while it lives; 0 without a storage."""
    if not isinstance(value, torch.Tensor):
        return 0
    try:
        return int(value.untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError):  # sparse and other tensors without a storage
        return 0
