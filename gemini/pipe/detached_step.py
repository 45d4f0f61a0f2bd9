"""Detached step: one process, but every value that crosses a stage boundary is copied, as between workers.

Forward, a stage receives copies without autograd history. Backward runs stage by stage in reverse: a stage receives the
gradients of its outputs, and sends those of its inputs back.

    forward    stage 0 ──copy──► stage 1 ──copy──► stage 2 ──copy──► loss
    backward   stage 0 ◄──grad── stage 1 ◄──grad── stage 2 ◄──grad──

Results equal the eager run bit by bit, so gradients must be summed in its order: last reader first. The gradient of a
value that several stages read passes through its readers from the last to the first, each adding its part; so does the
gradient of a parameter that several stages use, whose hooks run once, on the sum.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from gemini.ir.pytree import Ref
from gemini.pipe.tied_parameters import TiedGradients
from gemini.pipe.value_routes import CallerSide, ValueRoutes, name_outputs

if TYPE_CHECKING:
    from gemini.codegen.stage_interface import Interface, Port


class DetachedResult(NamedTuple):
    """The output of a step, and its loss where one was computed."""

    output: Any
    loss: torch.Tensor | None


def copy_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy with the same strides, in its own memory, without autograd history."""
    with torch.no_grad():
        plain = tensor.detach()
        made = plain.clone()
        if plain.layout is not torch.strided or made.stride() == plain.stride() or not plain.numel():
            return made
        # Expanded, overlapping or with gaps: copy the span of memory it covers, with the same strides.
        span = 1 + sum((size - 1) * stride for size, stride in zip(plain.shape, plain.stride(), strict=True))
        memory = plain.as_strided((span,), (1,), plain.storage_offset()).clone()
        empty = torch.empty(0, dtype=plain.dtype, device=plain.device)
        return empty.set_(memory.untyped_storage(), 0, plain.shape, plain.stride())


class _Receive(torch.autograd.Function):  # type: ignore[misc]
    """Copies a received value in forward; in backward, stores its gradient for the sender."""

    @staticmethod
    def forward(ctx: Any, _anchor: torch.Tensor, value: torch.Tensor, key: Any, inbox: dict[Any, Any]) -> torch.Tensor:
        ctx.key, ctx.inbox = key, inbox
        ctx.set_materialize_grads(False)
        return copy_tensor(value)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        if gradients[0] is not None:
            ctx.inbox[ctx.key] = copy_tensor(gradients[0])
        return None, None, None, None


class DetachedStep:
    """One step over detached stages: `forward`, then `backward` of the loss."""

    def __init__(
        self, routes: ValueRoutes, stages: Sequence[nn.Module], model: nn.Module, bound: dict[str, Any]
    ) -> None:
        self.routes, self.stages = routes, tuple(stages)
        self.caller = CallerSide(routes, model, bound)
        self.gradients: dict[Any, torch.Tensor] = {}  # by value: the sum over the readers so far
        self.sent: dict[str, Any] = {}  # values sent by the call and the stages
        self.received: list[dict[str, Any]] = []  # values received per stage
        self.delivered: dict[Any, Any] = {}  # values received by the caller
        self.passed: dict[Ref, torch.Tensor] = {}  # arguments that are part of the output
        self._anchor = torch.empty(0, requires_grad=True)

    # ── forward ────────────────────────────────────────────────────────────────────────────────────────────────
    def forward(self) -> Any:
        """Run all stages; the output is a copy too, attached to autograd."""
        self.sent = {port.name: self.caller.read_port(port) for port in self.routes.from_call}
        for interface, stage in zip(self.routes.interfaces, self.stages, strict=True):
            got = {port.name: self._send(port.value, self.sent[port.name]) for port in interface.inputs}
            versions = {name: getattr(value, "_version", 0) for name, value in got.items()}
            self.received.append(got)
            self.sent.update(name_outputs(interface, stage(*got.values())))
            self._write_back(interface, got, versions)
        return self.caller.output(lambda port: self._deliver(port.value, self.sent[port.name]), self._pass_on)

    def _send(self, key: Any, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return copy.deepcopy(value)
        if value.requires_grad and torch.is_grad_enabled():
            return _Receive.apply(self._anchor, value.detach(), key, self.gradients)
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False):  # so that its version counter counts writes
                return copy_tensor(value)
        return copy_tensor(value)

    def _deliver(self, key: Any, value: Any) -> Any:
        """Send a value to the caller: one copy, even if the output has it several times."""
        if key not in self.delivered:
            self.delivered[key] = self._send(key, value)
        return self.delivered[key]

    def _pass_on(self, ref: Ref, value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.requires_grad:
            self.passed[ref] = value
            return self._deliver(ref, value)
        return value

    def _write_back(self, interface: Interface, got: dict[str, Any], versions: dict[str, int]) -> None:
        """Copy writes of the model to its arguments back to the caller."""
        for port in interface.inputs:
            if port.source is None and getattr(got[port.name], "_version", 0) != versions[port.name]:
                with torch.no_grad():
                    self.sent[port.name].copy_(got[port.name])

    # ── backward ───────────────────────────────────────────────────────────────────────────────────────────────
    def backward(self, loss: torch.Tensor) -> None:
        """Run the backward of the loss, then that of the stages in reverse."""
        with TiedGradients(self.stages) as shared:
            loss.backward()
            for at in reversed(range(len(self.stages))):
                self._backward_of(self.routes.interfaces[at], self.received.pop(), shared)
        arguments = {port.value: self.sent[port.name] for port in self.routes.from_call if isinstance(port.value, Ref)}
        arguments.update(self.passed)
        found = [(value, self.gradients.get(ref)) for ref, value in arguments.items()]
        _run_backward([(value, gradient) for value, gradient in found if gradient is not None])

    def _backward_of(self, interface: Interface, got: dict[str, Any], shared: TiedGradients) -> None:
        roots = [self._root(port, self.sent.pop(port.name)) for port in interface.outputs]
        live = [root for root in roots if root is not None]
        if not live:
            return  # the loss does not depend on this stage
        later = [self._root(port, got[port.name]) for port in interface.inputs]
        live += [root for root in later if root is not None]
        _run_backward(live + shared.parts(interface.stage))

    def _root(self, port: Port, value: Any) -> tuple[torch.Tensor, torch.Tensor] | None:
        gradient = self.gradients.get(port.value) if isinstance(port.value, Ref) else None
        if gradient is None or not isinstance(value, torch.Tensor) or not value.requires_grad:
            return None
        return value, gradient


def _run_backward(roots: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    if roots:
        torch.autograd.backward([value for value, _ in roots], [gradient for _, gradient in roots])
