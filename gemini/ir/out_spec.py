"""Output specification: the structure of a value as a short text.

A graph holds as long as every node returns the captured structure: `T` for a tensor, plain values by their repr (the
caller's Python may branch on them).

    (hidden, None, {"n": 3})   →   tuple(T,None,dict(n=3))
"""

from __future__ import annotations

from typing import Any

import torch

from gemini.ir.encode import LITERALS, children


def structure_of(value: Any, depth: int = 0) -> str:
    """Return the structure of a value."""
    if isinstance(value, torch.Tensor):
        return "T"
    if isinstance(value, LITERALS):
        return repr(value)
    parts = children(value)
    if parts is None or depth > 8:
        return type(value).__name__
    inner = ",".join(
        structure_of(part, depth + 1) if kind == "i" else f"{key}={structure_of(part, depth + 1)}"
        for (kind, key), part in parts
    )
    return f"{type(value).__name__}({inner})"
