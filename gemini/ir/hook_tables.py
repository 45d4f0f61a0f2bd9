"""Hook tables: the hooks registered on a module."""

from __future__ import annotations

from typing import Any

from torch import nn

_KINDS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


# Hooks that only collect outputs while the forward runs: the graph returns the collected outputs.
_COLLECTING = ("transformers.utils.output_capturing",)


def has_hooks(module: nn.Module) -> bool:
    """Return whether user code has registered hooks on a module."""
    return any(
        getattr(hook, "__module__", "") not in _COLLECTING
        for kind in _KINDS
        for hook in (getattr(module, kind) or {}).values()
    )


def has_any_hooks(module: nn.Module) -> bool:
    """Return whether a module has hooks, those that only collect outputs included."""
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


def hook_tables(module: nn.Module) -> list[Any]:
    """Return the dictionaries that hold the hooks of a module."""
    return [getattr(module, kind) for kind in _KINDS]
