"""The node of a step in the program's autograd graph.

The workers have computed the gradients of the root already. When the program's own backward arrives here, they are
handed over, times the gradient that came: so accumulation, parameter hooks, loss scaling and clipping are torch's own.

    parameters, inputs, operands ──► Step ──► loss ──► / 4 ──► scaler.scale ──► backward()
                                      ▲ gradients, kept              │ 16384.0
                                      └──────────────────────────────┘

Anything else that is asked of it (gradients of another value, of the gradients themselves, a second time) is answered
by running the step again, eagerly, from what the call was given.

Where the program's backward is what runs the step, and nobody could see the difference, parameters are given their
gradients at once (`giving`): torch's engine takes longer for as many than all else that a step asks of this process.
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
    """A value of a step that has run, on its way into the graph, with the gradients that are known of it."""

    def __init__(self, pending: PendingCall, value: int, contents: torch.Tensor, gradients: list[Any] | None) -> None:
        self.pending: PendingCall | None = pending
        self.value, self.contents, self.gradients = value, [contents], gradients

    def connect(self, given: list[torch.Tensor]) -> torch.Tensor:
        """The value as a tensor of the program's graph, in which gradients go to those given."""
        assert self.pending is not None
        function = rename_grad_fn(StepFunction, self.pending.nodes.get(self.value, ""))
        with enable_graph():
            made: torch.Tensor = _apply(function, self, *given)
        return made

    def ends(self) -> list[Callable[[], Any]]:
        """What happens when its graph is freed: all that would be needed to run it again is freed, too."""
        freed: list[Callable[[], Any]] = [partial(vars(self).update, {"gradients": None, "pending": None})]
        return freed if self.gradients is None else [*freed, partial(setattr, self.pending, "is_backward_done", True)]

    def take(self, keep: bool) -> list[Any]:
        """The gradients; whoever takes them has the only reference, unless they are kept."""
        assert self.gradients is not None
        if keep:
            return [None if one is None else one.clone() for one in self.gradients]
        found, self.gradients = self.gradients, None
        return found


class StepFunction(torch.autograd.Function):  # type: ignore[misc]
    """One value of a step that has run."""

    @staticmethod
    def forward(ctx: Any, answer: StepValue, *inputs: torch.Tensor) -> torch.Tensor:  # noqa: ARG004
        """The contents."""
        ctx.set_materialize_grads(False)
        ctx.answer = answer
        ctx.save_for_backward(make_token(0, *answer.ends()))
        return answer.contents.pop()

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> tuple[Any, ...]:
        """Gradients of parameters, inputs and operands."""
        _ = ctx.saved_tensors  # raises as always where the graph has been freed
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
        if not math.isfinite(factor):  # times an infinite one, gradients that are nothing would be no numbers
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
    """Times a factor; in place, where the memory is one gradient's alone."""
    owners = Counter(one.untyped_storage()._cdata for one in found if one is not None)

    def scaled(one: torch.Tensor) -> torch.Tensor:
        is_alone = owners[one.untyped_storage()._cdata] == 1 and one.is_contiguous()
        return one.mul_(factor) if is_alone else one * factor

    return [None if one is None else scaled(one) for one in found]


def _release(found: list[Any]) -> tuple[Any, ...]:
    """As a tuple, with no reference left in the list: AccumulateGrad then keeps the tensors, and copies nothing."""
    given = tuple(found)
    found.clear()
    return given
