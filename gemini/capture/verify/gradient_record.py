"""Gradient records: the gradients of one backward, as tensors or digests.

Gradients are passed to a sink one by one, as the backward computes them, and released: comparing two runs must not hold
two sets of gradients. A *digest* of a gradient is 4096 random projections of it. Equal gradients have equal digests,
to the bit; different ones have different digests with near certainty. Where digests differ, one set is retained and
the other compared with it, gradient by gradient.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from gemini.capture.module_hooks import without_tensor_hooks

Grads = dict[str, torch.Tensor | None]
Sink = Callable[[str, torch.Tensor], Any]  # returns the part of a gradient to retain

_WIDTH = 4096
_TABLE = 65_521  # a prime, which divides no usual size
_BACKWARD = torch.autograd.backward  # capture replaces the attribute to refuse nested training


def objective(outputs: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Return a scalar that depends on every differentiable output, with fixed weights."""
    total: torch.Tensor | None = None
    for tensor in outputs:
        if not tensor.requires_grad:
            continue
        value = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
        value = value.to_dense() if value.layout != torch.strided else value
        if value.dim():
            value = (value * _weights(value)).sum() / max(1, value.numel()) ** 0.5
        total = value.float() if total is None else total + value.float()
    return total


def _weights(value: torch.Tensor) -> torch.Tensor:
    """Return fixed numbers between 0.5 and 1.5 per element; the table is repeated to save time."""
    table = _table(value.device, torch.float32).to(value.dtype)
    return table.repeat(-(-value.numel() // _TABLE))[: value.numel()].view(value.shape)


@functools.lru_cache(maxsize=8)
def _table(device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return (torch.rand(_TABLE, generator=generator) + 0.5).to(device, dtype)


def backward(model: nn.Module, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], keep: Sink) -> Grads:
    """Return the gradients of all parameters and inputs, as returned by `keep`; None where there is none."""
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    named.update({f"input {i}": t for i, t in enumerate(inputs) if t.requires_grad and t.is_leaf})
    total = objective(outputs)
    found: Grads = dict.fromkeys(named)
    if total is None or not total.requires_grad or not named or total.device.type == "meta":
        return found
    with without_tensor_hooks(named.values()):
        if any(node.name() == "CheckpointFunctionBackward" for node in autograd_nodes([total])):
            found.update((name, keep(name, grad)) for name, grad in _by_backward(total, named))
            return found
        hooks = [leaf.register_hook(_taker(found, name, keep)) for name, leaf in named.items()]
        try:
            torch.autograd.grad(total, list(named.values()), allow_unused=True)
        finally:
            for hook in hooks:
                hook.remove()
    return found


def _taker(found: Grads, name: str, keep: Sink) -> Callable[[torch.Tensor], torch.Tensor]:
    def take(grad: torch.Tensor) -> torch.Tensor:
        """Pass a gradient to the sink and return a placeholder without memory."""
        found[name] = keep(name, grad)
        if grad.layout != torch.strided:
            return torch.zeros_like(grad)
        return torch.zeros((), dtype=grad.dtype, device=grad.device).expand_as(grad)

    return take


def _by_backward(total: torch.Tensor, named: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the gradients by `backward()`, which re-entrant checkpoints need; restore the user's gradients."""
    saved = {name: leaf.grad for name, leaf in named.items()}
    for leaf in named.values():
        leaf.grad = None
    try:
        _BACKWARD(total)
        for name, leaf in named.items():
            if leaf.grad is not None:
                yield name, leaf.grad
    finally:
        for name, leaf in named.items():
            leaf.grad = saved[name]


def autograd_nodes(outputs: Sequence[torch.Tensor]) -> list[Any]:
    """Return the nodes of the autograd graph of some tensors, each once, in a fixed order."""
    waiting = [tensor.grad_fn for tensor in outputs if tensor.grad_fn is not None]
    seen = dict.fromkeys(waiting)
    while waiting:
        for node, _ in waiting.pop().next_functions:
            if node is not None and node not in seen:
                seen[node] = None
                waiting.append(node)
    return list(seen)


def autograd_graph_text(model: nn.Module, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> str:
    """Return the autograd graph of the outputs as text: functions, their settings, and the parameters.

    Two runs with equal values and equal texts have equal gradients.
    """
    names = {id(p): name for name, p in model.named_parameters()}
    names.update({id(tensor): f"input {index}" for index, tensor in enumerate(inputs)})
    nodes = autograd_nodes(outputs)
    index = {node: position for position, node in enumerate(nodes)}
    lines = [",".join(str(index.get(tensor.grad_fn, "-")) for tensor in outputs)]
    for node in nodes:
        leaf = names.get(id(node.variable), "?") if hasattr(node, "variable") else ""
        after = [(index.get(one, -1), slot) for one, slot in node.next_functions]
        lines.append(f"{node.name()} {leaf} {after} {_settings(node)}")
    return "\n".join(lines)


def _settings(node: Any) -> str:
    """Return the non-tensor state of an autograd node: dimensions, rates, the context of a custom function."""
    own = [value for value in getattr(node, "__dict__", {}).values() if isinstance(value, _PLAIN)]
    kind = type(node)
    if kind not in _SETTINGS:  # saved tensors also have a raw attribute
        _SETTINGS[kind] = [
            name for name in dir(kind) if name.startswith("_saved_") and not hasattr(kind, f"_raw{name}")
        ]
    return str([*own, *(getattr(node, name) for name in _SETTINGS[kind])])


_PLAIN = (bool, int, float, str, type(None))
_SETTINGS: dict[type, list[str]] = {}


def keep_gradient(_: str, grad: torch.Tensor) -> torch.Tensor:
    """Retain a gradient."""
    return grad.detach()


def digest(_: str, grad: torch.Tensor) -> torch.Tensor:
    """Return the sums of a tensor along one dimension with random weights; a small tensor is its own digest."""
    flat = grad.detach()
    flat = flat.to_dense() if flat.layout != torch.strided else flat
    flat = (torch.view_as_real(flat.resolve_conj()) if flat.is_complex() else flat).reshape(-1)
    flat = flat.float() if flat.is_floating_point() and flat.dtype != torch.float64 else flat.double()
    rows = flat.numel() // _WIDTH
    if rows < 2:
        return flat.clone()
    table = _table(flat.device, flat.dtype)
    weights = table.repeat(-(-rows // len(table)))[:rows]
    sums = flat[: rows * _WIDTH].view(rows, _WIDTH).t().mv(weights)
    return torch.cat([sums, flat[rows * _WIDTH :]])
