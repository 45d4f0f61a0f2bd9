"""Guard set: all guards of one model, in the order in which they are checked before a call.

    active modes         something observes every op, or torch itself is patched
    library patches      the script has replaced a function or attribute of a library that the model uses
    parameter hooks      hooks on several parameters draw random numbers
    reached values       the model's code is not pure, or reads values that have changed (before trial runs and plans)

`ModelVersion` and `ModuleState` guard what the model itself consists of; they belong to a plan, or to the copy of a
module in a worker.
"""

from __future__ import annotations

from torch import nn

from gemini.guards.active_modes import ActiveModes
from gemini.guards.base import ChangeGuard
from gemini.guards.monkeypatches import LibraryPatches
from gemini.guards.parameter_hooks import ParameterHooks
from gemini.guards.reached_values import ReachedValues


class GuardSet(ChangeGuard):
    """The guards of one model."""

    def __init__(self, model: nn.Module) -> None:
        self.reads = ReachedValues()
        self.patches = LibraryPatches(model)
        self._modes, self._hooks = ActiveModes(), ParameterHooks()
        self._classes = {*map(type, model.modules())}
        self._every_call: list[ChangeGuard] = [self._modes, self.patches, self._hooks]

    def check(self, module: nn.Module) -> str | None:
        """Return why a call has to run in this process, or None."""
        for guard in self._every_call:
            if reason := guard.check(module):
                return reason
        return None

    def refresh(self, model: nn.Module) -> bool:
        """Follow a model that has changed; return whether `patches` is new and wants the workers' class attributes."""
        self.reads.refresh()
        classes = {*map(type, model.modules())}
        if classes == self._classes:
            return False
        self.patches, self._classes = LibraryPatches(model), classes
        self._every_call = [self._modes, self.patches, self._hooks]
        return True
