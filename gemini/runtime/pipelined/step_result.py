"""Step result: the result of the executor as the result of a deferred call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from gemini.ir.encode import follow
from gemini.ir.pytree import Ref
from gemini.runtime.deferred import PendingCall, StepResult
from gemini.runtime.pipelined.call_signature import CallKind
from gemini.runtime.pipelined.loss_request import PreparedLoss, fetch_value, is_fetchable
from gemini.runtime.pipelined.step_request import ExecutedStep as Ran


def to_step_result(  # noqa: PLR0917
    kind: CallKind,
    prepared: PreparedLoss,
    pending: PendingCall,
    bound: dict[str, Any],
    ran: Ran,
    means: Mapping[int, list[float]],
) -> StepResult:
    """Convert an executed step; `means`: the weights of means among the values that workers retain."""
    assert prepared.loss is not None
    assert ran.root is not None
    parameters = _in_order(kind, pending.runner.parameters, ran.owners, ran.tensors)
    ran.tensors = []  # the only references
    inputs = _of_inputs(kind, pending, bound, ran.input_gradients) if ran.input_gradients else {}
    names = {number: f"#{number}" for number in prepared.loss.keep}
    names |= {number: name for number, name in prepared.loss.ports.items() if name in prepared.keep}
    outputs, splitting = ran.outputs, prepared.splitting

    def fetch(number: int) -> Any:
        return fetch_value(splitting, number, outputs[names[number]], means.get(number))

    known = (number for number in names if number in means or is_fetchable(splitting, number))
    kept = frozenset(number for number in known if names[number] in outputs)
    return StepResult(ran.root, parameters, inputs, dict(ran.operand_gradients), kept, fetch)


def _of_inputs(
    kind: CallKind, pending: PendingCall, bound: dict[str, Any], found: Mapping[str, torch.Tensor]
) -> dict[int, torch.Tensor | None]:
    """Return gradients of inputs by place, from those by port."""
    plan = kind.plan
    assert plan is not None
    places = {id(tensor): at for at, tensor in enumerate(pending.inputs)}
    piped = plan.build(kind.shares)
    return {
        places[id(follow(bound, piped.graph.inputs[port.value.node]))]: found[port.name]
        for port in piped.routes.from_call
        if port.name in found and isinstance(port.value, Ref)
    }


def announce_gradients(
    kind: CallKind, pending: PendingCall, root: int, owners: Sequence[nn.Parameter], tensors: list[torch.Tensor]
) -> None:
    """Pass the memory of the parameters' gradients to the deferred call, before workers compute them."""
    pending.assign_early(root, _in_order(kind, pending.runner.parameters, owners, tensors))


def _in_order(
    kind: CallKind, wanted: list[torch.Tensor], owners: Sequence[nn.Parameter], tensors: list[torch.Tensor]
) -> list[torch.Tensor | None]:
    """Return the gradients in the order of the wanted parameters."""
    known = kind.order
    if known is None or known[0] is not owners or known[1] is not wanted:
        places = {id(parameter): at for at, parameter in enumerate(owners)}
        known = kind.order = owners, wanted, [places.get(id(parameter), -1) for parameter in wanted]
    return [*map([*tensors, None].__getitem__, known[2])]
