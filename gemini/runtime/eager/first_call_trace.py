"""First-call trace: which modules a call of the model runs, in what order, how long each takes and how much work it is.

The first call of a managed model runs locally and is traced. Nothing runs twice. Times of a first call are noisy
(kernel selection, cold caches), so placement uses an estimate of the work that is the same in every run: one
multiplication per parameter and row of the result.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from gemini.guards.active_modes import is_checkpointed
from gemini.ir.encode import tensors


@dataclass
class ModuleTrace:
    """The trace of one module."""

    module: nn.Module
    order: int
    ms: float = 0.0  # of all its calls, inclusive
    work: float = 0.0  # estimated, inclusive
    calls: int = 0
    inside: dict[int, ModuleTrace] = field(default_factory=dict)  # modules it calls itself, by identity

    @property
    def inside_ms(self) -> float:
        """The time of the modules it calls."""
        return sum(one.ms for one in self.inside.values())

    @property
    def inside_work(self) -> float:
        """The work of the modules it calls."""
        return sum(one.work for one in self.inside.values())


class FirstCallTrace:
    """The trace of one call of a model."""

    def __init__(self, model: nn.Module) -> None:
        self.root = ModuleTrace(model, 0)
        self.stack = [self.root]
        self.count = 0
        self.is_checkpointed = False
        self.waits_for_backward = False  # which runs parts of it again, and must find them unplaced

    def run(self, work: Callable[[], Any]) -> Any:
        """Run the call of the model itself."""
        began = time.perf_counter()
        try:
            result = work()
            if self.is_checkpointed:
                self._wait_for_backward(result)
            return result
        finally:
            self.root.ms = (time.perf_counter() - began) * 1e3

    def call(self, module: nn.Module, run: Callable[[], Any]) -> Any:
        """Run a module's call and record it."""
        above = self.stack[-1]
        self.is_checkpointed = self.is_checkpointed or is_checkpointed()
        self.count += 1
        seen = above.inside.setdefault(id(module), ModuleTrace(module, self.count))
        self.stack.append(seen)
        began = time.perf_counter()
        try:
            result = run()
            work = estimate_work(module, result)
            for one in self.stack:
                one.work += work
            return result
        finally:
            seen.ms += (time.perf_counter() - began) * 1e3
            seen.calls += 1
            self.stack.pop()

    def _wait_for_backward(self, result: Any) -> None:
        for _, tensor in tensors(result):
            if tensor.grad_fn is not None:
                self.waits_for_backward = True
                tensor.grad_fn.register_prehook(lambda _: setattr(self, "waits_for_backward", False))

    def finish(self) -> None:
        """Drop the reference to the model, which the trace must not keep alive."""
        self.root.inside.pop(id(self.root.module), None)
        self.root.module = nn.Identity()


def estimate_work(module: nn.Module, result: Any) -> float:
    """Estimate the work of a module's own parameters in one call: all of them for each row of the result."""
    made = sum(tensor.numel() for _, tensor in tensors(result) if isinstance(tensor, torch.Tensor))
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        return float(made)
    sizes = [(p.numel(), p.shape[0]) for p in module._parameters.values() if p is not None and p.dim() and p.numel()]
    return float(made + sum(size * max(made / rows, 1.0) for size, rows in sizes))
