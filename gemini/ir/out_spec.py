"""Sketches: the structure of a value as a short text.

A graph is valid as long as every node returns what it returned when it was captured, up to the contents of
tensors. A sketch is that structure: `T` a tensor, plain values spelled out (the caller's Python may branch on them).

    (hidden, None, {"n": 3})   →   tuple(T,None,dict(n=3))
"""

from __future__ import annotations

from typing import Any

import torch

from gemini.ir.encode import LITERALS, children


def sketch(value: Any, depth: int = 0) -> str:
    """The structure of a value."""
    if isinstance(value, torch.Tensor):
        return "T"
    if isinstance(value, LITERALS):
        return repr(value)
    parts = children(value)
    if parts is None or depth > 8:
        return type(value).__name__
    inner = ",".join(
        sketch(part, depth + 1) if kind == "i" else f"{key}={sketch(part, depth + 1)}" for (kind, key), part in parts
    )
    return f"{type(value).__name__}({inner})"
