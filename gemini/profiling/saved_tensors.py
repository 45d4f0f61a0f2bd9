"""Saved tensors: what autograd keeps between forward and backward, counted by memory.

Several saved tensors may share one storage (views), and a saved tensor may be an input, an output or a parameter of
the node. Parameters live anyway and do not count; inputs and outputs are named by position, because the memory of a
value belongs to all nodes that keep it once, not once to each.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch

from gemini.profiling.class_measurement import Memory
from gemini.profiling.live_memory import storage_key
from gemini.profiling.measured_device import MB


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

    def summarize(self, inputs: list[Any], outputs: list[Any], held: list[torch.Tensor]) -> Memory:
        """Own memory and positions; peaks are left at zero."""
        input_keys = [storage_key(tensor) for tensor in inputs]
        output_keys = [storage_key(tensor) for tensor in outputs]
        known = {*input_keys, *output_keys, *(storage_key(tensor) for tensor in held)}
        own = sum(size for key, size in self.sizes.items() if key not in known)
        aliases = tuple(input_keys.index(key) if key and key in input_keys else -1 for key in output_keys)
        return Memory(
            saved_own=own / MB,
            saved_inputs=tuple(at for at, key in enumerate(input_keys) if key in self.sizes),
            saved_outputs=tuple(at for at, key in enumerate(output_keys) if key in self.sizes and aliases[at] < 0),
            aliases=aliases,
        )
