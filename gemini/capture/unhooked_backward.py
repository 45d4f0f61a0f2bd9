"""Gradients that the program has not asked for, without its hooks on tensors.

A hook that the program has registered on a parameter sees its gradient once in a backward, when it is complete. Where
gradients are computed to compare them, or in pieces that autograd adds up later, hooks must not be called.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch


@contextmanager
def unhooked(tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """Inside, hooks that hang on these tensors now are not called."""
    kinds = ("_backward_hooks", "_post_accumulate_grad_hooks")
    held = [hooks for tensor in tensors for kind in kinds if (hooks := getattr(tensor, kind, None))]
    found = [(hooks, dict(hooks)) for hooks in held]
    for hooks, _ in found:
        hooks.clear()  # autograd looks into the same dictionary
    try:
        yield
    finally:
        for hooks, before in found:
            added = dict(hooks)
            hooks.clear()
            hooks.update({**before, **added})  # in their order
