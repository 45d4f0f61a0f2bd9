"""Hooked: models with hooks on modules inside them.

A hook of the program keeps what it sees in lists and dicts of the program, or changes what flows: it has to run in the
program's process, once a call. Hooks of torch's own that make a weight (old weight and spectral normalization, pruning)
leave it in an attribute, which the program may read after the call. So there is no plan for such a model, and it is not
run to look at it either. Parametrizations, which took the place of those, have no hooks.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from gemini.ir.hook_tables import has_hooks, hook_tables
from gemini.planner.step_plan import UnplannableError

_WEIGHTS = "torch.nn.utils."


def check_hooks(model: nn.Module) -> None:
    """Raises UnplannableError where one hangs on a module inside; those on the model itself run around its call."""
    if found := hooks_inside(model):
        raise UnplannableError(found)


def hooks_inside(model: nn.Module) -> str:
    """Which hang on modules inside, as a reason; '' if none do."""
    hooked = {name: _hooks(module) for name, module in model.named_modules() if name and has_hooks(module)}
    names = [name for name, hooks in hooked.items() if not all(map(_makes_weights, hooks))]
    if names:
        return f"hooks of the program hang on {_listed(names)}"
    names = [name for name, hooks in hooked.items() if hooks]
    return f"a hook of torch.nn.utils makes a weight in every call of {_listed(names)}" if names else ""


def _listed(names: list[str]) -> str:
    return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")


def _hooks(module: nn.Module) -> list[Any]:
    return [hook for table in hook_tables(module) for hook in (table or {}).values()]


def _makes_weights(hook: Any) -> bool:
    function = getattr(hook, "func", hook)  # of a partial
    kinds = type(hook).__mro__[:-1]  # pruning methods may be derived from torch's
    return getattr(function, "__module__", "").startswith(_WEIGHTS) or any(
        kind.__module__.startswith(_WEIGHTS) for kind in kinds
    )
