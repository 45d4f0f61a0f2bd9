"""Hook tables: the hooks registered on a module."""

from __future__ import annotations

from typing import Any

from torch import nn

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
