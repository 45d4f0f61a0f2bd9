"""Names of nodes: a tensor that a step has computed is printed with the node that it would have without us.

print(loss)     tensor(1.5934, grad_fn=<NllLossBackward0>)
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

_MODULE = "builtins"  # of torch's own nodes, which have none


def grad_fn_name(tensor: torch.Tensor) -> str:
    """The name of what has made a tensor, as torch prints it; '' where nothing has, or a node of ours without one."""
    node = tensor.grad_fn
    if node is None:
        return ""
    kind: Any = type(node)
    if kind.__name__ == "CppFunction":  # of an extension
        return str(node.name()).rpartition("::")[2]
    made_by = getattr(kind, "_forward_cls", None)
    is_ours = made_by is not None and made_by.__module__.startswith("gemini.")
    return "" if is_ours and kind.__module__ != _MODULE else str(kind.__name__)


@cache
def rename_grad_fn(function: type[torch.autograd.Function], name: str) -> type[torch.autograd.Function]:
    """The function, whose nodes go by another name."""
    if not name:
        return function
    made: Any = type(function.__name__, (function,), {"__module__": function.__module__})
    node = made._backward_cls
    node.__name__ = node.__qualname__ = name
    node.__module__ = _MODULE
    return made  # type: ignore[no-any-return]
