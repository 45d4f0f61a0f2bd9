"""Joining: the whole value of those of the micro-batches, in the worker that has them, or here if several have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from gemini.batch_analysis.microbatch_weights import weigh

PARTS = ("parts",)  # as they are


def combined(parts: Sequence[torch.Tensor], how: tuple[Any, ...]) -> torch.Tensor:
    """All parts as one: ("join", kind), ("sum",), ("sum", weights) or ("first",)."""
    if how[0] == "join" and len(parts) > 1:
        whole: torch.Tensor = how[1].join(parts)
        return whole
    if how[0] == "sum" and len(how) > 1:
        parts = [weigh(part, weight) for part, weight in zip(parts, how[1], strict=True)]
    total = parts[0]
    for part in parts[1:] if how[0] == "sum" else ():
        total = total + part
    return total
