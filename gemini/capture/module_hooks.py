"""Module hooks: user code registered on modules and tensors.

A module inside the model with hooks is opaque, so that they run unchanged. Hooks of the model itself run around the
graph, which replaces `forward` only. A hook on a parameter sees its gradient once per backward, when it is complete:
where gradients are computed to compare them, or in parts that autograd accumulates later, hooks are disabled.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from gemini.capture.patches import ORIGINAL_CALL
from gemini.ir.hook_tables import has_hooks

_MODULE_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def run_with_hooks(
    model: nn.Module,
    args: Any,
    kwargs: Any,
    run: Callable[[Callable[..., Any], Any, Any], Any],
    counts: Callable[[nn.Module], bool] = has_hooks,
) -> Any:
    """Call `run(forward, args, kwargs)`, inside the hooks of the model if `counts(model)`.

    `forward` is the model where it has no hooks; else its forward method, since the hooks run around it.
    """
    if not counts(model):
        return run(model, args, kwargs)
    forward = model.forward
    own = vars(model)
    replaced = own.get("forward")

    @functools.wraps(forward)
    def stand_in(*a: Any, **k: Any) -> Any:
        return run(forward, a, k)

    stand_in.__gemini_stands_for__ = replaced  # type: ignore[attr-defined]
    own["forward"] = stand_in
    try:
        return ORIGINAL_CALL(model, *args, **kwargs)
    finally:
        if replaced is None:
            del own["forward"]
        else:
            own["forward"] = replaced


@contextmanager
def without_tensor_hooks(tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """Disable the hooks that are registered on these tensors."""
    kinds = ("_backward_hooks", "_post_accumulate_grad_hooks")
    tables = [hooks for tensor in tensors for kind in kinds if (hooks := getattr(tensor, kind, None))]
    found = [(hooks, dict(hooks)) for hooks in tables]
    for hooks, _ in found:
        hooks.clear()  # autograd reads the same dictionary
    try:
        yield
    finally:
        for hooks, before in found:
            added = dict(hooks)
            hooks.clear()
            hooks.update({**before, **added})  # in order of registration


@contextmanager
def without_hooks(model: nn.Module) -> Iterator[None]:
    """Inside, a call of the model runs its forward without the hooks on the model itself.

    Hooks of the model run once, around its pipelined call; an analysis that runs the model inside that call must not
    run them again.
    """
    own = vars(model)
    removed: dict[str, Any] = {kind: own[kind] for kind in _MODULE_HOOKS if own[kind]}
    wrapper = own.get("forward")
    is_wrapped = hasattr(wrapper, "__gemini_stands_for__")
    try:
        own.update({kind: OrderedDict() for kind in removed})
        if is_wrapped:
            own["forward"] = wrapper.__gemini_stands_for__
            if own["forward"] is None:
                del own["forward"]
        yield
    finally:
        own.update(removed)
        if is_wrapped:
            own["forward"] = wrapper
