"""Returned attributes: attributes that a call assigns to modules, and arguments that it returns unchanged.

Stages assign no attributes. The value that a call would assign is a result of the plan's graph, beside the model's
output; the script's module gets it when the call is made, as a deferred tensor like those of the output. Calls that run
by a plan do not read such an attribute: while a step runs or is repeated, an earlier value takes its place, and guards
see no change.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from gemini.capture.attribute_writes import AttributeWrite
from gemini.ir.call_binding import bind
from gemini.ir.interpreter import Execution
from gemini.planner.step_plan import StepPlan
from gemini.runtime.deferred.deferred_tensor import materialize

_MISSING: Any = object()


class ReturnedAttributes:
    """The attributes that calls of one model assign."""

    def __init__(self) -> None:
        self._given: dict[AttributeWrite, Any] = {}  # assigned last, possibly deferred
        self._earlier: dict[AttributeWrite, Any] = {}  # assigned by an eager call

    def collect(self, plan: StepPlan, model: nn.Module, output: Any) -> Any:
        """Return all results of an eager call: its output, and the attributes that it assigned."""
        if not plan.attribute_writes:
            return output
        values = self.values(plan, model)
        self._earlier.update(zip(plan.attribute_writes, values, strict=True))
        return output, values

    def assign(self, plan: StepPlan, model: nn.Module, made: Any) -> Any:
        """Assign the attributes; return the output alone."""
        if not plan.attribute_writes:
            return made
        output, values = made
        for left, value in zip(plan.attribute_writes, values, strict=True):
            _set_attribute(model, left, value)
            self._given[left] = value
        return output

    @contextmanager
    def restore(self, plan: StepPlan, model: nn.Module) -> Iterator[None]:
        """Inside, the model has earlier values; afterwards, its attributes are as before."""
        with self.hide(model):
            now = self.values(plan, model)
            try:
                yield
            finally:
                for left, value in zip(plan.attribute_writes, now, strict=True):
                    _set_attribute(model, left, value)

    @staticmethod
    def values(plan: StepPlan, model: nn.Module) -> tuple[Any, ...]:
        """Return the attributes that calls of a plan assign, as they are."""
        return tuple(_get_attribute(model, left) for left in plan.attribute_writes)

    def hide(self, model: nn.Module) -> AbstractContextManager[None]:
        """Inside, earlier values take the place of those assigned here, but not of those that the script assigned."""
        return self._hide(model) if self._given else nullcontext()

    @contextmanager
    def _hide(self, model: nn.Module) -> Iterator[None]:
        ours = [(left, value) for left, value in self._given.items() if _get_attribute(model, left) is value]
        for left, _ in ours:
            _set_attribute(model, left, self._earlier[left])
        try:
            yield
        finally:
            for left, value in ours:
                _set_attribute(model, left, value)

    def is_assigned(self, value: Any) -> bool:
        """Whether a call has assigned this value."""
        return any(value is one for one in self._given.values())

    def materialize(self, model: nn.Module) -> None:
        """Make the tensors in all attributes real: the model itself is about to be inspected."""
        for left, value in [*self._given.items()]:
            if _get_attribute(model, left) is value:
                real = materialize(value) if isinstance(value, torch.Tensor) else value
                _set_attribute(model, left, real)
                self._given[left] = real


def passthrough_tensors(plan: StepPlan, model: nn.Module, args: Any, kwargs: Any) -> dict[int, torch.Tensor]:
    """Return the arguments, and tensors of the model, that are in its output unchanged, by their place there."""
    if not plan.returned_sources:
        return {}
    execution = Execution(plan.graph, model, bind(model, args, kwargs))
    return {at: execution._source(plan.graph.nodes[node]) for at, node in plan.returned_sources.items()}


def _get_attribute(model: nn.Module, left: AttributeWrite) -> Any:
    return getattr(model.get_submodule(left.module), left.name, _MISSING)


def _set_attribute(model: nn.Module, left: AttributeWrite, value: Any) -> None:
    module = model.get_submodule(left.module)
    if value is not _MISSING:
        setattr(module, left.name, value)
    elif hasattr(module, left.name):
        delattr(module, left.name)
