"""Results: what workers say a step gave, in the words of the deferred call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from gemini.capture.forms import Ref
from gemini.capture.values import follow
from gemini.runtime.deferred import Pending, StepResult
from gemini.runtime.executor.request import StepResult as Ran
from gemini.runtime.overlap.kinds import Kind
from gemini.runtime.overlap.losses import Prepared, fetchable, fetched


def result_of(  # noqa: PLR0917
    kind: Kind,
    prepared: Prepared,
    pending: Pending,
    bound: dict[str, Any],
    ran: Ran,
    means: Mapping[int, list[float]],
) -> StepResult:
    """What a step gave, in the words of the deferred call; `means`: the weights of those that stay in workers."""
    plan = kind.plan
    assert plan is not None
    assert prepared.loss is not None
    assert ran.root is not None
    parameters = _in_order(kind, pending.work.parameters, ran)
    places = {id(tensor): at for at, tensor in enumerate(pending.inputs)}
    inputs = {}
    for port in plan.build(kind.shares).wiring.from_call:
        if port.name in ran.input_gradients and isinstance(port.value, Ref):
            inputs[places[id(follow(bound, plan.graph.inputs[port.value.node]))]] = ran.input_gradients[port.name]
    names = {number: f"#{number}" for number in prepared.loss.keep}
    names |= {number: name for number, name in prepared.loss.ports.items() if name in prepared.keep}
    outputs, splitting = ran.outputs, prepared.splitting

    def fetch(number: int) -> Any:
        return fetched(splitting, number, outputs[names[number]], means.get(number))

    known = (number for number in names if number in means or fetchable(splitting, number))
    kept = frozenset(number for number in known if names[number] in outputs)
    return StepResult(ran.root, parameters, inputs, dict(ran.operand_gradients), kept, fetch)


def _in_order(kind: Kind, wanted: list[torch.Tensor], ran: Ran) -> list[torch.Tensor | None]:
    """The gradients of parameters, which are nobody else's any more."""
    known = kind.order
    if known is None or known[0] is not ran.owners or known[1] is not wanted:
        places = {id(parameter): at for at, parameter in enumerate(ran.owners)}
        known = kind.order = ran.owners, wanted, [places.get(id(parameter), -1) for parameter in wanted]
    found: list[torch.Tensor | None] = [*ran.tensors, None]
    ran.tensors = []
    return [*map(found.__getitem__, known[2])]
