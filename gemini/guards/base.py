"""Change guard: the interface of change detection.

A plan holds for a call as long as nothing that it depends on has changed. Each guard watches one kind of dependency
and is checked before the call; `gemini.guards.guard_set` composes them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import nn


class ChangeGuard(ABC):
    """Detects one kind of change that keeps a call from running in the workers as planned."""

    @abstractmethod
    def check(self, module: nn.Module) -> str | None:
        """Return why a call of this module cannot run in the workers, or None if it can.

        Runs in every step: the unchanged case must cost microseconds.
        """
