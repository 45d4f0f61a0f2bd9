"""Changes: which modules keep something from a call that a later call may see.

Batch statistics, counters, caches: a module that changes its own state when it runs must not run in two places, each
with a state of its own. Tensors are known by version, plain attributes by value, other objects by identity and length.
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
    """What tells the state of a module and its children from another one, by name."""
    return {name: tuple(_facts(part)) for name, part in module.named_modules()}


def find_changed(before: ModuleStates, module: nn.Module, written: Collection[int] = ()) -> list[str]:
    """The children, or "" for the module itself, whose state is another now; `written`: memory that the run wrote."""
    after = module_states(module)
    writing = {name for name, part in module.named_modules() if _counts_batches(part) or _holds(part, written)}
    return [name for name, facts in after.items() if before.get(name) != facts or name in writing]


def _facts(part: nn.Module) -> list[Any]:
    found: list[Any] = []
    for key, value in vars(part).items():
        if key in ("_buffers", "_parameters"):
            found += [_fact(key, held) for held in value.values()]
        elif key not in _INTERNAL:
            found.append(_fact(key, value))
    if part.training and not isinstance(part, _Normalization):
        found += [(key, _contents(getattr(part, key, None))) for key in ("running_mean", "running_var")]
    return found


def _contents(value: Any) -> Any:
    """What tells statistics from others: torch writes them without a new version."""
    if not isinstance(value, torch.Tensor) or value.is_meta:
        return None
    return hash(value.detach().cpu().to(torch.float64).numpy().tobytes())


def _fact(key: str, value: Any) -> tuple[Any, ...]:
    if isinstance(value, torch.Tensor):
        return key, id(value), -1 if value.is_inference() else value._version
    if isinstance(value, _PLAIN):
        return key, repr(value)
    return key, id(value), len(value) if isinstance(value, (list, dict, set)) else 0


def _holds(part: nn.Module, written: Collection[int]) -> bool:
    """Whether some of its own tensors look at this memory."""
    held = (*part._parameters.values(), *part._buffers.values(), *vars(part).values()) if written else ()
    return any(isinstance(one, torch.Tensor) and storage_id(one) in written for one in held)


def _counts_batches(part: nn.Module) -> bool:
    """Batch normalization writes its statistics without a new version; layers of other names show it by contents."""
    return part.training and isinstance(part, _Normalization) and isinstance(part.running_mean, torch.Tensor)
