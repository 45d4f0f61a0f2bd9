"""Backward by autograd's engine, without what `torch.autograd.backward` and `grad` do before they call it.

Given gradients, torch compares their shapes with code for symbolic sizes, and to load that code takes seconds in every
process, for a library of symbolic mathematics comes with it: in the first step of a pipeline one worker after the other
would load it. The engine itself looks at shapes, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.graph import _engine_run_backward

Found = tuple[torch.Tensor | None, ...]


def accumulate(roots: Sequence[Any], gradients: Sequence[torch.Tensor]) -> None:
    """Backward from roots, which are tensors or edges, into `.grad`, as `torch.autograd.backward`."""
    _engine_run_backward(tuple(roots), tuple(gradients), False, False, (), True, accumulate_grad=True)


def differentiate(
    roots: Sequence[Any], gradients: Sequence[torch.Tensor], ends: Sequence[Any], retain_graph: bool = False
) -> Found:
    """Gradients of the ends, as `torch.autograd.grad`; None where there is none."""
    found: Found = _engine_run_backward(
        tuple(roots), tuple(gradients), retain_graph, False, tuple(ends), True, accumulate_grad=False
    )
    return found
