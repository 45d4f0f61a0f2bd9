"""Warm-up: the changes that a model makes to itself on its first calls only.

Lazy layers, caches and hooks that a model installs change attributes on the first call and on no other. Attributes
that change with every call are restored, and so is a module that initializes its weights from the first batch: that
must be the user's batch, in the user's run.

    run 1   attributes change                    undecided
    run 2   some of them change again            these are restored; the others remain
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from gemini.snapshot.model_state import AttributeSnapshot, ModelSnapshot
from gemini.snapshot.rng_snapshot import GeneratorStates


class Warmup:
    """Separates first-call changes from per-call changes. Call `after_run` after every run."""

    def __init__(self, model: nn.Module, saved: ModelSnapshot) -> None:
        self.model, self.saved = model, saved
        self.between: AttributeSnapshot | None = None  # after a first run that changed attributes
        self.written: set[str] = set()

    def after_run(self) -> None:
        """Restore the changes of a run, or decide which of them remain."""
        if self.between is None and not self.saved.attributes.find_changes():
            self.saved.restore_tensors()
            return
        if self.between is None:
            self.between = AttributeSnapshot(self.model)
            self.written = _changed_parameters(self.saved)
            self.saved.restore_tensors()
            return
        always, first = self.between.find_changes(), self.saved.attributes.find_changes()
        initialized = {name: keys for name, keys in first.items() if _owns_written(self.model, name, self.written)}
        again = _registered_again(self.model, first, self.saved.attributes)
        self.saved.attributes.restore(only=_join(_join(always, initialized), again))
        self.saved.restore_tensors()
        self.saved.attributes = AttributeSnapshot(self.model)
        self.saved.add_new_tensors()
        self.between = None

    def discard_run(self) -> None:
        """Restore everything after a run that raised, or whose changes do not count."""
        self.between = None
        self.saved.restore()

    def finish(self, run: Callable[[], Any]) -> None:
        """Run once more if the changes of the last run are undecided."""
        if self.between is not None:
            run()
            self.after_run()

    def warm_up(self, run: Callable[[], Any]) -> None:
        """Run the model until its first-call changes are made."""
        self.saved.restore()
        run()
        self.after_run()
        self.finish(run)


def materialize(model: nn.Module, run: Callable[[], Any]) -> None:
    """Run a model with lazy layers once, so that they get their sizes."""
    if any(torch.nn.parameter.is_lazy(tensor) for tensor in (*model.parameters(), *model.buffers())):
        generators = GeneratorStates()
        run()
        generators.restore()


def _changed_parameters(saved: ModelSnapshot) -> set[str]:
    """Return the parameters that the last run changed. Buffers do not count: statistics change with every call."""
    parameters = {name for name, _ in saved.model.named_parameters()}
    return {
        copy.name
        for copy in saved.written_tensors()
        if copy.name in parameters and not torch.equal(copy.tensor.detach(), copy.before)
    }


def _owns_written(model: nn.Module, name: str, written: set[str]) -> bool:
    """Return whether a module owns one of these parameters."""
    prefix = f"{name}." if name else ""
    return any(f"{prefix}{key}" in written for key in model.get_submodule(name)._parameters)


def _registered_again(
    model: nn.Module, changed: dict[str, list[str]], before: AttributeSnapshot
) -> dict[str, list[str]]:
    """Return the attributes under which a run has registered an existing parameter again.

    Dropout on weights does so in evaluation mode, where dropout returns its input; in training mode it could then not
    set that attribute.
    """
    known = {id(tensor) for slots in before.slots.values() for parameters in slots for tensor in parameters.values()}
    found: dict[str, list[str]] = {}
    for name, keys in changed.items():
        parameters = model.get_submodule(name)._parameters
        had = {key for slots in before.slots.get(name, ()) for key in slots}
        found[name] = [
            key for key in keys if key not in had and parameters.get(key) is not None and id(parameters[key]) in known
        ]
    return {name: keys for name, keys in found.items() if keys}


def _join(a: dict[str, list[str]], b: dict[str, list[str]]) -> dict[str, list[str]]:
    return {name: [*a.get(name, ()), *b.get(name, ())] for name in {**a, **b}}
