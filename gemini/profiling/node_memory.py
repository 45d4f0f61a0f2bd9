"""Saved tensors: what autograd keeps between forward and backward, counted by memory.

Several saved tensors may share one storage (views), and a saved tensor may be an input, an output or a parameter of
the node. Parameters live anyway and do not count; inputs and outputs are named by position, because the memory of a
value belongs to all nodes that keep it once, not once to each.
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

    `saved_own` is kept for backward and belongs to no input or output; `saved_inputs` and `saved_outputs` are the
    positions of those kept. `aliases` has, for every output, the position of the input whose memory it shares or -1.
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
        """Collect what is saved inside."""
        hooks: AbstractContextManager[Any] = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda saved: saved)
        return hooks

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        key = storage_key(tensor)
        if key:
            self.sizes[key] = int(tensor.untyped_storage().nbytes())
        return tensor.detach()  # the tensor itself would form a cycle with its own history

    def summarize(self, inputs: list[Any], outputs: list[Any], held: list[torch.Tensor]) -> NodeMemory:
        """Own memory and positions; peaks are left at zero."""
        input_keys = [storage_key(tensor) for tensor in inputs]
        output_keys = [storage_key(tensor) for tensor in outputs]
        known = {*input_keys, *output_keys, *(storage_key(tensor) for tensor in held)}
        own = sum(size for key, size in self.sizes.items() if key not in known)
        aliases = tuple(input_keys.index(key) if key and key in input_keys else -1 for key in output_keys)
        return NodeMemory(
            saved_own=own / MB,
            saved_inputs=tuple(at for at, key in enumerate(input_keys) if key in self.sizes),
            saved_outputs=tuple(at for at, key in enumerate(output_keys) if key in self.sizes and aliases[at] < 0),
            aliases=aliases,
        )


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
