"""Observations: everything one training step of a model shows, and the comparison of two of them.

The outputs, the gradients of all parameters and inputs of a fixed random combination of the outputs, the buffers
and the inputs afterwards. Two runs from the same generator states must agree in all of these.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from gemini.capture.binding import Call
from gemini.capture.sketch import sketch
from gemini.capture.values import tensors

_TOLERANCE = {"float64": 1e-9, "float32": 1e-5, "complex64": 1e-5, "complex128": 1e-9}


@dataclass
class Observation:
    """What one step showed; `grads` is None where only the forward ran."""

    structure: str
    outputs: list[torch.Tensor]
    buffers: dict[str, torch.Tensor]
    inputs: list[torch.Tensor]
    grads: dict[str, torch.Tensor | None] | None = None
    finite: bool = True


@dataclass
class Differences:
    """Where two observations disagree: readable lines, and the parameters whose gradients differ."""

    lines: list[str] = field(default_factory=list)
    forward: bool = False
    parameters: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.lines)


def observe(
    run: Callable[[Any, Any], Any],
    model: nn.Module,
    call: Call,
    given: Sequence[torch.Tensor],
    *,
    gradients: bool,
    digest: bool = False,
) -> Observation:
    """Run one step. The caller sets the generators before and restores the model after."""
    args, kwargs = call.arguments(given)
    return look(model, run(args, kwargs), (args, kwargs), gradients, digest)


def look(model: nn.Module, output: Any, arguments: Any, gradients: bool, digest: bool) -> Observation:
    """What a step that just ran shows. With `digest`, gradients are kept as a few numbers each, to save memory."""
    given = [tensor for _, tensor in tensors(arguments)]
    made = [tensor for _, tensor in tensors(output)]
    seen = Observation(
        sketch(output),
        [tensor.detach().clone() for tensor in made],
        {name: buffer.detach().clone() for name, buffer in model.named_buffers()},
        [tensor.detach() for tensor in given],
    )
    seen.finite = all(bool(torch.isfinite(t).all()) for t in made if t.is_floating_point() and t.device.type != "meta")
    if gradients:
        grads = _gradients(model, made, given)
        seen.grads = {name: _digest(grad) for name, grad in grads.items()} if digest else grads
    return seen


def _digest(grad: torch.Tensor | None) -> torch.Tensor | None:
    """Norms and two sums of a gradient: equal for equal gradients, and hardly ever for others."""
    if grad is None:
        return None
    flat = grad.detach().reshape(-1).float()
    return torch.stack([flat.norm(), flat.abs().sum(), flat.sum() + flat.norm(), flat[::7].sum() + flat.norm()])


def _objective(outputs: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """A scalar that every differentiable output takes part in, with fixed weights."""
    total: torch.Tensor | None = None
    generator = torch.Generator().manual_seed(1)
    for tensor in outputs:
        if not tensor.requires_grad:
            continue
        value = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        if value.dim():
            weights = torch.rand(value.shape, generator=generator).to(value.device, value.dtype) + 0.5
            value = (value * weights).sum() / max(1, value.numel()) ** 0.5
        total = value.float() if total is None else total + value.float()
    return total


def _gradients(
    model: nn.Module, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
) -> dict[str, torch.Tensor | None]:
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    named.update({f"input {i}": t for i, t in enumerate(inputs) if t.requires_grad and t.is_leaf})
    objective = _objective(outputs)
    if objective is None or not named:
        return dict.fromkeys(named)
    try:
        grads = torch.autograd.grad(objective, list(named.values()), allow_unused=True, retain_graph=True)
    except RuntimeError as error:
        if "checkpoint" not in str(error).lower():
            raise
        grads = _by_backward(objective, list(named.values()))
    return dict(zip(named, grads, strict=True))


def _by_backward(objective: torch.Tensor, leaves: list[torch.Tensor]) -> list[torch.Tensor | None]:
    """Re-entrant checkpoints only work with `backward()`; the user's gradients are put aside meanwhile."""
    held = [leaf.grad for leaf in leaves]
    for leaf in leaves:
        leaf.grad = None
    try:
        objective.backward()
        return [leaf.grad for leaf in leaves]
    finally:
        for leaf, grad in zip(leaves, held, strict=True):
            leaf.grad = grad


def compare(expected: Observation, found: Observation) -> Differences:
    """Where `found` differs from `expected`."""
    differences = Differences()
    if expected.structure != found.structure:
        differences.lines.append(f"the output is {found.structure:.200}, not {expected.structure:.200}")
    pairs = [
        *_pairs("output", dict(enumerate(expected.outputs)), dict(enumerate(found.outputs))),
        *_pairs("buffer", expected.buffers, found.buffers),
        *_pairs("input", dict(enumerate(expected.inputs)), dict(enumerate(found.inputs))),
    ]
    differences.lines += [line for _, line in pairs]
    differences.forward = bool(differences.lines)
    if expected.grads is not None and found.grads is not None:
        for name, line in _pairs("gradient of", expected.grads, found.grads):
            differences.lines.append(line)
            differences.parameters.append(str(name))
    return differences


def _pairs(what: str, expected: dict[Any, Any], found: dict[Any, Any]) -> list[tuple[Any, str]]:
    lines = []
    for name in dict.fromkeys([*expected, *found]):
        difference = tensor_difference(expected.get(name), found.get(name))
        if difference:
            lines.append((name, f"{what} {name}: {difference}"))
    return lines


def tensor_difference(expected: torch.Tensor | None, found: torch.Tensor | None) -> str:
    """How two tensors differ; '' if they are equal up to rounding."""
    if expected is None or found is None:
        return "" if expected is found else f"{'missing' if found is None else 'unexpected'}"
    if expected.shape != found.shape or expected.dtype != found.dtype:
        return f"{tuple(found.shape)} {found.dtype}, not {tuple(expected.shape)} {expected.dtype}"
    if expected.device.type == "meta" or expected.numel() == 0 or torch.equal(expected, found):
        return ""
    if not (expected.is_floating_point() or expected.is_complex()):
        return "other values"
    tolerance = _TOLERANCE.get(str(expected.dtype).removeprefix("torch."), 2e-2)
    finite = expected[torch.isfinite(expected)]
    scale = float(finite.abs().max()) if finite.numel() else 0.0
    if torch.allclose(expected, found, rtol=10 * tolerance, atol=tolerance * (scale + 1e-6), equal_nan=True):
        return ""
    return f"off by {float((expected - found).abs().nan_to_num().max()):.2g}"
