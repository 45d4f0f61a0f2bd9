"""Profile inputs: the batch on which a graph is profiled.

A real batch is best. Without one, tensors are generated from the captured sizes: normal random numbers for floating
point, ones for integers and masks, which are valid indices, labels and masks of nearly every model.
"""

from __future__ import annotations

from typing import Any

import torch

from gemini.errors import ProfileError
from gemini.ir.call_binding import bind
from gemini.ir.encode import follow
from gemini.ir.graph import Graph
from gemini.ir.node import TensorMeta


def input_tensors(graph: Graph, args: tuple[Any, ...] | None, kwargs: dict[str, Any] | None) -> dict[int, torch.Tensor]:
    """Return the tensor of every input node."""
    if args is None and kwargs is None:
        return {
            node.id: _make_tensor(next(iter(node.outputs.values()))) for node in graph.nodes if node.kind == "input"
        }
    model = graph.bound_model()
    bound = bind(model, args or (), kwargs or {})
    found: dict[int, torch.Tensor] = {}
    wrong: list[str] = []
    for id_, path in graph.inputs.items():
        name, meta = graph.nodes[id_].name, next(iter(graph.nodes[id_].outputs.values()))
        try:
            value = follow(bound, path)
        except (KeyError, IndexError, AttributeError, TypeError):
            wrong.append(f"  - {name} is missing")
            continue
        if not isinstance(value, torch.Tensor) or tuple(value.shape) != meta.shape or _dtype(value) != meta.dtype:
            actual = f"{_dtype(value)}{list(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
            wrong.append(f"  - {name} is {actual}, the graph was captured with {meta.dtype}{list(meta.shape)}")
        else:
            found[id_] = value
    if wrong:
        raise ProfileError(
            "the batch does not fit the graph:\n" + "\n".join(wrong) + "\n    → capture the model with this batch"
        )
    return found


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _make_tensor(meta: TensorMeta) -> torch.Tensor:
    dtype = getattr(torch, meta.dtype)
    generator = torch.Generator().manual_seed(0)
    if meta.device == "meta":
        return torch.empty(meta.shape, dtype=dtype, device="meta").requires_grad_(meta.requires_grad)
    if dtype.is_floating_point or dtype.is_complex:
        kind = torch.float32 if dtype.is_floating_point else torch.complex64
        made = torch.randn(meta.shape, generator=generator, dtype=kind).to(dtype)
    else:
        made = torch.ones(meta.shape, dtype=dtype)
    return made.to(meta.device).requires_grad_(meta.requires_grad)
