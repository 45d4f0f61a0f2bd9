"""Hooks: user code that hangs on modules and runs around their forward.

On a module inside the model they are a reason to keep it whole, so that they run as always. On the model itself they
run around the graph: the graph stands in for `forward` only.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn

from gemini.capture.patches import ORIGINAL_CALL

_KINDS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
# Hooks that only collect outputs while the model's own forward runs: the graph returns what they collected.
_COLLECTING = ("transformers.utils.output_capturing",)


def has_hooks(module: nn.Module) -> bool:
    """Whether hooks of the user hang on a module."""
    return any(
        getattr(hook, "__module__", "") not in _COLLECTING
        for kind in _KINDS
        for hook in (getattr(module, kind) or {}).values()
    )


def has_any_hooks(module: nn.Module) -> bool:
    """Whether hooks hang on a module, those that only collect included."""
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


def hook_tables(module: nn.Module) -> list[Any]:
    """The dictionaries in which hooks of a module are: where all are empty it has none."""
    return [getattr(module, kind) for kind in _KINDS]


def with_hooks(
    model: nn.Module,
    args: Any,
    kwargs: Any,
    run: Callable[[Callable[..., Any], Any, Any], Any],
    counts: Callable[[nn.Module], bool] = has_hooks,
) -> Any:
    """`run(forward, args, kwargs)`, inside the model's own hooks if it has any that count.

    `forward` calls the model: all of it where there are no hooks, its forward method where they already run.
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
