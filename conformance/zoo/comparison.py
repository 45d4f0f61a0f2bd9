"""Comparing two training steps: what a step shows, and where two steps differ.

Everything counts: the structure of the output, its tensors, the gradients of parameters and inputs, buffers, inputs
afterwards, and the states of all generators. A `limit` of 0 asks for equal elements. Another one is relative to the
largest element of a tensor; for gradients, to the model's largest gradient: a bias before a softmax has none but
rounding of others. Structures, generators, whole numbers and what is not finite must be equal under any limit.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from gemini.ir.call_binding import ModelCall
from gemini.ir.encode import tensors
from gemini.ir.out_spec import structure_of
from gemini.snapshot.model_state import ModelSnapshot
from gemini.snapshot.rng_snapshot import host_rng_fingerprint, torch_rng_fingerprint

Run = Callable[[Any, Any], Any]


@dataclass
class Seen:
    """What one step showed."""

    structure: str
    generators: tuple[Any, ...]
    outputs: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]
    gradients: dict[str, torch.Tensor | None]


def step(model: torch.nn.Module, call: ModelCall, seed: int, run: Run, *, backward: bool = True) -> Seen:
    """One training step from the same state; everything is as before afterwards. A run may go backward itself."""
    saved = ModelSnapshot(model)
    torch.manual_seed(seed)
    args, kwargs = call.arguments(call.tensors)
    model.zero_grad(set_to_none=True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            output = run(args, kwargs)
        loss = objective(output) if backward else None
        if loss is not None:
            loss.backward()
        inputs = {f"input {path}": t for path, t in tensors((args, kwargs))}
        gradients = {name: p.grad for name, p in model.named_parameters()}
        gradients |= {name: t.grad for name, t in inputs.items() if t.is_leaf and t.requires_grad}
        held = {**dict(model.named_buffers()), **inputs}
        buffers = {name: tensor.detach().clone() for name, tensor in held.items()}
        outputs = {str(path): t.detach().clone() for path, t in tensors(output)}
        return Seen(
            structure_of(output), (torch_rng_fingerprint(), host_rng_fingerprint()), outputs, buffers, gradients
        )
    finally:
        saved.restore()
        model.zero_grad(set_to_none=True)


def objective(output: Any) -> torch.Tensor | None:
    """A scalar that every differentiable output takes part in, with fixed weights."""
    generator, total = torch.Generator().manual_seed(1), None
    for _, tensor in tensors(output):
        if tensor.requires_grad:
            value = torch.view_as_real(tensor) if tensor.is_complex() else tensor
            weights = torch.rand(value.shape, generator=generator).to(value.device, value.dtype) + 0.5
            part = ((value * weights).sum() / max(1, value.numel()) ** 0.5).double()
            total = part if total is None else total + part
    return total


def differences(expected: Seen, found: Seen, limit: float = 0.0) -> list[str]:
    """Where a step differs from another by more than a limit."""
    return [*forward_differences(expected, found, limit), *gradient_differences(expected, found, limit)]


def forward_differences(expected: Seen, found: Seen, limit: float = 0.0) -> list[str]:
    """Differences of outputs, buffers, inputs and generators."""
    lines = [] if expected.structure == found.structure else [f"the output is {found.structure:.120}"]
    if expected.generators != found.generators:
        lines.append("generators are in other states afterwards")
    lines += _lines("output", expected.outputs, found.outputs, limit)
    return lines + _lines("buffer", expected.buffers, found.buffers, limit)


def gradient_differences(expected: Seen, found: Seen, limit: float = 0.0) -> list[str]:
    """Differences of gradients."""
    scale = max(map(largest, expected.gradients.values()), default=0.0)
    return _lines("gradient", expected.gradients, found.gradients, limit, scale)


def largest(tensor: torch.Tensor | None) -> float:
    """The size of the largest finite element."""
    if tensor is None or not tensor.numel() or tensor.dtype is torch.bool:
        return 0.0
    sizes = _dense(tensor).abs()
    return float(sizes.nan_to_num(0.0, 0.0, 0.0).max() if sizes.is_floating_point() else sizes.max())


def _lines(
    kind: str,
    expected: Mapping[str, torch.Tensor | None],
    found: Mapping[str, torch.Tensor | None],
    limit: float,
    scale: float = 0.0,
) -> list[str]:
    lines = []
    for name in dict.fromkeys((*expected, *found)):
        told = _difference(expected.get(name), found.get(name), limit, scale)
        if told:
            lines.append(f"{kind} {name}: {told}")
    return lines


def _difference(one: torch.Tensor | None, other: torch.Tensor | None, limit: float, scale: float) -> str:
    if one is None or other is None:
        return "" if one is other else f"{_kind(other)}, not {_kind(one)}"
    if one.shape != other.shape or one.dtype != other.dtype:
        return f"{_kind(other)}, not {_kind(one)}"
    one, other = _dense(one), _dense(other)
    if torch.equal(one, other):
        return ""
    same = (one == other) | (one.isnan() & other.isnan())
    if bool(same.all()):
        return ""
    if not (one.is_floating_point() or one.is_complex()):
        return "other whole numbers"
    wide = torch.complex128 if one.is_complex() else torch.float64
    off = float((one[~same].to(wide) - other[~same].to(wide)).abs().nan_to_num(nan=float("inf")).max())
    size = max(largest(one), scale)
    return "" if off <= limit * size else f"off by {off:.1e} of {size:.1e}"


def _kind(tensor: torch.Tensor | None) -> str:
    return "None" if tensor is None else f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_dense() if tensor.is_sparse else tensor
