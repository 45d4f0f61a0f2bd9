"""A rerun: the step in a graph of its own, to be differentiated in ways that a run of the workers cannot be.

What the step was given has a history in the program's graph, and that may lead to the very parameters of the step: two
calls of one model, one of which uses the other's output. The program's own backward goes along there. So a rerun is
differentiated up to its own inputs only: it has stand-ins for them, that let gradients through to the history except
while the rerun itself is differentiated.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from gemini.capture.unhooked_backward import unhooked


@dataclass
class Switch:
    """Whether gradients end at the stand-ins."""

    is_closed: bool = False


@dataclass
class Rerun:
    """Stand-ins for what a step was given, and the values that it has computed from them."""

    parameters: list[torch.Tensor]
    inputs: list[torch.Tensor]
    operands: dict[int, torch.Tensor]
    switch: Switch
    values: dict[int, Any] = field(default_factory=dict)

    @staticmethod
    def of(
        parameters: list[torch.Tensor], inputs: list[torch.Tensor], operands: dict[int, torch.Tensor], connect: bool
    ) -> Rerun:
        """Stand-ins; connected to the program's graph, or not."""
        switch = Switch()

        def stand_in(one: torch.Tensor) -> torch.Tensor:
            if not one.requires_grad:
                return one
            with torch.enable_grad():
                return StandIn.apply(switch, one) if connect else one.detach().requires_grad_()

        given = {number: stand_in(one) for number, one in operands.items()}
        return Rerun(parameters, [stand_in(one) for one in inputs], given, switch)

    def differentiate(self, value: int, gradient: torch.Tensor, create_graph: bool, operands: list[int]) -> list[Any]:
        """Gradients of parameters, of inputs that require one, and of these operands.

        Hooks of parameters see them where the program's own backward brings them, and not here as well.
        """
        inputs = [one for one in self.inputs if one.requires_grad]
        wanted = [*self.parameters, *inputs, *(self.operands[number] for number in operands)]
        self.switch.is_closed = True
        try:
            with unhooked(self.parameters):
                found = torch.autograd.grad(
                    [self.values[value]], wanted, [gradient], True, create_graph, allow_unused=True
                )
        finally:
            self.switch.is_closed = False
        return list(found)


class StandIn(torch.autograd.Function):  # type: ignore[misc]
    """The same contents; gradients go on, unless the switch is closed."""

    @staticmethod
    def forward(ctx: Any, switch: Switch, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor."""
        ctx.set_materialize_grads(False)
        ctx.switch = switch
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> tuple[Any, ...]:
        """To the tensor, or nowhere."""
        return None, None if ctx.switch.is_closed else gradient
