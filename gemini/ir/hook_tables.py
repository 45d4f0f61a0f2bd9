"""Hook tables: the hooks registered on a module."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.utils.weight_norm import WeightNorm

_KINDS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


# Hooks that only collect outputs while the forward runs: the graph returns the collected outputs.
_COLLECTING = ("transformers.utils.output_capturing",)
# Hooks with which activation checkpoints begin: the outputs of a trained layer require a gradient anyway.
_REQUIRING = ("transformers.modeling_utils", "make_inputs_require_grads")


def has_hooks(module: nn.Module) -> bool:
    """Return whether user code has registered hooks on a module that are more than a part of its forward."""
    return has_any_hooks(module) and not all(
        _is_part_of_forward(module, hook) for kind in _KINDS for hook in (getattr(module, kind) or {}).values()
    )


def computes_weight(module: nn.Module) -> bool:
    """Return whether hooks compute a weight of a module from others, as in `torch.nn.utils.weight_norm`."""
    return any(type(hook) is WeightNorm for hook in module._forward_pre_hooks.values())


def _is_part_of_forward(module: nn.Module, hook: Any) -> bool:
    place = getattr(hook, "__module__", "")
    if (place, getattr(hook, "__name__", "")) == _REQUIRING:
        return any(parameter.requires_grad for parameter in module.parameters(recurse=False))
    return type(hook) is WeightNorm or place in _COLLECTING


def has_any_hooks(module: nn.Module) -> bool:
    """Return whether a module has hooks, those that only collect outputs included."""
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


def hook_tables(module: nn.Module) -> list[Any]:
    """Return the dictionaries that hold the hooks of a module."""
    return [getattr(module, kind) for kind in _KINDS]
