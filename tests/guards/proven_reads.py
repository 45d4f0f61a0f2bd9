"""The guard of reached values, bound to one model and proven at once."""

from __future__ import annotations

from torch import nn

from gemini.guards.reached_values import ReachedValues
from gemini.purity.value_watch import WatchedValue


class ProvenReads:
    """Holds what the code of a model reads now."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self._values = model, ReachedValues()
        self.check()

    def check(self) -> str | None:
        """Why the model cannot run in a worker, or None."""
        return self._values.check(self.model)

    def refresh(self) -> None:
        """Prove again at the next check."""
        self._values.refresh()

    @property
    def entries(self) -> list[WatchedValue]:
        """The watched values."""
        return self._values.entries or []
