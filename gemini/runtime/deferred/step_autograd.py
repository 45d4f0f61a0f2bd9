"""The node of a step in the script's autograd graph.

The workers have already computed the gradients of the root. When the script's backward arrives at the node, they are
handed over, times the incoming gradient: accumulation, parameter hooks, loss scaling and clipping are torch's own.

    parameters, inputs, operands ──► StepFunction ──► loss ──► / 4 ──► scaler.scale ──► backward()
                                      ▲ gradients, retained               │ 16384.0
                                      └───────────────────────────────────┘

Other requests (gradients of another value, higher-order gradients, a second backward) run the step again, eagerly, from
the inputs of the call.

Where the script's backward is what runs the step, and the difference is unobservable, gradients are assigned directly
(`grad_assignment`): torch's engine takes longer for them than all other work of the controller in a step.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from gemini.autograd_engine import rename_grad_fn
from gemini.runtime.deferred.grad_assignment import enable_graph
from gemini.runtime.graph_token import make_token

if TYPE_CHECKING:
    from gemini.runtime.deferred.pending_call import PendingCall


class StepValue:
    """A value of a completed step on its way into the graph, with its known gradients."""

    def __init__(self, pending: PendingCall, value: int, contents: torch.Tensor, gradients: list[Any] | None) -> None:
        self.pending: PendingCall | None = pending
        self.value, self.contents, self.gradients = value, [contents], gradients

    def connect(self, given: list[torch.Tensor]) -> torch.Tensor:
        """Return the value as a tensor of the script's graph, in which gradients go to `given`."""
        assert self.pending is not None
        function = rename_grad_fn(StepFunction, self.pending.nodes.get(self.value, ""))
        with enable_graph():
            made: torch.Tensor = _apply(function, self, *given)
        return made

    def ends(self) -> list[Callable[[], Any]]:
        """Return the actions for when its graph is freed: release all that a rerun would need."""
        freed: list[Callable[[], Any]] = [partial(vars(self).update, {"gradients": None, "pending": None})]
        return freed if self.gradients is None else [*freed, partial(setattr, self.pending, "is_backward_done", True)]

    def take(self, keep: bool) -> list[Any]:
        """Return the gradients; the caller has the only reference, unless `keep`."""
        assert self.gradients is not None
        if keep:
            return [None if one is None else one.clone() for one in self.gradients]
        found, self.gradients = self.gradients, None
        return found


class StepFunction(torch.autograd.Function):  # type: ignore[misc]
    """One value of a completed step."""

    @staticmethod
    def forward(ctx: Any, answer: StepValue, *inputs: torch.Tensor) -> torch.Tensor:  # noqa: ARG004
        """Return the contents."""
        ctx.set_materialize_grads(False)
        ctx.answer = answer
        ctx.save_for_backward(make_token(0, *answer.ends()))
        return answer.contents.pop()

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> tuple[Any, ...]:
        """Return the gradients of parameters, inputs and operands."""
        _ = ctx.saved_tensors  # raises where the graph has been freed
        answer: StepValue = ctx.answer
        count = len(ctx.needs_input_grad) - 1
        if gradient is None:
            return (None,) * (count + 1)
        pending = answer.pending
        assert pending is not None
        keep = torch._C._autograd._get_current_graph_task_keep_graph()
        is_usual = not (torch.is_grad_enabled() or pending.has_graph() or _is_batched(gradient))
        pending.record_gradient(answer.value, is_usual)
        factor = gradient.item() if is_usual and answer.gradients is not None else math.nan
        if not math.isfinite(factor):  # zero gradients times infinity would be NaN
            return (None, *pending.differentiate(answer.value, gradient, torch.is_grad_enabled()))
        found = answer.take(keep)
        return (None, *_release(found if factor == 1 else _scale(found, factor)))


def _apply(function: Any, *given: Any) -> Any:
    """`StepFunction.apply`, without checking every parameter for functorch wrappers and deferred tensors."""
    if torch._C._are_functorch_transforms_active():
        return function.apply(*given)
    return super(torch.autograd.Function, function).apply(*given)


def _is_batched(gradient: torch.Tensor) -> bool:
    active = torch._C._are_functorch_transforms_active()
    return bool(active or torch._C._functorch.is_batchedtensor(gradient))


def _scale(found: list[Any], factor: float) -> list[Any]:
    """Multiply by a factor; in place where the memory belongs to one gradient."""
    owners = Counter(one.untyped_storage()._cdata for one in found if one is not None)

    def scaled(one: torch.Tensor) -> torch.Tensor:
        is_alone = owners[one.untyped_storage()._cdata] == 1 and one.is_contiguous()
        return one.mul_(factor) if is_alone else one * factor

    return [None if one is None else scaled(one) for one in found]


def _release(found: list[Any]) -> tuple[Any, ...]:
    """Return a tuple without references left in the list: AccumulateGrad then takes the tensors without a copy."""
    given = tuple(found)
    found.clear()
    return given
