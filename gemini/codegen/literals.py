"""Literals: plain Python and torch values as source text."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch


def string(value: str) -> str:
    """Return a string in double quotes, unless single quotes save escapes."""
    text = repr(value)
    if text[0] == '"' or '"' in value:
        return text
    return f'"{text[1:-1]}"'


def literal(value: Any) -> str | None:
    """Return the text of a value; None if it has no literal."""
    if value is None or value is ... or isinstance(value, bool):
        return "..." if value is ... else repr(value)
    if isinstance(value, int):
        return repr(int(value))
    if isinstance(value, float):
        return repr(float(value)).replace("e+", "e") if math.isfinite(value) else f'float("{float(value)!r}")'
    if isinstance(value, complex):
        return f"complex({literal(value.real)}, {literal(value.imag)})"
    if isinstance(value, str):
        return string(str(value))
    if isinstance(value, bytes):
        return f"b{string(repr(value)[2:-1])}" if "\\" not in repr(value) else f'bytes.fromhex("{value.hex()}")'
    if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
        return str(value)
    if isinstance(value, torch.device):
        return f'torch.device("{value}")'
    if isinstance(value, range):
        bounds = (value.start, value.stop) if value.step == 1 else (value.start, value.stop, value.step)
        return f"range({', '.join(map(repr, bounds))})"
    return _collection(value)


def _collection(value: Any) -> str | None:
    if isinstance(value, np.ndarray):
        listed = literal(value.tolist())
        return None if listed is None else f'np.array({listed}, dtype="{value.dtype}").reshape({value.shape!r})'
    if isinstance(value, (list, tuple, set, frozenset)):
        ordered = sorted(value, key=repr) if isinstance(value, (set, frozenset)) else value
        texts = [literal(part) for part in ordered]
        if None in texts:
            return None
        return _join(type(value), [text for text in texts if text is not None])
    return None


def _join(cls: type, texts: list[str]) -> str | None:
    inner = ", ".join(texts)
    if cls is tuple:
        return f"({inner},)" if len(texts) == 1 else f"({inner})"
    if cls is list:
        return f"[{inner}]"
    if cls is set:
        return f"{{{inner}}}" if texts else "set()"
    if cls is frozenset:
        return f"frozenset({{{inner}}})" if texts else "frozenset()"
    return f"torch.Size(({inner}{',' if len(texts) == 1 else ''}))" if cls is torch.Size else None
