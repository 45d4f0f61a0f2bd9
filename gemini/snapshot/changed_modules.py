"""Changed modules: the modules whose state a call changes (batch statistics, counters, caches).

Such a module must not run in two processes, each with its own state. Tensors are compared by version, plain attributes
by value, other objects by identity and length.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import nn

from gemini.snapshot.tensor_writes import storage_id

_INTERNAL = frozenset(vars(nn.Module())) - {"_buffers", "_parameters"}
_PLAIN = (type(None), bool, int, float, complex, str, bytes, tuple)

_Normalization = nn.modules.batchnorm._NormBase

ModuleStates = dict[str, Any]


def module_states(module: nn.Module) -> ModuleStates:
    """Return comparable facts about the state of a module and its children, by name."""
    return {name: tuple(_facts(part)) for name, part in module.named_modules()}


def find_changed(before: ModuleStates, module: nn.Module, written: Collection[int] = ()) -> list[str]:
    """Return the children, "" for the module itself, whose state has changed; `written`: storages the run wrote."""
    after = module_states(module)
    writing = {
        name for name, part in module.named_modules() if _updates_statistics(part) or _has_storage_in(part, written)
    }
    return [name for name, facts in after.items() if before.get(name) != facts or name in writing]


def _facts(part: nn.Module) -> list[Any]:
    found: list[Any] = []
    for key, value in vars(part).items():
        if key in ("_buffers", "_parameters"):
            found += [_fact(key, tensor) for tensor in value.values()]
        elif key not in _INTERNAL:
            found.append(_fact(key, value))
    if part.training and not isinstance(part, _Normalization):
        found += [(key, _contents(getattr(part, key, None))) for key in ("running_mean", "running_var")]
    return found


def _contents(value: Any) -> Any:
    """Return a hash of statistics: torch writes them without a new version."""
    if not isinstance(value, torch.Tensor) or value.is_meta:
        return None
    return hash(value.detach().cpu().to(torch.float64).numpy().tobytes())


def _fact(key: str, value: Any) -> tuple[Any, ...]:
    if isinstance(value, torch.Tensor):
        return key, id(value), -1 if value.is_inference() else value._version
    if isinstance(value, _PLAIN):
        return key, repr(value)
    return key, id(value), len(value) if isinstance(value, (list, dict, set)) else 0


def _has_storage_in(part: nn.Module, written: Collection[int]) -> bool:
    """Return whether a module has a tensor in one of these storages."""
    own = (*part._parameters.values(), *part._buffers.values(), *vars(part).values()) if written else ()
    return any(isinstance(one, torch.Tensor) and storage_id(one) in written for one in own)


def _updates_statistics(part: nn.Module) -> bool:
    """Return whether a module is batch normalization in training; other layers are compared by contents."""
    return part.training and isinstance(part, _Normalization) and isinstance(part.running_mean, torch.Tensor)
