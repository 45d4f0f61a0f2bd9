"""Backward from a deferred tensor: the step runs, then torch continues with real tensors.

The usual case is one loss: call, tape and backward run pipelined with that loss as the root. Roots of several calls run
one after the other. Requests that need more of the graph than its gradients (`create_graph`, gradients of deferred
tensors, several roots of one call) require an eager run of the call.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from gemini.runtime.call_outcome import FallbackReason
from gemini.runtime.deferred import pending_queue
from gemini.runtime.deferred.deferred_tensor import (
    OVERRIDES,
    DeferredTensor,
    find_deferred,
    graph_tensor,
    materialize,
    replace_deferred,
)
from gemini.runtime.deferred.pending_call import WAITING, PendingCall
from gemini.runtime.tracebacks import shorten_traceback

_backward: Any = torch.autograd.backward
_grad: Any = torch.autograd.grad
_of_tensor: Any = torch.Tensor.backward


def install() -> None:
    """Patch the entry points of torch.autograd for deferred tensors."""
    if torch.autograd.backward is _backward:
        torch.autograd.backward = backward
        # Not by `__torch_function__`: torch pops modes there, and the hazard mode could not be removed.
        torch.Tensor.backward = _backward_method
        OVERRIDES[_grad] = grad


def backward(  # noqa: PLR0917
    tensors: Any,
    grad_tensors: Any = None,
    retain_graph: Any = None,
    create_graph: bool = False,
    grad_variables: Any = None,
    inputs: Any = None,
) -> None:
    """`torch.autograd.backward`, also from deferred tensors."""
    given = (tensors, grad_tensors, grad_variables, inputs)
    if any(True for _ in find_deferred(given)):
        _materialize_roots(tensors, (grad_tensors, grad_variables), inputs, create_graph)
        tensors, grad_tensors, grad_variables, inputs = replace_deferred(given, materialize)
    _backward(tensors, grad_tensors, retain_graph, create_graph, grad_variables, inputs)


def grad(
    outputs: Any,
    inputs: Any,
    grad_outputs: Any = None,
    retain_graph: Any = None,
    create_graph: bool = False,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """`torch.autograd.grad` of deferred tensors."""
    calls = {id(one._pending): one._pending for one in find_deferred(inputs) if one._pending is not None}
    _materialize_roots(outputs, grad_outputs, inputs, create_graph)
    outputs, inputs, grad_outputs = replace_deferred((outputs, inputs, grad_outputs), materialize)
    rerun = [one for one in calls.values() if one.has_graph()]
    if not rerun:
        return _grad(outputs, inputs, grad_outputs, retain_graph, create_graph, *args, **kwargs)
    inputs = [inputs] if isinstance(inputs, torch.Tensor) else list(inputs)
    total = list(_grad(outputs, inputs, grad_outputs, True, create_graph, allow_unused=True))
    for pending in rerun:
        _add_gradients_through(pending, outputs, inputs, grad_outputs, create_graph, total)
    return tuple(total)


def _add_gradients_through(  # noqa: PLR0917
    pending: PendingCall, outputs: Any, inputs: list[Any], factors: Any, create_graph: bool, total: list[Any]
) -> None:
    """Add the gradients of values of a completed step: through the graph of its rerun, from its root."""
    root, again = pending.roots()
    if root is None:
        return
    (arrived,) = _grad(outputs, [root], factors, True, create_graph, allow_unused=True)
    if arrived is not None:
        found = _grad([again], inputs, [arrived], True, create_graph, allow_unused=True)
        for at, one in enumerate(found):
            if one is not None:
                total[at] = one if total[at] is None else total[at] + one


@functools.wraps(_of_tensor)
def _backward_method(self: torch.Tensor, *args: Any, **kwargs: Any) -> None:
    pending_queue.remove_finished()
    try:
        if (
            type(self) is DeferredTensor
            and not args
            and not kwargs
            and (pending := _find_waiting_call(self)) is not None
        ):
            if not pending.run(self._value, is_plain_backward=True):
                _backward(materialize(self))
        elif isinstance(self, DeferredTensor):
            _from_deferred(self, *args, **kwargs)
        else:
            _of_tensor(self, *args, **kwargs)
    except BaseException as error:
        shorten_traceback(error)
        raise


def _find_waiting_call(loss: DeferredTensor) -> PendingCall | None:
    """Return the call that waits for this scalar loss (the usual case), or None."""
    pending = loss._pending
    if loss._real is not None or pending is None or pending.state != WAITING:
        return None
    return pending if pending.tape.metas[loss._value].is_scalar() else None


def _from_deferred(
    tensor: DeferredTensor,
    gradient: Any = None,
    retain_graph: Any = None,
    create_graph: bool = False,
    inputs: Any = None,
) -> None:
    backward(tensor, gradient, retain_graph, create_graph, inputs=inputs)


def _materialize_roots(roots: Any, factors: Any, inputs: Any, create_graph: bool) -> None:
    """Make roots, factors and inputs real, pipelined where a scalar root allows it."""
    for one in [*find_deferred(inputs)]:
        graph_tensor(one)
    by_call: dict[int, tuple[PendingCall, list[int]]] = {}
    for one in find_deferred(roots):
        pending = one._pending
        if one._real is None and pending is not None and pending.state == WAITING:
            by_call.setdefault(id(pending), (pending, []))[1].append(one._value)
    for pending, values in by_call.values():
        if create_graph or len(values) > 1 or not pending.tape.metas[values[0]].is_scalar():
            pending.resolve(FallbackReason.UNUSUAL_BACKWARD)
        else:
            pending.run(values[0])
    for one in [*find_deferred((roots, factors))]:
        materialize(one)
