"""Checking a captured graph from outside: graph and model side by side, and how finely it can be cut."""

from __future__ import annotations

from typing import Any

import torch

from gemini.capture import Graph
from gemini.capture.verify.step_observation import compare, observe
from gemini.ir.call_binding import ModelCall
from gemini.snapshot.model_state import ModelSnapshot

PIECES = 4
BALANCE = 1.5


def differences(graph: Graph, model: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> list[str]:
    """Where one training step of graph and model differ, with a fresh seed and another order of samples."""
    call = ModelCall(args, kwargs)
    lines: list[str] = []
    for seed in (11, 12):
        saved = ModelSnapshot(model)
        seen = []
        for run in (lambda a, k: model(*a, **k), lambda a, k: graph.run(*a, **k)):
            torch.manual_seed(seed)
            seen.append(observe(run, model, call, call.tensors, gradients=True))
            saved.restore()
        lines += compare(*seen).lines
    return lines


def weights(graph: Graph, model: torch.nn.Module) -> list[float]:
    """What each node weighs for cutting: the layers with parameters it holds, a little for ops."""
    found = []
    for node in graph.compute_nodes:
        if node.kind not in ("module", "block"):
            found.append(0.05)
            continue
        module = model.get_submodule(node.target) if node.target else model
        found.append(0.05 + sum(1 for part in module.modules() if any(True for _ in part.parameters(recurse=False))))
    return found


def balance(loads: list[float], pieces: int = PIECES) -> float:
    """Heaviest piece of the best contiguous cut, as a multiple of the ideal."""
    if len(loads) < pieces or sum(loads) == 0:
        return float("inf")
    ideal, low, high = sum(loads) / pieces, max(loads), sum(loads)
    for _ in range(40):
        limit = (low + high) / 2
        used, filled = 1, 0.0
        for load in loads:
            if filled + load > limit:
                used, filled = used + 1, 0.0
            filled += load
        low, high = (low, limit) if used <= pieces else (limit, high)
    return high / ideal
