"""Observing: which modules a call of the model runs, in what order, and how long each takes.

The first call of a managed model runs here, as it would without Gemini, and is watched. Nothing is run twice.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import nn


@dataclass
class Seen:
    """A module and what was seen of it."""

    module: nn.Module
    order: int
    ms: float = 0.0  # all its calls, what runs inside included
    calls: int = 0
    inside: dict[int, Seen] = field(default_factory=dict)  # modules it calls itself, by identity

    @property
    def inside_ms(self) -> float:
        """The time of the modules it calls."""
        return sum(one.ms for one in self.inside.values())


class Observation:
    """Watches one call of a model."""

    def __init__(self, model: nn.Module) -> None:
        self.root = Seen(model, 0)
        self.stack = [self.root]
        self.count = 0

    def call(self, module: nn.Module, run: Callable[[], Any]) -> Any:
        """Run a module's call and remember it."""
        above = self.stack[-1]
        self.count += 1
        seen = above.inside.setdefault(id(module), Seen(module, self.count))
        self.stack.append(seen)
        began = time.perf_counter()
        try:
            return run()
        finally:
            seen.ms += (time.perf_counter() - began) * 1e3
            seen.calls += 1
            self.stack.pop()

    def finish(self) -> None:
        """Let go of the model itself, which nothing here may keep alive."""
        self.root.inside.pop(id(self.root.module), None)
        self.root.module = nn.Identity()
